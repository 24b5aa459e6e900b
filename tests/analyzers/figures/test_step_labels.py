"""The numbers of steps above the timeline do not cover each other."""

from __future__ import annotations

from analyzers.figures.time.activity import TimelineItem
from analyzers.figures.time.timeline import draw


def labels(items: list[TimelineItem]) -> list[str]:
    return sorted(found.text for found in draw(items).layout.annotations)


def forward(step: int, start_ms: float, end_ms: float) -> TimelineItem:
    return TimelineItem(rank=0, kind="forward", is_call=False, step=step, start_ms=start_ms, end_ms=end_ms)


def test_each_of_a_few_steps_has_its_number() -> None:
    assert labels([forward(step, 100.0 * step, 100.0 * step + 90) for step in range(12)]) == sorted(
        f"step {step}" for step in range(12)
    )


def test_steps_before_a_hang_are_too_narrow_for_theirs() -> None:
    assert labels([forward(28, 0, 90), forward(29, 100, 190), forward(30, 200, 7_000)]) == ["step 30"]


def test_names_of_bars_have_one_size_or_are_left_out() -> None:
    items = [TimelineItem(rank=0, kind="forward", is_call=False, start_ms=0.0, end_ms=50.0, step=1)]
    figure = draw(items)
    (bar,) = [trace for trace in figure.data if trace.text is not None]
    assert bar.insidetextfont.size == figure.layout.uniformtext.minsize
    assert figure.layout.uniformtext.mode == "hide"


def test_a_pipelines_waits_are_not_drawn_as_work_between_phases() -> None:
    def item(kind: str, start_ms: float, end_ms: float, stage: int | None = None) -> TimelineItem:
        return TimelineItem(rank=0, kind=kind, is_call=False, step=1, start_ms=start_ms, end_ms=end_ms, stage=stage)

    spans = [item("data", 0, 2), item("forward", 2, 18, 0), item("backward", 54, 86, 0), item("optimizer", 93, 98)]
    assert {bar.name for bar in draw(spans).data if bar.type == "bar"} == {"data", "forward", "backward", "optimizer"}
