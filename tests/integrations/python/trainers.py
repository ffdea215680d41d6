"""A training step and a recovery for each adapter of GradientExchange."""

from __future__ import annotations

import os
import signal

import torch
from models import WIDTH, data, make_mlp
from policies import Wrapped
from thinwire.torch import GradientExchange, State, hook
from thinwire.torch.exchange.recovery import Recovery
from torch.nn.parallel import DistributedDataParallel

WAYS = ("hook", "hook momentum", "loop", "p3", "wfbp", "delay", "p3 momentum")
_OPTIONS = {"min_bytes": 0, "chunk_bytes": 8192, "timeout_s": 100.0, "recoverable": True}


class Trainer:
    """Trains by SGD on a fixed teacher. way: one of WAYS."""

    def __init__(self, way: str) -> None:
        self.way = way
        self._width = WIDTH if "hook" in way else 512  # DDP then has several buckets
        self.model = make_mlp(width=self._width)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        owned = {"codec": "onebit", "momentum": 0.9} if "momentum" in way else {"codec": "int4"}
        if "hook" in way:
            names = {p: name for name, p in self.model.named_parameters()}
            self.state = State(names=names, **owned, **_OPTIONS)
            if "momentum" in way:
                self.state.take_momentum(self.optimizer)
            self._wrap()
            self.exchange = self.state
        elif way == "loop":
            self.exchange = GradientExchange(**owned, **_OPTIONS)
        else:
            policy = "wfbp" if way == "wfbp" else "p3"
            delay = 1 if way == "delay" else 0
            self.optimizer = Wrapped(
                self.optimizer, self.model, policy=policy, delay=delay, **owned, **_OPTIONS
            )
            self.exchange = self.optimizer.exchange

    def _wrap(self) -> None:
        self.forward = DistributedDataParallel(self.model, bucket_cap_mb=0.02)
        self.forward.register_comm_hook(self.state, hook)

    def step(self, step: int, rank: int) -> float:
        """Make a step, and return the loss."""
        x = data(step, rank, self._width)
        forward = self.forward if "hook" in self.way else self.model
        out = forward(x)
        self.optimizer.zero_grad()
        loss = (out - torch.sin(x[:, : out.shape[1]])).square().mean()
        loss.backward()
        if self.way == "loop":
            self.exchange.reduce_gradients(dict(self.model.named_parameters()))
        self.optimizer.step()
        return loss.item()

    def finish(self) -> None:
        if isinstance(self.optimizer, Wrapped):
            self.optimizer.finish()

    def kept(self) -> dict:
        """Return residuals and momentum by parameter."""
        self.finish()
        return self.exchange.state_dict()["residuals"]

    def recover(self) -> Recovery:
        if isinstance(self.optimizer, Wrapped):
            return self.optimizer.recover()
        if self.way == "loop":
            return self.exchange.recover()
        result = self.state.recover(module=self.model, optimizer=self.optimizer)
        self._wrap()
        return result

    def die_in_the_next_step(self) -> None:
        """Die in mid-backward, after DDP has sent some of the step's buckets but not all."""
        self.model[0].weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))

    def loss(self) -> float:
        """Return the loss of this rank's parameters on data that no step has used."""
        self.finish()
        x = torch.randn(256, self._width, generator=torch.Generator().manual_seed(5))
        with torch.no_grad():
            return (self.model(x) - torch.sin(x[:, :10])).square().mean().item()
