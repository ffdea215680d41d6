"""Predictions, advice and codec="auto"."""

import contextlib
import copy
import dataclasses
import types
from pathlib import Path

import pytest
import thinwire.torch
import torch
from models import data, digest, make_mlp, wrap
from policies import Wrapped
from ranks import reserved_port, run, torchrun, variables
from thinwire import cli, config
from thinwire.simulate import CodecCost, Layer, Link, Profile, simulate
from thinwire.torch import advise as advice_
from thinwire.torch import forecast
from thinwire.torch.advise import Advice, advise
from thinwire.torch.exchange import auto
from thinwire.torch.forecast import CODECS, Notes, Prediction, choose, codecs_on

HERE = Path(__file__).parent
PROFILE = Profile(tuple(Layer(1 << 20, 0.01, 0.02) for _ in range(6)), 0.005)


def test_one_rank_only_computes():
    step = simulate(PROFILE, Link(1, 1e9), "int4", "p3")
    assert step.step_s == pytest.approx(PROFILE.compute_s)
    assert PROFILE.compute_s == pytest.approx(0.185)


def test_chunks_that_are_overtaken_are_small():
    def step(policy, **options):
        return simulate(PROFILE, Link(2, 1e7), "int4", policy, **options)

    mib = 1 << 20
    assert step("p3") == step("p3", chunk_bytes=mib) != step("p3", chunk_bytes=4 * mib)
    assert step("wfbp") == step("wfbp", chunk_bytes=4 * mib)


def test_chunks_over_nccl_are_large():
    profile = Profile((Layer(1 << 24, 0.01, 0.02),) * 2, 0.005)

    def step(policy="wfbp", **options):
        return simulate(profile, Link(2, 1e9), "int4", policy, **options)

    assert step(transport="nccl") == step(chunk_bytes=32 << 20) != step()
    assert step("p3", transport="nccl") == step("p3")


def test_a_slow_link_takes_its_bytes():
    bytes_ = 6 * (1 << 20) * 4  # two ranks, both hops: each rank sends its bytes once
    step = simulate(PROFILE, Link(2, 1e7), "fp32", "fifo")
    # The first gradient comes after one layer, and the forward pass follows the last byte.
    assert step.step_s == pytest.approx(bytes_ / 1e7 + 0.02 + 0.06 + 0.005, rel=0.01)
    assert step.bound_s <= step.step_s
    compressed = simulate(PROFILE, Link(2, 1e7), "int4", "fifo")
    assert compressed.step_s < step.step_s / 5


def test_every_cost_costs():
    link = Link(2, 1e8)
    plain = simulate(PROFILE, link, "int8", "fifo").step_s
    for change in ({"latency_s": 2e-3}, {"overhead_s": 5e-3}, {"bytes_per_s": 5e7}):
        assert simulate(PROFILE, dataclasses.replace(link, **change), "int8", "fifo").step_s > plain
    shared = dataclasses.replace(link, contention=1.0)
    cost = CodecCost(1e-9, 1e-9, 1e-9)
    alone = simulate(PROFILE, link, "int8", "fifo", cost).step_s
    assert simulate(PROFILE, shared, "int8", "fifo", cost).step_s > alone > plain
    burst = dataclasses.replace(link, burst_bytes=1e6)
    assert simulate(PROFILE, burst, "int8", "fifo").step_s < plain


def test_a_topology_is_taken_whatever_the_links_are_worth():
    slow_inside = Link(4, 1e8, local_size=2, inside_bytes_per_s=1e8)

    def step(topology=None):
        return simulate(PROFILE, slow_inside, "int4", "fifo", topology=topology).step_s

    assert step() == step("flat") < step("hierarchical")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"codec": "int5"}, "int5"),
        ({"topology": "ring"}, "topology"),
        ({"policy": "p4"}, "p4"),
        ({"link": Link(2, 0.0)}, "bytes_per_s"),
        ({"link": Link(2, 1e9, latency_s=-1.0)}, "0 or more"),
        ({"profile": Profile(())}, "at least one layer"),
        ({"profile": Profile((Layer(0, 1.0, 1.0),))}, "layer 0"),
    ],
)
def test_a_bad_setting_is_a_typed_error(change, match):
    arguments = {"profile": PROFILE, "link": Link(2, 1e9), "codec": "int4", "policy": "p3"}
    with pytest.raises(thinwire.InvalidArgumentError, match=match):
        simulate(**(arguments | change))


