"""What is over, or was so when its run ended, is told in the past tense."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

from analyzers.diagnose import conclude, diagnose
from analyzers.finding import Finding
from analyzers.live import LivePolicy, LiveState, record_findings
from analyzers.run.findings.past_tense import at_run_end, in_past, over
from store.readers.memory_store import MemoryStore
from tests.analyzers.plain_run import BEGIN_NS, S, plain_run
from tests.sentences import assert_plain

LIVE = re.compile(
    r"\b(has|have) (been|paused|waited|become|not)\b|\bis (stopped|stuck|down)\b|\b(hangs|grows|takes|costs)\b"
)


@pytest.mark.parametrize(
    ("now", "then"),
    [
        ("Rank 3 has been slow since step 60: +15 ms (1.32x).", "Rank 3 was slow from step 60 to 149: +15 ms (1.32x)."),
        ("Ranks 3 and 4 have been slow 5 times since step 6.", "Ranks 3 and 4 were slow 5 times from step 6 to 149."),
        ("Rank 3 has been slow from the first step: +1 ms.", "Rank 3 was slow from the first step to 149: +1 ms."),
        ("Rank 3 has been slow since step 6, the first one compared.",
         "Rank 3 was slow from step 6, the first one compared, to 149."),
        ("Node 2, ranks 8-11, has been slow from step 44, the first recorded: up to +41 ms.",
         "Node 2, ranks 8-11, was slow from step 44, the first recorded, to 149: up to +41 ms."),
        ("Ranks 1 and 2 have been slow in turn since step 9.", "Ranks 1 and 2 were slow in turn from step 9 to 149."),
        ("Rank 1 has paused in 20 % of the steps since step 9.",
         "Rank 1 paused in 20 % of the steps from step 9 to 149."),
        ("The link has been slow in communication since step 9: a message takes 3.1x as long as before.",
         "The link was slow in communication from step 9 to 149: a message took 3.1x as long as before."),
        ("All ranks have been slower since step 40.", "All ranks were slower from step 40 to 149."),
        ("Training has become slower with every step.", "Training became slower with every step."),
        ("All ranks have waited for data 40 % of the time since step 3: 4 of 5 ms per step.",
         "All ranks waited for data 40 % of the time from step 3 to 149: 4 of 5 ms per step."),
        ("Memory of rank 3 grows by 3 MiB a step. Out of memory in 90 steps (3 min) at this rate.",
         "Memory of rank 3 grew by 3 MiB a step. Out of memory would have followed in 90 steps (3 min) at this rate."),
        ("The last good checkpoint is of step 3, 40 steps ago, with one due every 5. A failure now costs 3 s.",
         "The last good checkpoint was of step 3, 40 steps earlier, with one due every 5. A failure would have "
         "cost 3 s."),
        ("40 % of the tokens in steps 3 to 6 are padding.", "40 % of the tokens in steps 3 to 6 were padding."),
        ("Rank 1 is stopped at step 5 (process state T), in forward. Rank 0 waited in that call for 9 s.",
         "Rank 1 was stopped at step 5 (process state T), in forward. Rank 0 waited in that call for 9 s."),
        ("Rank 0 hangs in the data loader at step 3.", "Rank 0 hung in the data loader at step 3."),
        ("Ranks 0 and 1 do not respond at step 3.", "Ranks 0 and 1 did not respond at step 3."),
        ("Node 2 has not reported since the attempt began, 30 s before: its machine is down.",
         "Node 2 had not reported since the attempt began, 30 s before: its machine was down."),
        ("The loss climbed from 2.1 to 3.4 at step 30.", "The loss climbed from 2.1 to 3.4 at step 30."),
    ],
)  # fmt: skip
def test_a_sentence_is_put_in_the_past_tense(now: str, then: str) -> None:
    assert in_past(now, "to 149") == then
    assert in_past(then, "to 170") == then, "it is not changed twice"
    assert not LIVE.search(then)
    assert_plain(then)


def finding(summary: str, kind: str = "straggler", **more: object) -> Finding:
    return Finding(analyzer="a", kind=kind, severity="warning", status="fired", summary=summary, **more)  # type: ignore[arg-type]


def test_the_last_step_is_named_only_if_it_is_known() -> None:
    slow = finding("Rank 3 has been slow since step 60: +15 ms.", ranks=(3,), first_step=60, last_step=70)
    assert over(slow, 118).summary == "Rank 3 was slow from step 60 to 118: +15 ms."
    assert over(slow).summary == "Rank 3 was slow from step 60 on: +15 ms."
    assert at_run_end(slow).summary == "Rank 3 was slow from step 60 to the end: +15 ms."


def test_what_was_compared_only_until_some_ranks_records_end_did_not_last_to_the_end() -> None:
    """A tape was cut at step 70 of 118: whether the rank was slow in the later steps is not known."""
    slow = finding("Rank 3 has been slow since step 60: +15 ms.", ranks=(3,), first_step=60, last_step=70)
    for steps, until in ((118, "to 70, the last one compared"), (75, "to the end")):
        (ended,) = conclude([slow], {"steps": steps, "attempts": 1}, has_ended=True).findings
        assert ended.summary == f"Rank 3 was slow from step 60 {until}: +15 ms."
        assert_plain(ended.summary)
    (unknown,) = conclude([slow], {"steps": 118, "attempts": 2}, has_ended=True).findings
    assert unknown.summary.endswith("to the end: +15 ms.")


def test_the_verdict_on_a_past_finding_begins_with_already_over() -> None:
    slow = finding("Rank 3 has been slow since step 60: +15 ms.", ranks=(3,), first_step=60, last_step=118, attempt=0)
    fast = finding("Rank 1 has been slow since step 70: +15 ms.", ranks=(1,), first_step=70, last_step=149, attempt=0)
    closed = {slow.id: "over"}
    assert conclude([slow], {}, closed=closed).verdict == "Already over: Rank 3 was slow from step 60 to 118: +15 ms."
    first, second = conclude([slow, fast], {}, closed=closed).verdict.splitlines()
    assert (first, second[:13]) == (fast.summary, "Already over:")
    ended = conclude([fast], {}, has_ended=True)
    assert ended.verdict == ended.fired[0].summary == "Rank 1 was slow from step 70 to the end: +15 ms."


def slow_until(steps: Sequence[int]) -> MemoryStore:
    """A run of 200 steps that still runs, in which rank 2 computes longer in the given steps."""
    store = plain_run(ranks=4, steps=200)
    store.connection.execute("DELETE FROM events WHERE kind = 'run_ended'")
    store.connection.execute(
        "UPDATE steps SET data_ns = 80000000, duration_ns = 179000000 WHERE step BETWEEN ? AND ?", [steps[0], steps[-1]]
    )
    return store


def test_the_event_that_a_finding_is_over_names_its_last_step() -> None:
    state = LiveState(policy=LivePolicy(periodic_ticks=1, window_steps=90))
    (fired,) = record_findings(slow_until(range(100, 201)), state, BEGIN_NS + 27 * S)
    assert fired.summary.startswith("All ranks have waited for data ")
    (ended,) = record_findings(plain_run(ranks=4, steps=200), state, BEGIN_NS + 28 * S)
    assert ended.status == "ok"
    assert re.match(r"Over: All ranks waited for data \d+ % of the time from step \d+ to 200: ", ended.summary)


def test_a_live_run_is_reported_in_the_present_perfect() -> None:
    store = slow_until(range(100, 201))
    live, ended = (
        next(one for one in diagnose(store, {}, now_ns=now_ns).fired if one.kind == "data_bound")
        for now_ns in (BEGIN_NS + 27 * S, None)
    )
    assert " have waited for data " in live.summary
    assert " waited for data " in ended.summary
    assert " to the end: " in ended.summary
