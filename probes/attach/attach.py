"""Attach to a user's training loop.

    recorder = attach(model, optimizer)          # any script: one process, DDP, FSDP2, wrappers
    log(loss=loss)                               # optional
    ...
    detach()                                     # optional; recording also stops when the process ends

What it does: finds the run's folder and this rank's place in it (`joining`), opens the rank's tapes, records process
groups made before and after (`collectives`, `existing_groups`), times phases and steps through hooks (`loop_hooks`),
measures gradients, lets the node process take stacks (`stack_file`), and starts a `watch` from local rank 0. No
collective is added and training results do not change; a probe that fails is logged and disabled.

To mark steps and phases explicitly:

    with recorder.step():
        with recorder.phase("forward"): ...
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..collectives.existing_groups import record_existing
from ..collectives.nccl_plugin.loading import gpu_is_present, record_nccl
from ..collectives.torchft_groups import TorchftGroups
from ..collectives.wrapped import install, uninstall
from ..device.graph_replays import record_replays
from ..device.stream_waits import stamp_waits
from ..fail_open import failing_open, probes_disabled, record_error
from ..gradients import GradientProbe
from ..recorder import NullRecorder, Recorder
from ..step_scalars import StepScalars
from ..tape import event_kinds
from ..tape.dump_pipe import offer_dump_pipe
from ..tape.rundir import RunDir
from ..tape.stack_file import register
from ..tape_recorder import TapeRecorder
from .attached_config import SECTIONS
from .forks import in_forks
from .last_line import last_line
from .launch import mesh as mesh_of_loop
from .launch.announcement import VARIABLE as ANNOUNCED_IN
from .launch.announcement import Watch, announce
from .launch.identity import Identity, launcher_pid
from .launch.watch_process import digest_address, start_detached_watch
from .loop.loop_hooks import LoopPhases
from .loop.tokens import store_flops_per_token
from .loop.updates import named_parameters_in, named_parameters_of
from .loop.weak_objects import WeakObjects
from .open_recorder import open_recorder
from .process_end import ProcessEnd
from .retention_line import print_retention

__all__ = ["Attached", "attach", "current", "describe", "detach", "log", "phase"]

logger = logging.getLogger("rankscope.probes")
_current: Attached | None = None


class Attached:
    """Handle returned by `attach`: log values, mark steps and phases, detach."""

    def __init__(self, recorder: Recorder, run: RunDir | None) -> None:
        self.recorder: Recorder = recorder
        self.run_dir: Path | None = run.path if run is not None else None
        """The run's folder; None if nothing is recorded."""
        self.is_watched: bool = False
        """True if this process started a `watch`, which outlives it, or had the launcher start one."""
        self._values = StepScalars(recorder) if isinstance(recorder, TapeRecorder) else None
        self._phases = LoopPhases(recorder, self._values) if self._values is not None else None
        self._undo: list[Callable[[], object]] = []
        self._undo_records: list[Callable[[], object]] = []
        self._number = 0
        self.end: ProcessEnd = ProcessEnd(recorder, lambda: -1 if self._phases is None else self._phases.thread)
        """Records how the process ends."""
        self._reporting_node = -1
        self._models = WeakObjects()
        self._gradient_interval = 50
        self._is_described = False

    @contextlib.contextmanager
    def step(self, number: int | None = None) -> Iterator[None]:
        """Record the block as a step. After the first such block the optimizer no longer ends steps."""
        self._number = self._number + 1 if number is None else number
        if self._phases is None:
            yield
            return
        if self._phases.automatic:
            self._phases.end_last()
            self._phases.automatic = False
        with self.recorder.step(self._number):
            self._phases.step_began()
            yield
            with failing_open("attach.loss"):
                self._phases.settle()
        self._phases.values.flush()

    def phase(self, kind: str, *, microbatch: int = -1) -> contextlib.AbstractContextManager[object]:
        """Record the block as `data`, `forward`, `backward`, `optimizer`, `checkpoint`, `evaluate`, or a custom name.

        The phases of a step never add up to more than the step: a phase inside another one is recorded, but its time
        counts only once.
        """
        return self.recorder.span(kind, microbatch=microbatch) if microbatch >= 0 else self.recorder.span(kind)

    def log(self, /, **values: float | Tensor) -> None:
        """Log numbers of the current step: loss, tokens, grad_norm, lr, batch_index, and any custom name.

        A custom name becomes a series in table `scalars`. Tensors must have one element; they are read without waiting.
        """
        if self._phases is None:
            return
        try:
            self._phases.log(**values)
        except Exception as error:
            record_error("attach.log", error)

    def event(self, kind: str, /, **detail: Any) -> None:
        """Write an event, such as a change of the data, to the run. `kind` and fields are free.

        A field with the name of a common field (`rank`, `kind`, ...) gets a trailing `_`.
        """
        common = ("wall_ns", "mono_ns", "attempt", "rank", "kind")
        fields = {f"{name}_" if name in common else name: value for name, value in detail.items()}
        self.recorder.user_event(kind, **fields)

    def detach(self) -> None:
        """Stop recording, and restore hooks, patches, process groups and signal handlers."""
        global _current
        if _current is self:
            _current = None
        if self._phases is not None:
            with failing_open("attach.detach"):
                self._phases.end_last()
                self._phases.remove()
            self._phases = None
        for undo in (self._undo, self._undo_records):
            while undo:
                with failing_open("attach.detach"):
                    undo.pop()()

    def at_detach(self, undo: Callable[[], object]) -> None:
        """Call `undo` when recording stops."""
        self._undo.append(undo)

    def _forked(self) -> None:
        """Stop recording in a forked child, since the records belong to its parent; hooks stay until `detach`."""
        phases, self._phases, self.recorder, self.is_watched = self._phases, None, NullRecorder(), False
        self._undo_records.clear()
        self.end.is_of_rank = lambda: False
        if phases is not None:
            phases.thread = -1  # the hooks of `phases` then record nothing
            self._undo.append(phases.remove)

    def _begin(
        self, identity: Identity, models: list[nn.Module], optimizers: list[Any], *, run: RunDir, gradient_interval: int
    ) -> None:
        assert self._phases is not None
        assert isinstance(self.recorder, TapeRecorder)
        if identity.local_rank == 0:
            self._reporting_node = identity.node_rank
            launcher = launcher_pid() if "TORCHELASTIC_RUN_ID" in os.environ else 0
            place = {"node_rank": identity.node_rank, "nproc_per_node": identity.node_size()}
            self.recorder.event(event_kinds.RUN_STARTED, **place, launcher_pid=launcher)
        self._undo_records.append(self._close)
        self._undo_records.append(register(run, self.recorder.attempt, identity.rank))
        has_plugin = record_nccl(self.recorder, log_status=identity.local_rank == 0)
        if gpu_is_present():
            offer_dump_pipe(run, self.recorder.attempt)
        install(self.recorder, has_plugin=has_plugin)
        self._undo.append(uninstall)
        record_existing(models)
        self._undo += [record_replays(self.recorder), stamp_waits(self.recorder.stamps)]
        self._undo.append(self.end.hook())
        atexit.register(self._at_exit)
        self._undo.append(lambda: atexit.unregister(self._at_exit))
        if multiprocessing.parent_process() is not None:  # such a process may end without running `atexit` handlers
            self._undo.append(Finalize(None, self._at_exit, exitpriority=0).cancel)
        self.end.at_failure = self._phases.failed
        in_forks(self._forked)
        self._phases.patch()
        self._phases.at_training.append(self._switch_models)
        torchft_groups = TorchftGroups(rank=identity.rank, world_size=identity.world_size)
        self._undo.append(torchft_groups.release)
        self._phases.at_first_update += [self.derive_mesh, self._store_flops, torchft_groups.record]
        self.watch(models, optimizers, gradient_interval=gradient_interval)

    def _at_exit(self) -> None:
        """Close the records at the end of the process. A process that failed does not record a clean end."""
        if self._phases is not None and self.end.ended_normally():
            with failing_open("attach.exit"):
                self._phases.end_last()
                self._phases = None
                self._close()
        # Under `rankscope run` the launcher prints the verdict.
        if self.is_watched and self.run_dir is not None and ANNOUNCED_IN not in os.environ:
            with failing_open("attach.last_line"):
                sys.stderr.write(last_line(RunDir(self.run_dir), self._reporting_node) + "\n")

    def _close(self) -> None:
        """Write `run_ended` for this node, as the launcher does, and close the recorder."""
        if self._reporting_node >= 0:
            reason, code = self.end.reason
            self.recorder.event(event_kinds.RUN_ENDED, node_rank=self._reporting_node, reason=reason, exit_code=code)
        self.recorder.close()

    def watch(
        self,
        models: Iterable[nn.Module],
        optimizers: Iterable[Any] = (),
        *,
        gradient_interval: int | None = None,
        leads: bool = True,
    ) -> None:
        """Hook models and optimizers, including those created later. `leads`: optimizer steps end the loop's steps."""
        if self._phases is None:
            for model in models:
                self._models.add(model)  # even if nothing is recorded, `guard` needs the parameters
            return
        with failing_open("attach.watch"):
            models = [model for model in models if not self.watches(model)]
            for model in models:
                self._models.add(model)
                self._phases.watch_model(model)
            for optimizer in optimizers:
                self._phases.watch_optimizer(optimizer, leads=leads)
            self._gradient_interval = self._gradient_interval if gradient_interval is None else gradient_interval
            if models or gradient_interval is not None:
                self._phases.norms.measure_with(self._gradient_probe)

    def _gradient_probe(self) -> GradientProbe:
        """Make the probe at an update. In forward, `torch.func.functional_call` may have replaced the parameters."""
        named = named_parameters_in(self._models) or named_parameters_of(self._phases and self._phases.leader)
        return GradientProbe(self.recorder, named, interval=self._gradient_interval, models=self._models)

    def _switch_models(self, optimizer: Any) -> None:
        """Measure only the models that this optimizer updates, because the script now trains another model."""
        self._models = WeakObjects([] if self._phases is None else self._phases.models(optimizer))
        self.watch([], gradient_interval=self._gradient_interval)

    def watches(self, model: nn.Module) -> bool:
        """Return True for a watched model: given to `attach` or a callback, or found automatically."""
        return self._phases is not None and self._phases.watches(model)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Parameters of the watched models."""
        return [parameter for _, parameter in named_parameters_in(self._models)]

    def describe(self, *, mesh: Any) -> None:
        """Record this rank's place in a mesh: a DeviceMesh, or sizes as {"pp": 2, "dp": 4}, last dimension fastest."""
        if isinstance(self.recorder, TapeRecorder):
            with failing_open("attach.describe"):
                mesh_of_loop.describe(self.recorder, mesh)
                self._is_described = True

    def derive_mesh(self) -> None:
        """Record this rank's place in the mesh, derived from process groups and pipeline stages unless described."""
        if isinstance(self.recorder, TapeRecorder) and not self._is_described:
            with failing_open("attach.derive"):
                mesh_of_loop.derive(self.recorder)

    def _store_flops(self) -> None:
        if self.run_dir is not None and self.recorder.rank == 0:
            with failing_open("attach.flops"):
                store_flops_per_token(RunDir(self.run_dir), list(self._models))

    def is_in_loop(self) -> bool:
        """Return True in the loop's thread. Only call it where a model trains or an optimizer steps."""
        return self._phases is not None and self._phases.is_here(trains=True)

    def refused(self) -> None:
        """End the current step without an update; the next activity begins another step."""
        if self._phases is not None:
            with failing_open("attach.refused"):
                self._phases.refused()

    def called(self, model: nn.Module, args: Any = ()) -> None:
        """Handle a call of `model` with `args` that began before the model was watched."""
        if self._phases is not None:
            self._phases.before_forward(model, args)


