"""What each kind of fault does to a rank, in a real training loop of one process."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import pytest
import torch.distributed as dist

from probes.guard.decisions import RunStopped
from probes.tape.events import EventWriter
from probes.tape.format.reader import read_segment, segment_paths
from probes.tape.rundir import NODE_RANK, RunDir
from tests.forked import ForkedPython, run_python
from tests.trainer.faults.test_options import injected, step_column
from tests.trainer.training_runs import RunResult, run_loop, small, with_steps
from tests.waiting import wait_for
from trainer.config.config import Config
from trainer.faults.inject import distort_clock
from trainer.faults.injectors import process, timing
from trainer.faults.options import FaultError, parse_fault
from trainer.rank.loop import Session
from trainer.training import rank_training as training_module

FUTEX = {"x86_64": "202", "aarch64": "98"}.get(os.uname().machine, "")
"""Number of the system call in which a thread waits for a lock."""


@pytest.fixture(autouse=True)
def what_faults_change_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that was broken on purpose dies with its changes; a test's process goes on."""
    monkeypatch.setattr(training_module, "learning_rate", vars(training_module)["learning_rate"])
    monkeypatch.setattr(dist, "all_reduce", dist.all_reduce)
    monkeypatch.setattr(time, "time_ns", time.time_ns)
    return


def train(tmp_path: Path, *faults: str, steps: int = 14, config: Config | None = None) -> RunResult:
    return run_loop(with_steps(config or small(), steps), tmp_path, rank=0, world_size=1, faults=faults)


def rates_of(folder: Path) -> list[float]:
    paths = segment_paths(RunDir(folder).rank_dir(0, 0), "steps")
    return [float(rate) for path in paths for rate in read_segment(path).records["lr"]]


def test_an_inf_in_an_activation_makes_the_loss_bad_once(tmp_path: Path) -> None:
    result = train(tmp_path, "inf_activation@step=9,rank=0")
    assert (injected(tmp_path), result.skipped) == ([(9, "inf_activation")], [])


def test_large_gradients_overflow_in_the_norm(tmp_path: Path) -> None:
    result = train(tmp_path, "overflow@step=9")
    assert (injected(tmp_path), result.skipped) == ([(9, "overflow")], [])


@pytest.mark.parametrize(
    ("fault", "num_skipped"),
    [("nan_grad@step=9,rank=0", 0), ("bit_flip_gradient@step=9,rank=0", 0), ("failing_batch@batch=8", 1)],
)
def test_faults_reach_a_compiled_model_whose_loss_is_taken_in_chunks(
    fault: str, num_skipped: int, tmp_path: Path
) -> None:
    """A compiled block calls no hooks of its layers, and a loss in chunks does not call the output layer."""
    of_train = small().train.model_copy(update={"compile": True, "compile_backend": "aot_eager", "chunked_loss": True})
    result = train(tmp_path, fault, config=small().model_copy(update={"train": of_train}))
    assert injected(tmp_path)[:1] == [(9, fault.partition("@")[0])]
    assert len(result.skipped) == num_skipped


def test_the_rate_is_too_high_for_one_step_and_recorded_so(tmp_path: Path) -> None:
    train(tmp_path, "lr_spike@step=9,factor=3")
    rates = rates_of(tmp_path)
    assert [round(rate / rates[7], 3) for rate in rates[7:11]] == [1, 3, 1, 1]


def test_the_rate_drifts_from_a_step_on(tmp_path: Path) -> None:
    train(tmp_path, "divergence@step=9,factor=1.5", steps=12)
    rates = rates_of(tmp_path)
    assert [round(rate / rates[7], 3) for rate in rates[7:12]] == [1, 1, 1.5, 2.25, 3.375]


def test_a_failing_batch_is_skipped_and_never_met_again(tmp_path: Path) -> None:
    result = train(tmp_path, "failing_batch@batch=8")
    assert result.skipped == [8]
    assert result.outcome == "finished"


def test_data_that_always_fails_stops_the_run_with_a_report(tmp_path: Path) -> None:
    with pytest.raises(RunStopped, match="failures in a row"):
        train(tmp_path, "failing_data@step=9")
    assert (tmp_path / "reports" / "guard-stop.json").exists()


def test_a_rank_runs_out_of_data(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError) as caught:
        train(tmp_path, "data_ends@step=9,rank=0")
    assert isinstance(caught.value.__cause__, StopIteration)


def test_a_loader_process_is_killed(tmp_path: Path) -> None:
    """In a process of its own: torch raises from a signal handler, wherever the loop is at that moment."""
    code = (
        "import sys; from pathlib import Path\n"
        "from tests.trainer.training_runs import run_loop, small, with_steps\n"
        "run_loop(with_steps(small(data={'num_workers': 1}), 14), Path(sys.argv[1]), rank=0, world_size=1,"
        " faults=['loader_killed@step=9,rank=0'])"
    )
    ended = run_python(["-c", code, str(tmp_path)])
    assert ended.returncode == 1
    assert "DataLoader worker" in ended.stderr or "EOFError" in ended.stderr
    assert injected(tmp_path) == [(9, "loader_killed")]


def test_a_loader_process_that_is_not_there_cannot_be_killed(tmp_path: Path) -> None:
    with pytest.raises(FaultError, match=r"data\.num_workers = 0"):
        train(tmp_path, "loader_killed@step=9,rank=0")


