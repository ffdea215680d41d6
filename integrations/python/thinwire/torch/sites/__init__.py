"""Training between sites over slow links: local steps, and rounds of compressed updates between
members that may come and go::

    from thinwire.torch import sites

    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    with sites.DiLoCo(sites.static(), [model], inner, outer, sync_every=64, codec="int4"):
        for x, y in loader:
            loss_of(model(x), y).backward()
            inner.step()  # every 64th step is followed by a round with the other sites
            inner.zero_grad()
"""

from __future__ import annotations

from thinwire.torch.sites.averager import PeriodicModelAverager
from thinwire.torch.sites.diloco import DiLoCo, LocalSGD
from thinwire.torch.sites.members import join, static
from thinwire.torch.sites.pace import Overhead
from thinwire.torch.sites.round import Report

__all__ = ["DiLoCo", "LocalSGD", "Overhead", "PeriodicModelAverager", "Report", "join", "static"]
