"""Own times of steps out of tqdm's smoothed rate: real bars of tqdm with a clock that the test moves."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import tqdm.std

from analyzers.evidence.diagnose_files import diagnose_files
from store.readers.bar_times import single_step_times
from store.readers.logs.progress_bars import read_bar

STEPS = 200


def drawn(monkeypatch: pytest.MonkeyPatch, slow_s: float, *, usual_s: float = 1.1, **settings: Any) -> str:
    """What a bar over 200 steps writes, of which every 20th takes `slow_s`."""
    now_s = [1000.0]
    file = io.StringIO()
    with monkeypatch.context() as patched:
        patched.setattr(tqdm.std, "time", lambda: now_s[0])
        with tqdm.std.tqdm(total=STEPS, file=file, ncols=80, **settings) as bar:
            bar._time = lambda: now_s[0]
            for step in range(1, STEPS + 1):
                now_s[0] += slow_s if step % 20 == 0 else usual_s
                bar.update()
    return file.getvalue()


@pytest.mark.parametrize("usual_s", [0.13, 1.1, 12.0])
def test_a_slow_step_stands_out_of_the_smoothed_rate(monkeypatch: pytest.MonkeyPatch, usual_s: float) -> None:
    text = drawn(monkeypatch, 2 * usual_s, usual_s=usual_s)
    bars = [bar for part in text.split("\r") if (bar := read_bar(part)) is not None]
    times = {bars[place].step: took_ns / 1e9 for place, took_ns in single_step_times(bars).items()}
    assert len(times) >= STEPS - 1
    for step, took_s in times.items():
        assert took_s == pytest.approx(usual_s * (2 if step % 20 == 0 else 1), rel=0.06), step


@pytest.mark.parametrize("settings", [{"smoothing": 0}, {"smoothing": 1}, {"smoothing": 0.05}])
def test_bars_with_another_smoothing_keep_their_rate(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, float]
) -> None:
    text = drawn(monkeypatch, 40.0, **settings)
    assert single_step_times([bar for part in text.split("\r") if (bar := read_bar(part)) is not None]) == {}


def test_every_twentieth_step_of_a_bar_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.log").write_text(drawn(monkeypatch, 2.2))
    (found,) = diagnose_files([tmp_path]).fired
    assert (found.cause, found.evidence["every_steps"]) == ("periodic", 20)
    assert found.evidence["factor_ratio"] == pytest.approx(2.0, abs=0.1)
    (tmp_path / "train.log").write_text(drawn(monkeypatch, 1.15))
    assert diagnose_files([tmp_path]).fired == ()


def test_a_step_that_holds_an_evaluation_is_a_remark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = drawn(monkeypatch, 4.4).split("\r")
    for step in range(20, STEPS + 1, 20):
        parts[step] += "".join(f"\r{10 * n:3d}%|#         | {n}/10 [00:00<00:01,  3.10it/s]" for n in range(1, 11))
    (tmp_path / "train.log").write_text("\r".join(parts))
    diagnosis = diagnose_files([tmp_path])
    assert diagnosis.fired == ()
    (remark,) = (one for one in diagnosis.findings if one.cause == "periodic")
    assert "Another progress bar runs before most of them" in remark.summary


def test_a_log_that_begins_within_the_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = drawn(monkeypatch, 2.2).split("\r")
    (tmp_path / "train.log").write_text("\r".join(parts[33:]))
    (found,) = diagnose_files([tmp_path]).fired
    assert (found.cause, found.evidence["every_steps"]) == ("periodic", 20)


def test_the_bar_of_rich_has_steps_and_a_rate(tmp_path: Path) -> None:
    states = (
        f"\r\x1b[2KEpoch {epoch}/2  \x1b[35m{'━' * step}\x1b[0m\x1b[90m╺{'━' * (40 - step)}\x1b[0m {step}/40 "
        f"\x1b[2m0:00:{step // 5:02} • 0:00:01\x1b[0m \x1b[2m{5.0 if epoch else 20.0:.2f}it/s\x1b[0m train_loss: 0.250"
        for epoch in range(3)
        for step in range(0, 41, 2)
    )
    (tmp_path / "train.log").write_text("".join(states) + "\n")
    diagnosis = diagnose_files([tmp_path])
    assert diagnosis.run["steps"] == 120
    (slower,) = diagnosis.fired
    assert (slower.kind, slower.evidence["factor_ratio"]) == ("throughput", pytest.approx(4.0, abs=0.1))
