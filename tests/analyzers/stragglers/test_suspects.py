"""One rank or one node; for good, for a while, again and again, or in turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from analyzers.stragglers.comparison.corroboration import Counters
from analyzers.stragglers.comparison.peer_comparison import find_stragglers
from analyzers.stragglers.suspects import Suspect, suspects
from tests.analyzers.rank_timings import Slow, simulate
from tests.analyzers.stragglers.test_straggler import judged, stored


def found(
    faults: Sequence[Slow], *, ranks: int = 8, steps: int = 200, per_node: int = 0, seed: int = 0
) -> list[Suspect]:
    timings = simulate(seed, ranks=ranks, steps=steps, faults=faults)
    nodes = {rank: f"node {rank // per_node}" for rank in range(ranks)} if per_node else {}
    return suspects(find_stragglers(timings), {}, nodes, int(timings.steps.min()))


def test_slowness_is_classified_as_permanent_temporary_repeated_or_in_turn() -> None:
    (chronic,) = found([Slow(rank=1, step=1, factor=1.3)])
    assert chronic.pattern == "chronic"
    (onset,) = found([Slow(rank=1, step=80, factor=1.3)])
    assert (onset.pattern, onset.ongoing) == ("since", True)
    (over,) = found([Slow(rank=1, step=40, until=90, factor=1.3)])
    assert (over.pattern, over.ongoing) == ("transient", False)
    (again,) = found([Slow(rank=1, step=step, until=step + 29, factor=1.3) for step in (20, 80, 140)])
    assert (again.pattern, len(again.worst.segments)) == ("intermittent", 3)
    (twice,) = found([Slow(rank=1, step=step, until=step + 29, factor=1.3) for step in (40, 100)])
    assert (twice.pattern, twice.ongoing) == ("intermittent", False), "it was not slow from step 70 to 99"


def test_a_rank_that_pauses_for_a_core_as_its_peers_do_is_no_suspect() -> None:
    timings = simulate(0, steps=200, faults=[Slow(rank=1, step=20, pause_ms=200.0, share=0.4)])
    slow = find_stragglers(timings)
    assert slow[0].paused_ratio > 0
    excess_ms = slow[0].excess_ms
    taken = Counters(cpu_ms=0.0, run_delay_ms=excess_ms, own_run_delay_ms=1.2 * excess_ms, on_cpu=True)
    (suspect,) = suspects(slow, {(1, "compute"): taken}, {}, 6)
    assert (suspect.cause, suspect.reason) == ("host", "core")
    crowded = replace(taken, own_run_delay_ms=5 * excess_ms)  # its peers wait for four fifths of that
    assert suspects(slow, {(1, "compute"): crowded}, {}, 6) == []


def test_a_rank_that_waits_for_a_core_as_all_ranks_do_at_other_times_is_no_suspect() -> None:
    """Its peers had a core of their own meanwhile: they were quicker than usual."""
    slow = find_stragglers(simulate(0, steps=200, faults=[Slow(rank=1, step=80, factor=3.0)]))
    wait_ms = slow[0].excess_ms
    counters = Counters(
        cpu_ms=0.0, run_delay_ms=wait_ms, own_run_delay_ms=wait_ms, usual_run_delay_ms=0.1, usual_core_wait_ratio=0.1,
        slow_s=4.0, on_cpu=True,
    )  # fmt: skip

    def named(**changed: float) -> list[Suspect]:
        return suspects(slow, {(1, "compute"): replace(counters, **changed)}, {}, 6)

    assert [(one.cause, one.reason) for one in named()] == [("host", "core")]
    assert named(usual_run_delay_ms=0.8 * wait_ms) == []
    assert named(usual_core_wait_ratio=2.0) == [], "on a crowded machine luck lasts for seconds"
    assert len(named(usual_core_wait_ratio=2.0, slow_s=20.0)) == 1
    assert len(named(usual_core_wait_ratio=2.0, run_delay_ms=0.1 * wait_ms)) == 1, "it sleeps: no core is missing"


def test_a_rank_whose_peer_is_kept_from_working_in_another_phase_is_no_suspect() -> None:
    """As recorded on a crowded machine: 26 ms more in loading, and less in all its work together."""
    slow = [replace(one, factor=0.91) for one in find_stragglers(simulate(0, faults=[Slow(rank=1, step=20)]))]
    crowded = Counters(usual_core_wait_ratio=2.0, on_cpu=True)
    assert len(slow) == 1
    assert suspects(slow, {(1, slow[0].cause): crowded}, {}, 6) == []
    assert len(suspects(slow, {(1, slow[0].cause): replace(crowded, usual_core_wait_ratio=0.1)}, {}, 6)) == 1


def test_a_slowness_that_goes_round_names_nobody_alone() -> None:
    faults = [Slow(rank=rank, step=1 + 40 * rank, until=40 + 40 * rank, factor=1.4) for rank in range(5)]
    (suspect,) = found(faults, ranks=8)
    assert (suspect.pattern, suspect.ranks) == ("rotating", (0, 1, 2, 3, 4))
    (finding,) = judged(stored(simulate(0, ranks=8, steps=200, faults=faults)))
    assert "in turn" in finding.summary
    assert finding.evidence["pattern"] == "rotating"


def test_all_ranks_of_a_node_are_the_node() -> None:
    faults = [Slow(rank=rank, step=60, factor=1.3) for rank in (4, 5, 6, 7)]
    (suspect,) = found(faults, ranks=16, per_node=4)
    assert (suspect.node, suspect.ranks) == ("node 1", (4, 5, 6, 7))
    alone = found(faults[:1], ranks=16, per_node=4)
    assert [(s.node, s.ranks) for s in alone] == [("", (4,))]
    # With one node there is nothing to tell it from.
    assert {s.ranks for s in found(faults[:2], ranks=8, per_node=8)} == {(4,), (5,)}


def test_a_node_in_a_finding() -> None:
    store = stored(simulate(1, ranks=12, steps=120, faults=[Slow(rank=r, step=60, factor=1.3) for r in (4, 5, 6, 7)]))
    store.add("ranks", [{"attempt": 0, "rank": r, "node_rank": r // 4, "host": f"gpu{r // 4}", "wall_ns": 1}
                        for r in range(12)])  # fmt: skip
    (finding,) = judged(store)
    assert finding.ranks == (4, 5, 6, 7)
    assert finding.evidence["node"] == "node 1 (gpu1)"
    assert finding.summary.startswith("Node 1 (gpu1), ranks 4-7, has been slow")
