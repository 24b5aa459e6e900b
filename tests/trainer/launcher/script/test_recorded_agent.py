"""Ends of ranks as torch's own agent reports them: who ended by itself, and who was stopped by the launcher."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from tests.trainer.launcher.stop_actions import NoActions
from tests.waiting import wait_for
from trainer.launcher.script.recorded_agent import recorded
from trainer.launcher.stop_signals import StopSignals


class _Ends:
    def __init__(self) -> None:
        self.by_itself: dict[int, int] = {}
        self.stopped: dict[int, int] = {}

    def started(self, pids: Sequence[int]) -> None:
        assert len(pids) == 2

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
