"""Ends of ranks as torch's own agent reports them: who ended by itself, and who was stopped by the launcher."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.api import SignalException, SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from tests.trainer.launcher.stop_actions import NoActions
from tests.waiting import wait_for
from trainer.launcher.script.recorded_agent import recorded
from trainer.launcher.stop_signals import StopSignals


class _Told(NoActions):
    def announce(self, number: int) -> None:
        pass

    report = announce


class _Ends:
    def __init__(self) -> None:
        self.by_itself: dict[int, int] = {}
        self.stopped: dict[int, int] = {}

    def started(self, pids: Mapping[int, int]) -> None:
        assert pids.keys() == {0, 1}

    def ended(self, *, rank: int, pid: int, code: int, is_stopped: bool) -> None:
        (self.stopped if is_stopped else self.by_itself)[rank] = code


def test_a_rank_killed_just_before_torch_looks_is_not_counted_as_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kill comes after the agent's own look at the exit codes and before torch's, in every round."""
    look = SubprocessContext._poll

    def late_look(context: SubprocessContext) -> Any:
        handlers = context.subprocess_handlers.values()
        wait_for(lambda: any(handler.proc.poll() is not None for handler in handlers), "the end of a rank")
        return look(context)

    monkeypatch.setattr(SubprocessContext, "_poll", late_look)
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=2, rdzv_backend="c10d", rdzv_endpoint="localhost:0", max_restarts=0
    )
    ends = _Ends()
    script = 'if [ "$RANK" = 1 ]; then sleep 1; kill -9 $$$$; fi; exec sleep 60'  # torch makes $ of $$
    with StopSignals(NoActions(), grace_s=lambda: 20.0) as stop, recorded(ends, stop), pytest.raises(ChildFailedError):
        elastic_launch(config, "/bin/sh")("-c", script)
    assert ends.by_itself == {1: -signal.SIGKILL}
    assert ends.stopped == {0: -signal.SIGTERM}


def test_a_rank_that_does_not_end_on_a_signal_is_reported_as_killed(tmp_path: Path) -> None:
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=2, rdzv_backend="c10d", rdzv_endpoint="localhost:0", max_restarts=0
    )
    ends = _Ends()
    script = f'if [ "$RANK" = 1 ]; then trap "" INT; fi; touch {tmp_path}/$RANK; while :; do sleep 0.1; done'

    def interrupt() -> None:
        wait_for(lambda: len([*tmp_path.iterdir()]) == 2, "both ranks")
        os.kill(os.getpid(), signal.SIGINT)

    def ended(number: int) -> SignalException:
        return SignalException("stopped", signal.Signals(number))

    thread = threading.Thread(target=interrupt, daemon=True)
    with StopSignals(_Told(), grace_s=lambda: 4.0) as stop, recorded(ends, stop):
        stop.listen()
        thread.start()
        with pytest.raises(SignalException), stop.raising(ended):
            elastic_launch(config, "/bin/sh")("-c", script)
    assert ends.stopped == {1: -signal.SIGKILL}
