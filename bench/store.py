"""The parameter server: compared with an allreduce, in several orders, and with unequal workers.

    python -m bench store [--parts formula,order,stragglers,simulated] [--seconds 20]
                          [--out FILE]

formula     one exchange of 4 Mi elements by the store, relative to one by thinwire's allreduce with
            the same codec, and the ratio that their bytes allow: with n workers and s servers whose
            links are b times a worker's, an allreduce moves 2 (n - 1) / n of a worker's wire bytes
            over each link in each direction, and the store max(1, n / (s b)).
order       steps of int4 under P3, under fifo, and in MXNet's manner (whole keys, push, then pull,
            in the order of the backward pass), if the exchange takes as long as computing; and of
            fp32 under fifo.
stragglers  updates per second of all workers, with one of four at half speed, and with one step in
            ten that takes four times as long.
simulated   the steps of `order` and the updates of `stragglers`, by schedule/sim/store.h, which
            runs the store's own rules on a virtual clock: links have a rate and a latency, and
            nothing else takes time. It also has a lower bound for any order of the same bytes.

Workers and servers are processes that call thinwire.kvstore.create as programs do. A step sleeps in
place of computing, as if that were on a GPU, so that only the store uses the cores that the members
share. The first two parts run in the network lab, and require root; the last one requires neither,
and gives the same figures on every machine."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import multiprocessing
import os
import random
import signal
import statistics
import time
import timeit
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench import harness, lab
from bench.harness import Row, Turn

CODECS = ("fp32", "int4")
MODES = {"sync": "dist_sync", "ssp": "dist_ssp:staleness=2", "async": "dist_async"}
TIMEOUT_S = 60.0  # seconds, of connecting and of each wait

# Sizes and links of the part "formula".
ELEMENTS, KEYS = 4 << 20, 4
FAST_SERVER = "1gbit"
LINK = "200mbit"
PLACES = (  # workers, servers, links of the servers
    (2, 1, LINK), (2, 2, LINK), (4, 1, LINK), (4, 2, LINK), (4, 1, FAST_SERVER),
)  # fmt: skip

# The part "order": the VGG-like model of subjects/priority.py, as the parameters of each layer and
# the millions of multiplications of its forward pass; a backward pass takes twice as long.
LAYERS = {
    "conv1": (896, 0.9), "conv2": (9248, 9.4), "conv3": (18496, 4.7), "conv4": (36928, 9.4),
    "conv5": (73856, 4.7), "conv6": (147584, 9.4), "fc1": (2048 * 2049, 4.2),
    "fc2": (2048 * 2049, 4.2), "fc3": (10 * 2049, 0.02),
}  # fmt: skip
WHOLE = 1 << 26  # elements of a slice: no key is cut
ORDER_PLACE = (2, 2)  # workers, servers
ORDERS = ("fifo", "mxnet", "p3")
# Steps of the other orders in fp32 take seconds, so they are only simulated.
ORDER_SUBJECTS = (("fifo", "int4"), ("mxnet", "int4"), ("p3", "int4"), ("fifo", "fp32"))
ORDER_TURN = 8  # steps; a turn waits for its last exchange

# The part "stragglers".
SMALL = 100_000  # elements of the model
STEP_S = 0.04
STRAGGLER_WORKERS, STRAGGLER_TURN = 4, 40
HALF, SPIKES = "one of four at half speed", "one step in ten takes 4 times as long"

# The part "simulated": one-way latencies of a link. Steps are means over them, because windows that
# measure a clock without noise fall into patterns that depend on the latency.
LATENCIES_S = tuple(tenths * 1e-5 for tenths in range(2, 42, 4))
ORDER_STEPS, STRAGGLER_STEPS = 30, 10_000
WARMUP = 10


def bytes_bound(workers: int, servers: int, faster: float) -> float:
    """Return the store's speed relative to an allreduce's, from the bytes on each link. faster: the
    rate of a server's link divided by a worker's."""
    return 2 * (workers - 1) / workers / max(1.0, workers / (servers * faster))


# Members of a lab: its first ranks are workers, and join a torch group of only workers; the others
# serve. Each store has separate processes on the servers' hosts.


@dataclass(frozen=True)
class Spec:
    """A store that all members create. codec: "fp32" means no compression."""

    mode: str = "dist_sync"
    codec: str = "fp32"
    slice_elements: int = 0

    def create(self) -> Any:
        from thinwire import kvstore

        return kvstore.create(
            self.mode, codec=None if self.codec == "fp32" else self.codec,
            slice_elements=self.slice_elements, timeout_s=TIMEOUT_S,
        )  # fmt: skip


def be_member(specs: Sequence[Spec], rows: Callable[[list[Any]], Any]) -> int:
    """Run a rank of a lab. rows: measures in a worker, with the stores in the order of specs."""
    from thinwire import launch

    role, world = launch.store_role(), os.environ["WORLD_SIZE"]
    if role.role == "server":
        import thinwire.kvstore  # noqa: F401 - so that forked processes have it and torch

        context = multiprocessing.get_context("fork")
        served = [context.Process(target=_serve, args=each) for each in enumerate(specs)]
        for process in served:
            process.start()
        for process in served:
            process.join()
        return max(abs(process.exitcode) for process in served)

    def with_stores() -> Any:
        os.environ["WORLD_SIZE"] = world
        with contextlib.ExitStack() as stack:
            stores = [stack.enter_context(contextlib.closing(spec.create())) for spec in specs]
            return rows(stores)

    os.environ["WORLD_SIZE"] = str(role.workers)  # of torch's group
    return harness.be_rank(with_stores)


def _serve(place: int, spec: Spec) -> None:
    from thinwire import kvstore

    ctypes.CDLL(None).prctl(lab.PR_SET_PDEATHSIG, signal.SIGKILL)
    for _ in range(place):  # members match stores by their number in the process
        kvstore.create("local").close()
    spec.create()


# Workers measure the following with their stores.


def _gradients(seed: int) -> list[Any]:
    import torch

    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(ELEMENTS // KEYS, generator=generator) for _ in range(KEYS)]


@contextlib.contextmanager
def exchange_by_store(store: Any) -> Iterator[Turn]:
    """Yield a turn whose steps push gradients, pull values, and wait for them."""
    gradients = _gradients(store.rank)
    values = [gradient.new_zeros(gradient.shape) for gradient in gradients]
    store.init(range(KEYS), values)
    store.set_optimizer("sgd", learning_rate=0.01, rescale_grad=1 / store.num_workers)

    def step() -> None:
        for key, (gradient, value) in enumerate(zip(gradients, values, strict=True)):
            store.pushpull(key, gradient, out=value, priority=-key)
        store.wait()

    yield lambda steps: timeit.repeat(step, number=1, repeat=steps)


@contextlib.contextmanager
def exchange_by_allreduce(codec: str) -> Iterator[Turn]:
    """Yield a turn whose steps reduce as many elements by thinwire's allreduce."""
    import torch.distributed as dist
    from thinwire import torch as tw

    gradients = _gradients(dist.get_rank())
    sums = [gradient.clone() for gradient in gradients]

    def start(key: int) -> Any:
        total = sums[key].copy_(gradients[key])
        name = f"{codec} {key}"
        return tw.all_reduce(total, dist.ReduceOp.AVG, async_op=True, codec=codec, name=name)

    def step() -> None:
        for work in [start(key) for key in range(KEYS)]:
            work.wait()

    yield lambda steps: timeit.repeat(step, number=1, repeat=steps)


