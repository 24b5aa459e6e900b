"""A machine with too few processes, files or memory: one line with the resource and its limits, and a restart."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import pytest
from torch.distributed.elastic.agent.server.api import WorkerSpec

from probes.tape.events import EventWriter, read_events
from probes.tape.rundir import NODE_RANK
from tests.factories import empty_run
from tests.forked import run_python
from tests.trainer.launcher.stop_actions import NoActions
from trainer.config.config import Config
from trainer.exit_codes import EXIT_FAILED
from trainer.launcher.agent import Agent
from trainer.launcher.launch import _outcome
from trainer.launcher.node import Node, Outcome
from trainer.launcher.nodes.devices import Devices
from trainer.launcher.nodes.rendezvous import NodeRendezvous
from trainer.launcher.processes.rank_processes import RankProcesses
from trainer.launcher.processes.shortage import shortage
from trainer.launcher.processes.zygote import Zygote, ZygoteError
from trainer.launcher.stop_signals import StopSignals


class _Short(RankProcesses):
    """Two ranks that end at once with 0; the kernel refuses the second one so many times."""

    def __init__(self, logs: Path, number: int, times: int) -> None:
        super().__init__(logs, arguments=[])
        self._number, self._left = number, times

    def _start(self, local_rank: int, environment: Mapping[str, str], stdout: Path, stderr: Path) -> int:
        if local_rank == 1 and self._left:
            self._left -= 1
            raise OSError(self._number, os.strerror(self._number))
        process = subprocess.Popen([sys.executable, "-c", ""], start_new_session=True)
        self._interpreters[local_rank] = process
        return process.pid


def launched(tmp_path: Path, number: int, times: int) -> tuple[Outcome, list[str]]:
    """The outcome, and the messages of the ranks' ends."""
    run = empty_run(tmp_path)
    run.node_dir(0).mkdir(parents=True)
    log = run.node_dir(0) / "events.jsonl"
    node, config = Node(nproc=2), Config.model_validate({"parallel": {"dp_replicate": 2}})
    handler = NodeRendezvous(node, rejoin_s=1.0).handler
    spec = WorkerSpec(
        role="trainer", local_world_size=2, entrypoint="trainer.rank.worker", rdzv_handler=handler, max_restarts=1,
        monitor_interval=0.05,
    )  # fmt: skip
    with (
        contextlib.closing(EventWriter(log, attempt=0, rank=NODE_RANK)) as events,
        StopSignals(NoActions(), grace_s=lambda: 20.0) as stop,
    ):
        agent = Agent(
            spec, run=run, config=config, node=node, events=events, ranks=_Short(run.path / "logs", number, times),
            devices=Devices(2), stop=stop,
        )  # fmt: skip
        outcome = _outcome(agent, stop)
        handler.shutdown()
    return outcome, [cast("str", event["message"]) for event in read_events(log)[0] if event["kind"] == "rank_exit"]


def test_a_rank_for_which_there_was_no_process_uses_a_restart(tmp_path: Path) -> None:
    outcome, messages = launched(tmp_path, errno.EAGAIN, 1)
    assert (outcome.reason, outcome.exit_code, outcome.restarts) == ("finished", 0, 1)
    (message,) = messages
    assert message.startswith("no process or thread can be created. Limits: ")


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (errno.EAGAIN, "no process or thread can be created. Limits: "),
        (errno.ENOMEM, "no memory is left."),
        (errno.EMFILE, "no file can be opened. Limits: "),
    ],
)
def test_ranks_that_never_start_end_the_launch_with_a_line(tmp_path: Path, number: int, expected: str) -> None:
    outcome, _ = launched(tmp_path, number, 9)
    assert (outcome.reason, outcome.exit_code, outcome.restarts) == ("failed", EXIT_FAILED, 1)
    assert outcome.message.startswith(f"Rank 1 could not be started: {expected}")
    assert outcome.message.endswith(". No restart is left.")


def test_without_a_process_for_the_zygote_the_ranks_are_interpreters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> int:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr("trainer.launcher.processes.zygote._forked", refuse)
    monkeypatch.setattr("trainer.launcher.processes.zygote._interpreter", refuse)
    zygote = Zygote(tmp_path / "log")
    with pytest.raises(ZygoteError):
        zygote.fork(arguments=[], environment={}, stdout=tmp_path / "out", stderr=tmp_path / "err")
    zygote.close()


_TRAIN = """
import resource, sys
from rankscope.__main__ import main
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv.pop(1)), 4096))
sys.argv[0] = "rankscope"
main()
"""


def test_the_command_names_the_limit_and_not_the_disk(tmp_path: Path) -> None:
    done = run_python(["-c", _TRAIN, "7", "train", "--set", f"run.dir={tmp_path}"], cwd=tmp_path)
    assert (
        done.stderr
        == "rankscope: no file can be opened. Limits: 7 per process (`ulimit -n`). Raise it, then try again.\n"
    )
    assert done.returncode == EXIT_FAILED


@pytest.mark.parametrize(
    ("groups", "limits"),
    [
        ("0::/job/step\n", {"job/step": "max", "job": "64"}),
        ("8:pids:/job\n0::/\n", {"pids/job": "64", "pids": "max"}),
        ("0::/\n", {"": "64"}),
    ],
)
def test_the_limit_of_a_control_group_is_the_lowest_that_is_set(
    tmp_path: Path, groups: str, limits: Mapping[str, str]
) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(groups)
    for folder, limit in limits.items():
        place = tmp_path / "sys/fs/cgroup" / folder
        place.mkdir(parents=True, exist_ok=True)
        (place / "pids.max").write_text(f"{limit}\n")
    said = shortage(RuntimeError("can't start new thread"), tmp_path)
    assert "Limits: 64 in its cgroup (pids.max)" in said


def test_other_errors_are_no_shortage() -> None:
    assert not shortage(OSError(errno.ENOSPC, "No space left on device"))
    assert not shortage(RuntimeError("another"))
