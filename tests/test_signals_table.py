"""The table of the benchmark of signals: percentiles over the tries of a trial, and each problem in its cell."""

from __future__ import annotations

from benchmarks.durability.signals import Result, summary


def _result(signal: str, verdict_s: float | None, end_s: float, *, left: int = 0, problem: str = "") -> Result:
    return Result(
        command="run", state="held", signal=signal, verdict_s=verdict_s, end_s=end_s, left=left, problem=problem
    )


def test_the_table_has_a_cell_for_each_signal_with_its_worst_try() -> None:
    results = [_result("SIGINT", 0.1, 9.0), _result("SIGINT", 0.3, 8.0), _result("SIGTERM", None, 19.0, left=2)]
    lines = summary(results).splitlines()
    assert lines[0] == "| command, state | SIGINT | SIGTERM |"
    assert lines[2] == "| run, held | 0.3, 9.0 / 0 | -, 19.0 / 2 |"
    assert lines[-1] == (
        "3 trials, 0 with a problem; verdict of a hang: p99 0.3 s of 2; end: p99 19.0 s, at most 19.0 s; left: 2"
    )


def test_a_problem_of_one_try_stands_in_its_cell() -> None:
    results = [_result("SIGINT", 0.1, 9.0), _result("SIGINT", 4.0, 9.5, problem="no verdict within 3 s")]
    assert "| run, held | 4.0, 9.5 / 0: no verdict within 3 s |" in summary(results)
    assert "2 trials, 1 with a problem" in summary(results)
