"""Ends that a log tells by more than one line: the rank or node of a death, another training after a finished one."""

from __future__ import annotations

from pathlib import Path

import pytest

from analyzers.diagnose import Diagnosis
from analyzers.evidence.diagnose_files import diagnose_files
from analyzers.report.wording.explained import next_step
from tests.analyzers.evidence.written import diagnosed


def analyzed(folder: Path, **texts: str) -> Diagnosis:
    paths = [folder / f"job.{suffix}" for suffix in texts]
    for path, text in zip(paths, texts.values(), strict=True):
        path.write_text(text, encoding="utf-8")
    return diagnose_files(paths)


def test_an_uncaught_c_plus_plus_exception_belongs_to_the_only_rank_that_aborted(tmp_path: Path) -> None:
    err = "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc\n"
    out = "mpirun noticed that process rank 6 with PID 0 on node n4 exited on signal 6 (Aborted).\n"
    (finding,) = analyzed(tmp_path, err=err, out=out).fired
    assert (finding.cause, finding.ranks) == ("host_out_of_memory", (6,))


def test_a_single_waiting_rank_asks_for_the_logs_of_the_others(tmp_path: Path) -> None:
    text = (
        "[rank2]: RuntimeError: [third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 60000ms "
        "for recv operation to complete\n"
    )
    (finding,) = analyzed(tmp_path, log=text).fired
    assert "the other ranks' logs" in finding.evidence["do"]


def test_an_unknown_lmod_module_is_not_a_cause(tmp_path: Path) -> None:
    err = 'Lmod has detected the following error: The following module(s) are unknown: "cuda/99"\n'
    assert analyzed(tmp_path, err=err, out="The card is ready.\nEpoch 199: mean 0.1064\n").fired == ()


def test_the_node_of_a_lost_daemon_is_named(tmp_path: Path) -> None:
    text = (
        "ORTE has lost communication with a remote daemon.\n\n  HNP daemon   : [[4,0],0] on node launcher-a\n"
        "  Remote daemon: [[4,0],7] on node worker-6\n"
    )
    (finding,) = analyzed(tmp_path, log=text).fired
    assert finding.cause == "connection_lost"
    assert "worker-6" in finding.summary
    assert "launcher-a" not in finding.summary


@pytest.mark.parametrize("daemon", ["[[4,0],7]", "[prterun-launcher-a-71@0,7]"])
def test_a_killed_process_without_a_name_is_on_the_node_of_the_lost_daemon(tmp_path: Path, daemon: str) -> None:
    text = "command terminated with exit code 137\nORTE has lost communication with a remote daemon.\n\n"
    text += f"  HNP daemon   : [[4,0],0] on node launcher-a\n  Remote daemon: {daemon} on node worker-6\n"
    (finding,) = analyzed(tmp_path, log=text).fired
    assert (finding.cause, finding.evidence["signal"], finding.evidence["host"]) == ("signal", "SIGKILL", "worker-6")
    assert "mpirun lost its daemon on worker-6" in finding.summary
    two = analyzed(tmp_path, log=text + f"  Remote daemon: {daemon} on node worker-7\n").fired[0]
    assert "host" not in two.evidence


def test_an_uncorrectable_hardware_error_asks_for_the_error_counters_of_that_gpu(tmp_path: Path) -> None:
    text = "[7.1] amdgpu 0000:2c:00.0: {1}uncorrectable hardware error(ERREVENT_ATHUB_INTERRUPT) detected!\n"
    text += "[7.9] amdgpu 0000:2c:00.0: amdgpu: GPU reset begin!\n"
    (finding,) = analyzed(tmp_path, log=text).fired
    assert "amd-smi metric --ecc" in finding.evidence["do"]


def test_a_ray_driver_that_reports_a_dead_actor_is_not_the_culprit(tmp_path: Path) -> None:
    text = (
        'Traceback (most recent call last):\n  File "/job/fit.py", line 8, in <module>\n    estimator.fit(frame)\n'
        "RuntimeError: A Ray actor died during training and the maximum number of retries (2) is exhausted\n"
    )
    (finding,) = analyzed(tmp_path, log=text).fired
    assert (finding.cause, finding.status) == ("exit", "suspect")


