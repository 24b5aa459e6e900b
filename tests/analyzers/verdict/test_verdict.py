"""The verdict claims no more than was measured, and does not contradict the what-if."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

from analyzers.account.goodput import measure
from analyzers.diagnose import diagnose
from analyzers.finding import Finding
from analyzers.report.wording.account_lines import what_if_line
from analyzers.verdict.run_facts import run_facts
from analyzers.verdict.verdict import outcome, verdict
from analyzers.whatif.what_if import WhatIf
from analyzers.wording import counted_ranks
from rankscope.api import open_run
from store import Store
from tests.analyzers.plain_run import plain_run
from tests.factories import make_run
from tests.sentences import assert_plain

FACTS = {"steps": 50, "num_ranks": 2}
GAIN = WhatIf(
    attempt=0, first_step=6, last_step=50, basis="calls", error_ratio=0.01, step_ms=65.0, ideal_step_ms=52.0,
    slowdown=1.25, by_rank={1: 1.24}, worst_ranks=(1,), worst_ranks_ratio=0.95, last_stage_ratio=None,
)  # fmt: skip


def test_no_problems_are_found_where_nine_tenths_were_judged() -> None:
    clean = "No problems found (50 steps, 2 ranks)."
    assert verdict((), FACTS) == clean
    assert verdict((), FACTS | {"steps_not_measured_ratio": 0.06, "steps_not_compared_ratio": 0.04}) == clean


def test_what_is_missing_is_said_instead() -> None:
    said = verdict((), FACTS | {"steps_not_measured_ratio": 0.34, "steps_not_compared_ratio": 0.0})
    assert said == "Nothing was found (50 steps, 2 ranks), but of the step time, 34 % was not measured."
    assert_plain(said)
    said = verdict((), FACTS | {"steps_not_measured_ratio": 0.06, "steps_not_compared_ratio": 0.3})
    assert "6 % was not measured and 30 % was host time between phases on GPU ranks" in said


def test_steps_that_could_not_be_written_are_named() -> None:
    lost = {"dropped_records": {"steps": 300, "spans": 900}}
    text = "Nothing was found (50 steps, 2 ranks), but 300 records of steps could not be written to the disk."
    assert verdict((), FACTS | lost) == text
    unjudged = Finding.insufficient("straggler", "straggler", "Ranks were not compared: no steps are recorded.")
    text = verdict((unjudged,), {"num_ranks": 1} | lost)
    assert text.startswith(
        "Nothing was found (1 rank), but no step is recorded: 300 records of steps could not be written to the disk."
    )
    assert verdict((), FACTS | {"dropped_records": {"of rank 0": 16}}).startswith("No problems found")


def test_ranks_and_calls_that_left_no_records_are_named() -> None:
    silent = Finding.insufficient("coverage", "records", "Rank 5 has no step.", ranks=(5,))
    said = verdict((silent,), {"steps": 60, "num_ranks": 7})
    assert said.startswith("Nothing was found (60 steps, 7 ranks), but rank 5 left no records of steps.")
    no_calls = Finding.insufficient("hang", "hang", "Hangs were not checked: collective calls were not recorded.")
    said = verdict((no_calls,), {"steps": 60, "num_ranks": 8})
    assert said.startswith("Nothing was found (60 steps, 8 ranks), but hangs could not be checked.")
    assert verdict((no_calls,), {"steps": 60, "num_ranks": 1}).startswith("No problems found")


def test_a_run_without_an_end_whose_identities_are_lost_is_not_called_healthy(tmp_path: Path) -> None:
    run = make_run(tmp_path, ranks=2, steps=30)
    for path in run.path.glob("tapes/attempt-*/rank-*/events.jsonl"):
        path.unlink()
    node = run.node_dir(0) / "events.jsonl"
    if node.exists():
        node.write_text("".join(line for line in node.read_text().splitlines(True) if '"run_ended"' not in line))
    text = open_run(run.path).verdict
    assert text.startswith("Nothing was found (30 steps), but how the ranks ended could not be checked."), text


def test_a_gain_that_nothing_explains_is_said() -> None:
    said = verdict((), FACTS, GAIN)
    gain = "Balanced ranks would be 1.25x faster, and no finding explains why."
    assert said == f"Nothing was found (50 steps, 2 ranks). {gain}"
    assert_plain(said)
    assert verdict((), FACTS, replace(GAIN, error_ratio=0.3)) == verdict((), FACTS)
    assert verdict((), FACTS, replace(GAIN, slowdown=1.005, error_ratio=0.0)) == verdict((), FACTS)
    # Steps that vary are no lasting difference between ranks, and a gain that is withheld is none.
    assert verdict((), FACTS, replace(GAIN, lasting_slowdown=1.0)) == verdict((), FACTS)
    assert "1.12x" in verdict((), FACTS, replace(GAIN, lasting_slowdown=1.12))
    assert verdict((), FACTS, replace(GAIN, withheld="no recorded work ran in 34 % of the time")) == verdict((), FACTS)


def test_a_gain_that_advice_explains_is_said_with_it() -> None:
    advice = Finding(
        analyzer="straggler", kind="straggler", severity="info", status="advice", summary="...", ranks=(0,)
    )
    said = verdict((advice,), FACTS, GAIN)
    gain = "Balanced ranks would be 1.25x faster, and the advice says why."
    assert said == f"Nothing was found (50 steps, 2 ranks). {gain} 1 piece of advice."
    assert_plain(said)


def test_no_gain_is_claimed_beside_a_run_without_problems() -> None:
    """Whatever the what-if comes to, the line about it and the verdict of a run without findings agree."""
    draw = random.Random(0)
    for _ in range(2000):
        slowdown = 1 + draw.choice((0.0, 0.005, 0.01, 0.0101, 0.02, 0.3)) * draw.uniform(0.9, 1.1)
        lasting = draw.choice((None, 1.0, 1 + (slowdown - 1) * draw.random()))
        what = replace(
            GAIN, slowdown=slowdown, lasting_slowdown=lasting, error_ratio=draw.choice((0.0, 0.004, 0.02, 0.2)),
            launch_delay_ratio=draw.choice((0.0, 0.05)), withheld=draw.choice(("", "no work ran in 40 % of the time")),
        )  # fmt: skip
        claims = "faster" in (line := what_if_line(what)) and "not be faster" not in line
        assert claims != verdict((), FACTS, what).startswith("No problems found"), line


def test_a_straggler_explains_the_gain_and_unmeasured_time_is_a_fact_of_the_run(tmp_path: Path) -> None:
    with Store.open(make_run(tmp_path, steps=60, slow={2: 1.6})) as store:
        diagnosis = diagnose(store, {})
    assert diagnosis.what_if is not None
    assert diagnosis.what_if.is_beyond_error
    assert diagnosis.verdict.startswith("Rank 2 was slow")
    assert "nothing recorded explains" not in diagnosis.verdict
    assert diagnosis.run["steps_not_measured_ratio"] == 0


def test_an_elastic_run_says_how_many_ranks_it_has_and_had() -> None:
    """Three ranks; after a node has left, two go on; a fourth attempt has only begun."""
    store = plain_run(ranks=3)
    rows = [
        {"attempt": attempt, "rank": rank, "wall_ns": 1, "world_size": 2, "dp_shard": rank, "host": "node-0"}
        for attempt, rank in ((1, 0), (1, 1), (2, 0))
    ]
    store.connection.execute("UPDATE ranks SET dp_shard = rank, dp_replicate = 0")
    assert run_facts(store, {})["num_ranks_before"] == []
    store.add("ranks", rows[:2])
    facts = run_facts(store, {})
    assert (facts["num_ranks"], facts["num_ranks_before"], facts["mesh"]) == (2, [3], {"dp_shard": 2})
    assert counted_ranks(facts) == "2 ranks (3 before)"
    store.add("ranks", rows[2:])
    assert run_facts(store, {})["num_ranks"] == 2


def test_ranks_without_records_are_ranks_of_the_run() -> None:
    """The records of rank 3 were lost, or not collected."""
    store = plain_run(ranks=3)
    store.connection.execute("UPDATE ranks SET dp_shard = rank, dp_replicate = 0")
    assert run_facts(store, {})["mesh"] == {"dp_shard": 3}
    store.connection.execute("UPDATE ranks SET world_size = 4")
    facts = run_facts(store, {})
    assert (facts["num_ranks"], facts["world_size"], facts["mesh"]) == (3, 4, {})
    assert counted_ranks(facts) == "3 of 4 ranks"


def test_a_rank_without_records_after_a_restart_is_not_counted_as_recorded() -> None:
    """Rank 3 has records in attempt 0 only: the newest attempt is that of three ranks of four."""
    store = plain_run(ranks=4)
    for table in ("ranks", "steps"):
        store.connection.execute(f"INSERT INTO {table} BY NAME SELECT * REPLACE (1 AS attempt) FROM {table} "
                                 "WHERE rank < 3")  # fmt: skip
    store.connection.execute("UPDATE steps SET start_ns = start_ns + 20000000000, step = step + 100 WHERE attempt = 1")
    facts = run_facts(store, {})
    assert (counted_ranks(facts), facts["mesh"]) == ("3 of 4 ranks", {})
    account = measure(store)
    assert account is not None
    assert (sorted(account.by_rank), account.is_split) == ([0, 1, 2], False)


def test_files_in_which_nothing_is_known_are_no_healthy_run() -> None:
    problems = [{"path": "x.wandb", "problem": "holds no step"}]
    facts = {"files_read": {"run of W&B (.wandb)": 1}, "file_problems": problems}
    assert verdict([], facts, None).startswith("Nothing was judged: ")
    assert verdict([], facts | {"steps": 40, "num_ranks": 2}, None).startswith("No problems found (40 steps, 2 ranks)")
    assert verdict([], facts | {"files_read": {"log": 2}}, None).startswith("No problems found")


def test_what_is_wrong_with_a_records_file_stands_in_brackets() -> None:
    """A problem may be a clause or a predicate, and other files are only counted."""
    problems = [{"path": f"tapes/{name}", "problem": "3 records have a damaged state"} for name in ("a.tape", "b.tape")]
    text = verdict([], {"steps": 40, "num_ranks": 2, "file_problems": problems})
    assert "Records incomplete: tapes/a.tape (3 records have a damaged state), and 1 more file." in text


def test_a_verdict_with_a_reservation_is_not_marked_as_clean() -> None:
    """256 ranks without recorded calls: nothing was found, but hangs could not be checked."""
    facts = {"steps": 1_000, "num_ranks": 256, "ended": "finished"}
    text = verdict([Finding.insufficient("hang", "hang", "Hangs were not checked.")], facts)
    assert text.startswith("Nothing was found (1000 steps, 256 ranks), but hangs could not be checked.")
    assert outcome(text, facts) == "unjudged"
    assert outcome(verdict([], facts), facts) == "clean"
    assert outcome(verdict([], facts | {"ended": "failed"}), facts | {"ended": "failed"}) == "failed"
