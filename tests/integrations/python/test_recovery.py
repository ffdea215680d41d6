"""After an error the remaining ranks build a new group, call recover() once, and continue: no
residual is lost or sent twice, and replicas are bit-identical."""

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import thinwire
import torch
import torch.distributed as dist
from memory import bytes_in_use
from models import data, digest, loss_of, make_mlp
from ranks import HANG_S, outcomes_of, run
from thinwire import comm
from thinwire.torch import GradientExchange, State, agree, hook, private
from torch.nn.parallel import DistributedDataParallel
from trainers import WAYS, Trainer

LAST = 5  # the step in which a rank dies
MORE = 20  # steps after that step


def regroup(folder: str, rank: int, world: int, generation: int = 1) -> None:
    """Do what the user does: end the old process group and begin a new one."""
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/{generation}", rank=rank, world_size=world
    )


def train_until_error(trainer: Trainer, rank: int, steps: range) -> thinwire.Error:
    for step in steps:
        try:
            trainer.step(step, rank)
        except thinwire.Error as error:
            return error
    raise AssertionError("no error came")


def lose_a_rank(rank: int, way: str, folder: str):
    trainer = Trainer(way)
    for step in range(LAST):
        trainer.step(step, rank)
    if rank == 1:
        trainer.die_in_the_next_step()
    error = train_until_error(trainer, rank, range(LAST, 1000))
    assert isinstance(error, thinwire.PeerLostError), error
    new = rank // 2
    regroup(folder, new, 2)
    result = trainer.recover()
    kept = {name: tuple(memory) for name, memory in trainer.exchange._session.restored.items()}
    before = trainer.loss()
    for step in range(LAST + 1, LAST + 1 + MORE):
        trainer.step(step, new)
    trainer.finish()
    return result, kept, digest(trainer.model), before, trainer.loss(), trainer.exchange.steps


def never_fail(rank: int, way: str, steps: int):
    """Return the residuals and momentum after that many steps without a failure."""
    trainer = Trainer(way)
    for step in range(steps):
        trainer.step(step, rank)
    return trainer.kept()


@pytest.mark.parametrize(
    "way", [pytest.param(w, marks=() if w == "hook" else pytest.mark.slow) for w in WAYS]
)
def test_two_of_three_ranks_go_on(way, tmp_path):
    outcomes = outcomes_of(lose_a_rank, way, str(tmp_path), world=3)
    assert outcomes[1].exit_code < 0
    reference = {
        steps: run(never_fail, way, steps, world=3) for steps in (LAST - 1, LAST, LAST + 1)
    }
    digests = set()
    for rank in (0, 2):
        assert not outcomes[rank].error, outcomes[rank].trace
        result, kept, bits, before, after, steps = outcomes[rank].value
        digests.add(bits)
        assert after < before and steps == result.step + MORE
        assert kept.keys() == reference[LAST][rank].keys()
        for name, (first, second, momentum) in kept.items():
            agreed = [
                torch.equal(first, was["first"] + 3 * was["second"])
                and (momentum is None or torch.equal(momentum, was["momentum"]))
                for was in (of_ranks[rank][name] for of_ranks in reference.values())
            ]
            assert any(agreed), name
            assert not second.any()
            if way != "delay":  # its means come a step later
                assert result.step == LAST and agreed[1], (name, agreed, result)
    assert len(digests) == 1


