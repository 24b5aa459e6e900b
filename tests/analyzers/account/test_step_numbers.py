"""Steps of an attached loop over a restart: discarded, kept or not known, by what its optimizer counts."""

from __future__ import annotations

import pytest

from analyzers.account.goodput import Account
from analyzers.report.wording.account_lines import goodput_line
from tests.analyzers.account.test_goodput import Timeline, told


def restarted(*counts: int | None) -> Account:
    """Attempts of four steps each, all numbered from 1; `counts`: what each one's optimizer had counted before."""
    line = Timeline(ranks=2)
    line.event("run_started", 0)
    for attempt, before in enumerate(counts):
        begin = 1000 * attempt
        line.identity(begin, attempt=attempt)
        line.event("first_update", begin + 120, attempt=attempt, num_before=before)
        for step in (1, 2, 3, 4):
            line.step(step, begin + 100 * step, 100, attempt=attempt, forward=100)
    line.event("run_ended", 1000 * len(counts) - 500, reason="finished")
    return line.account()


@pytest.mark.parametrize(
    ("counts", "kept", "discarded", "not_known"),
    [
        ((None, 4), 8, 0, 0),  # it went on where the first attempt ended
        ((None, 2), 6, 2, 0),  # from a checkpoint of step 2: steps 3 and 4 ran twice
        ((None, 2, 6), 10, 2, 0),
        ((10, 12), 6, 2, 0),  # the first attempt resumed, too
        ((None, None), 8, 0, 4),  # began anew, or loaded without the optimizer
        ((None, 0), 8, 0, 4),
        ((None, 2, None), 10, 2, 6),
        ((None, None, 3), 11, 1, 4),
    ],
)
def test_a_restart_is_judged_by_what_its_optimizer_counts(
    counts: tuple[int | None, ...], kept: int, discarded: int, not_known: int
) -> None:
    account = restarted(*counts)
    assert (account.num_kept, account.num_discarded, account.num_unconfirmed) == (kept, discarded, not_known)
    assert told(account.seconds).get("recomputed", 0) == 100 * discarded
    assert told(account.seconds)["training"] == 100 * kept
    assert account.to_json()["steps_not_known"] == not_known
    assert ("Unknown whether" in goodput_line(account)) == bool(not_known)


def test_a_trainer_whose_attempt_began_anew_has_lost_its_steps() -> None:
    """It writes no such event: its steps keep their numbers over restarts."""
    line = Timeline(ranks=1)
    line.event("run_started", 0)
    for attempt in (0, 1):
        for step in (1, 2):
            line.step(step, 1000 * attempt + 100 * step, 100, attempt=attempt, forward=100)
    line.event("run_ended", 1300, reason="finished")
    account = line.account()
    assert (account.num_kept, account.num_discarded, account.num_unconfirmed) == (2, 2, 0)
