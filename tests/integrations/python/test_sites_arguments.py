"""Invalid arguments of rounds between sites are typed errors, before anything is sent."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from models import make_mlp
from thinwire.errors import InvalidArgumentError
from thinwire.torch import sites

WIDTH = 64  # enough elements that layers are not sent in fp32 anyway


def outer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.7)


def alone(model: torch.nn.Module) -> sites.LocalSGD:
    """The only member of its group."""
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    members = sites.join(torch.distributed.HashStore(), "basel", min_members=1)
    return sites.LocalSGD(members, model, inner, 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sync_every": 3}, "multiple of the 2 fragments"),
        ({"sync_every": 4, "fragment_sync_delay": 4}, "more than fragment_sync_delay"),
        ({"sync_every": 4, "aggregate": "krum"}, "expected one of 'mean'"),
        ({"sync_every": 4, "decay": 2.0}, "decay is 2.0"),
        ({"sync_every": 4, "fragment_update_alpha": -1}, "fragment_update_alpha is -1"),
        ({"sync_every": 4, "weight": 0.0}, "weight is 0.0"),
        ({"sync_every": 4, "weight": float("inf")}, "weight is inf"),
        ({"sync_every": 4, "weight": 1e300}, "weight is 1e"),
        ({"sync_every": 4, "prox": -(10**400)}, "prox is -1000"),
        ({"sync_every": 4, "decay": "1"}, "decay is '1'"),
        ({"sync_every": 4, "prox": float("nan")}, "prox is nan"),
        ({"sync_every": 4, "codec": "int5"}, "int5"),
        ({"sync_every": "often"}, "steps, a timedelta or an Overhead"),
        ({"sync_every": 4, "round_log": "/nowhere/rounds"}, "round_log is '/nowhere/rounds'"),
    ],
)
def test_what_cannot_be_is_refused(options, message):
    model = make_mlp(width=WIDTH)
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    with pytest.raises(InvalidArgumentError, match=message):
        sites.DiLoCo(sites.static(), [model[0], model[2:]], inner, outer_of(model), **options)


def test_numpys_integers_are_taken():
    one = np.int64(1)
    assert type(sites.Overhead(first=one, most=one).most) is int
    members = sites.join(
        torch.distributed.HashStore(), "basel", min_members=one, timeout_s=60 * one, beat_s=one,
        dead_s=9 * one,
    )  # fmt: skip
    model = make_mlp(width=WIDTH)
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    sites.DiLoCo(
        members, [model[0], model[2:]], inner, outer_of(model), 4 * one, fragment_sync_delay=one,
        fragment_update_alpha=0 * one, weight=one, prox=one, decay=one,
    )  # fmt: skip


def test_an_inner_optimizer_of_another_model_is_refused():
    model = make_mlp(width=WIDTH)
    stale = torch.optim.SGD(make_mlp(width=WIDTH).parameters(), lr=0.05)
    with pytest.raises(InvalidArgumentError, match="inner_optimizer has no parameter of the fragm"):
        sites.DiLoCo(sites.static(), [model], stale, outer_of(model), 4)


def test_steps_outside_of_the_with_are_told_once():
    model = make_mlp(width=WIDTH)
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    members = sites.join(torch.distributed.HashStore(), "basel", min_members=1)
    local = sites.LocalSGD(members, model, inner, 4)
    with pytest.warns(UserWarning, match="outside of the with, where nothing is exchanged"):
        inner.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        inner.step()
        local.close()


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, torch.optim.SparseAdam])
def test_an_outer_optimizer_steps_by_a_dense_gradient(kind):
    model = make_mlp(width=WIDTH)
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    with pytest.raises(InvalidArgumentError, match=rf"outer_optimizer is {kind.__name__}, expecte"):
        sites.DiLoCo(sites.static(), [model], inner, kind(list(model.parameters())), 4)


def test_a_lazy_module_is_made_before():
    model = torch.nn.Sequential(torch.nn.LazyLinear(4))
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    with pytest.raises(InvalidArgumentError, match=r"'0\.weight': got a tensor of a lazy module"):
        sites.LocalSGD(sites.static(), model, inner, 4)


def test_an_outer_optimizer_has_all_parameters():
    model = make_mlp(width=WIDTH)
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    outer = torch.optim.SGD(model[0].parameters(), lr=0.7)
    with pytest.raises(InvalidArgumentError, match=r"has no '2\.weight'"):
        sites.DiLoCo(sites.static(), [model], inner, outer, 4)


def test_calls_that_cannot_be_are_refused():
    model = make_mlp(width=WIDTH)
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    local = sites.LocalSGD(sites.static(), model, inner, 4)
    for samples in (-1, 1e300, float("nan"), float("inf"), "8", None, torch.ones(2)):
        with pytest.raises(InvalidArgumentError, match="samples is"):
            local.saw(samples)
    local.saw(torch.tensor(8))
    with pytest.raises(InvalidArgumentError, match="saved is None"):
        local.load_state_dict(None)
    with pytest.raises(InvalidArgumentError, match="share is '5%'"):
        sites.Overhead("5%")
    for fragments in (model[0], None, [], [None], 3, "model"):
        with pytest.raises(InvalidArgumentError, match=r"model_fragments is .*such as"):
            sites.DiLoCo(sites.static(), fragments, inner, outer_of(model), 4)
    for outer in (None, 3, [], [None]):
        with pytest.raises(InvalidArgumentError, match="outer_optimizer is"):
            sites.DiLoCo(sites.static(), [model], inner, outer, 4)
    with pytest.raises(InvalidArgumentError, match="parameters that are trained"):
        sites.LocalSGD(sites.static(), torch.nn.ReLU(), inner, 4)
    for name in ("", "a\0", "\udc80", None):
        with pytest.raises(InvalidArgumentError, match="name is"):
            sites.join(torch.distributed.HashStore(), name)
    with pytest.raises(InvalidArgumentError, match="key_file is 3"):
        sites.join(torch.distributed.HashStore(), "basel", key_file=3)
    path = sites.join(torch.distributed.HashStore(), "basel", key_file=Path("/key")).key_file
    assert path == "/key"
    for options in (
        {"timeout_s": float("inf")},
        {"timeout_s": "5"},
        {"beat_s": -1},
        {"dead_s": None},
        {"allow_split": "x"},
    ):
        with pytest.raises(InvalidArgumentError, match=f"{next(iter(options))} is"):
            sites.join(torch.distributed.HashStore(), "site", **options)
    with pytest.raises(InvalidArgumentError, match="outside the `with`"):
        local.sync()
    with pytest.raises(InvalidArgumentError, match="outer_optimizer is the inner_optimizer"):
        sites.DiLoCo(sites.static(), [model], inner, inner, 4)
    with pytest.raises(InvalidArgumentError, match="in a `with` already"), alone(model) as local:
        local.__enter__()


def test_fragments_have_no_parameter_in_common():
    model = make_mlp(width=WIDTH)
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    with pytest.raises(InvalidArgumentError, match=r"'0\.weight' in common"):
        sites.DiLoCo(sites.static(), [model, model[:1]], inner, inner, 4)
