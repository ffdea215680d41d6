"""The page about GPUs in nodes has the figures that its script computes, and its bytes are those
that the engine sends."""

import ctypes
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from thinwire import config
from thinwire.comm import Communicator

from bench import gpu_nodes

NUMEL = 1 << 20
CASES = list(gpu_nodes.cases())
NUMBER = re.compile(r"\d+(?:\.\d+)?")


def test_the_committed_page_is_what_the_script_gives():
    made, committed = gpu_nodes.page(), gpu_nodes.PAGE.read_text()
    message = "run python -m bench.gpu_nodes"
    assert NUMBER.sub("0", made) == NUMBER.sub("0", committed), message
    # Another compiler may round the last digit differently.
    numbers = [[float(x) for x in NUMBER.findall(text)] for text in (made, committed)]
    assert numbers[0] == pytest.approx(numbers[1], rel=0.01, abs=0.1001), message


def wire_bytes(nodes: int, gpus: int, codec: str, topology: str) -> float:
    """Return the bytes per element that a rank of a real group sends; ranks are threads here."""
    world = nodes * gpus
    settings = config.Config(
        codec=codec, topology=topology, local_size=gpus, min_bytes=0, timeout_s=60,
        local_group=f"{topology} {codec} {nodes} {gpus}",
    )  # fmt: skip

    def be(rank: int) -> float:
        communicator = Communicator(rank, world, None, "nodes", settings)
        try:
            values = (ctypes.c_float * NUMEL)()
            communicator.all_reduce(ctypes.addressof(values), NUMEL, "float32", "mean")
            return communicator.stats()["wire_bytes"] / NUMEL
        finally:
            communicator.close()

    with ThreadPoolExecutor(world) as threads:
        return sum(threads.map(be, range(world))) / world


@pytest.mark.parametrize("codec", gpu_nodes.CODECS)
@pytest.mark.parametrize("topology", ["flat", "hierarchical"])
@pytest.mark.parametrize(("nodes", "gpus"), [(2, 4), (2, 8), (4, 2)])
def test_the_bytes_are_the_engines(nodes, gpus, topology, codec):
    inside, between = gpu_nodes.sent(nodes, gpus, codec, topology)
    assert inside + between == pytest.approx(wire_bytes(nodes, gpus, codec, topology), rel=0.005)


@pytest.mark.parametrize("codec", gpu_nodes.CODECS)
def test_a_grid_has_the_bytes_that_the_page_reckons_with(codec):
    inside, between = gpu_nodes.sent(2, 4, codec, "hierarchical")
    expected = inside * gpu_nodes.inside_of_grid(codec) + between
    assert wire_bytes(2, 4, codec, "grid") == pytest.approx(expected, rel=0.005)


@pytest.mark.parametrize(("nodes", "gpus"), gpu_nodes.SHAPES[1:])
@pytest.mark.parametrize("codec", gpu_nodes.CODECS)
def test_the_way_taken_puts_less_on_a_card_than_any_uncompressed_one(nodes, gpus, codec):
    way = gpu_nodes.chosen(nodes, gpus)
    least = gpu_nodes.least_on_card(nodes)
    assert gpu_nodes.on_card(nodes, gpus, codec, way) <= 1.02 * least
    assert least <= gpu_nodes.ring_on_card(nodes, gpus)


def test_a_flat_exchange_would_put_more_there_than_the_ring():
    """For this reason "auto" chooses nodes without a measurement."""
    assert gpu_nodes.on_card(2, 8, "int8", "flat") > gpu_nodes.ring_on_card(2, 8)


def name(case: gpu_nodes.Case) -> str:
    return case.name.replace(" | ", ", ")


BETWEEN = [case for case in CASES if case.nodes > 1]
OVER_PCIE = [case for case in BETWEEN if case.inside.name == "PCIe"]


@pytest.mark.parametrize("codec", gpu_nodes.CODECS)
@pytest.mark.parametrize("case", CASES, ids=name)
def test_the_way_taken_is_never_behind(case, codec):
    taken = case.seconds(codec, case.way)
    assert taken <= 1.02 * case.least_seconds() <= 1.021 * case.ring_seconds()


@pytest.mark.parametrize("codec", gpu_nodes.CODECS)
@pytest.mark.parametrize("case", OVER_PCIE, ids=name)
def test_a_grid_is_the_fastest_over_pcie(case, codec):
    """The page recommends a grid there."""
    grid = case.seconds(codec, "grid")
    assert all(grid <= 1.02 * case.seconds(codec, way) for way in ("flat", "hierarchical"))


@pytest.mark.parametrize("codec", gpu_nodes.CODECS)
def test_a_node_with_nvlink_gains_nothing(codec):
    """The page states this."""
    (case,) = [case for case in CASES if case.nodes == 1 and case.inside.name == "NVLink"]
    assert case.seconds(codec, "flat") > case.least_seconds()
