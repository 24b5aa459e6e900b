"""Steps that programs printed: slower, waiting for data, not finite; and how a log without a cause ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from analyzers.diagnose import Diagnosis
from analyzers.evidence.diagnose_files import SourceError, diagnose_files
from analyzers.evidence.printed_steps import printed_step_findings
from benchmarks.incidents.printed import printed
from store.readers.memory_store import MemoryStore


def _diagnosis(tmp_path: Path, text: str) -> Diagnosis:
    path = tmp_path / "train.log"
    path.write_text(text, encoding="utf-8")
    return diagnose_files([path])


@pytest.mark.parametrize("program", ["hf", "torchtitan", "fairseq", "megatron"])
def test_a_lasting_rise_of_the_duration_is_found(tmp_path: Path, program: str) -> None:
    first = _diagnosis(tmp_path, printed(program, steps=200, slow_from=100)).fired[0]
    assert (first.kind, first.cause) == ("throughput", "unknown")
    assert abs((first.first_step or 0) - 100) <= 5
    assert first.evidence["factor_ratio"] == pytest.approx(2.0, abs=0.1)


def test_a_slow_step_in_every_twenty_is_periodic(tmp_path: Path) -> None:
    first = _diagnosis(tmp_path, printed("litgpt", steps=240, every=20)).fired[0]
    assert (first.cause, first.evidence["every_steps"]) == ("periodic", 20)


def test_the_first_step_of_an_epoch_stands_for_itself(tmp_path: Path) -> None:
    lines = [
        f"Epoch: [{epoch}]  [{step:4d}/500]  eta: 0:01:00  loss: {3 / (epoch + 1):.4f} (3.1)  "
        f"time: {1.9 if step == 0 else 0.2 + step % 3 / 1000:.6f}  data: 0.0002\n"
        for epoch in range(12)
        for step in (*range(0, 500, 20), 499)
    ]
    assert _diagnosis(tmp_path, "".join(lines)).fired == ()  # 1.7 s of 100


def test_another_trial_that_begins_is_no_spike(tmp_path: Path) -> None:
    trial = [f"Epoch {epoch}/{{}} - loss: {1 + 5 * 0.9**epoch + epoch % 3 / 100:.4f}\n" for epoch in range(1, 61)]
    lines = [line.format(60) for length in (40, 60, 35, 50) for line in trial[:length]]
    assert _diagnosis(tmp_path, "".join(lines)).fired == ()
    lines[85] = "Epoch 46/60 - loss: 9.1000\n"
    (finding,) = _diagnosis(tmp_path, "".join(lines)).fired
    assert (finding.kind, finding.first_step) == ("loss_spike", 86)


def test_iterations_that_make_a_step_together_are_called_so(tmp_path: Path) -> None:
    def text(slow_from: int) -> str:
        return "".join(
            f"Epoch 1 | iter {n} step {n // 4} | loss train: {3 - n / 500:.3f}, val: n/a | iter time: "
            f"{(100 if n % 4 else 190) * (2.5 if n >= slow_from else 1):.2f} ms{'' if n % 4 else ' (step)'}\n"
            for n in range(1, 401)
        )

    healthy = _diagnosis(tmp_path, text(1000))
    assert (healthy.fired, "400 printed iterations to iteration 400" in healthy.verdict) == ((), True)
    (remark,) = (one for one in healthy.findings if one.cause == "periodic")
    assert "once per optimizer step" in remark.summary
    (slower,) = _diagnosis(tmp_path, text(201)).fired
    assert "since iteration 20" in slower.summary


def test_a_large_share_of_data_time_is_found(tmp_path: Path) -> None:
    first = _diagnosis(tmp_path, printed("mmengine", steps=30, data_share=0.8)).fired[0]
    assert first.kind == "data_bound"
    assert first.evidence["data_ratio"] == pytest.approx(0.8, abs=0.01)


def test_the_gradient_before_the_loss(tmp_path: Path) -> None:
    found = _diagnosis(tmp_path, printed("megatron", steps=80, gradient_from=50, nan_from=53)).fired
    assert [one.kind for one in found] == ["non_finite"]
    assert "gradient norm is not finite from step 50 on, the loss from step 53" in found[0].summary
    assert "rank 0" not in found[0].summary


@pytest.mark.parametrize("prefix", ["", "[default3]:"])
def test_a_count_of_nan_iterations_is_dated_by_its_own_line_and_blames_no_printer(tmp_path: Path, prefix: str) -> None:
    line = f"{prefix} iteration {{step:8}}/     100 | elapsed time per iteration (ms): 1234.5 | "
    line += "learning rate: 1.0E-04 | lm loss: {loss} | grad norm: {loss} | number of nan iterations:   {num} |\n"
    text = "".join(line.format(step=step, loss=6.1, num=0) for step in (10, 20, 30))
    first = _diagnosis(tmp_path, text + line.format(step=40, loss="nan", num=1)).fired[0]
    assert (first.kind, first.first_step, first.ranks) == ("non_finite", 40, ())
    assert "train.log:4" in first.evidence["basis"]


def test_a_divergence_is_one_finding(tmp_path: Path) -> None:
    found = _diagnosis(tmp_path, printed("hf_lines", steps=300, diverge_from=200)).fired
    assert len(found) == 1
    assert "step 2" not in found[0].summary  # the lines are counted, and are no steps of the trainer


def test_skipped_steps_are_counted(tmp_path: Path) -> None:
    first = _diagnosis(tmp_path, printed("megatron", steps=300, skip_from=200)).fired[0]
    assert first.evidence["skipped_steps"] == 101
    assert _diagnosis(tmp_path, printed("megatron", steps=60, skip_from=1)).fired == ()  # the search for a scale


def test_finished_running_and_ended_are_told_apart(tmp_path: Path) -> None:
    steps = printed("litgpt", steps=50)
    ends = {
        "finished": steps + "{'train_runtime': 61.0, 'train_loss': 3.0, 'epoch': 1.0}\n",
        "still running, or ended without a log line": steps,
        "without a reason in the logs": steps + "closing\n" * 40,
    }
    for ended, text in ends.items():
        diagnosis = _diagnosis(tmp_path, text)
        assert (diagnosis.run["ended"], diagnosis.fired) == (ended, ())
        assert "50 printed steps" in diagnosis.verdict


def test_a_warning_in_a_job_that_finished_is_no_death(tmp_path: Path) -> None:
    error = "HTTPSConnectionPool(host='hub.example', port=443): Max retries exceeded with url: /"
    warning = f"WARNING:urllib3.connectionpool:{error}\n"
    assert _diagnosis(tmp_path, warning + printed("hf", steps=40, total=40)).fired == ()


FINISHED = "{'train_runtime': 61.0, 'train_loss': 3.0, 'epoch': 1.0}\n"
RAISED = """\
Traceback (most recent call last):
  File "/app/report.py", line 12, in report
    upload(metrics)
