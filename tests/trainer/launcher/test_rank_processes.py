"""The end of a rank is seen as soon as its peers can have seen it, and told apart from a stop by the launcher."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

from trainer.launcher.processes.rank_processes import RankProcesses


class Forked(RankProcesses):
    """Ranks that hold memory and a pipe, and wait. `reading`: the end of the pipe that sees a rank's end, by rank."""

    def __init__(self, logs: Path, *, ignores_sigterm: bool = False) -> None:
        super().__init__(logs, arguments=[], zygote=None)
        self.ignores_sigterm = ignores_sigterm
        self.reading: list[int] = []

    def _start(self, local_rank: int, environment: Mapping[str, str], stdout: Path, stderr: Path) -> int:
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_IGN if self.ignores_sigterm else signal.SIG_DFL)
            held = bytearray(os.urandom(1 << 20) * 64)
            os.write(writing, b"1")
            while held:
                time.sleep(60)
        os.close(writing)
        assert os.read(reading, 1) == b"1"
        self.reading.append(reading)
        return pid


def started(tmp_path: Path, *, ignores_sigterm: bool = False) -> tuple[Forked, dict[int, int]]:
    ranks = Forked(tmp_path, ignores_sigterm=ignores_sigterm)
    return ranks, ranks.start(attempt=0, environments={rank: {"RANK": str(rank)} for rank in range(2)})


def test_a_killed_rank_whose_connections_are_closed_has_an_exit_code(tmp_path: Path) -> None:
    ranks, pids = started(tmp_path)
    ranks.wait_for_exiting(30.0)  # none is
    assert ranks.exit_codes() == {0: None, 1: None}
    os.kill(pids[1], signal.SIGKILL)
    assert os.read(ranks.reading[1], 1) == b""  # what another rank sees of it
    ranks.wait_for_exiting(30.0)
    assert ranks.exit_codes() == {0: None, 1: -signal.SIGKILL}
    ranks.stop(signal.SIGTERM, 30.0)
    assert ranks.exit_codes()[0] == -signal.SIGTERM
    assert not ranks.was_killed(0)
    assert not ranks.was_killed(1)


def test_a_rank_that_stays_is_killed_by_stop(tmp_path: Path) -> None:
    ranks, pids = started(tmp_path, ignores_sigterm=True)
    os.kill(pids[0], signal.SIGKILL)
    ranks.stop(signal.SIGTERM, 0.2)
    assert ranks.exit_codes() == {0: -signal.SIGKILL, 1: -signal.SIGKILL}
    assert ranks.was_killed(1)
