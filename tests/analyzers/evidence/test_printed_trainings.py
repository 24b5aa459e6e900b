"""Several trainings in one log (folds, trials, stages, programs): each is judged alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from analyzers.evidence.diagnose_files import diagnose_files
from analyzers.finding import Finding

Loss = Callable[[int, int], float]


def _bar(step: int, total: int, loss: float | None = None) -> str:
    values = "" if loss is None else f", loss={loss:.4f}"
    return f"{100 * step // total}%|##   | {step}/{total} [00:{step % 60:02d}<00:03,  1.00s/it{values}]"


def _fold_in_brackets(loss: Loss) -> str:
    return "".join(
        f"\r[fold_{fold}] {epoch:03d}/040:  {_bar(step, 4, loss(fold, 4 * epoch + step - 4))}"
        for fold in range(3) for epoch in range(1, 41) for step in range(1, 5)
    )  # fmt: skip


def _stages(loss: Loss) -> str:
    return "".join(
        f"\rStage {stage}: {_bar(step, 160, loss(stage, step))}" for stage in range(3) for step in range(1, 161)
    )


def _epochs_of_bars(loss: Loss) -> str:
    return "".join(
        f"\r{epoch}/40 {_bar(step, 4, loss(trial, 4 * epoch + step - 4))}"
        for trial in range(3) for epoch in range(1, 41) for step in range(1, 5)
    )  # fmt: skip


def _transformers(loss: Loss) -> str:
    return "".join(
        f"\r{_bar(step, 160)}" + f"\n{{'loss': {loss(run, step):.4f}, 'epoch': {step / 40}}}\n" * (step % 4 == 0)
        for run in range(3) for step in range(1, 161)
    )  # fmt: skip


def _longer_each_time(loss: Loss) -> str:
    return "".join(
        f"step {step} loss {(1 + 2 * run) * loss(run, step):.4f}\n"
        for run, num_steps in enumerate((80, 120, 160)) for step in range(1, num_steps + 1)
    )  # fmt: skip


FORMS = (_fold_in_brackets, _stages, _epochs_of_bars, _transformers, _longer_each_time)


def _falling(_training: int, step: int) -> float:
    return 0.5 + 4 * 0.97**step + step % 3 / 100


def _fired(folder: Path, text: str) -> tuple[Finding, ...]:
    path = folder / "train.log"
    path.write_text(text, encoding="utf-8")
    return tuple(diagnose_files([path]).fired)


@pytest.mark.parametrize("form", FORMS)
def test_the_first_losses_of_another_training_compare_with_nothing_before(
    tmp_path: Path, form: Callable[[Loss], str]
) -> None:
    text = form(_falling)
    assert _fired(tmp_path, text) == ()
    assert _fired(tmp_path, text[: 45 * len(text) // 100]) == ()


@pytest.mark.parametrize("form", FORMS[:4])
def test_a_spike_within_a_later_training_is_found(tmp_path: Path, form: Callable[[Loss], str]) -> None:
    def loss(training: int, step: int) -> float:
        return 9.0 if training == 1 and 120 <= step < 124 else _falling(training, step)

    (spike,) = _fired(tmp_path, form(loss))
    assert (spike.kind, spike.cause) == ("loss_spike", "batch")
    assert (spike.first_step or 0) - 280 in range(5)


@pytest.mark.parametrize("form", FORMS)
def test_a_loss_that_is_not_finite_is_found_in_any(tmp_path: Path, form: Callable[[Loss], str]) -> None:
    def loss(training: int, step: int) -> float:
        return float("nan") if training == 1 and 60 <= step < 70 else _falling(training, step)

    assert _fired(tmp_path, form(loss))[0].kind == "non_finite"


@pytest.mark.parametrize("form", FORMS[:4])
def test_the_end_of_an_epoch_or_of_a_fold_is_not_that_of_the_job(tmp_path: Path, form: Callable[[Loss], str]) -> None:
    path = tmp_path / "train.log"
    bars = form(_falling).split("\r")
    end = max(place for place, bar in enumerate(bars[: 2 * len(bars) // 3 + 1]) if "100%|" in bar)
    path.write_text("\r".join(bars[: end + 1]), encoding="utf-8")
    assert "reached its last step" not in diagnose_files([path]).verdict