def test_memory_runs_out_for_this_process_only_and_it_can_still_speak(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        train(tmp_path, "oom@step=9,rank=0")
    assert injected(tmp_path) == [(9, "oom")]
    assert len(bytearray(256 << 20)) == 256 << 20, "the limit is gone again"


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("segfault", signal.SIGSEGV), ("abort", signal.SIGABRT), ("kill", signal.SIGKILL), ("exit", None)],
)
def test_deaths_are_those_that_were_asked_for(kind: str, expected: signal.Signals | None) -> None:
    code = f"import trainer.faults.injectors.process as p; p._ACTIONS[{kind!r}](None)"
    ended = run_python(["-c", code])
    assert ended.returncode == (1 if expected is None else -expected)


@pytest.mark.skipif(not FUTEX, reason="the number of the system call is not known")
def test_the_lock_of_python_is_held_while_the_process_lives() -> None:
    code = (
        "import os, threading, trainer.faults.injectors.process as p\n"
        "threading.Thread(target=lambda: (os.read(0, 1), os.write(1, b'ran')), daemon=True).start()\n"
        "os.write(1, b'go')\n"
        "p._ACTIONS['gil'](None)"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stdout.read(2) == b"go", "imports are done: threads that they start have ended"
    wait_for(lambda: _waits_in(child.pid, child.pid) == FUTEX, "the main thread to wait for its mutex")
    (other,) = (int(task.name) for task in Path(f"/proc/{child.pid}/task").iterdir() if int(task.name) != child.pid)
    child.stdin.write(b"x")
    child.stdin.flush()
    wait_for(lambda: _waits_in(child.pid, other) == FUTEX, "the other thread to wait for Python's lock")
    child.kill()
    assert child.communicate()[0] == b"", "no other thread of it ever ran"


def _waits_in(pid: int, thread: int) -> str:
    """Number of the system call in which a thread waits."""
    return Path(f"/proc/{pid}/task/{thread}/syscall").read_text().split()[0]


def test_a_pause_is_a_garbage_collection_of_one_step(tmp_path: Path) -> None:
    train(tmp_path, "pause@step=9,rank=0,seconds=0.2")
    collecting = step_column(tmp_path, "gc_ns")
    assert collecting.index(max(collecting)) == 8
    assert max(collecting) > 50e6


def test_slow_logging_is_outside_of_every_phase(tmp_path: Path) -> None:
    train(tmp_path, "slow_logging@step=9,rank=0,seconds=0.5,until=10")
    phases = ("data", "forward", "backward", "optimizer", "checkpoint")
    rest = [*step_column(tmp_path, "duration_ns")]
    for phase in phases:
        rest = [left - took for left, took in zip(rest, step_column(tmp_path, f"{phase}_ns"), strict=True)]
    assert min(rest[8:10]) > 490e6
    assert median(rest) < 250e6


def test_a_paced_connection_is_really_slow() -> None:
    """The kernel's work, not ours: a million bytes over a connection of 2 MB/s."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname())
        receiver, _ = server.accept()
        with sender, receiver:
            assert timing._pace(2_000_000) >= 2
            start, left = time.monotonic(), 1_000_000
            child = os.fork()
            if not child:
                sender.sendall(bytes(left))
                os._exit(0)
            while left:
                left -= len(receiver.recv(65536))
            took_s = time.monotonic() - start
            os.waitpid(child, 0)
            timing._pace(timing._UNLIMITED)
    assert took_s > 0.2


def test_the_watch_of_the_node_is_killed(tmp_path: Path) -> None:
    watch = ForkedPython(["-c", "import time; time.sleep(600)"])
    folder = RunDir(tmp_path).node_dir(0)
    folder.mkdir(parents=True)
    node = EventWriter(folder / "events.jsonl", attempt=0, rank=NODE_RANK)
    node.write("watch_started", pid=watch.pid)
    node.close()
    train(tmp_path, "watch_killed@step=9,rank=0")
    assert watch.wait(60) == -signal.SIGKILL


def test_the_store_is_spoilt(tmp_path: Path) -> None:
    store = RunDir(tmp_path).store()
    store.parent.mkdir(exist_ok=True)
    store.write_bytes(bytes(20_000))
    train(tmp_path, "store_corrupt@step=9,rank=0")
    assert store.read_bytes()[:12_288] == b"\xa5" * 12_288
    assert store.stat().st_size == 20_000


def test_only_the_struck_rank_has_the_wrong_clock() -> None:
    fault = parse_fault("clock_shift@step=9,rank=1")
    before = time.time_ns()
    distort_clock([fault], rank=0)
    assert abs(time.time_ns() - before) < 60e9
    distort_clock([fault], rank=1)
    assert 599e9 < time.time_ns() - before < 700e9


def test_a_rank_killed_in_recovery_has_reported_the_nan_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(Exception):
        pass

    def die(fault: object) -> None:
        raise Killed

    monkeypatch.setattr(process, "_kill", die)
    sessions: list[Session] = []
    with pytest.raises(Killed):
        run_loop(
            with_steps(small(), 14), tmp_path, rank=0, world_size=1, faults=["kill_in_recovery@step=9,rank=0"],
            change=sessions.append,
        )  # fmt: skip
    sessions[0].recovery.copies.disk.background.shutdown()  # which a kill would have ended
    again = run_loop(
        with_steps(small(), 14), tmp_path, rank=0, world_size=1, faults=["kill_in_recovery@step=9,rank=0"], attempt=1
    )
    assert again.outcome == "finished"