def lose_the_means(until: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This rank's exchanges end normally, and then raise an error here, once `until` exists."""
    ended = comm.Bucket.wait_stream

    def wait_stream(bucket: comm.Bucket, stream: int | None) -> None:
        ended(bucket, stream)
        while not until.exists():
            time.sleep(0.001)
        raise thinwire.PeerLostError("the connection broke after the last byte")

    monkeypatch.setattr(comm.Bucket, "wait_stream", wait_stream)


def fail_on_rank_0(rank: int, way: str, folder: str):
    """Return a trainer. Rank 1 completes a step, up to the last parameter, that fails on rank 0."""
    trainer, made = Trainer(way), Path(folder) / "made"
    for step in range(LAST):
        trainer.step(step, rank)
    trainer.finish()
    if rank == 0:
        with pytest.MonkeyPatch.context() as monkeypatch, pytest.raises(thinwire.PeerLostError):
            lose_the_means(made, monkeypatch)
            trainer.step(LAST, rank)
            trainer.finish()
    else:
        trainer.step(LAST, rank)
        trainer.finish()
        made.touch()
    return trainer


def one_lacks_the_step(rank: int, way: str, folder: str):
    trainer = fail_on_rank_0(rank, way, folder)
    regroup(folder, rank, 2)
    result = trainer.recover()
    bits, kept, before = digest(trainer.model), trainer.kept(), trainer.loss()
    for step in range(LAST + 1, LAST + 1 + MORE):
        trainer.step(step, rank)
    return result, bits, kept, before, trainer.loss(), digest(trainer.model)


def keeps_of_a_run(rank: int, way: str):
    trainer = Trainer(way)
    for step in range(LAST + 1):
        trainer.step(step, rank)
    trainer.finish()
    return digest(trainer.model), trainer.kept()


@pytest.mark.parametrize(
    "way",
    [
        pytest.param(w, marks=() if w == "hook" else pytest.mark.slow)
        for w in ("hook", "hook momentum", "p3", "wfbp", "p3 momentum")
    ],
)
def test_a_step_that_one_rank_lacks_counts_as_made(way, tmp_path):
    """Everything continues bit by bit as if the step had failed nowhere."""
    ranks = run(one_lacks_the_step, way, str(tmp_path))
    (bits, first), (_, second) = run(keeps_of_a_run, way)
    expected = (first, second)
    for rank, (result, after, kept, before, at_the_end, _) in enumerate(ranks):
        assert result == (LAST + 1, 1, False)
        assert after == bits
        assert kept.keys() == expected[rank].keys()
        for name, tensors in kept.items():
            for kind, tensor in tensors.items():
                assert torch.equal(tensor, expected[rank][name][kind]), (rank, name, kind)
        assert at_the_end < before
    assert ranks[0][-1] == ranks[1][-1]


def cut_recovery(rank: int, way: str, folder: str, cut: str):
    """The first recovery fails in one of torch's collectives, as if a third rank were lost, and the
    second one succeeds."""
    trainer = fail_on_rank_0(rank, way, folder)
    regroup(folder, rank, 2)
    with pytest.MonkeyPatch.context() as monkeypatch:
        calls, collective = [], getattr(dist, cut)

        def lose(*arguments, **options):
            calls.append(arguments)
            if cut != "broadcast" or len(calls) == 2:  # each rank sends half of the parameters
                raise RuntimeError("Connection closed by peer")
            return collective(*arguments, **options)

        monkeypatch.setattr(dist, cut, lose)
        with pytest.raises(thinwire.PeerLostError, match="call recover\\(\\) there"):
            trainer.recover()
    regroup(folder, rank, 2, generation=2)
    result = trainer.recover()
    bits, kept = digest(trainer.model), trainer.kept()
    for step in range(LAST + 1, LAST + 1 + MORE):
        trainer.step(step, rank)
    trainer.finish()
    return result, bits, kept, digest(trainer.model)


@pytest.mark.parametrize("cut", ["all_gather_object", "broadcast"])
@pytest.mark.parametrize("way", ["hook", pytest.param("p3", marks=pytest.mark.slow)])
def test_a_recovery_that_is_cut_is_made_again(way, cut, tmp_path):
    """Everything continues bit by bit as if the step had failed nowhere."""
    ranks = run(cut_recovery, way, str(tmp_path), cut)
    (bits, first), (_, second) = run(keeps_of_a_run, way)
    for rank, expected in enumerate((first, second)):
        result, after, kept, _ = ranks[rank]
        assert result == (LAST + 1, 1, False)
        assert after == bits
        for name, tensors in expected.items():
            for kind, tensor in tensors.items():
                assert torch.equal(tensor, kept[name][kind]), (rank, name, kind)
    assert ranks[0][-1] == ranks[1][-1]


def lose(*_: object, **__: object) -> None:
    raise RuntimeError("Connection closed by peer")


def no_replica_is_left(rank: int, folder: str):
    """The rank that has completed the step is lost while it sends its parameters."""
    trainer, made = Trainer("hook"), Path(folder) / "made"
    for step in range(LAST):
        trainer.step(step, rank)
    with pytest.MonkeyPatch.context() as monkeypatch:
        if rank > 0:
            trainer.step(LAST, rank)
            made.touch()
        else:
            lose_the_means(made, monkeypatch)
            with pytest.raises(thinwire.PeerLostError):
                trainer.step(LAST, rank)
    regroup(folder, rank, 2)
    with pytest.MonkeyPatch.context() as monkeypatch, pytest.raises(thinwire.PeerLostError):
        monkeypatch.setattr(dist, "broadcast", lose)
        trainer.recover()
    if rank == 0:
        regroup(folder, 0, 1, generation=2)
        trainer.recover()


def lose_a_rank_in_the_first_step(rank: int, folder: str):
    """Torch's exchange of the parameters' order fails, as if a third rank were lost."""
    trainer = Trainer("p3")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(dist, "broadcast_object_list", lose)
        with pytest.raises(thinwire.PeerLostError, match="the order of the parameters"):
            trainer.step(0, rank)
    regroup(folder, rank, 2)
    result = trainer.recover()
    for step in range(MORE):
        trainer.step(step, rank)
    trainer.finish()
    return result, digest(trainer.model)


def test_a_rank_that_is_lost_in_the_first_step_is_a_typed_error(tmp_path):
    first, second = run(lose_a_rank_in_the_first_step, str(tmp_path))
    assert first == second and first[0] == (0, 0, True)


def lose_a_rank_while_replicas_are_made(_rank: int):
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(dist, "broadcast", lose)
        with pytest.raises(thinwire.PeerLostError, match="the same replica"):
            thinwire.torch.compress(make_mlp(), "int4")


def test_a_rank_that_is_lost_while_replicas_are_made_is_a_typed_error():
    run(lose_a_rank_while_replicas_are_made)


def lose_rank_1_at(rank: int, folder: str, moment: str):
    """Rank 1 of three is lost before the new group's recovery, or during it."""
    exchange = GradientExchange("int4")
    exchange.reduce({"x": data(0, rank)})
    regroup(folder, rank, 3)
    if rank == 1:
        if moment == "before":
            os._exit(9)
        dist.all_gather_object = lambda *_, **__: os._exit(9)
    exchange.recover()


@pytest.mark.parametrize("moment, expected", [
    ("before", "rank 1 did not come"),
    ("in it", "rank 1 came, and did not answer again within 2 s"),
])  # fmt: skip
def test_a_recovery_names_the_rank_that_is_lost(moment, expected, tmp_path):
    outcomes = outcomes_of(lose_rank_1_at, str(tmp_path), moment, world=3)
    for rank in (0, 2):
        message = outcomes[rank].message
        assert outcomes[rank].error == "PeerLostError", outcomes[rank].trace
        assert f"rank {rank} could not agree" in message and "expected all 3 ranks" in message
        assert expected in message, message
        assert "call recover() there" in message


HOLDER = """
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
input()
"""


def agree_without_a_store(rank: int, port: int, holder: int):
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo", store=dist.TCPStore("127.0.0.1", port), rank=rank, world_size=2,
        timeout=timedelta(seconds=2),
    )  # fmt: skip
    dist.barrier()
    if rank == 1:
        os.kill(holder, signal.SIGSTOP)
        os._exit(9)
    with agree.agreeing("a step", None):
        dist.recv(torch.zeros(1), 1)