def formula_rows(arguments: argparse.Namespace, stores: list[Any]) -> list[Row]:
    found = []
    for codec, store in zip(CODECS, stores, strict=True):
        subjects = {"allreduce": exchange_by_allreduce(codec), "store": exchange_by_store(store)}
        base, row = harness.measure(subjects, steps=2, seconds=arguments.seconds)
        found.append({"codec": codec, "baseline_ms": base["ms"]} | row)
    return found


def forward_s() -> dict[str, float]:
    """Return the seconds of each layer's forward pass, half of its backward pass's. A step computes
    for as long as the wire bytes of int4 take on LINK."""
    from thinwire.codec import encoded_bytes

    elements, shares = map(sum, zip(*LAYERS.values(), strict=True))
    workers, servers = ORDER_PLACE
    wire = encoded_bytes("int4", elements) * max(1.0, workers / servers)
    step_s = 8 * wire / lab.bits_per_second(LINK)
    return {layer: step_s * share / shares / 3 for layer, (_, share) in LAYERS.items()}


@contextlib.contextmanager
def order(name: str, stores: Mapping[bool, Any] | None) -> Iterator[Turn]:
    """Yield a turn of a loop that pushes each layer's gradient when the backward pass has computed
    it, and whose forward pass waits for each layer's values. stores: by whether their keys are not
    cut; None: no exchange. All orders of a store use the same keys."""
    import torch

    seconds = forward_s()
    store = None if stores is None else stores[name == "mxnet"]
    values = {layer: torch.zeros(numel) for layer, (numel, _) in LAYERS.items()}
    gradients = {layer: torch.randn(numel) for layer, (numel, _) in LAYERS.items()}

    def exchange(number: int, layer: str) -> None:
        if name == "mxnet":
            store.push(layer, gradients[layer])
            store.pull(layer, values[layer], wait=False)
        else:
            priority = -number if name == "p3" else 0
            store.pushpull(layer, gradients[layer], out=values[layer], priority=priority)

    def turn(steps: int) -> list[float]:
        start = time.perf_counter()
        for _ in range(steps):
            for layer in LAYERS:
                if store is not None:
                    store.wait(layer)
                time.sleep(seconds[layer])
            for number, layer in reversed(list(enumerate(LAYERS))):
                time.sleep(2 * seconds[layer])
                if store is not None:
                    exchange(number, layer)
        if store is not None:
            store.wait()
        return [(time.perf_counter() - start) / steps]

    yield turn


