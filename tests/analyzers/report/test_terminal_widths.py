"""Nothing of a finding's evidence is cut off, however narrow the terminal is."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from analyzers.diagnose import conclude
from analyzers.finding import Finding
from analyzers.report.terminal.diagnosis_text import render
from analyzers.report.terminal.safe_console import SafeConsole, with_bound_units

NUMBERS = {"excess_ms": 28.25, "peer_wait_ms": 25.46, "num_slow_steps": 80, "step_ms": 288.7}


@pytest.mark.parametrize("width", [40, 60, 79, 80, 81, 100, 120, 200])
@pytest.mark.parametrize("parameter", ["blocks.3.mlp.up.weight", "layers.11.mlp.down_proj", "head"])
def test_values_and_the_link_are_whole(monkeypatch: pytest.MonkeyPatch, width: int, parameter: str) -> None:
    monkeypatch.setenv("RANKSCOPE_DASHBOARD_URL", "http://127.0.0.1:8501")
    finding = Finding(
        analyzer="non_finite", kind="non_finite", severity="warning", status="fired", ranks=(2,), first_step=40,
        attempt=0, summary="Rank 2 produced a NaN.", evidence={**NUMBERS, "parameter": parameter, "batch": 39},
    )  # fmt: skip
    written = io.StringIO()
    render(conclude([finding], {"run_id": "gpt-demo-20261126-134157"}), Console(file=written, width=width))
    lines = written.getvalue().splitlines()
    pages = [line for line in lines if "page: " in line]
    assert pages
    assert all(line.endswith("&finding=non_finite-0-40-r2") for line in pages)
    assert all(len(line) <= width for line in lines if line not in pages)
    for value in (parameter, "28.25 ms", "25.46 ms", "288.7 ms"):
        assert value in written.getvalue()


@pytest.mark.parametrize("width", [80, 100])
def test_a_long_value_goes_on_below_its_begin(width: int) -> None:
    finding = Finding(
        analyzer="hang", kind="hang", severity="critical", status="fired", summary="Rank 2 hangs.",
        evidence={"lines": ["job.log:9: " + "word " * 20]},
    )  # fmt: skip
    written = io.StringIO()
    render(conclude([finding], {}), Console(file=written, width=width))
    lines = written.getvalue().splitlines()
    (first,) = [number for number, line in enumerate(lines) if "job.log:9" in line]
    begin = lines[first].index("job.log:9")
    assert lines[first + 1].startswith(" " * begin + "word")
    assert "HANG  critical" in [line.rstrip() for line in lines], "no word where no step is known"


@pytest.mark.parametrize("width", [80, 120])
def test_long_and_short_values_begin_in_one_column(width: int) -> None:
    finding = Finding(
        analyzer="hang", kind="hang", severity="critical", status="fired", summary="Rank 2 hangs.",
        evidence={**NUMBERS, "lines": ["job.log:9: " + "word " * 20]},
    )  # fmt: skip
    written = io.StringIO()
    render(conclude([finding], {}), Console(file=written, width=width))
    lines = written.getvalue().splitlines()
    begins = [line.index(value) for line in lines for value in ("28.25 ms", "job.log:9") if value in line]
    assert len(begins) == 2
    assert begins[0] == begins[1]


def test_each_line_of_a_log_has_its_own_row() -> None:
    finding = Finding(
        analyzer="hang", kind="hang", severity="critical", status="fired", summary="Rank 2 hangs.",
        evidence={"lines": ["job.log:9:", "job.log:12: Watchdog"]},
    )  # fmt: skip
    written = io.StringIO()
    render(conclude([finding], {}), Console(file=written, width=60))
    lines = [line.split() for line in written.getvalue().splitlines()]
    assert ["log", "line", "job.log:9:"] in lines
    assert ["log", "line", "job.log:12:", "Watchdog"] in lines


@pytest.mark.parametrize("width", range(12, 40))
def test_a_number_and_its_unit_are_on_one_line(width: int) -> None:
    sentence = "It has 30.7 ms of CPU time, 12 % of all, and 2.3 GB/s, 4 GiB at step 5 since 10 s."
    written = io.StringIO()
    console = SafeConsole(file=written, width=width)
    console.print(sentence)
    text = written.getvalue()
    for value in ("30.7 ms", "12 %", "2.3 GB/s", "4 GiB", "10 s"):
        assert value in text
    assert " ".join(text.split()) == sentence
    assert len(with_bound_units(sentence)) == len(sentence)
    assert "step 5 since" in with_bound_units(sentence)
