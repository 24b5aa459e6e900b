"""Logs as jobs leave them: of several launches, with errors that Python ignores, of sweeps and resumes."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from rankscope.cli import app
from tests.analyzers.evidence.written import diagnosed

STEPS = "".join(f"2026-03-01 10:{i:02d}:00 - train - INFO - Step {i} loss: {4 - i / 20:.4f}\n" for i in range(1, 30))
TRACEBACK = (
    "Traceback (most recent call last):\n"
    '  File "/job/report.py", line 31, in emit\n    text = record.format()\n'
    "{raised}\n"
)


def table(rank: int) -> str:
    """torchrun's table of failures."""
    return (
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
        f"{'=' * 60}\ntrain.py FAILED\n{'-' * 60}\nFailures:\n  <NO_OTHER_FAILURES>\n{'-' * 60}\n"
        "Root Cause (first observed failure):\n[0]:\n  time      : 2026-03-01_10:00:23\n  host      : n1\n"
        f"  rank      : {rank} (local_rank: {rank})\n  exitcode  : 1 (pid: 41)\n  error_file: <N/A>\n"
        f"  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html\n{'=' * 60}\n"
    )


STARTED = "Setting OMP_NUM_THREADS environment variable for each process to be 1 in default\n"


def test_the_last_of_several_launches_in_one_file_is_judged(tmp_path: Path) -> None:
    first = STARTED + TRACEBACK.format(raised="ModuleNotFoundError: No module named 'apex'") + table(0)
    second = STARTED + TRACEBACK.format(raised="KeyError: 'labels'") + table(1)
    (finding,) = diagnosed(tmp_path, "job.log", first + second).fired
    assert (finding.cause, finding.ranks) == ("exception", (1,))
    assert "labels" in finding.summary


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("--- Logging error ---\n", 'Call stack:\n  File "/job/train.py", line 9, in <module>\n    main()\n'),
        (" 10%|#         | 10/100 [00:07<01:09,  1.29it/s]--- Logging error ---\n", "Call stack:\n"),
    ],
)
def test_an_error_of_a_log_message_ends_no_job(before: str, after: str, tmp_path: Path) -> None:
    text = (before + TRACEBACK.format(raised="TypeError: not all arguments converted") + after) * 60 + "done\n"
    assert not diagnosed(tmp_path, "job.log", text).fired


def test_an_error_of_a_task_that_nothing_awaits_is_not_proven(tmp_path: Path) -> None:
    text = "Task exception was never retrieved\nfuture: <Task finished name='Task-9'>\n"
    text += TRACEBACK.format(raised="NameError: name 'reply' is not defined")
    (finding,) = diagnosed(tmp_path, "job.log", text + "serving the next request\n" * 3).fired
    assert finding.status == "suspect"


@pytest.mark.parametrize("name", ["sqlite3.OperationalError", "psycopg2.errors.UndefinedTable", "tool4.core.StepError"])
def test_an_exception_module_ending_in_a_digit_is_not_a_host(name: str, tmp_path: Path) -> None:
    (finding,) = diagnosed(tmp_path, "job.log", TRACEBACK.format(raised=f"{name}: 11 columns, 7 values")).fired
    assert finding.cause == "exception"
    assert "11 columns, 7 values" in finding.summary
    assert "report.py:31" in finding.summary


def test_a_command_line_that_is_refused_is_named_with_its_ranks(tmp_path: Path) -> None:
    usage = "usage: train.py [-h] [--lr LR]\ntrain.py: error: unrecognized arguments: --learning_rat 1\n"
    text = usage + table(2).replace("exitcode  : 1", "exitcode  : 2")
    (finding,) = diagnosed(tmp_path, "job.log", text).fired
    assert (finding.cause, finding.ranks) == ("exception", (2,))
    assert "--learning_rat" in finding.summary


def test_a_level_printed_by_the_program_logger_is_not_a_collector_prefix(tmp_path: Path) -> None:
    names = ("hub", "web.server", "store", "tokens", "app.pages", "jobs", "cache")
    lines = [f"{'WARNING' if i % 9 == 4 else 'INFO'}:{names[i % 7]}:line {i * i}\n" for i in range(60)]
    lines[31] = (
        "WARNING:hub.file_download:Error while downloading: HTTPSConnectionPool(host='a.co', port=443): timeout\n"
    )
    assert not diagnosed(tmp_path, "job.log", "".join(lines)).fired


def test_a_loss_scale_that_is_not_known_is_not_exhausted(tmp_path: Path) -> None:
    text = "".join(
        f" iteration {i:8d}/  100 | elapsed time per iteration (ms): 812.0 | lm loss: {9 - i / 9:.3f} | "
        "loss scale: -1.0 | grad norm: 0.000 |\n"
        for i in range(1, 40)
    )
    assert not diagnosed(tmp_path, "job.log", text).fired


