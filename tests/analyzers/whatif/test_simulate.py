"""Steps replayed on paper: who waits for whom, by hand."""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np
import pytest

from analyzers.report.wording.account_lines import what_if_line
from analyzers.whatif.held_out import held_out_error
from analyzers.whatif.simulate import Graph, replay, step_ends
from analyzers.whatif.step_graph import StepGraph
from analyzers.whatif.what_if import measure_graph, without


def meeting(work: list[list[float]], transfer: float = 2.0) -> Graph:
    """`work[step][rank]`, then one call for all."""
    graph = Graph()
    for step, of_rank in enumerate(work):
        call = graph.new_call(("dp", "all_reduce", 4), transfer)
        for rank, ms in enumerate(of_rank):
            graph.add_work(rank, step, 0, ms)
            graph.add_post(rank, call)
            graph.add_wait(rank, call)
            graph.end_step(rank, step)
    return graph


def test_all_wait_for_the_slowest() -> None:
    graph = meeting([[10, 14], [12, 11]])
    assert replay(graph) == 14 + 2 + 12 + 2
    assert replay(graph, [10, 10, 11, 11]) == 10 + 2 + 11 + 2
    np.testing.assert_array_equal(step_ends(graph, graph.work_ms, graph.transfer_ms), [[16, 30], [16, 30]])


def test_rendezvous_times_are_summed_without_replaying_the_programs() -> None:
    dice = np.random.default_rng(0)
    graph = meeting(dice.uniform(5, 20, (6, 4)).tolist())
    other = dice.uniform(5, 20, 24)
    one_by_one = replay(graph), replay(graph, other)
    graph.work_before_sync = np.arange(24).reshape(6, 4)
    assert (replay(graph), replay(graph, other)) == pytest.approx(one_by_one)


def test_a_rank_that_posts_a_call_goes_on_and_an_early_call_is_hidden() -> None:
    graph = Graph()
    call = graph.new_call(("dp", "all_reduce", 4), 5.0)
    for rank in (0, 1):
        graph.add_work(rank, 1, 0, 3.0)
        graph.add_post(rank, call)
        graph.add_work(rank, 1, 1, 10.0 if rank else 1.0)
        graph.add_wait(rank, call)
        graph.end_step(rank, 1)
    assert step_ends(graph, graph.work_ms, graph.transfer_ms).ravel().tolist() == [8.0, 13.0]


def test_a_pipeline_waits_for_its_first_stage() -> None:
    graph = Graph()
    for microbatch in range(3):
        graph.add_work(0, 1, microbatch, 4.0)
        message = graph.new_call(("p2p", "p2p", 8), 1.0)
        graph.add_post(0, message)
        graph.add_post(1, message)
        graph.add_wait(1, message)
        graph.add_work(1, 1, microbatch + 1, 6.0)
    graph.end_step(0, 1)
    graph.end_step(1, 1)
    assert replay(graph) == 4 + 3 * (1 + 6)  # a message is on its way when both have posted it


def test_a_wait_that_never_ends_is_no_number() -> None:
    graph = meeting([[1, 1]])
    graph.members[0] += 1  # somebody whose records are gone
    assert np.isnan(step_ends(graph, graph.work_ms, graph.transfer_ms)).all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.isnan(replay(graph))


def test_slowdown_of_the_job_and_of_each_worker() -> None:
    steps = [[10.0, 10.0, 10.0, 16.0]] * 6
    found = StepGraph(graph=meeting(steps, 2.0), basis="steps", error_ratio=0.0, measured_ms=18.0)
    what = measure_graph(found, 0, {}, {})
    mean = 46 / 4  # all alike: the mean of the four
    assert what.slowdown == pytest.approx((16 + 2) / (mean + 2))
    assert what.by_rank[3] == pytest.approx((16 + 2) / (mean + 2))
    assert what.by_rank[0] == pytest.approx(1.0)
    assert (what.worst_ranks, what.last_stage_ratio) == ((3,), None)
    assert what.worst_ranks_ratio == pytest.approx(1.0)
    assert what.ideal_step_ms == pytest.approx(mean + 2)
    assert without(found, [3], {3: [0, 1, 2, 3]}) == pytest.approx(12.0)
    assert without(found, [3], {3: [0, 1, 2, 3]}, share=0.5) == pytest.approx(15.0)
    assert without(found, [], {}, faster_calls={"dp": 0.5}) == pytest.approx(17.0)


