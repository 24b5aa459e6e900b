"""Every line in step_lines.md is read as it says, and docs/other-runs.md names its program and fields."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from store.readers.logs.progress_bars import read_bar
from store.readers.logs.scan import read_log
from store.readers.logs.step_lines import read_step
from store.readers.logs.step_rows import step_rows

_EXAMPLE = re.compile(r"```text\n([^\n]+)\n```\n\nRead: ([^\n]+)\.\n")
_FIELDS = {
    "step": "step", "loss": "loss", "gradient norm": "grad_norm", "learning rate": "lr", "duration": "duration_ns",
    "data time": "data_ns", "throughput": "throughput", "skipped steps": "skipped", "progress bar": "bar",
}  # fmt: skip
LINES = (Path(__file__).parent / "step_lines.md").read_text(encoding="utf-8")
PAGE = (Path(__file__).parents[4] / "docs" / "other-runs.md").read_text(encoding="utf-8")
EXAMPLES = _EXAMPLE.findall(LINES)
ROWS = re.findall(r"^\| (.+?) \| (.+?) \|$", PAGE.split("| programs | read |")[1].split("\n\n")[0], re.MULTILINE)
"""Rows of the page's table: programs, fields."""
PROGRAMS = dict(re.findall(r"\*\*(.+?)\*\*\n\n(.*?)(?=\n\*\*|\Z)", LINES, re.DOTALL))


def test_fifteen_programs_have_examples() -> None:
    assert len(PROGRAMS) >= 15
    assert len(EXAMPLES) >= 18


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_page_names_the_program_and_all_that_is_read(program: str) -> None:
    fields = dict.fromkeys(name for _, names in _EXAMPLE.findall(PROGRAMS[program]) for name in names.split(", "))
    (read,) = (set(read.split(", ")) for names, read in ROWS if program in names)
    assert read == set(fields)


@pytest.mark.parametrize(("line", "names"), EXAMPLES, ids=lambda text: text[:30])
def test_a_line_is_read_as_stated(line: str, names: str) -> None:
    found = read_step(line)
    assert found is not None
    assert {name for name, field in _FIELDS.items() if getattr(found, field) is not None} == set(names.split(", "))


@pytest.mark.parametrize(
    ("line", "seconds"),
    [
        ("iter 0 step 0: loss 2.04, iter time: 3391.02ms", 3.39102),
        ("step 3 | loss: 2.0 | dt: 679.48ms | total time: 0.1m", 0.67948),
        ("Epoch: [0][ 10/500]\tTime  0.512 ( 0.600)\tData  0.002 ( 0.050)\tLoss 6.9e+00 (7.0e+00)", 0.512),
        ("step 3 loss 2.0 total time: 16:02:11", None),
        ('{"step": 3, "loss": 2.0, "eta_seconds": 5321.5}', None),
        ('{"step": 3, "loss": 2.0, "elapsed_seconds": 5321.5, "step_seconds": 0.5}', 0.5),
        ('{"step": 3, "loss": 2.0, "seconds": 0.5, "eta_seconds": 5321.5}', 0.5),
        ("step=3 loss=2.0 eta_iter_time=530.2", None),
        ("step 3 | loss 2.0 | remaining time: 530.2 s | time: 0.5 s", 0.5),
        ("step 3 | loss 2.0 | Elapsed time: 530.2 s", None),
        ("step 3 | loss 2.0 | elapsed 5.2 s/iter", 5.2),
    ],
)
def test_units_are_kept(line: str, seconds: float | None) -> None:
    found = read_step(line)
    assert found is not None
    assert found.duration_ns == (None if seconds is None else pytest.approx(seconds * 1e9, abs=1))


@pytest.mark.parametrize(
    ("line", "step"),
    [
        ("epoch: 5/20 - batch: 6/130 - total_loss: 0.22 - time: 0.5427 - data_time: 0.0067", 656),
        ("Epoch [2/5], Step [100/600], Loss: 0.2116", 1300),
        ("Epoch: [ 1/200] Iter [   3/1487] || Time: 508.5 sec || lr: 0.0099 || Loss: 1.3008", 1490),
        ("Epoch 3 | Batch 10 of 50 | avg_loss 1.25", 160),
        ("step: 40/900 epoch: 0.44 loss: 2.0", 40),
        ("Iters: 40/9000 || Lr: 0.01 || Task Loss: 2.5 || Cost Time: 0:00:20", 40),
        ("{‘loss’: 1.453, ‘grad_norm’: 2.47, ‘epoch’: 0.19}", None),
        ("[GPU3] Epoch 12 | Batchsize: 32 | Steps: 500 | Loss: 0.25", None),  # steps per epoch
    ],
)
def test_loops_that_people_wrote_are_read(line: str, step: int | None) -> None:
    found = read_step(line)
    assert found is not None
    assert found.step == step
    assert found.loss is not None


