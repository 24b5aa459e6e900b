from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

from dashboard.data import background_answers as answers_module
from dashboard.data.background_answers import Answers


def test_an_answer_is_computed_once_for_a_version() -> None:
    answers, calls = Answers(), []
    for version in (1, 1, 2, 2):
        compute = lambda version=version: calls.append(version) or version  # noqa: E731
        found = answers.get("loss", version, compute, patience_s=60, again_s=60)
        assert (found.value, found.is_fresh) == (version, True)
    assert calls == [1, 2]


def test_the_previous_answer_stays_while_the_next_is_computed() -> None:
    answers, gate = Answers(), threading.Event()
    assert answers.get("a", 1, lambda: "first", patience_s=60).value == "first"
    late = answers.get("a", 2, lambda: gate.wait(60) and "second", patience_s=60, again_s=0.01)
    assert (late.value, late.is_fresh) == ("first", False)
    gate.set()
    assert answers.get("a", 2, lambda: "never", patience_s=60, again_s=60).value == "second"


def test_a_slow_first_answer_is_empty_and_comes_later() -> None:
    answers, gate = Answers(), threading.Event()
    first = answers.get("a", 1, lambda: gate.wait(60) and "there", patience_s=0.01)
    assert (first.value, first.is_fresh, first.error) == (None, False, None)
    gate.set()
    assert answers.get("a", 1, lambda: "never", patience_s=60).value == "there"


def test_a_slow_first_answer_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page Fleet waited a second at each poll while the runs were being diagnosed."""
    now = [100.0]
    monkeypatch.setattr(answers_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    answers, gate = Answers(), threading.Event()
    assert answers.get("a", 1, lambda: gate.wait(120), patience_s=0.01).value is None
    now[0] += 60
    began = time.monotonic()
    assert answers.get("a", 1, lambda: "never", patience_s=60).value is None
    assert time.monotonic() - began < 30
    gate.set()


def test_an_error_is_shown_beside_the_previous_answer() -> None:
    answers = Answers()
    answers.get("a", 1, lambda: "first", patience_s=60)
    found = answers.get("a", 2, lambda: 1 / 0, patience_s=60, again_s=60)
    assert isinstance(found.error, ZeroDivisionError)
    assert (found.value, found.is_fresh) == ("first", False)


def test_the_number_of_answers_is_bounded() -> None:
    answers, calls = Answers(max_entries=3), []
    for key in (1, 2, 3, 4, 1):
        answers.get(key, 0, lambda key=key: calls.append(key) or key, patience_s=60)
    assert calls == [1, 2, 3, 4, 1]


def test_an_answer_is_recomputed_after_ten_times_its_duration_and_a_first_one_sooner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first diagnosis of a run that has just begun knew no step, and stood on its page for half a minute."""
    now = [100.0]
    monkeypatch.setattr(answers_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    answers, done = Answers(), []

    def compute() -> float:
        now[0] += 3
        done.append(now[0])
        return now[0]

    for version in range(300):
        answers.get("diagnosis", version, compute, patience_s=60, again_s=60)
        now[0] += 1
    began = [at - 3 for at in done]
    assert began[1] - done[0] == pytest.approx(3, abs=1), "as long as it had been asked for"
    rests = [begin - end for begin, end in zip(began[1:], done, strict=False)]
    assert rests == sorted(rests)
    assert rests[-1] == pytest.approx(30, abs=1), "ten times three seconds"