def test_accuracy_decides_between_equals():
    rows = [Prediction(c, "p3", s) for c, s in (("fp32", 1.2), ("int8", 1.02), ("int4", 1.0))]
    assert choose(rows, ("fp32", "int8", "int4")).codec == "int8"
    assert choose(rows, ("fp32", "int4")).codec == "int4"
    rows.append(Prediction("int8", "wfbp", 1.0))
    assert choose(rows, ("fp32", "int8", "int4")).policy == "wfbp"
    rows.append(Prediction("int8", "fifo", 0.9))
    assert choose(rows, ("fp32", "int8", "int4")).policy == "fifo"
    with pytest.raises(thinwire.InvalidArgumentError, match="expected some of"):
        choose(rows, ("topk",))


def test_a_codec_without_kernels_is_not_for_gpus(monkeypatch):
    assert codecs_on(torch.device("cuda"), CODECS) == CODECS  # all codecs have kernels now

    def without_int4s(codec: str) -> thinwire.CodecInfo:
        return dataclasses.replace(thinwire.codec_info(codec), has_kernels=codec != "int4")

    monkeypatch.setattr(forecast, "codec_info", without_int4s)
    assert codecs_on(torch.device("cpu"), CODECS) == CODECS
    assert set(CODECS) - set(codecs_on(torch.device("cuda"), CODECS)) == {"int4"}


@pytest.mark.parametrize(
    ("wfbp_s", "p3_s", "policy"),
    [(1.0, 0.98, "wfbp"), (1.0, 0.9, "p3"), (0.002, 0.0018, "wfbp"), (0.002, 0.001, "p3")],
)
def test_nobody_is_sent_away_from_ddp_for_little(wfbp_s, p3_s, policy):
    """A few per cent are not enough, nor are tenths of a millisecond."""
    rows = [Prediction("fp32", "wfbp", wfbp_s), Prediction("fp32", "p3", p3_s)]
    assert choose(rows, ("fp32",)).policy == policy


def test_plain_ddp_is_named_where_it_is_the_answer():
    plain = Prediction("fp32", "wfbp", 1.0)
    advice = Advice((plain,), plain, 1.0, Link(2, 1e9), {25: 1.0, 1: 1.1})
    assert "stay with plain DDP" in advice.table()
    assert "bucket_cap_mb=25" in advice.table()