def test_an_error_of_sagemaker_asks_for_no_log_of_ray(tmp_path: Path) -> None:
    text = "2026-11-23 14:11:01,611 sagemaker-containers ERROR    ExecuteUserScriptError:\nCommand python fit.py\n"
    (finding,) = analyzed(tmp_path, log=text).fired
    assert finding.cause == "exit"
    assert "ray" not in str(finding.evidence["collect"])


def test_a_bus_error_without_a_text_points_to_shared_memory(tmp_path: Path) -> None:
    text = (
        "[2026-11-23 09:12:47,361] [ERROR] [launch.py:321:sigkill_handler] ['python', 'a.py', '--local_rank=1'] "
        "exits with return code = -7\n"
    )
    (finding,) = analyzed(tmp_path, log=text).fired
    assert finding.evidence["signal"] == "SIGBUS"
    assert "/dev/shm" in next_step(finding)


def bar(step: int, total: int) -> str:
    share, loss = 100 * step // total, 3 - step / 100
    return f"\rfit: {share:3d}%|##   | {step}/{total} [00:{step % 60:02d}<01:00,  1.00it/s, loss={loss:.3f}]"


def test_another_training_after_a_finished_one_still_runs(tmp_path: Path) -> None:
    first = "".join(bar(step, 60) for step in range(61)) + "\n"
    assert analyzed(tmp_path, log=first).run["ended"] == "finished"
    found = analyzed(tmp_path, log=first + "".join(bar(step, 40) for step in range(9)))
    assert found.fired == ()
    assert found.run["ended"].startswith("still running")


def test_a_signal_in_a_row_that_is_not_the_root_cause_names_the_rank_of_its_process(tmp_path: Path) -> None:
    """Both ranks ended in one second, and torchrun's table puts the one that lost its peer first."""
    (tmp_path / "job.log").write_text(
        "step: 9 loss: 2.5\n"
        "[rank0]: RuntimeError: Connection closed by peer [10.0.0.2]:4711\n"
        "============================================================\n"
        "train.py FAILED\n"
        "------------------------------------------------------------\n"
        "Failures:\n"
        "[1]:\n"
        "  time      : 2026-05-04_10:11:12\n"
        "  host      : gpu-01\n"
        "  rank      : 3 (local_rank: 3)\n"
        "  exitcode  : -11 (pid: 4803) (SIGSEGV)\n"
        "  error_file: <N/A>\n"
        "  traceback : Signal 11 (SIGSEGV) received by PID 4803\n"
        "------------------------------------------------------------\n"
        "Root Cause (first observed failure):\n"
        "[0]:\n"
        "  time      : 2026-05-04_10:11:12\n"
        "  host      : gpu-01\n"
        "  rank      : 0 (local_rank: 0)\n"
        "  exitcode  : 1 (pid: 4800)\n"
        "  error_file: <N/A>\n"
        "  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html\n"
        "============================================================\n"
    )
    (found,) = diagnose_files([tmp_path]).fired
    assert (found.kind, found.ranks, found.cause) == ("rank_lost", (3,), "signal")


WAITED = (
    "[rank5]:[E801 10:20:00.1 ProcessGroupNCCL.cpp:616] [Rank 5] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=77, OpType=ALLREDUCE, NumelIn=4, NumelOut=4, Timeout(ms)=900000) ran for 900031 milliseconds "
    "before timing out.\n"
)


def test_a_worker_of_ray_that_died_before_a_wait_ran_out_explains_it(tmp_path: Path) -> None:
    died = "(raylet) The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR\n"
    (finding,) = analyzed(tmp_path, log=died + WAITED).fired
    assert (finding.cause, finding.status, finding.ranks) == ("exit", "suspect", ())
    assert "exited by itself" not in next_step(finding)
    (finding,) = analyzed(tmp_path, log=WAITED + died).fired  # the watchdog ended that worker
    assert finding.kind == "hang"


def test_ranks_whose_wait_ran_out_are_named_with_the_rank_that_raised(tmp_path: Path) -> None:
    raised = '[rank2]: Traceback (most recent call last):\n[rank2]:   File "/job/read.py", line 9, in load\n'
    raised += "[rank2]:     handle.read()\n[rank2]: OSError: [Errno 116] Stale file handle\n"
    (finding,) = analyzed(tmp_path, log=WAITED + raised).fired
    assert (finding.ranks, finding.evidence["victims"]) == ((2,), [5])
    assert "Rank 5 failed as a consequence." in finding.summary


