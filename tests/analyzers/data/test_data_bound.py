from __future__ import annotations

import pytest

from analyzers.data.analyze import data_bound
from analyzers.finding import Finding
from analyzers.scope import Scope
from tests.analyzers.explained import explained
from tests.analyzers.plain_run import MS, plain_run

SLOW = 80 * MS


def starving(where: str, **options: int) -> list[Finding]:
    store = plain_run(steps=200, **options)
    store.connection.execute(
        f"UPDATE steps SET data_ns = {SLOW}, duration_ns = duration_ns + {SLOW - MS} WHERE {where}"
    )
    return explained(data_bound(store, Scope()))


@pytest.mark.parametrize(
    ("where", "cause", "every", "since"),
    [
        ("step > 60", "steady", None, 61),
        ("step % 3 = 0", "periodic", 3, None),
        ("(step - 1) % 25 < 12", "epoch_start", 25, None),
    ],
)
def test_the_finding_has_the_share_the_period_and_the_onset_of_the_wait(
    where: str, cause: str, every: int | None, since: int | None
) -> None:
    (finding,) = starving(where)
    assert (finding.kind, finding.status, finding.cause) == ("data_bound", "fired", cause)
    assert finding.ranks == ()
    assert finding.evidence["every_steps"] == every
    assert 0.1 < finding.evidence["data_ratio"] < 0.5
    if since is not None:
        assert abs(finding.first_step - since) <= 1
        assert finding.evidence["data_ratio"] == pytest.approx(80 / 179, rel=0.02)


def test_half_of_the_ranks_are_named() -> None:
    (finding,) = starving("rank >= 1")
    assert finding.ranks == (1, 2, 3)


@pytest.mark.parametrize(
    "where",
    ["false", "rank = 3", "step BETWEEN 40 AND 60", "step % 50 = 0", "step <= 3"],
)
def test_no_finding_if_the_loader_keeps_up_or_recovered_or_one_rank_alone_is_slow(where: str) -> None:
    assert starving(where) == []


def test_a_loop_that_waits_for_a_core_does_not_wait_for_data() -> None:
    """On a crowded machine each phase is long, and the loader is one of them."""
    store = plain_run(steps=200)
    store.connection.execute(f"UPDATE steps SET data_ns = {SLOW}, duration_ns = duration_ns + {SLOW - MS}")
    assert [found.status for found in data_bound(store, Scope())] == ["fired"]
    store.connection.execute(f"UPDATE steps SET run_delay_ns = {SLOW}")
    assert data_bound(store, Scope()) == []
    store.connection.execute(f"UPDATE steps SET run_delay_ns = {SLOW // 4}")
    (finding,) = data_bound(store, Scope())
    assert finding.evidence["data_ms"] == pytest.approx(60.0)


def test_an_irregular_wait_counts_the_steps_that_wait() -> None:
    (finding,) = starving("hash(step) % 5 < 2")
    assert finding.cause == "irregular"
    counts = [int(word) for word in finding.summary.split() if word.isdigit()]
    assert 40 <= counts[-2] <= 120 < counts[-1]


def test_why_gives_the_number_of_steps_of_the_verdict() -> None:
    """Some waits are much longer than the usual one."""
    store = plain_run(steps=200)
    for share, wait in ((3, SLOW // 4), (1, SLOW)):
        store.connection.execute(f"UPDATE steps SET data_ns = {wait} WHERE hash(step) % 5 < {share}")
    (finding,) = explained(data_bound(store, Scope()))
    assert finding.cause == "irregular"
    assert finding.summary.endswith(f"in {finding.evidence['starved_steps']} of {finding.evidence['steps']} steps.")


def test_missing_records_are_reported() -> None:
    for damage in ("DELETE FROM steps", "UPDATE steps SET data_ns = NULL", "UPDATE steps SET data_ns = 0",
                   "DELETE FROM steps WHERE step > 20"):  # fmt: skip
        store = plain_run()
        store.connection.execute(damage)
        (finding,) = explained(data_bound(store, Scope()))
        assert (finding.status, finding.kind) == ("insufficient_data", "data_bound"), damage
