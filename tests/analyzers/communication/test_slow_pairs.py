"""A slow link between two ranks is named by the pair: one direction, both, all links of a rank; and nobody else."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from analyzers.finding import Finding
from tests.analyzers.memory_store import MemoryStore
from tests.analyzers.rank_timings import simulate
from tests.analyzers.stragglers.test_straggler import judged, stored

STAGES, STEPS, ONSET, MICROBATCHES = 4, 120, 20, 4
NS = 1e6
Slow = Callable[[int, int], float]


def pipeline(
    slow: Slow,
    *,
    transfer_ms: float = 2.0,
    stages: int = STAGES,
    hosts: bool = False,
    jitter: float = 0.1,
    seed: int = 0,
) -> MemoryStore:
    """Stages that send forwards and backwards; from step ONSET on a transfer takes `slow(from, to)` times as long.

    Whoever comes first waits for the other end. With `hosts` each rank has a host and a clock of its own.
    """
    rng = np.random.default_rng(seed)
    store = stored(simulate(seed, ranks=stages, steps=STEPS))
    store.connection.execute("DELETE FROM collectives")
    clock = 600e9 * rng.standard_normal(stages) if hosts else np.zeros(stages)
    for rank in range(stages):
        place = {"attempt": 0, "rank": rank, "wall_ns": 1, "host": f"host-{rank if hosts else 0}", "pp": rank}
        store.add("ranks", [place])
    rows = []
    pairs = [(a, b) for a in range(stages) for b in (a - 1, a + 1) if 0 <= b < stages]
    for sender, receiver in pairs:
        seq = 0
        for step in range(1, STEPS + 1):
            for _ in range(MICROBATCHES):
                issue = step * 1e9 + rng.exponential(3e6, 2)
                factor = slow(sender, receiver) if step >= ONSET else 1.0
                end = issue.max() + transfer_ms * NS * factor * np.exp(jitter * rng.standard_normal())
                for op, rank, peer, at in (("send", sender, receiver, issue[0]), ("recv", receiver, sender, issue[1])):
                    rows.append(
                        {"attempt": 0, "rank": rank, "step": step, "seq": seq, "process_group": "pp:0-3", "op": op,
                         "bytes": 1 << 20, "peer": peer, "issue_ns": int(at + clock[rank]),
                         "end_ns": int(end + clock[rank])}
                    )  # fmt: skip
                seq += 1
    store.add_columns("collectives", **{name: np.array([row[name] for row in rows]) for name in rows[0]})
    return store


def fired(store: MemoryStore) -> list[Finding]:
    return [finding for finding in judged(store) if finding.status == "fired"]


@pytest.mark.parametrize("hosts", [False, True])
def test_one_direction_is_named(hosts: bool) -> None:
    (finding,) = fired(pipeline(lambda a, b: 6.0 if (a, b) == (2, 3) else 1.0, hosts=hosts))
    assert (finding.cause, finding.ranks) == ("communication", (2, 3))
    assert finding.summary.startswith("The link rank 2 -> rank 3 has been slow in communication since step")
    assert ONSET - 5 <= (finding.first_step or 0) <= ONSET + 5
    assert finding.evidence["factor_ratio"] == pytest.approx(6.0, rel=0.15)
    assert finding.evidence["process_groups"] == ["rank 2 -> rank 3"]


def test_both_directions_are_one_link() -> None:
    (finding,) = fired(pipeline(lambda a, b: 6.0 if {a, b} == {1, 2} else 1.0))
    assert finding.ranks == (1, 2)
    assert "The link rank 1 <-> rank 2" in finding.summary


def test_all_links_of_a_rank_are_that_rank() -> None:
    (finding,) = fired(pipeline(lambda a, b: 6.0 if 2 in (a, b) else 1.0))
    assert finding.ranks == (2,)
    assert finding.summary.startswith("Rank 2 has been slow in communication")
    assert len(finding.evidence["process_groups"]) == 4


def test_the_only_link_is_compared_with_its_past() -> None:
    (finding,) = fired(pipeline(lambda a, b: 6.0, stages=2))
    assert finding.ranks == (0, 1)
    assert "as before" in finding.summary
    (finding,) = fired(pipeline(lambda a, b: 6.0 if a == 0 else 1.0, stages=2))
    assert "The link rank 0 -> rank 1" in finding.summary


def test_a_network_that_is_slower_for_all_names_no_link() -> None:
    assert fired(pipeline(lambda a, b: 6.0)) == []


@pytest.mark.parametrize("seed", range(3))
def test_noise_names_nobody(seed: int) -> None:
    assert fired(pipeline(lambda a, b: 1.0, jitter=0.5, seed=seed)) == []
    assert fired(pipeline(lambda a, b: 1.0, jitter=0.5, seed=seed, stages=2, hosts=True)) == []


def test_a_link_that_costs_next_to_nothing_is_not_reported() -> None:
    assert fired(pipeline(lambda a, b: 6.0 if (a, b) == (2, 3) else 1.0, transfer_ms=0.02)) == []


@pytest.mark.parametrize(("factor", "named"), [(2.5, False), (6.0, True)])
def test_where_ranks_wait_for_cores_only_a_clear_link_is_named(factor: float, named: bool) -> None:
    def slow(a: int, b: int) -> float:
        return factor if (a, b) == (2, 3) else 1.0

    store = pipeline(slow)
    assert [finding.ranks for finding in fired(store)] == [(2, 3)]
    store.connection.execute("UPDATE steps SET run_delay_ns = 60e6")
    assert [finding.ranks for finding in fired(store)] == [(2, 3)] * named


def test_small_messages_that_wait_for_a_core_name_no_link() -> None:
    """Half a millisecond becomes three where whoever receives it waits for a core: a real pipeline of four ranks on two
    cores, which waited for 24 to 55 ms a step."""
    store = pipeline(lambda a, b: 6.0 if (a, b) == (2, 3) else 1.0, transfer_ms=0.5)
    assert [finding.ranks for finding in fired(store)] == [(2, 3)]
    store.connection.execute("UPDATE steps SET run_delay_ns = 150e6")
    assert fired(store) == []


def test_a_burst_that_is_over_names_no_link() -> None:
    store = pipeline(lambda a, b: 6.0 if (a, b) == (2, 3) else 1.0)
    store.connection.execute("DELETE FROM collectives WHERE step BETWEEN 30 AND 34")
    store.connection.execute(
        "UPDATE collectives SET end_ns = issue_ns + 2e6 WHERE step >= 35 AND op = 'recv' AND rank = 3 AND peer = 2"
    )
    store.connection.execute(
        "UPDATE collectives SET end_ns = issue_ns + 2e6 WHERE step >= 35 AND op = 'send' AND rank = 2 AND peer = 3"
    )
    assert fired(store) == []