def test_a_connection_that_was_never_made_explains_a_wait(tmp_path: Path) -> None:
    unmet = "(Engine pid=7, ip=10.3.0.8) [E socket.cpp:922] [c10d] The client socket has timed out after 900s while "
    unmet += "trying to connect to ({address}, 4451).\n"
    (finding,) = analyzed(tmp_path, log=unmet.format(address="10.3.0.9") + WAITED).fired
    assert finding.cause == "rendezvous"
    (finding,) = analyzed(tmp_path, log=unmet.format(address="172.17.0.5") + WAITED).fired
    assert finding.cause == "no_interface"
    assert "172.17.0.5, which is valid on one host only" in finding.summary
    taken = "[E socket.cpp:462] [c10d] The server socket has failed to listen on any local network address.\n"
    for text in (WAITED + unmet.format(address="10.3.0.9"), taken + WAITED):  # the store ended; another launch
        (finding,) = analyzed(tmp_path, log=text).fired
        assert finding.kind == "hang"


@pytest.mark.parametrize("head", ["", "gpu-4:88:91 [3] transport/net_ib.cc:93 NCCL WARN "])
def test_a_port_that_failed_before_a_wait_explains_it(tmp_path: Path, head: str) -> None:
    port = f"{head}NET/IB : mlx5_3:1 Got async event : port error\n"
    (finding,) = analyzed(tmp_path, log=port + WAITED).fired
    assert (finding.cause, finding.status, finding.ranks) == ("infiniband", "suspect", ())
    assert "mlx5_3:1" in finding.summary
    steps = "".join(f"step {step} | loss {3 - step / 50:.3f}\n" for step in range(1, 60))
    assert analyzed(tmp_path, log=port + steps + WAITED).fired[0].kind == "hang"  # the job went on


def test_an_error_that_the_job_survived_is_not_its_end(tmp_path: Path) -> None:
    text = "CondaError: Run 'conda init' before 'conda activate'\n\n"
    text += "".join(f"step {step} | loss {3 - step / 50:.3f}\n" for step in range(1, 60))
    assert str(analyzed(tmp_path, log=text).run["ended"]).startswith("still running")


def test_a_launcher_that_kills_before_its_code_is_printed_shows_that_one_failed(tmp_path: Path) -> None:
    head = "[2026-11-21 08:32:07,148] [INFO] [launch.py:131:sigkill_handler] "
    kills = "".join(f"{head}Killing subprocess {pid}\n" for pid in (2506, 2507))
    (finding,) = analyzed(tmp_path, log=kills).fired
    assert (finding.status, finding.cause, finding.ranks) == ("suspect", "exit", ())
    code = "[2026-11-21 08:32:08,001] [ERROR] [launch.py:321:sigkill_handler] ['python'] exits with return code = -9\n"
    (finding,) = analyzed(tmp_path, log=kills + code).fired
    assert finding.cause == "signal"
    interrupted = analyzed(tmp_path, log=f"{kills}{head}Main process received SIGINT, exiting\n").fired
    assert [one.cause for one in interrupted] == ["cancelled"]


@pytest.mark.parametrize("after", ["Training finished\n", ""])
def test_a_program_that_failed_before_another_one_trained_is_named(tmp_path: Path, after: str) -> None:
    steps = "".join(f"step {step} loss {3 - step / 10}\n" for step in range(1, 6))
    error = (
        'Traceback (most recent call last):\n  File "/job/a.py", line 9, in <module>\n    main()\n'
        '  File "/job/a.py", line 5, in main\n    raise ValueError("shape")\nValueError: shape\n'
    )
    verdict = analyzed(tmp_path, log=f"{steps}{error}{steps}{after}").verdict
    assert "One of several programs in the file failed (job.log:6: ValueError: shape)" in verdict
    assert "No failure seen" not in verdict
    resumed = steps + error + "".join(f"step {step} loss 2.0\n" for step in range(4, 9)) + after
    assert "No failure seen" in analyzed(tmp_path, log=resumed).verdict
    caught = error.replace("in <module>", "in try_it")
    assert "No failure seen" in analyzed(tmp_path, log=steps + caught + steps + after).verdict