def test_parts_of_a_loss_show_a_step_and_that_it_was_not_finite() -> None:
    line = "Epoch 0/7 itr 104/3489: lr: 0.0001 speed: 2.94(0.63s r2.27)s/itr loss_pose: 0.2749 loss_shape: {}"
    healthy, bad = read_step(line.format(0.1287)), read_step(line.format("nan"))
    assert healthy is not None
    assert bad is not None
    assert (healthy.step, healthy.loss) == (104, None)
    assert str(bad.loss) == "nan"
    assert read_step("step 100 val_loss: 0.3 loss_valid: 0.2") is None


@pytest.mark.parametrize("name", ["Loading checkpoint shards", "Running tokenizer", "Validation", "Map (num_proc=8)"])
def test_bars_of_other_work_are_no_steps(name: str) -> None:
    assert read_bar(f"{name}:  20%|##   | 20/100 [00:10<00:40,  2.00it/s]") is None


def test_a_loss_of_transformers_has_the_step_of_the_bar_before_it(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    with path.open("w", encoding="utf-8") as file:
        for step in range(1, 31):
            file.write(f"\r {step}%|#   | {step}/100 [00:{step:02d}<01:00,  1.50s/it]")
            if step % 10 == 0:
                file.write(f"\n{{'loss': {3 - step / 100}, 'grad_norm': 1.0, 'epoch': 0.1}}\n")
    rows = step_rows(0, read_log(path).steps)
    assert [row["step"] for row in rows if row.get("loss") is not None] == [10, 20, 30]
    assert {row["duration_ns"] for row in rows} == {1_500_000_000}


def test_a_line_with_a_duration_and_no_loss_is_a_step() -> None:
    found = read_step(
        " iteration      300/    9000 | elapsed time per iteration (ms): 640.5 | global batch size:    16 |"
    )
    assert found is not None
    assert (found.step, found.total, found.duration_ns) == (300, 9000, 640_500_000)


@pytest.mark.parametrize("line", ["mean time per step: 0.8 s", "per iteration: 3"])
def test_a_duration_is_no_step_number(line: str) -> None:
    assert read_step(line) is None


@pytest.mark.parametrize(("own", "loss"), [("4.125", 4.125), ("nan", math.nan)])
def test_nemo_s_own_loss_stands_before_lightning_s_mean(own: str, loss: float) -> None:
    line = (
        f"Epoch 0:   1%| | 12/900 [00:31<38:12, 2.58s/it, loss=nan, v_num=, reduced_train_loss={own}, global_step=11.0"
    )
    found = read_step(line)
    assert found is not None
    assert found.loss == pytest.approx(loss, nan_ok=True)


@pytest.mark.parametrize("name", ["Steps", "Training steps", "step", "Iteration"])
def test_the_share_of_a_bar_is_no_step_number(name: str) -> None:
    found = read_step(f"{name}:  12%|#         | 37/300 [00:40<04:44,  1.08s/it, loss=0.31, lr=1e-5]")
    assert found is not None
    assert found.bar is not None
    assert (found.step, found.bar.step, found.bar.total) == (None, 37, 300)


def test_composer_s_values_stand_below_the_heading_of_their_batch(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    path.write_text("".join(
        f"[epoch={epoch}][batch={batch}/50]:\n\t Train time/token: {4096 * batch}\n"
        f"\t Train loss/train/total: 2.{batch:02d}\n"
        "\t Train metrics/train/LanguageCrossEntropy: 9.5\n\t Train throughput/batches_per_sec: 0.8000\n"
        for epoch in (1, 2) for batch in range(1, 51)
    ), encoding="utf-8")  # fmt: skip
    rows = step_rows(0, read_log(path).steps)
    assert [row["step"] for row in rows] == list(range(1, 101))
    assert (rows[60]["loss"], rows[60]["duration_ns"]) == (2.11, 1_250_000_000)


@pytest.mark.parametrize(("printed", "seconds"), [("840", 0.84), ("1.26K", 1.26), ("97.4K", 97.4), ("1.2M", 1200.0)])
def test_milliseconds_in_thousands_are_read(printed: str, seconds: float) -> None:
    found = read_step(f"iteration: 8 / 90 | elapsed_time_per_iteration_ms: {printed} | tokens_per_sec: 1M | lm_loss: 3")
    assert found is not None
    assert (found.step, found.loss, found.duration_ns) == (8, 3.0, pytest.approx(seconds * 1e9))


@pytest.mark.parametrize("heading", ["Test:", "Val", "Evaluation:", "eval"])
def test_a_test_with_an_eta_is_no_training_step(heading: str) -> None:
    line = "{}  [ 40/900]  eta: 0:12:40  loss: 2.1000 (2.3000)  time: 0.8100  data: 0.0200  max mem: 9311"
    train, test = read_step(line.format("Epoch: [3]")), read_step(line.format(heading))
    assert train is not None
    assert (train.loss, train.duration_ns, train.data_ns) == (2.1, 810_000_000, 20_000_000)
    assert test is None or test.step is None


def test_a_first_line_that_was_cut_keeps_the_other_lines_times(tmp_path: Path) -> None:
    path = tmp_path / "rest.log"
    lines = [f"[2026-03-01 10:{n // 60:02d}:{n % 60:02d}] step {n}: loss 2.{n:03d}\n" for n in range(100, 160)]
    path.write_text("".join([lines[0][12:], *lines[1:]]), encoding="utf-8")
    rows = step_rows(0, read_log(path).steps)
    assert [row["start_ns"] is None for row in rows[:3]] == [True, False, False]
    assert {row.get("duration_ns") for row in rows[3:]} == {1_000_000_000}


def test_the_date_of_glog_may_have_a_year(tmp_path: Path) -> None:
    path = tmp_path / "glog.log"
    path.write_text("".join(
        f"I20260301 10:00:{n:02d}.250000 4121 helpers.py:103] Training  [  {n}/90]  eta: 0:03:04  loss: 3.1 (3.2)\n"
        for n in range(20)
    ), encoding="utf-8")  # fmt: skip
    rows = step_rows(0, read_log(path).steps)
    assert {row["start_ns"] % 1_000_000_000 for row in rows} == {250_000_000}


@pytest.mark.parametrize(
    ("line", "step", "total", "loss"),
    [
        ("     7/299     1.76G   0.08732    0.0546   0.02143       112       640", 7, 299, None),
        ("     7/299     1.76G   0.08732       nan   0.02143       112       640", 7, 299, math.nan),
        ("   7/299   14.2G   0.02  1.2e-05   0.003   0.023   5   640   0.5   0.6   nan   0.3", 7, 299, None),
        (
            "{'objective/kl': 0.1, 'loss/policy_avg': -0.005, 'lr': 3e-06, 'episode': 64, 'epoch': 0.1}",
            None,
            None,
            None,
        ),
        ("{'loss/policy/total': nan, 'loss/value/total': 0.3, 'epoch': 0.1}", None, None, math.nan),
        ("{'ppo/loss/value': 0.3, 'ppo/loss/total': nan, 'ppo/learning_rate': 3e-06}", None, None, math.nan),
        ("30/42 of epoch 28/30 class : 0.014 - acc class : 100.00 [bs:128]", 28 * 42 + 30, None, None),
        ("30/42 of epoch 28/30, loss: 0.5", 28 * 42 + 30, None, 0.5),
    ],
)
def test_rows_without_a_bar_and_losses_of_ppo_are_steps(
    line: str, step: int | None, total: int | None, loss: float | None
) -> None:
    found = read_step(line)
    assert found is not None
    assert (found.step, found.total, found.loss) == (step, total, pytest.approx(loss, nan_ok=True))


def test_an_evaluation_counted_by_batch_of_epoch_is_no_step() -> None:
    found = read_step("Validation 30/42 of epoch 28/30 loss 0.3")
    assert found is None or found.step is None


def test_rows_without_a_bar_are_found_in_a_log(tmp_path: Path) -> None:
    row = "{n:6}/299     1.76G   0.08732    0.0546   0.02143       112       640\n"
    (tmp_path / "train.log").write_text("".join(row.format(n=n) for n in range(5)))
    assert [row["step"] for row in step_rows(0, read_log(tmp_path / "train.log").steps)] == [0, 1, 2, 3, 4]