def test_an_agreement_fails_though_the_holder_of_the_store_is_stopped():
    command = [sys.executable, "-c", HOLDER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        try:
            port = int(holder.stdout.readline())
            first, _ = outcomes_of(agree_without_a_store, port, holder.pid, timeout_s=60)
        finally:
            holder.kill()
    assert first.error == "PeerLostError", first.trace
    assert "the process that holds the group's rendezvous store is silent" in first.message


def test_ranks_of_which_none_has_whole_parameters_are_told(tmp_path):
    first, second = outcomes_of(no_replica_is_left, str(tmp_path))
    assert first.error == "DataLossError", first.trace
    assert "load a checkpoint" in first.message
    assert not second.error, second.trace


def disagree(rank: int, way: str, folder: str):
    """All ranks get a mismatch and recover; this happens twice."""
    trainer = Trainer(way)
    steps = iter(range(1000))
    for generation in (1, 2):
        for _ in range(3):
            trainer.step(next(steps), rank)
        bucket = trainer.exchange.bucket("odd", [("odd", 5000 + rank)], torch.float32)
        with pytest.raises(thinwire.MismatchError, match="odd"):
            trainer.exchange.wait(trainer.exchange.submit(bucket, torch.ones(5000 + rank)))
        regroup(folder, rank, 2, generation)
        result = trainer.recover()
        assert result.equal or way == "delay"
    before = trainer.loss()
    for _ in range(MORE):
        trainer.step(next(steps), rank)
    assert trainer.loss() < before
    return digest(trainer.model), trainer.exchange.steps


@pytest.mark.parametrize("way", ["hook", "loop"])
def test_all_ranks_recover_from_a_mismatch_twice(way, tmp_path):
    first, second = run(disagree, way, str(tmp_path))
    assert first == second
    assert first[1] == 6 + MORE


def leave_the_old_model(rank: int, folder: str):
    """Only rank 0 begins a step that also has an all-reduce of torch's own. The all-reduce ends
    when rank 1 drops its old model, long after rank 0 has dropped its own."""
    model = make_mlp()
    state = State("int4", recoverable=True)
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    ddp.register_comm_hook(state, hook)
    loss_of(ddp, data(0, rank)).backward()
    try:
        if rank == 0:
            loss_of(ddp, data(1, rank)).backward()
        else:
            state.fail(thinwire.Error("enough"))
    except thinwire.Error:
        pass  # a traceback that is kept would keep the model alive
    kept = ddp if rank == 1 else None
    regroup(folder, rank, 2)
    state.recover(module=model)
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    ddp.register_comm_hook(state, hook)
    loss_of(ddp, data(2, rank)).backward()
    del kept
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def test_a_model_dies_after_its_group_while_that_is_busy(tmp_path):
    first, second = run(leave_the_old_model, str(tmp_path))
    assert torch.equal(first, second)


def test_nothing_is_kept_of_a_state_that_has_died():
    states = [State("int4") for _ in range(5)]
    for state in states:
        private.keep_former_group(state, object())
    del state, states
    gc.collect()
    end = time.monotonic() + HANG_S
    while private._former_groups or not private._to_keep.empty():
        assert time.monotonic() < end, private._former_groups
        time.sleep(0.01)


def leave_without_recovery(rank: int, folder: str):
    """Only rank 0 begins a step that also has an all-reduce of torch's own. It then drops its model
    after its group, without recover()."""
    ddp = DistributedDataParallel(make_mlp(), find_unused_parameters=True)
    compression = thinwire.torch.compress(ddp, "int4", timeout_s=10)
    for step in range(2):  # DDP's second step has a broadcast
        loss_of(ddp, data(step, rank)).backward()
    gone = Path(folder) / "gone"
    if rank == 0:
        with pytest.raises(thinwire.TimeoutError):
            loss_of(ddp, data(2, rank)).backward()
        dist.destroy_process_group()
        compression.close()
        del ddp, compression
        gc.collect()
        gone.touch()
    while not gone.exists():
        time.sleep(0.01)


def test_a_model_dies_after_its_group_without_a_recovery(tmp_path):
    run(leave_without_recovery, str(tmp_path))


def threads_at_rest() -> int:
    """Return the fewest threads within a moment, since ending threads stay visible for a while."""
    counts = []
    for _ in range(5):
        counts.append(len(os.listdir("/proc/self/task")))
        time.sleep(0.01)
    return min(counts)


def recover_often(rank: int, folder: str):
    """Rank 1 fails the group as soon as it has a step, which rank 0 may then lack."""
    trainer, usage, unequal = Trainer("hook momentum"), [], 0
    for generation in range(1, 24):
        with contextlib.suppress(thinwire.Error):
            trainer.step(generation, rank)
            if rank == 1:
                trainer.exchange.fail(thinwire.Error("enough"))
        regroup(folder, rank, 2, generation)
        unequal += not trainer.recover().equal
        trainer.step(generation, rank)
        usage.append((len(os.listdir("/proc/self/fd")), threading.active_count(),
                      threads_at_rest(), bytes_in_use()))  # fmt: skip
    kept = sum(12 * parameter.numel() for parameter in trainer.model.parameters())
    return (usage, kept), digest(trainer.model), trainer.exchange.steps, unequal


@pytest.mark.slow
def test_twenty_recoveries_leave_nothing_behind(tmp_path):
    outcomes = run(recover_often, str(tmp_path))
    assert outcomes[0][1:] == outcomes[1][1:]
    for (usage, kept), *_ in outcomes:
        early, late = usage[2], usage[-1]
        assert late[0] <= early[0] + 8  # torch's own descriptors come and go
        assert late[1] <= early[1] and late[2] <= early[2] + 4
        print(early, late, kept)
        # Less than half a residual of each parameter per recovery. A recovery keeps three arrays of
        # that size.
        assert late[3] - early[3] < len(usage[3:]) * kept / 6


def test_recovering_needs_a_process_group():
    with pytest.raises(thinwire.InvalidArgumentError, match="init_process_group"):
        State("int4").recover()
    with pytest.raises(thinwire.InvalidArgumentError, match="init_process_group"):
        GradientExchange("int4").recover()


def closed(rank: int):
    exchange = GradientExchange("int4")
    exchange.reduce({"x": data(0, rank)})
    exchange.close()
    with pytest.raises(thinwire.Error, match="closed"):
        exchange.recover()


def test_a_closed_exchange_does_not_recover():
    run(closed)