def order_rows(arguments: argparse.Namespace, stores: list[Any]) -> list[Row]:
    import torch

    by_codec: dict[str, dict[bool, Any]] = {codec: {} for codec in CODECS}
    for spec, store in zip(PARTS["order"].specs, stores, strict=True):
        by_codec[spec.codec][spec.slice_elements == WHOLE] = store
    for store in stores:
        store.init(list(LAYERS), [torch.zeros(numel) for numel, _ in LAYERS.values()])
        store.set_optimizer("sgd", learning_rate=0.01, rescale_grad=1 / store.num_workers)
    subjects = {f"{name} {codec}": order(name, by_codec[codec]) for name, codec in ORDER_SUBJECTS}
    subjects["alone"] = order("alone", None)
    rows = harness.measure(subjects, steps=ORDER_TURN, seconds=arguments.seconds)
    p3 = next(row["ratio"] for row in rows if row["subject"] == "p3 int4")
    return [row | {"of_p3": p3 / row["ratio"]} for row in rows]


@contextlib.contextmanager
def straggle(mode: str, store: Any, what: str) -> Iterator[Turn]:
    """Yield a turn that returns, for each step, the mean time between two updates of all workers
    together. In sync every worker makes the turn's steps; in the other modes each makes as many as
    it can in the time in which the slowest worker makes these."""
    import torch
    import torch.distributed as dist

    key, value = what, torch.zeros(SMALL)
    gradient = torch.randn(SMALL, generator=torch.Generator().manual_seed(store.rank))
    store.init(key, value)
    turns = 0

    def seconds_of(chance: random.Random) -> float:
        if what == HALF:
            return STEP_S * (2 if store.rank == STRAGGLER_WORKERS - 1 else 1)
        return STEP_S * (4 if chance.random() < 0.1 else 1)

    def turn(steps: int) -> list[float]:
        nonlocal turns
        turns += 1
        chance = random.Random(f"{turns} {store.rank}")  # the same in each mode
        done, start = 0, time.monotonic()
        while done < steps if mode == "sync" else time.monotonic() - start < 2 * steps * STEP_S:
            time.sleep(seconds_of(chance))
            store.pushpull(key, gradient, out=value)
            store.wait()
            done += 1
        store.barrier()  # in ssp the others would otherwise wait for a worker that has stopped
        took = time.monotonic() - start
        total = torch.tensor(float(done))
        dist.all_reduce(total)
        return [took / total.item()]

    yield turn


def straggler_rows(arguments: argparse.Namespace, stores: list[Any]) -> list[Row]:
    for store in stores:
        store.set_optimizer("sgd", learning_rate=1e-4)
    found = []
    for what in (HALF, SPIKES):
        subjects = {
            mode: straggle(mode, store, what) for mode, store in zip(MODES, stores, strict=True)
        }
        rows = harness.measure(subjects, steps=STRAGGLER_TURN, seconds=arguments.seconds)
        found += [{"what": what} | row for row in rows]
    return found