@pytest.mark.parametrize(
    "line",
    [
        "fatal: not a git repository (or any of the parent directories): .git\n",
        "wandb: ERROR Error while calling W&B API: context deadline exceeded (<Response [500]>)\n",
        "ERROR: pip's dependency resolver does not currently take into account all the packages\n",
        "[2026-03-01 10:00:34,298] [ERROR] [job.cli.main:182] [PID:41] [RANK:0]\n",
    ],
)
def test_an_error_line_about_something_minor_is_not_suspected(line: str, tmp_path: Path) -> None:
    assert not diagnosed(tmp_path, "job.log", f"loading\n{line}ready\n").fired


@pytest.mark.parametrize(
    "line",
    ["Training time 3:02:11\n", "120 epochs completed in 3.214 hours.\n", "Saved final model to: /out/final.zip\n",
     "Training Completed!!! Saving pre-trained model to ./out\n", "INFO:__main__:Finetuning done!\n",
     "2026-03-01 10:59:00,836 - __main__ - INFO - Fine-tuning completed successfully!\n"],
)  # fmt: skip
def test_a_line_that_says_finished_ends_the_job(line: str, tmp_path: Path) -> None:
    assert diagnosed(tmp_path, "job.log", STEPS + line).verdict.startswith("The job finished")


@pytest.mark.parametrize(
    "line",
    ["[2026-03-01 10:27:14,902] [INFO] [launch.py:328:sigkill_handler] Main process received SIGINT, exiting\n",
     "Detected KeyboardInterrupt, attempting graceful shutdown ...\n"],
)  # fmt: skip
def test_a_line_that_says_stopped_ends_the_job(line: str, tmp_path: Path) -> None:
    (finding,) = diagnosed(tmp_path, "job.log", STEPS + line).fired
    assert (finding.cause, finding.ranks) == ("cancelled", ())


def bar(step: int, total: int, elapsed: int, rate: float) -> str:
    shown = f"{rate:.2f}it/s" if rate > 1 else f"{1 / rate:.2f}s/it"
    return f"\r{100 * step // total:3d}%|##    | {step}/{total} [{elapsed // 60:02d}:{elapsed % 60:02d}<10:00, {shown}]"


def test_the_rate_of_skipped_steps_is_none_of_training(tmp_path: Path) -> None:
    """A resumed job passes over its data in a second, and tqdm's rate forgets that in some forty steps."""
    total, at = 3000, 1500
    text = bar(0, total, 0, 0.1) + bar(at, total, 5, 300.0)
    for i in range(1, 400):
        text += bar(at + i, total, 5 + 4 * i, 0.25 + 300 * 0.7**i)
    assert not diagnosed(tmp_path, "job.log", text + "\n").fired


def test_a_second_training_in_one_log_is_not_a_slowdown_of_the_first(tmp_path: Path) -> None:
    def training(begin: int, steps: int, seconds: int) -> str:
        times = [(begin + i * seconds, i) for i in range(1, steps)]
        return "".join(
            f"2026-03-01 {s // 3600:02d}:{s // 60 % 60:02d}:{s % 60:02d} - train - INFO - Step {i * 8} loss: 2.5\n"
            for s, i in times
        )

    assert not diagnosed(tmp_path, "job.log", training(0, 90, 3) + training(1000, 160, 7)).fired


def test_values_below_a_line_with_their_step_are_read(tmp_path: Path) -> None:
    text = "".join(
        f"2026-03-01 10:{i:02d}:00.1\tn1:0\tolmo.train:979\tINFO\t[step={i}/50,epoch=0]\n"
        f"    optim/total_grad_norm=1.1\n    train/CrossEntropyLoss={'nan' if i > 20 else 9 - i / 9}\n"
        "    throughput/device/tokens_per_second=47,552\n"
        for i in range(1, 30)
    )
    finding = diagnosed(tmp_path, "job.log", text).fired[0]
    assert (finding.kind, finding.first_step) == ("non_finite", 21)


def test_the_rendezvous_is_closed_because_a_peer_was_lost(tmp_path: Path) -> None:
    text = TRACEBACK.format(raised="RuntimeError: [../gloo/pair.cc:598] Connection closed by peer [10.0.1.12]:61423")
    text += "INFO:torch.distributed.elastic.agent.server.api:[default] Worker group FAILED; will restart worker group\n"
    text += TRACEBACK.format(raised="torch.distributed.elastic.rendezvous.api.RendezvousClosedError")
    finding = diagnosed(tmp_path, "job.log", text).fired[0]
    assert (finding.cause, finding.ranks) == ("connection_lost", ())
    assert "10.0.1.12" in finding.summary


def test_habanas_bridge_signs_an_error_with_its_rank(tmp_path: Path) -> None:
    text = (
        "terminate called after throwing an instance of 'c10::Error'\n"
        "  what():  [Rank:5] FATAL ERROR :: MODULE:PT_DEVICE GRAPH:: the stream is another\n"
    )
    (finding,) = diagnosed(tmp_path, "job.log", text).fired
    assert (finding.cause, finding.ranks) == ("exception", (5,))


