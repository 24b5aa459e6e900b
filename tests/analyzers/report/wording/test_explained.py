"""Names and units of evidence, and the count of checks that were not judged."""

from __future__ import annotations

from pathlib import Path

from analyzers.diagnose import conclude
from analyzers.finding import Finding
from analyzers.report.terminal.diagnosis_text import evidence_rows
from analyzers.report.wording import labels
from analyzers.report.wording.explained import next_step
from analyzers.report.wording.stack_texts import stack_texts

GIB = 1 << 30


def test_evidence_has_names_and_units_that_people_read() -> None:
    rows = dict(
        evidence_rows(
            Finding(
                analyzer="x",
                kind="straggler",
                severity="warning",
                status="fired",
                summary="Slow.",
                cost_s=599.9,
                evidence={
                    "num_nonfinite_parameters": 1,
                    "pattern": "since",
                    "cpu_time_excess_ms": 22.364,
                    "headroom_bytes": 12 * GIB,
                    "clock_median_hertz": 1.98e9,
                    "hottest_celsius": 91.0,
                    "age_steps": 400,
                    "is_reproduced": False,
                    "loss_z": 12.5,
                    "some_new_number_ms": 3,
                    "first_wall_ns": 1,
                },
            )
        )
    )
    assert rows == {
        "non-finite parameters": "1",
        "pattern": "every step since onset",
        "extra CPU time per step": "22.36 ms",
        "left until full": "12 GiB",
        "clock median": "1,980 MHz",
        "hottest": "91 °C",
        "age of the checkpoint": "400 steps",
        "reproduced on replay": "no",
        "cost": "599.9 s",
        "loss deviation": "12.5 sigma",
        "some new number": "3 ms",
    }


def test_labels_fit_their_column() -> None:
    assert [name for name in labels._LABELS.values() if len(name) > 24] == []


def test_the_verdict_counts_what_was_not_judged() -> None:
    kinds = ("checkpoint_age", "configuration", "data_bound")
    verdict = conclude([Finding.insufficient("a", kind, "no records") for kind in kinds], {"steps": 3}).verdict
    assert verdict == "No problems found (3 steps). 3 checks need more data: see Not judged."


def test_ranks_are_no_counts_and_groups_are_spelled_out() -> None:
    assert labels.shown("waiting_ranks", [0, 2, 3, 4, 5]) == "ranks 0 and 2-5"
    assert labels.shown("waiting_ranks", [3]) == "rank 3"
    assert labels.shown("first_to_report_rank", 3) == "rank 3"
    assert labels.shown("process_group", "pp:1-7/2") == "pp:1,3,5,7"
    assert labels.shown("process_groups", ["tp:6-7", "dp_shard:0-1022/2"]) == "tp:6-7, dp_shard:0-1022, every 2nd rank"
    assert labels.shown("waiting_calls", {"recv #7 from rank 5": [6], "all_reduce #8": [0, 1]}) == (
        "recv #7 from rank 5: rank 6; all_reduce #8: ranks 0 and 1"
    )


def test_numbers_have_the_digits_that_people_compare() -> None:
    assert labels.shown("excess_ms", 102.5512) == "102.6 ms"
    assert labels.shown("step_ms", 1234.56789) == "1,235 ms"
    assert labels.shown("lost_ratio", 6.57e-05) == "less than 0.1 %"
    assert labels.shown("lost_ratio", 0.0) == "0 %"
    assert labels.shown("noise_ratio", 0.02345) == "2.3 %"
    assert labels.shown("num_checked_inputs", 12345) == "12,345"
    assert labels.shown("seq", 12345) == "12345"
    assert labels.shown("work_ms_by_coordinate", [1134.926, 903.094]) == "1,135 ms, 903.1 ms"
    assert labels.shown("idle_ratio_by_rank", {"3": 0.123456}) == "3 12 %"


def test_the_sides_of_a_stack_are_told_apart_from_its_stages() -> None:
    group = {
        "ranks": [0, 1, 2, 3, 6],
        "num_ranks": 5,
        "role": "stages 0 and 1",
        "doing": "in recv",
        "frames": ["a:1 f"],
    }
    ((heading, _),) = stack_texts({"stack_groups": [group]})
    assert heading == "5 ranks have the same stack: 0-3 and 6 (stages 0 and 1), in recv, innermost first"


def test_a_command_of_the_next_step_names_the_run() -> None:
    spike = Finding(
        analyzer="spike", kind="loss_spike", severity="warning", status="fired", summary="", cause="batch",
        first_step=101,
    )  # fmt: skip
    assert "Run `rankscope analyze runs/my-run --why-spike 101` for" in next_step(spike, "runs/my-run")
    assert "`rankscope analyze 'my runs/1' --why-spike 101`" in next_step(spike, Path("my runs/1"))
    assert "rankscope analyze RUN " in next_step(spike)