def test_the_last_state_of_a_bar_behind_the_summary_is_the_end_of_training(tmp_path: Path) -> None:
    bar = "100%|##########| 90/90 [09:00<00:00,  6.00s/it]\n"
    log = "{'train_runtime': 540.1, 'train_loss': 0.6, 'epoch': 1.0}\n" + bar
    log += (
        "Memory on the node (IP: 10.0.0.4, ID: b1) was 95 of 99 GB, which exceeds the memory usage threshold of 0.95.\n"
    )
    (finding,) = analyzed(tmp_path, log=bar.replace("90/90", "89/90") + log).fired
    assert finding.cause == "host_out_of_memory"
    assert "Training had finished before that (job.log:2)" in finding.summary


@pytest.mark.parametrize(
    "last",
    [
        "2026-03-01 11:00:00,001: rank0[4122][MainThread]: INFO: llmfoundry.command_utils.train: Done.",
        "2026-03-01 11:00:00,100 INFO [train.py:1200] (0/8) Done!",
        "0: INFO    26-03-01 11:00:00.000 - 1:00:00 - Done",
        "Done",
        "[node7] 2026-03-01 11:00:00,000 (trainer:450) INFO: The training was finished at 4 epochs",
        "Finished training at epoch 33.",
    ],
)
def test_a_last_line_that_says_done_ends_the_job(tmp_path: Path, last: str) -> None:
    path = tmp_path / "train.log"
    steps = "".join(f"step {n}: loss 2.{n:03d} time 1.2s\n" for n in range(40))
    path.write_text(f"{steps}{last}\n", encoding="utf-8")
    assert "finished" in diagnose_files([path]).verdict


@pytest.mark.parametrize("last", ["Saving the checkpoint: Done.", "Loading data... Done", "Done loading the shards"])
def test_a_finished_part_is_not_the_end_of_the_job(tmp_path: Path, last: str) -> None:
    path = tmp_path / "train.log"
    steps = "".join(f"step {n}: loss 2.{n:03d} time 1.2s\n" for n in range(40))
    path.write_text(f"{steps}{last}\n", encoding="utf-8")
    assert "The log ends in training" in diagnose_files([path]).verdict


STOPS = (
    "=> early stopping",
    "Early stopping at epoch 12.",
    "Epoch 00012: early stopping",
    "Early stopping!",
    "Monitored metric val_loss did not improve in the last 3 records. Best score: 0.412. Signaling Trainer to stop.",
    "EarlyStopping: Training stopped early as no improvement observed in last 50 epochs.",
)


@pytest.mark.parametrize("stop", STOPS)
def test_a_training_that_stops_early_has_finished(tmp_path: Path, stop: str) -> None:
    steps = "".join(f"step {n} loss {2 - n / 20:.3f}\n" for n in range(1, 21))
    assert diagnosed(tmp_path, "train.log", f"{steps}{stop}\n").run["ended"] == "finished"
    for config in (
        "Early Stopping",
        "early stopping: True",
        "Early stopping patience: 12",
        "EarlyStopping counter: 3/7",
    ):
        assert diagnosed(tmp_path, "train.log", f"{steps}{config}\n").run["ended"] != "finished"


@pytest.mark.parametrize("end", ["Training finished.", STOPS[0]])
def test_a_job_whose_next_fold_trains_has_not_finished(tmp_path: Path, end: str) -> None:
    steps = "".join(f"step {n} loss {2 - n / 20:.3f}\n" for n in range(1, 21))
    diagnosis = diagnosed(tmp_path, "train.log", f"Fold 0\n{steps}{end}\nFold 1\n{steps}")
    assert "finished" not in str(diagnosis.run["ended"])
    bars = "".join(f"{2 * n}%|##  | {n}/50 [00:{n:02d}<00:50,  1.00it/s]\n" for n in range(1, 51))
    assert diagnosed(tmp_path, "train.log", f"{steps}{end}\n{bars}").run["ended"] == "finished"
