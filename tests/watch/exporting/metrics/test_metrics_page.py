"""The catalogue of metrics, and docs/metrics.md made from it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from watch.exporting.metrics.catalogue import COMMON_LABELS, METRICS, Metric, document

PAGE = Path(__file__).resolve().parents[4] / "docs" / "metrics.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == document(), (
        "python -m watch.exporting.metrics.catalogue > docs/metrics.md"
    )


@pytest.mark.parametrize("metric", METRICS.values(), ids=lambda metric: metric.name)
def test_names_follow_prometheus(metric: Metric) -> None:
    assert re.fullmatch(r"rankscope_[a-z0-9_]+", metric.name)
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    assert metric.name.endswith("_info") == (metric.kind == "info")
    assert not metric.unit or metric.name.removesuffix("_total").endswith(f"_{metric.unit}")
    assert metric.help.endswith(".")
    assert not set(metric.labels) & set(COMMON_LABELS)
    assert ("timestamp" in metric.name) <= (metric.unit == "seconds")
    assert not metric.name.endswith("_age_seconds")  # timestamps: PromQL knows what time it is


def test_otel_names_are_dotted_and_bear_no_unit() -> None:
    metric = METRICS["rankscope_rank_step_duration_seconds"]
    assert (metric.otel_name, metric.otel_unit) == ("rankscope.rank.step.duration", "s")
    assert METRICS["rankscope_tokens_total"].otel_name == "rankscope.tokens"
