"""The fence: a process of an older attempt writes nothing that a newer one would read, whenever it wakes up."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from probes.tape.events import read_events
from probes.tape.rundir import RunDir
from tests.forked import ForkedPython
from tests.trainer.rank.test_worker import CONFIG, ROOT
from tests.waiting import wait_for
from trainer.checkpoint import attempt_fence as fence
from trainer.checkpoint.disk_tier.manifest import write_json
from trainer.exit_codes import EXIT_FENCED


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setattr(fence, "_held", None)
    return RunDir.create(tmp_path, name="fenced", manifest={})


def test_each_claim_gets_a_unique_number(run: RunDir) -> None:
    taken: list[int] = []
    claimers = [threading.Thread(target=lambda: taken.append(fence.claim(run))) for _ in range(16)]
    for claimer in claimers:
        claimer.start()
    for claimer in claimers:
        claimer.join()
    assert sorted(taken) == list(range(16))
    assert fence.claims(run)[7]["pid"] == os.getpid()


def test_a_claim_goes_beyond_the_tapes_of_runs_without_claims(run: RunDir) -> None:
    run.rank_dir(4, 0).mkdir(parents=True)
    assert fence.claim(run) == 5


def test_only_a_later_claim_fences(run: RunDir, tmp_path: Path) -> None:
    fence.check()  # nothing is held
    attempt = fence.claim(run)
    fence.hold(run, attempt)
    write_json(tmp_path / "ledger.json", {"by": attempt})
    fence.claim(run)
    with pytest.raises(fence.Fenced, match="attempt 1 has taken over the run") as left:
        write_json(tmp_path / "ledger.json", {"by": "nobody"})
    assert left.value.code == EXIT_FENCED
    assert '"by": 0' in (tmp_path / "ledger.json").read_text()


def test_what_was_prepared_before_the_sweep_cannot_be_renamed(run: RunDir, tmp_path: Path) -> None:
    fence.hold(run, fence.claim(run))
    prepared = fence.scratch(tmp_path / "step-00000050")
    prepared.mkdir()
    fence.check()  # passed; then the process is stopped for an hour
    fence.hold(run, fence.claim(run))
    fence.sweep(tmp_path)
    with pytest.raises(FileNotFoundError):
        prepared.rename(tmp_path / "step-00000050")


@pytest.mark.parametrize("moment", ["inside a save", "between saves"])
def test_a_rank_that_wakes_up_after_the_next_attempt_began(moment: str, tmp_path: Path) -> None:
    """SIGSTOP, the next attempt begins, SIGCONT: it leaves by itself and has committed nothing."""
    config = tmp_path / "worker.toml"
    config.write_text(CONFIG.format(runs=tmp_path, text=__file__))
    endless = ["--set", "train.steps=1000000", "--set", "checkpoint.interval=1", "--set", "train.log_interval=1"]
    process = ForkedPython(
        ["-m", "trainer.rank.worker", str(config), *endless],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        _wait(lambda: len(list(tmp_path.glob("latest/checkpoints/step-" + 8 * "[0-9]"))) > 2, process)
        run = RunDir.open(tmp_path / "latest")
        _wait(lambda: bool(list(run.checkpoints.glob("*.tmp"))) == (moment == "inside a save"), process)
        process.send_signal(signal.SIGSTOP)
        _wait(lambda: _is_stopped(process.pid), process)  # a thread in the middle of a write ends it first
        assert fence.claim(run) == 1
        fence.sweep(run.checkpoints)
        before = _contents(run.checkpoints)
        process.send_signal(signal.SIGCONT)
        _, told = process.communicate(timeout=100)
    finally:
        process.kill()
    assert process.returncode == EXIT_FENCED, told
    assert "attempt 0 is over: attempt 1 has taken over the run" in told
    assert "Traceback" not in told
    assert {name: blob for name, blob in _contents(run.checkpoints).items() if ".tmp" not in name} == before
    assert read_events(run.rank_dir(0, 0) / "events.jsonl")[0][-1]["kind"] == "fenced"
    assert {attempt for attempt, _, _ in run.rank_dirs()} == {0}


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _is_stopped(pid: int) -> bool:
    try:
        stats = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    except OSError:  # a thread has ended since
        return False
    return {stat.rpartition(")")[2].split()[0] for stat in stats} == {"T"}


def _wait(condition: Callable[[], object], process: subprocess.Popen[str]) -> None:
    wait_for(lambda: condition() or process.poll() is not None, "the moment")
    assert process.poll() is None, process.communicate()[1]