def attach(
    model: nn.Module | Iterable[nn.Module] = (),
    optimizer: Any = (),
    *,
    name: str = "",
    run_dir: str | os.PathLike[str] | None = None,
    config: Mapping[str, Any] | None = None,
    gradient_interval: int = 50,
    watch: bool = True,
) -> Attached:
    """Record this process's training from here on.

    `model` and `optimizer`: the objects that the loop calls, or lists of them (the last optimizer's step then ends the
    loop's step). Call `attach` on every rank, best right after creating both. `run_dir` (or RANKSCOPE_RUN_DIR): the
    run's folder; by default `runs/<name>-<date>`, the same on all ranks, where `name` defaults to the script's name.
    `config` is stored in run.json; its sections for recording and `watch` apply as in a configuration
    (docs/configuration.md). Under `rankscope run` the run has already begun, so use `--set` there. `gradient_interval`:
    steps between per-parameter gradient measurements. `watch=False`: start no node process; the tapes are read
    afterwards.
    """
    global _current
    if _current is not None:
        if ignored := sorted(set(config or {}) & set(SECTIONS)):
            logger.warning(
                "attach(config=...) ignores %s: the run has already begun; use rankscope run --set SECTION.KEY=VALUE",
                ", ".join(ignored),
            )
        _current.watch(_as_list(model), _as_list(optimizer), gradient_interval=gradient_interval)
        return _current
    attached = None
    if not probes_disabled():
        with failing_open("attach"):
            attached = _attach(
                _as_list(model), _as_list(optimizer), name=name, run_dir=run_dir or os.environ.get("RANKSCOPE_RUN_DIR"),
                config=dict(config or {}), gradient_interval=gradient_interval, watch=watch,
            )  # fmt: skip
    _current = attached or Attached(NullRecorder(), None)
    if attached is None:
        _current.watch(_as_list(model))
    return _current