def test_an_uneven_last_stage_is_attributed_to_the_stage() -> None:
    """Two pipelines of two stages; the last has twice the work of the first."""
    graph = Graph()
    for step in range(4):
        for lane in (0, 1):
            message = graph.new_call(("p2p", "p2p", 8), 0.0)
            back = graph.new_call(("p2p", "p2p", 8), 0.0)
            first, last = lane, lane + 2
            graph.add_work(first, step, 0, 10.0)
            graph.add_post(first, message)
            graph.add_post(first, back)
            graph.add_wait(first, back)
            graph.end_step(first, step)
            graph.add_post(last, message)
            graph.add_wait(last, message)
            graph.add_work(last, step, 1, 20.0)
            graph.add_post(last, back)
            graph.end_step(last, step)
    found = StepGraph(graph=graph, basis="calls", error_ratio=0.0, measured_ms=30.0)
    what = measure_graph(found, 0, {0: 0, 1: 0, 2: 1, 3: 1}, {0: (0,), 1: (1,), 2: (0,), 3: (1,)})
    assert what.slowdown == pytest.approx(1.0)  # as much in all: one after the other, nothing overlaps
    assert set(what.by_rank) == {0, 1, 2, 3}


def test_the_error_is_that_of_steps_that_were_not_read() -> None:
    steady = meeting([[10.0, 14.0]] * 8)
    assert held_out_error(steady, replay(steady)) == pytest.approx(0.0)
    uneven = meeting([[10.0, 14.0], [10.0, 21.0]] * 4)  # replayed as it ran it is exact, and predicts nothing
    assert replay(uneven) == 4 * (16 + 23)
    assert held_out_error(uneven, replay(uneven)) == pytest.approx(7 * 4 / (4 * 39) * 2)
    assert held_out_error(meeting([[10.0, 14.0]]), 16.0) is None
    other = meeting([[10.0, 14.0]] * 2)
    other.add_work(0, 1, 1, 5.0)  # another number of calls: the step before predicts nothing of it
    assert held_out_error(other, 32.0) is None
    assert held_out_error(uneven, replay(uneven), {(1, step): "evaluated" for step in (1, 3, 5, 7)}) is None
    assert held_out_error(steady, replay(steady), {(1, 3): "saved"}) == pytest.approx(0.0)


def test_launch_delay_is_kept_as_it_ran_and_none_in_the_ideal() -> None:
    graph = meeting([[12.0, 12.0]] * 4)
    graph.delay_ms = [3.0, 3.0] * 4
    found = StepGraph(graph=graph, basis="calls", error_ratio=0.0, measured_ms=14.0, launch_delay_ratio=3 / 14)
    what = measure_graph(found, 0, {}, {})
    assert what.slowdown == pytest.approx(14 / 11)
    assert what.withheld == "no recorded work ran in 21 % of the time"
    assert not what.is_beyond_error
    assert what_if_line(what) == f"The time with balanced ranks is not predicted: {what.withheld}."
    little = measure_graph(replace(found, launch_delay_ratio=0.04), 0, {}, {})
    assert "launch delay 4 %" in what_if_line(little)
    assert not little.is_beyond_error, "no rank is slower than another"


def test_a_slowest_rank_that_changes_is_no_lasting_difference() -> None:
    dice = np.random.default_rng(3)
    varying = dice.normal(20, 2, (40, 8))
    slow = varying + 4.0 * (np.arange(8) == 5)
    for work, lasts in ((varying, False), (slow, True)):
        found = StepGraph(graph=meeting(work.tolist()), basis="calls", error_ratio=0.01, measured_ms=25.0)
        what = measure_graph(found, 0, {}, {})
        assert what.slowdown > 1.1, "the slowest of eight makes each step longer"
        assert what.is_beyond_error == lasts
        assert ("Balanced ranks would gain less than 1 %" in what_if_line(what)) != lasts
        assert ("Balanced ranks would be" in what_if_line(what)) == lasts
