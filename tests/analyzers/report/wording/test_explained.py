"""Names and units of evidence, and the count of checks that were not judged."""

from __future__ import annotations

from analyzers.diagnose import conclude
from analyzers.finding import Finding
from analyzers.report.terminal.diagnosis_text import evidence_rows
from analyzers.report.wording import labels

GIB = 1 << 30


def test_evidence_has_names_and_units_that_people_read() -> None:
    rows = dict(
        evidence_rows(
            {
                "num_nonfinite_parameters": 1,
                "pattern": "since",
                "cpu_time_excess_ms": 22.364,
                "left_bytes": 12 * GIB,
                "clock_median_hertz": 1.98e9,
                "hottest_celsius": 91.0,
                "age_steps": 400,
                "comes_back": False,
                "loss_z": 12.5,
                "some_new_number_ms": 3,
                "first_wall_ns": 1,
            }
        )
    )
    assert rows == {
        "non-finite parameters": "1",
        "pattern": "from its first step on",
        "more processor time": "22.364 ms",
        "left until full": "12 GiB",
        "clock median": "1,980 MHz",
        "hottest": "91 °C",
        "age of the checkpoint": "400 steps",
        "repeated by a replay": "no",
        "loss deviation": "12.5 sigma",
        "some new number": "3 ms",
    }


def test_labels_fit_their_column() -> None:
    assert [name for name in labels._LABELS.values() if len(name) > 24] == []


def test_the_verdict_counts_what_was_not_judged() -> None:
    kinds = ("checkpoint_age", "configuration", "data_bound")
    verdict = conclude([Finding.insufficient("a", kind, "no records") for kind in kinds], {"steps": 3}).verdict
    assert verdict == "No problems found (3 steps). 3 checks need more data: see Not judged."