def ddp_buckets(rank: int, cap: int | None):
    """Return the elements of DDP's buckets in order, after DDP has rebuilt them."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(512, width, bias=False) for width in WIDTHS]
    model = torch.nn.ModuleList(layers)
    ddp = torch.nn.parallel.DistributedDataParallel(
        Sum(model), **({} if cap is None else {"bucket_cap_mb": cap})
    )
    seen: list[int] = []

    def hook(_state: None, bucket: torch.distributed.GradBucket):
        seen.append(bucket.buffer().numel())
        return done(bucket.buffer())

    hook.__annotations__ = {}
    ddp.register_comm_hook(None, hook)
    for _ in range(3):
        seen.clear()
        ddp(torch.randn(2, 512)).backward()
    return seen


WIDTHS = (2048, 512, 512, 1024, 512, 3000, 512)


class Sum(torch.nn.Module):
    """Runs its layers in sequence. Each layer's gradient is ready before its predecessor's."""

    def __init__(self, layers: torch.nn.ModuleList) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)[:, :512]
        return x.square().mean()


def done(buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(buffer)
    return future


@pytest.mark.parametrize("cap", [1, 2, 4, None])
def test_buckets_are_those_of_ddp(cap):
    profile = Profile(tuple(Layer(512 * width, 1.0, 2.0) for width in WIDTHS), 0.5)
    found = forecast.bucketed(profile, forecast.DDP_CAP_MB if cap is None else cap)
    assert [layer.numel for layer in reversed(found.layers)] == run(ddp_buckets, cap)[0]
    assert found.compute_s == profile.compute_s


def test_the_size_of_buckets_is_chosen_by_the_link():
    """Early buckets are hidden behind the backward pass; each bucket costs its latency."""
    profile = Profile(tuple(Layer(1 << 18, 0.001, 0.004) for _ in range(32)), 0.001)

    def cap(link: Link) -> int:
        return forecast.choose_cap(forecast.predict_caps(profile, link, "int4", CodecCost()))

    assert cap(Link(2, 2e7)) < 8
    assert cap(Link(2, 1e12)) == forecast.DDP_CAP_MB
    assert forecast.choose_cap({25: 1.02, 4: 1.0, 50: 1.01}) == 25
    assert forecast.choose_cap({25: 1.04, 4: 1.01, 1: 1.0}) == 4


def profile_of_notes(rank: int):
    notes = Notes()
    for step in range(4):
        for unit in range(3):
            notes.waited_for(unit, 10.0 * step + unit)
        for unit in (2, 0, 1):  # out of order: the last unit's gradient is ready first
            notes.submitted(unit, 100 + unit, 10.0 * step + {2: 5.0, 0: 6.0, 1: 8.0}[unit])
    notes.waited_for(0, 40.0)
    return notes.profile(1, None)


@pytest.mark.slow
def test_notes_become_a_profile():
    first, second = run(profile_of_notes)
    assert first == second
    assert first.layers == (Layer(100, 1.0, 0.0), Layer(101, 1.0, 3.0), Layer(102, 0.0, 3.0))
    assert first.between_s == pytest.approx(2.0)


def make():
    """Return (model, optimizer, run), which the command takes."""
    model = make_mlp(width=256)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return model, optimizer, lambda: model(data(0, 0, width=256)).square().mean().backward()


def make_without_parameters():
    _, optimizer, run = make()
    return torch.nn.ReLU(), optimizer, run


def make_without_optimizer():
    model, _, run = make()
    return model, None, run


def without_backward(rank: int):
    model, optimizer, _ = make()
    with pytest.raises(thinwire.InvalidArgumentError, match=f"rank {rank}: .* made no gradients"):
        advise(model, optimizer, lambda: None, steps=1)


def test_a_run_without_a_backward_pass_is_said():
    run(without_backward)


def test_a_link_on_which_the_smallest_probe_takes_long_has_a_rate():
    class OnSlowLink:
        def time(self, numel, **_):
            seconds = 0.01 + 4 * numel / 1e5
            return forecast.Spent(seconds, seconds, seconds / 10)

    link = forecast._link(OnSlowLink(), 2)
    assert link.bytes_per_s == pytest.approx(1e5)
    assert link.cpu_s_per_byte == pytest.approx(1e-6)


def on_link(found, bytes_per_s: float):
    """Return the measured times for another link, with cores to spare. fp32 costs nothing: on a
    busy machine single measurements of fp32 and int8 may swap places."""
    link = Link(found.link.ranks, bytes_per_s)
    return dataclasses.replace(found, link=link, costs=found.costs | {"fp32": CodecCost()})


def advised(rank: int, bytes_per_s: float | None):
    model, optimizer, step = make()
    step()
    optimizer.step()
    before, state = digest(model), copy.deepcopy(optimizer.state_dict())
    if bytes_per_s is not None:  # everything is measured, except the link
        real = advice_.probe

        advice_.probe = lambda *args: on_link(real(*args), bytes_per_s)
    advice = advise(model, optimizer, step, steps=4)
    assert digest(model) == before
    for key, value in optimizer.state_dict()["state"].items():
        for name, tensor in value.items():
            assert torch.equal(tensor, state["state"][key][name])
    return advice, advice.table()


def test_every_rank_gets_the_whole_table():
    (first, table), (second, _) = run(advised, None)
    assert first == second
    assert len(first.rows) == 21 and all(row.step_s > 0 for row in first.rows)
    assert first.bucket_cap_mb in forecast.CAPS_MB
    for word in ("fp32", "adaptive", "topk", "wfbp", "computing alone", "bucket_cap_mb="):
        assert word in table


@pytest.mark.slow
def test_a_slow_link_wants_compression_and_a_fast_one_does_not():
    (slow, table), _ = run(advised, 1e6)
    assert slow.best.codec == "int4" and slow.compress
    assert "recommended: codec='int4'" in table
    (fast, table), _ = run(advised, 1e12)
    assert not fast.compress
    assert "do not compress" in table


def test_the_command_prints_the_table():
    wanted = ("advise", "test_advise:make", "--codecs", "fp32,int4")
    printed = torchrun("thinwire", *wanted)
    assert printed.count("predicted ms a step") == 1
    assert "int4" in printed and "topk" not in printed


def test_the_command_needs_ranks(capsys):
    assert cli.main(["advise", "nothing:there"]) == 2
    assert "torchrun" in capsys.readouterr().err


@pytest.mark.parametrize("make, words", [
    (":make", "did you mean MODULE:make"),
    ("./test_advise.py:make", "did you mean test_advise:make"),
    ("nothing:make", "'nothing:make' is not there"),
    ("test_advise:make_without_parameters", "a torch.nn.Module with parameters"),
    ("test_advise:make_without_optimizer", "expected (model, optimizer, run)"),
    (".test_advise:make", "did you mean"),
    ("test_advise:CODECS", "expected a function"),
    ("test_advise:make_mlp", "expected (model, optimizer, run)"),
])  # fmt: skip
def test_the_command_needs_a_function_that_makes_all(make, words, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    assert cli.main(["advise", make]) == 2
    assert words in capsys.readouterr().err


MADE_WRONG = """
import torch

