"""Record the ranks that a script starts itself, as with `torch.multiprocessing.spawn`, in the run of its launch.

    follow_started_ranks(attached)         # in a process that `rankscope run` has started, before the script

The target of each process that `multiprocessing` starts becomes a `FollowedTarget`. In the new process it waits for a
default process group, and then records the process as the rank that it has in this group. A process that joins no group
is left alone. Rank 0 takes over the place of the process that started it. That process is then no rank any more, and
records how the started ranks ended.

Not followed are a loader's workers, pools, managers, and subclasses of `Process` that override `run`.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ..fail_open import failing_open, probes_disabled
from ..tape import event_kinds
from ..tape.attempts import pids_of_rank
from ..tape.events import EventWriter
from ..tape.rundir import NODE_RANK, RunDir
from ..tape.signal_names import signal_name
from .patching.on_import import OnImport
from .patching.replaced import replaced

if TYPE_CHECKING:
    from .attach import Attached

__all__ = ["FollowedTarget", "follow_started_ranks", "has_started_ranks"]

_GROUPS = "torch.distributed.distributed_c10d"
_STORES = "torch.distributed.rendezvous"
_USES_AGENTS_STORE = "TORCHELASTIC_USE_AGENT_STORE"
_NOT_RANKS = ("multiprocessing.", "torch.utils.data.", "concurrent.")


class FollowedTarget:
    """Calls `target` in a new process, and attaches that process once it is a rank."""

    def __init__(self, target: Callable[..., Any], agents_port: str = "") -> None:
        """`agents_port`: port of the store of torchrun's agent; "" if there is no such agent."""
        self.target = target
        self.agents_port = agents_port

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not probes_disabled():
            with failing_open("attach.started"):
                _attach_at_group(self.agents_port)
        try:
            return self.target(*args, **kwargs)
        except BaseException as error:
            _left_by(error)
            raise


def follow_started_ranks(attached: Attached) -> None:
    """Follow what this process starts from now on, until `attached` is detached."""
    ranks = _StartedRanks(attached)
    attached.at_detach(replaced(BaseProcess, "start", ranks.start))
    attached.end.is_of_rank = lambda: not ranks.places()
    atexit.register(ranks.report)
    attached.at_detach(lambda: atexit.unregister(ranks.report))


class _StartedRanks:
    def __init__(self, attached: Attached) -> None:
        self._attached = attached
        self._processes: dict[int, BaseProcess] = {}
        self._pid = os.getpid()
        self._agents_port = os.environ.get("MASTER_PORT", "")

    def start(self, real: Callable[..., Any], process: Any) -> None:
        follows = False
        with failing_open("attach.started"):
            target = getattr(process, "_target", None)
            has_own_run = type(process).run is not BaseProcess.run
            if target is not None and not has_own_run and not str(target.__module__).startswith(_NOT_RANKS):
                process._target = FollowedTarget(target, self._agents_port)
                follows = True
        real(process)
        if follows:
            self._processes[process.pid] = process

    def places(self) -> dict[int, tuple[int, int]]:
        """{pid: (attempt, rank)} of the ranks that were started here."""
        if not self._processes or self._attached.run_dir is None or os.getpid() != self._pid:
            return {}
        return {
            pid: (attempt, rank)
            for attempt, rank, folder in RunDir(self._attached.run_dir).rank_dirs()
            for pid in pids_of_rank(folder / "events.jsonl")
            if pid in self._processes
        }

    def report(self) -> None:
        """Record exit codes of the started processes, which only their parent gets."""
        with failing_open("attach.started"):
            places = self.places()
            codes = {pid: code for pid in places if (code := _exit_code(self._processes[pid])) is not None}
            failed = any(code not in (0, -signal.SIGTERM) for code in codes.values())
            for pid, code in sorted(codes.items(), key=lambda item: item[1] >= 0):
                self._write(pid, *places[pid], code, is_stopped=failed and code == -signal.SIGTERM)

    def _write(self, pid: int, attempt: int, rank: int, code: int, *, is_stopped: bool) -> None:
        assert self._attached.run_dir is not None
        folder = RunDir(self._attached.run_dir).node_dir(int(os.environ.get("GROUP_RANK", "0")))
        folder.mkdir(parents=True, exist_ok=True)
        events = EventWriter(folder / "events.jsonl", attempt=attempt, rank=NODE_RANK)
        fields: dict[str, Any] = {"exit_rank": rank, "pid": pid, "exit_code": code}
        if is_stopped:  # torch stopped this rank after another one had failed
            events.write(event_kinds.RANK_STOPPED, **fields)
        else:
            fields |= {"signal": signal_name(code) or None, "message": "", "out_of_memory": None, "blamed": False}
            events.write(event_kinds.RANK_EXIT, **fields)
        events.close()


def _exit_code(process: BaseProcess) -> int | None:
    try:
        return process.exitcode
    except ValueError:  # the script has closed the process object
        return None


def has_started_ranks(run: RunDir, attempt: int, rank: int, pid: int) -> bool:
    """Return True if the launcher's process of this rank started the rank in a child process."""
    pids = pids_of_rank(run.rank_dir(attempt, rank) / "events.jsonl")
    return pid in pids and pids[-1] != pid


def _attach_at_group(agents_port: str) -> None:
    """Attach this process when it gets a default process group. A forked one first leaves its parent's records."""
    if (module := sys.modules.get(f"{__package__}.attach")) and (forked := module.current()):
        forked.detach()
    imports = OnImport()
    imports.when(_STORES, lambda module: _use_own_store(module, agents_port))
    imports.when(_GROUPS, _wait_for_group)


def _use_own_store(stores: ModuleType, agents_port: str) -> None:
    """Let rank 0 open the store of a port that the script has chosen: under torchrun all ranks would wait for it."""
    from ..torch_compat import STORE_MAKER

    def make(real: Callable[..., Any], host: Any, port: Any, *args: Any, **kwargs: Any) -> Any:
        if str(port) != agents_port:
            os.environ.pop(_USES_AGENTS_STORE, None)
        return real(host, port, *args, **kwargs)

    replaced(stores, STORE_MAKER, make)


def _wait_for_group(groups: ModuleType) -> None:
    from ..torch_compat import DEFAULT_GROUP_SETTER

    def set_group(real: Callable[..., Any], group: Any) -> None:
        real(group)
        if group is not None and group is not groups.GroupMember.NON_GROUP_MEMBER:
            restore()
            with failing_open("attach.started"):
                from .auto_attach import auto_attach

                auto_attach()

    restore = replaced(groups, DEFAULT_GROUP_SETTER, set_group)


def _left_by(error: BaseException) -> None:
    if (module := sys.modules.get(f"{__package__}.attach")) and (attached := module.current()):
        attached.end.record_failure(error)
