"""A short part of the fault matrix (`make soak` runs all of it), from a seed that it prints."""

import random
from dataclasses import replace

import harness
import pytest
from cases import PHASES, draw
from nodes import open_nodes
from thinwire import _library, errors
from verdict import judge

SEED = random.SystemRandom().randrange(10**6)
STOPPED = ("connecting", "direct", "chunks")  # each costs the timeout


@pytest.mark.parametrize("phase", PHASES)
def test_a_killed_rank_is_named_on_every_other(phase):
    expect_no_problem(draw(SEED, phase, "SIGKILL", 1.5 if phase == "store" else 8.0))


def test_a_rank_of_four_that_dies_when_it_has_just_connected():
    """With four or more ranks the group also looks for nodes, without waiting for a dead rank."""
    expect_no_problem(draw(142106, "connecting", "SIGKILL", 8.0).on_one_node())


def test_a_rank_that_dies_while_the_group_agrees_on_ucx():
    """The ranks are connected by then, and must learn of the death from their connections."""
    case = draw(7011, "connecting", "SIGKILL", 8.0).on_one_node()
    expect_no_problem(replace(case, transport="auto"))


@pytest.mark.parametrize(
    ("phase", "topology"),
    [("connecting", "auto"), ("direct", "hierarchical"), ("chunks", "hierarchical")],
)
def test_a_rank_that_is_killed_between_nodes(phase, topology):
    """UCX inside nodes does not report lost peers; Gloo between nodes has all the connections."""
    ending = expect_no_problem(draw(SEED, phase, "SIGKILL", 8.0).on_two_nodes(topology))
    with open_nodes(1) as nodes:
        split = bool(nodes) and ucx_is_here()
    for rank, report in ending.reports.items():
        if split and report.stage == "step" and rank != ending.case.victim:
            assert "inside nodes" in report.transport


@pytest.mark.parametrize("phase", ("connecting", "direct", "chunks"))
def test_a_killed_rank_is_named_over_several_loops(phase):
    """Its connections to the others end one after the other, on different threads."""
    case = draw(SEED, phase, "SIGKILL", 8.0)
    expect_no_problem(replace(case, loops=3, transport="gloo"))


def test_a_rank_that_stops_over_several_loops():
    case = draw(SEED, "chunks", "SIGSTOP", 1.5)
    expect_no_problem(replace(case, loops=3, transport="gloo"))


def test_a_rank_that_stops_while_several_loops_agree_on_a_plane():
    """The ranks agree over connections that the deadline must reach, too."""
    expect_no_problem(draw(402242, "connecting", "SIGSTOP", 1.5))


@pytest.mark.parametrize("phase", STOPPED)
def test_a_stopped_rank_is_named_when_the_timeout_is_over(phase):
    expect_no_problem(draw(SEED, phase, "SIGSTOP", 1.5))


def test_a_rank_that_stops_while_links_are_measured():
    """All other ranks wait then, some of them for one another."""
    expect_no_problem(draw(459235, "connecting", "SIGSTOP", 1.5))


def test_an_abort_from_another_thread_is_heard_of_everywhere():
    expect_no_problem(draw(SEED, "chunks", "abort", 8.0))


def expect_no_problem(case):
    ending = harness.run_awake(case)
    verdict = judge(ending)
    assert not verdict.problems, "\n  ".join([str(case), *verdict.problems])
    return ending


def ucx_is_here() -> bool:
    try:
        _library.ucx_version(None)
    except errors.UnavailableError:
        return False
    return True
