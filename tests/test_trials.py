"""The command of `make trials` keeps the rows of finished trials and continues with the others."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import tests.trials.__main__ as trials
from tests.suite import Result
from tests.trials.__main__ import Trial

PAGE = "# Page\n<!-- trials -->\n<!-- /trials -->\nthe rest\n"


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of trials in the order in which they ran; `stops` is interrupted in its first run."""
    names: list[str] = []
    page = tmp_path / "testing.md"
    page.write_text(PAGE)

    def run(trial: Trial, name: str) -> list[Result]:
        if trial.name == "test_stops" and trial.name not in names:
            names.append(trial.name)
            raise KeyboardInterrupt
        names.append(trial.name)
        outcome = "failed" if trial.name == "test_fails" else "passed"
        return [Result(test=name, outcome=outcome, real=True, wall_s=2.0, cpu_s=1.0, text="")]

    found = [Trial("tests/trials/test_a.py", name, 2, 0.5) for name in ("test_well", "test_fails", "test_stops")]
    monkeypatch.setattr(trials, "PAGE", page)
    monkeypatch.setattr(trials, "RESULTS", tmp_path)
    monkeypatch.setattr(trials, "_commit", lambda: "12345678")
    monkeypatch.setattr(trials, "_collect", lambda path: [Trial(t.path, t.name, t.times, t.at_least) for t in found])
    monkeypatch.setattr(trials, "_run", run)
    monkeypatch.setattr(sys, "argv", ["trials", "test_a.py"])
    return names


def test_an_interrupted_run_goes_on_with_what_has_no_row(ran: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt):
        trials.main()
    assert ran == ["test_well", "test_well", "test_fails", "test_fails", "test_stops"]
    rows = trials.PAGE.read_text().splitlines()
    passed = [row.split("|")[2].strip() for row in rows if "test_a.py" in row]
    assert passed == ["0 of 2 (at least 50%)", "2 of 2 (at least 50%)"]
    del ran[:4]
    assert trials.main() == 1, "one that ended before the interruption was below its bound"
    assert ran == ["test_stops"] * 3, "with all of its repeats"
    assert "2 of 3 have a row of this commit" in capsys.readouterr().out
    text = trials.PAGE.read_text()
    assert text.count("| 12345678, ") == 3
    assert text.endswith("the rest\n")


def test_a_row_of_another_commit_is_replaced(ran: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["trials", "test_a.py", "-k", "well"])
    assert trials.main() == 0
    monkeypatch.setattr(trials, "_commit", lambda: "87654321")
    assert trials.main() == 0
    assert ran == ["test_well"] * 4
    assert "12345678" not in trials.PAGE.read_text()
    assert trials.main() == 0
    assert ran == ["test_well"] * 4
    monkeypatch.setattr(sys, "argv", ["trials", "test_a.py", "-k", "well", "--again"])
    assert trials.main() == 0
    assert ran == ["test_well"] * 6


def test_a_process_that_dies_before_it_reports_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "RESULTS", tmp_path)
    (result,) = trials._run(Trial("tests/trials/test_none.py", "test_none"), "none")
    assert result.outcome == "failed"