def current() -> Attached | None:
    """Return the handle of this process; None before `attach`."""
    return _current


def detach() -> None:
    """Undo `attach`; no-op without `attach`."""
    if _current is not None:
        _current.detach()


def log(**values: float | Tensor) -> None:
    """`Attached.log` of this process; no-op without `attach`."""
    if _current is not None:
        _current.log(**values)


def phase(kind: str) -> contextlib.AbstractContextManager[object]:
    """`Attached.phase` of this process; no-op without `attach`."""
    return contextlib.nullcontext() if _current is None else _current.phase(kind)


def describe(*, mesh: Any) -> None:
    """`Attached.describe` of this process; no-op without `attach`."""
    if _current is not None:
        _current.describe(mesh=mesh)


def _attach(
    models: list[nn.Module],
    optimizers: list[Any],
    *,
    name: str,
    run_dir: str | os.PathLike[str] | None,
    config: dict[str, Any],
    gradient_interval: int,
    watch: bool,
) -> Attached | None:
    identity = Identity.from_environment().in_group()
    opened = open_recorder(identity, models, name=name, run_dir=run_dir, config=config)
    if opened is None:
        return None
    recorder, run = opened
    attached = Attached(recorder, run)
    attached._begin(identity, models, optimizers, run=run, gradient_interval=gradient_interval)
    if watch and identity.local_rank == 0:
        with failing_open("attach.watch"):
            attached.is_watched = True
            num_nodes, digests = digest_address()
            if ANNOUNCED_IN in os.environ:  # `rankscope run` starts `watch`, and replaces it if it does not answer
                facts = Watch(node_rank=identity.node_rank, num_nodes=num_nodes, digests=digests)
                announce(run, recorder.attempt, watch=facts)
            else:
                start_detached_watch(run.path, identity.node_rank, num_nodes=num_nodes, digests=digests)
            print_retention(run, identity)
    if identity.rank == 0:
        logger.info("rankscope records to %s", run.path)
    return attached


def _as_list(given: Any) -> list[Any]:
    """Return the objects as a list; a single object becomes a list of one."""
    return list(given) if isinstance(given, (list, tuple)) else [given]