def raises():
    def run():
        model(torch.ones(2, 5))
    model = torch.nn.Linear(3, 3)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), run

def make():
    try:
        raise KeyError("first")
    except KeyError:
        thinwire.encode("int3", [])
"""


@pytest.mark.parametrize("name, text, called, frame, message, kind", [
    ("imports", "import nothing_there", "the import of imports", "imports.py",
     "No module named 'nothing_there'", "ModuleNotFoundError"),
    ("cut", "def make(:", "the import of cut", "cut.py", "def make(:", "SyntaxError"),
    ("makes", "import thinwire" + MADE_WRONG, "makes:make()", "in make", "KeyError: 'first'",
     "InvalidArgumentError"),
    ("runs", MADE_WRONG.replace("make", "other").replace("raises", "make"), "run() of runs:make",
     "in run", "cannot be multiplied", "RuntimeError"),
])  # fmt: skip
def test_an_error_of_the_users_function_has_its_frames_only(
    name, text, called, frame, message, kind, tmp_path, capsys, monkeypatch
):
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    with reserved_port() as port:
        for variable, value in variables(0, 1, port).items():
            monkeypatch.setenv(variable, value)
        assert cli.main(["advise", f"{name}:make"]) == 1
    said = capsys.readouterr().err
    assert frame in said and message in said
    assert said.splitlines()[-1] == f"thinwire advise: {called} raised {kind}"
    assert str(Path(cli.__file__).parent) not in said and "importlib" not in said, said


def automatic(rank: int, bytes_per_s: float, loss: float, policy: str, steps: int = 50):
    real = auto.probe

    auto.probe, auto._LOSS = lambda *args: on_link(real(*args), bytes_per_s), loss
    model = make_mlp(seed=rank, width=256)
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = Wrapped(inner, model, codec="auto", policy=policy, min_bytes=0)
    used = []
    for step in range(steps):
        optimizer.zero_grad()
        x = data(step, rank, width=256)
        (model(x) - torch.sin(x[:, :10])).square().mean().backward()
        optimizer.step()
        used.append(optimizer.codec)
    optimizer.finish()
    settled = optimizer.codec
    optimizer.close()
    return used, settled, digest(model)


@pytest.mark.parametrize("policy", ["p3", "wfbp"])
def test_auto_takes_what_is_advised(policy):
    (used, settled, first), (_, _, second) = run(automatic, 1e6, 1e9, policy)
    assert first == second
    assert settled == "int4"
    assert used[0] == "fp32" and list(dict.fromkeys(used)) == ["fp32", "int4"]


def codecs_used(monkeypatch, seconds: list[float]) -> list[str]:
    """Return the codec after each stretch of steps, if int4 is advised. A step of stretch i
    takes seconds[i]."""
    rows = [Prediction(codec, "wfbp", step_s) for codec, step_s in (("fp32", 2.0), ("int4", 1.0))]
    now, used = 0.0, []
    monkeypatch.setattr(auto, "time", types.SimpleNamespace(perf_counter=lambda: now))
    monkeypatch.setattr(forecast.Notes, "profile", lambda *_: None)
    monkeypatch.setattr(auto, "probe", lambda *_: types.SimpleNamespace(link=None, costs=None))
    monkeypatch.setattr(auto, "predict", lambda *_, **__: rows)
    monkeypatch.setattr(auto, "from_rank_0", lambda value, _: value)
    monkeypatch.setattr(auto, "agreeing", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(auto, "worst_of_ranks", lambda values, _: values)
    chooser = auto.AutoCodec(config.resolve(codec="auto"), None)
    codec = chooser.config.codec
    for step_s in seconds:
        for _ in range(auto._WARM_UP + auto._TIMED):
            now += step_s
            if choice := chooser.after_step(torch.device("cpu"), lambda: None):
                codec = choice.codec
        used.append(codec)
    return used


# The first stretch is measured for the prediction, the second is the fp32 time to compare with.
@pytest.mark.parametrize(
    ("seconds", "used"),
    [
        ([1, 1, 0.5, 9, 9, 9], ["fp32", *["int4"] * 5]),  # decided after the third
        ([1, 1, 1.02, 9], ["fp32", "int4", "int4", "int4"]),
        # Another program ran while int4 was timed first.
        ([1, 1, 3, 1, 0.5, 9, 9], ["fp32", "int4", "fp32", "int4", "int4", "int4", "int4"]),
        ([1, 1, 1.1, 1, 1.1, 1, 1], ["fp32", "int4", "fp32", "int4", "fp32", "fp32", "fp32"]),
    ],
)
def test_auto_goes_back_from_a_codec_that_was_slower_twice(monkeypatch, seconds, used):
    assert codecs_used(monkeypatch, seconds) == used


def automatic_ddp(rank: int, bytes_per_s: float, loss: float, momentum: float, steps: int = 50):
    real = auto.probe

    auto.probe, auto._LOSS = lambda *args: on_link(real(*args), bytes_per_s), loss
    model = make_mlp(seed=rank, width=256)
    ddp, state = wrap(model, "auto", bucket_cap_mb=0.3, momentum=momentum)
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    if momentum:
        state.take_momentum(sgd)
    used, losses = [], []
    for step in range(steps):
        sgd.zero_grad()
        x = data(step, rank, width=256)
        losses.append((ddp(x) - torch.sin(x[:, :10])).square().mean())
        losses[-1].backward()
        sgd.step()
        used.append(state.codec)
    stats = state.stats()
    return used, losses[-1].item(), stats, digest(model)


@pytest.mark.slow
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_auto_takes_what_is_advised_under_ddp(momentum):
    (used, loss, stats, first), (_, _, _, second) = run(automatic_ddp, 1e6, 1e9, momentum)
    assert first == second
    assert list(dict.fromkeys(used)) == ["fp32", "int4"]
    assert stats["steps"] == 50 and 1.0 < stats["ratio"] < 7  # over all steps
    (used, plain, _, _), _ = run(automatic_ddp, 1e12, 1e9, momentum)
    assert set(used) == {"fp32"}
    assert loss == pytest.approx(plain, rel=0.1)


def test_auto_goes_back_under_ddp_where_it_loses():
    (used, _, _, first), (_, _, _, second) = run(automatic_ddp, 1e6, 0.0, 0.0, 80)
    assert first == second
    assert list(dict.fromkeys(used)) == ["fp32", "int4"] and used[-1] == "fp32"


def test_auto_goes_back_where_it_loses():
    (used, settled, first), (_, _, second) = run(automatic, 1e6, 0.0, "p3", 80)
    assert first == second
    assert settled == "fp32" and list(dict.fromkeys(used)) == ["fp32", "int4"]
    assert used[-1] == "fp32"


def changed(rank: int):
    """Return the residuals before and after a change of codec, and whether a step uses them."""
    model = make_mlp()
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = Wrapped(sgd, model, codec="int4", momentum=0.9, min_bytes=0)

    def step(number: int) -> None:
        optimizer.zero_grad()
        model(data(number, rank)).square().mean().backward()
        optimizer.step()
        optimizer.finish()

    def kept() -> dict:
        return optimizer.state_dict()["thinwire"]["residuals"]

    step(0)
    before, sent = kept(), optimizer.stats()["wire_bytes"]
    optimizer.exchange._take(auto.Choice("int8", ("int8",)))
    after = kept()
    step(1)
    assert optimizer.stats()["wire_bytes"] > sent > 0
    return before, after


def test_a_change_of_codec_takes_everything_along():
    for before, after in run(changed):
        assert before.keys() == after.keys() and before
        for name, memory in before.items():
            assert memory.keys() == after[name].keys() and memory["momentum"].any()
            assert all(torch.equal(memory[key], after[name][key]) for key in memory)


def lost_while_choosing(rank: int, ddp: bool):
    def probe(*_):
        raise RuntimeError("Connection closed by peer")  # as torch's collectives raise it

    auto.probe = probe
    model = make_mlp(seed=rank)
    sgd = torch.optim.SGD(model.parameters(), lr=0.05)
    if ddp:
        model, _ = wrap(model, "auto")
    else:
        sgd = Wrapped(sgd, model, codec="auto")
    with pytest.raises(thinwire.errors.PeerLostError, match=f"rank {rank}.*closed by peer"):
        for step in range(20):
            sgd.zero_grad()
            model(data(step, rank)).square().mean().backward()
            sgd.step()


@pytest.mark.parametrize("ddp", [False, True])
def test_a_rank_that_goes_while_a_codec_is_chosen_is_a_typed_error(ddp):
    run(lost_while_choosing, ddp)


def refusals(rank: int):
    model = make_mlp()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(thinwire.InvalidArgumentError, match="codec='auto'"):
        thinwire.torch.State(codec="auto", momentum=0.9, warm_up_steps=2)
    with pytest.raises(thinwire.InvalidArgumentError, match="thinwire advise"):
        Wrapped(sgd, model, codec={"*.bias": "auto", "*": "int4"})
    with pytest.raises(thinwire.InvalidArgumentError, match="delay=1"):
        Wrapped(sgd, model, codec="auto", delay=1)


def test_where_auto_can_not_be_is_said():
    run(refusals)


def test_auto_leaves_a_fast_link_alone():
    (used, settled, _), _ = run(automatic, 1e12, 1.03, "p3")
    assert settled == "fp32" and set(used) == {"fp32"}


FEW_BYTES = ("onebit", "topk:density=0.01")


def seconds_to_encode(rank: int) -> list[float]:
    from thinwire.torch.forecast import probe

    costs = probe(FEW_BYTES, torch.device("cpu")).costs
    return [costs[codec].encode_s for codec in FEW_BYTES]


def test_codecs_of_few_bytes_take_time():
    for seconds in run(seconds_to_encode):
        assert min(seconds) > 0


def test_two_exchanges_in_a_row_take_two_latencies():
    """Ranks that alternate find the other's bytes already there every second time."""
    assert forecast._in_pairs([0.0, 10.0, 0.0, 10.0]) == [5.0, 5.0, 5.0]
    assert forecast._in_pairs([3.0]) == [3.0]