ValueError: no metric
"""


@pytest.mark.parametrize("error", [RAISED, "requests.exceptions.ConnectionError: could not download the dataset\n"])
def test_an_error_that_the_job_finished_after_is_no_death(tmp_path: Path, error: str) -> None:
    steps = printed("litgpt", steps=50)
    survived = _diagnosis(tmp_path, steps + error + FINISHED)
    assert (survived.run["ended"], survived.fired) == ("finished", ())
    assert "50 printed steps" in survived.verdict
    assert "No failure seen" in survived.verdict
    (died,) = _diagnosis(tmp_path, steps + error).fired
    assert died.kind == "rank_lost"


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.json", '{"alpha": [1, 2], "beta": 3}\n', "is a JSON document"),
        ("b.csv", "a,b\n1,2\n3,4\n", "is a CSV table"),
        ("c.log", "", "is empty"),
    ],
)
def test_unsupported_files_are_named_as_what_they_are(tmp_path: Path, name: str, text: str, said: str) -> None:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    try:
        verdict = diagnose_files([path]).verdict
    except SourceError as error:
        verdict = str(error)
    assert said in verdict
    assert "rankscope analyze --help lists the supported formats" in verdict


def _noisy(losses: dict[int, float], *, steps: int = 400, values: str = "") -> str:
    usual = {step: 3.6 + 0.02 * (step % 5) for step in range(1, steps + 1)} | losses
    return "".join(f"step:{step}/{steps} train_loss:{loss:.4f}{values}\n" for step, loss in usual.items())


def test_a_moderate_rise_on_one_line_is_a_remark(tmp_path: Path) -> None:
    found = _diagnosis(tmp_path, _noisy({300: 4.9}))
    assert found.fired == ()
    assert found.verdict.startswith("The job reached its last step")
    assert "did not last" in found.advised[0].summary
    # a rise that doubles the loss, that lasts, or with which the log ends is none
    for losses in ({300: 7.5}, {300: 4.9, 301: 4.9, 302: 4.8}, {400: 4.9}):
        assert [one.kind for one in _diagnosis(tmp_path, _noisy(losses)).fired] == ["loss_spike"]


def test_a_rise_of_a_loss_that_is_almost_zero_is_a_remark(tmp_path: Path) -> None:
    lines = [f"Epoch: {step // 10}| train loss: {max(0.56 * 0.9**step, 3e-4):.6f}\n" for step in range(300)]
    lines[250:253] = [f"Epoch: 25| train loss: {loss}\n" for loss in (0.0050, 0.0034, 0.0020)]
    found = _diagnosis(tmp_path, "".join(lines))
    assert found.fired == ()
    assert "300 printed lines" in found.verdict


def test_losses_of_epochs_are_read_and_their_means_are_not_mixed_in(tmp_path: Path) -> None:
    lines = []
    for epoch in range(1, 9):
        lines += [f"Epoch {epoch} - Batch loss: {2 / (epoch + batch / 40):.4f}\n" for batch in range(40)]
        lines += [f"Epoch {epoch} - Average Train Loss: {9 / epoch:.4f}\n", f"Epoch {epoch} - Validation loss: 9.0\n"]
    assert "320 printed lines of a step, the loss fell from 2 to" in _diagnosis(tmp_path, "".join(lines)).verdict
    with_steps = "".join(f"step {step} loss 2.0\nEpoch 1 - Average Train Loss: 9.0\n" for step in range(1, 30))
    assert "29 printed steps to step 29" in _diagnosis(tmp_path, with_steps).verdict


def test_a_rhythm_of_epochs_or_of_times_between_lines_is_a_remark(tmp_path: Path) -> None:
    epochs = "".join(
        f"Epoch: [{epoch}][{step:3d}/100]\tTime {1.2 if step == 0 else 0.2:.3f} ( 0.250)\tLoss 2.{step % 5}0e+00\n"
        for epoch in range(9)
        for step in range(100)
    )
    found = _diagnosis(tmp_path, epochs)
    assert found.fired == ()
    assert "once per epoch" in found.advised[0].summary
    bars = "".join(
        f"\rEpoch {epoch}: {step}%|##  | {step}/100 [00:10<00:20, {1.2 if step == 1 else 0.1:.2f}s/it, "
        f"loss=2.{step % 5}]"
        for epoch in range(9)
        for step in range(1, 101)
    )
    assert _diagnosis(tmp_path, bars).fired == ()
    second, lines = 0, []
    for step in range(400):
        second += 61 if step and step % 50 == 0 else 1
        lines.append(
            f"2026-11-02 {second // 3600:02d}:{second // 60 % 60:02d}:{second % 60:02d} step {step} loss 2.0\n"
        )
    found = _diagnosis(tmp_path, "".join(lines))
    assert found.fired == ()
    assert "the time between lines" in found.advised[0].summary


def test_two_engines_that_each_count_skipped_steps(tmp_path: Path) -> None:
    lines = []
    for step in range(10, 400, 10):
        lines += [f"[Rank 0] step={step}, skipped={count}, lr=[1e-06], mom=[(0.9, 0.95)]\n" for count in (7, 5)]
        lines += [f"reward {step + number}\n" for number in range(30)]
    found = _diagnosis(tmp_path, "".join(lines))
    assert found.fired == ()
    assert "ends in training" in found.verdict  # as far from its last step as steps are from each other
    ended = "[2026-11-02 09:18:22,606] [INFO] [launch.py:460:main] Process 4797 exits successfully.\n"
    assert _diagnosis(tmp_path, "".join([*lines, ended])).verdict.startswith("The job finished")


@pytest.mark.parametrize(
    "lines",
    [
        [f"2026-03-02 05:16:{second:02d}, 348 - INFO - ##### Epoch {second} #####" for second in range(20)],
        [f"04-06 21:48:{second:02d},  content:r-0.3-5e-5" for second in range(20)],
    ],
)
def test_a_log_with_commas_is_no_table(tmp_path: Path, lines: list[str]) -> None:
    assert "None of 20 lines names" in _diagnosis(tmp_path, "\n".join(lines) + "\n").verdict


def test_a_table_of_steps_with_tabs(tmp_path: Path) -> None:
    rows = "".join(f"{step}\t{10 / step:.4f}\n" for step in range(1, 60))
    assert "59 printed steps" in _diagnosis(tmp_path, f"step\tloss\n{rows}").verdict


@pytest.mark.parametrize("prefix", ["[rank{}]:", "{}: "])
def test_a_rank_with_longer_printed_steps_is_named(tmp_path: Path, prefix: str) -> None:
    def log(slow: float) -> str:
        return "".join(
            f"{prefix.format(rank)}step {step} | loss: 2.0 | step time: {800 * factor + step % 7:.1f} ms\n"
            for step in range(1, 200)
            for rank in range(4)
            for factor in (slow if rank == 2 and step >= 80 else 1,)
        )

    (found,) = _diagnosis(tmp_path, log(1.4)).fired
    assert (found.kind, found.status, found.ranks, found.first_step) == ("straggler", "suspect", (2,), 80)
    assert "1.40x the step time of the other 3 ranks" in found.summary
    assert _diagnosis(tmp_path, log(1.0)).fired == ()


class _CountedRow(dict[str, Any]):
    """A printed step that counts how often its values are read."""

    reads = 0

    def get(self, key: str, default: Any = None) -> Any:
        _CountedRow.reads += 1
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        _CountedRow.reads += 1
        return super().__getitem__(key)


def _reads(num_spikes: int) -> int:
    """Reads of a log of 2,000 steps with some spikes of the loss."""
    noise = np.random.default_rng(0).normal(0, 0.02, 2000)
    spikes = set(range(500, 2000, 1500 // num_spikes))
    rows = [
        _CountedRow(rank=0, attempt=0, step=step, loss=float(3 + noise[step] + (step in spikes)), start_ns=None)
        for step in range(2000)
    ]
    with MemoryStore() as store:
        store.add("steps", rows)
        _CountedRow.reads = 0
        assert printed_step_findings(store, [], rows)
    return _CountedRow.reads


def test_the_steps_are_not_read_once_more_for_each_spike() -> None:
    assert _reads(num_spikes=20) < 1.2 * _reads(num_spikes=2)