def simulated_orders() -> Iterator[Row]:
    """Yield the orders of each codec. bound: the largest possible speed of an order relative to the
    simulated fifo."""
    workers, servers = ORDER_PLACE
    layers = " ".join(f"{LAYERS[layer][0]} {s} {2 * s}" for layer, s in forward_s().items())
    rate = lab.bits_per_second(LINK) / 8
    for codec in reversed(CODECS):
        fifo = 0.0
        for name in ORDERS:
            steps = harness.simulate("store", [
                f"{workers} {servers} {rate} {rate} {latency} {codec} sync {name} 1 0 1 "
                f"{WARMUP} {ORDER_STEPS} 0 {layers}"
                for latency in LATENCIES_S
            ])  # fmt: skip
            ms = sorted(1e3 * step["step_s"] for step in steps)
            fifo = fifo or statistics.mean(ms)
            row = {"ms": statistics.mean(ms), "low_ms": ms[0], "high_ms": ms[-1]}
            yield row | {
                "what": "a step of " + codec, "subject": f"{name} {codec}",
                "ratio": fifo / row["ms"],
            } | ({} if name == "mxnet" else {
                "bound": fifo / statistics.mean(1e3 * step["bound_s"] for step in steps)
            })  # fmt: skip


def simulated_stragglers() -> Iterator[Row]:
    """Yield rows for exchanges that take no time: workers wait only because of the ledger."""
    modes = {mode: name.removeprefix("dist_") for mode, name in MODES.items()}
    for what, straggling in ((HALF, "2 0 1"), (SPIKES, "1 0.1 4")):
        rows = harness.simulate("store", [
            f"{STRAGGLER_WORKERS} 1 1e15 1e15 0 int4 {mode} fifo {straggling} "
            f"{WARMUP} {STRAGGLER_STEPS} 0 {SMALL} 0 {STEP_S}"
            for mode in modes.values()
        ])  # fmt: skip
        for mode, row in zip(modes, rows, strict=True):
            yield {
                "what": what, "subject": mode, "ms": 1e3 * row["step_s"] / STRAGGLER_WORKERS,
                "ratio": rows[0]["step_s"] / row["step_s"],
            }  # fmt: skip


@dataclass(frozen=True)
class Part:
    """A lab's stores, which all members create, and the measurement of its workers."""

    specs: Sequence[Spec]
    rows: Callable[[argparse.Namespace, list[Any]], list[Row]]


PARTS = {
    "formula": Part([Spec(codec=codec) for codec in CODECS], formula_rows),
    "order": Part(
        [Spec(codec="int4"), Spec(codec="int4", slice_elements=WHOLE), Spec(codec="fp32")],
        order_rows,
    ),
    "stragglers": Part([Spec(mode, "int4") for mode in MODES.values()], straggler_rows),
}
ALL = (*PARTS, "simulated")


def rank(arguments: argparse.Namespace) -> int:
    """Run a rank of a lab that measures the part arguments.parts."""
    part = PARTS[arguments.parts]
    return be_member(part.specs, functools.partial(part.rows, arguments))


def in_lab(
    arguments: argparse.Namespace, part: str, workers: int, servers: int, links: Sequence[str]
) -> list[Row]:
    argv = ["store", f"--parts={part}", f"--seconds={arguments.seconds}"]
    with lab.open_lab(workers + servers, links) as place:
        return harness.run_ranks(place, argv, 3600.0, THINWIRE_SERVERS=servers)


def formula(arguments: argparse.Namespace) -> Iterator[Row]:
    for workers, servers, link in PLACES:
        bound = bytes_bound(workers, servers, lab.bits_per_second(link) / lab.bits_per_second(LINK))
        links = [LINK] * workers + [link] * servers
        for row in in_lab(arguments, "formula", workers, servers, links):
            yield row | {
                "workers": workers, "servers": servers, "link": LINK, "server_link": link,
                "formula": bound, "of_formula": row["ratio"] / bound,
            }  # fmt: skip


def run(arguments: argparse.Namespace) -> list[Row]:
    refusal, found = lab.can_shape(), []
    for part in arguments.parts.split(","):
        if part in ("formula", "order") and refusal:
            print(f"{part}: skipped, {refusal}", flush=True)
            continue
        if part == "formula":
            rows = list(formula(arguments))
        elif part == "order":
            rows = in_lab(arguments, part, *ORDER_PLACE, [LINK] * sum(ORDER_PLACE))
        elif part == "stragglers":
            links = [lab.LOOPBACK] * (STRAGGLER_WORKERS + 1)
            rows = in_lab(arguments, part, STRAGGLER_WORKERS, 1, links)
        else:
            rows = [*simulated_orders(), *simulated_stragglers()]
        print(harness.table(rows) + "\n", flush=True)
        found += [{"part": part} | row for row in rows]
    return found