def test_a_warning_of_nccl_before_its_communicator_is_complete_ends_no_job(tmp_path: Path) -> None:
    warning = "n1:41:42 [0] misc/nvmlwrap.cc:100 NCCL WARN nvmlInit_v2() failed: Driver/library version mismatch\n"
    ready = "n1:41:42 [0] NCCL INFO comm 0x8b01 rank 0 nranks 1 cudaDev 0 busId ca000 commId 0x28 - Init COMPLETE\n"
    assert diagnosed(tmp_path, "job.log", warning).fired[0].cause == "device_setup"
    assert not diagnosed(tmp_path, "job.log", warning + ready + "questions 5,300 of 5,300\n").fired


def test_trainings_of_a_sweep_are_not_one_training(tmp_path: Path) -> None:
    """Bars of other lengths are of other trainings, each of which begins with a high loss."""

    def trained(total: int, first: float, last: float) -> str:
        losses = (first + (last - first) * (i / total) ** 0.5 for i in range(total))
        return "".join(
            f"\rTraining: {100 * i // total:3d}%|##    | {i}/{total} [00:03<02:16,  1.05it/s, loss={loss:.3f}]" * 2
            for i, loss in enumerate(losses)
        )

    text = trained(300, 0.7, 0.004) + trained(210, 5.6, 5.1) + trained(220, 5.7, 5.2)
    assert not diagnosed(tmp_path, "job.log", text + "\n").fired


def test_a_program_that_writes_on_for_a_thousand_lines_has_not_ended(tmp_path: Path) -> None:
    error = TRACEBACK.format(raised="NameError: name 'meter' is not defined")
    rest = "".join(f"INFO:root:[{i // 100}, {i % 100}/2562] - distances {i % 7}\n" for i in range(1_500))
    assert not diagnosed(tmp_path, "job.log", error + rest).fired
    (finding,) = diagnosed(tmp_path, "job.log", rest + error).fired
    assert (finding.cause, finding.status) == ("exception", "fired")
    ended = "train.sh: line 3: 4110 Killed                  python train.py\n"
    assert diagnosed(tmp_path, "job.log", error + rest + ended).fired


def test_a_log_of_one_rank_says_whose_lines_it_has_and_what_they_show(tmp_path: Path) -> None:
    losses = "".join(f"{{'loss': {loss}, 'grad_norm': 1.2, 'epoch': 0.1}}\n" for loss in (2.31, 2.1, 1.95))
    error = "".join(f"[rank3]: {line}\n" for line in TRACEBACK.format(raised="KeyError: 'de'").splitlines())
    (tmp_path / "job.log").write_text(losses + error)
    printed = CliRunner().invoke(app, ["analyze", str(tmp_path / "job.log")], env={"COLUMNS": "100"}).output
    assert "lines of rank 3" in printed
    assert "1 rank " not in printed
    assert "2.3100 at the start, 1.9500 at the end" in printed
    assert "Why       job.log:4: its traceback." in printed


FRAME = '  File "/job/sft.py", line 44, in main\n    step(batch)\n'
BARRIER = '  File "/x/site-packages/torch/distributed/distributed_c10d.py", line 33, in barrier\n    work.wait()\n'


def test_a_file_that_ends_within_a_traceback_ends_with_an_error(tmp_path: Path) -> None:
    (finding,) = diagnosed(tmp_path, "job.log", f"step 4 loss 2.0\nTraceback (most recent call last):\n{FRAME}").fired
    assert (finding.cause, finding.status) == ("exception", "suspect")
    assert "sft.py:44" in finding.summary


@pytest.mark.parametrize("below", [BARRIER, f"{BARRIER}going on\n", "    called from a warning\nstep 5 loss 1.9\n"])
def test_a_call_that_waits_for_others_and_lines_below_frames_show_no_error(below: str, tmp_path: Path) -> None:
    text = f"step 4 loss 2.0\nTraceback (most recent call last):\n{FRAME}{below}"
    assert not diagnosed(tmp_path, "job.log", text).fired


@pytest.mark.parametrize("driver", ["", "amdgpu: "])
def test_an_amd_gpu_that_is_reset_is_named_by_its_address(driver: str, tmp_path: Path) -> None:
    text = (
        "[ 71.10] [drm:amdgpu_job_timedout [amdgpu]] *ERROR* ring sdma0 timeout, signaled seq=16, emitted seq=18\n"
        f"[ 71.12] amdgpu 0000:c3:00.0: {driver}GPU reset begin!\n"
    )
    (finding,) = diagnosed(tmp_path, "dmesg.txt", text).fired
    assert finding.cause == "device_error"
    assert "GPU 0000:c3:00.0 does not answer" in finding.summary


def test_an_error_before_a_traceback_that_is_cut_stands_alone(tmp_path: Path) -> None:
    killed = "RuntimeError: DataLoader worker (pid 624) is killed by signal: Segmentation fault. "
    text = TRACEBACK.format(raised=killed) + (
        "\nThe above exception was the direct cause of the following exception:\n\nTraceback (most recent call last):\n"
    )
    (finding, *_) = diagnosed(tmp_path, "job.log", text + FRAME).fired
    assert finding.cause == "data_worker"
    assert "after" not in finding.summary
