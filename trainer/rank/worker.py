"""One rank of a training, under torchrun or `rankscope train`.

    torchrun --nproc-per-node 4 -m trainer.rank.worker examples/gpt-demo.toml --set train.steps=50
    torchrun --nproc-per-node 4 --max-restarts 3 -m trainer.rank.worker my.toml --fault kill@step=20,rank=1

The environment identifies the rank (RANK, WORLD_SIZE, ...). RANKSCOPE_RUN_DIR names the run's folder. Without it rank 0
creates a folder, or finds the folder of the former attempt, and announces it through the rendezvous store.
RANKSCOPE_CONFIG holds a resolved configuration as JSON, used if no CONFIG is given.

SIGTERM and SIGINT end the run with a checkpoint, after a step that all ranks agree on. A second SIGINT, or the end of
the time budget (`trainer.stop_budget`), ends the process at once. Exit codes are listed in `trainer.exit_codes`. Under
other launchers, 143 (stopped on request) becomes 0, because they would restart the rank.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch.distributed.elastic.multiprocessing.errors import record

from probes.attach.launch.identity import Identity
from probes.attach.launch.parent_death import end_with_launcher
from probes.collectives.nccl_plugin.loading import record_nccl
from probes.collectives.wrapped import install
from probes.device.stream_waits import stamp_waits
from probes.guard.decisions import RunStopped
from probes.profiling.memory_snapshots import record_exception
from probes.recorder import Recorder
from probes.tape import event_kinds
from probes.tape.dump_pipe import offer_dump_pipe
from probes.tape.pauses import rest_while_running
from probes.tape.run_facts import exception_fields
from probes.tape.rundir import RunDir, RunError
from probes.tape.stack_file import register
from probes.tape_recorder import TapeRecorder
from trainer.checkpoint import attempt_fence as fence
from trainer.checkpoint.disk_tier.manifest import CheckpointError, StorageError
from trainer.config.config import Config
from trainer.config.load import ConfigError, load_config
from trainer.data.token_folder import DamagedDataError
from trainer.exit_codes import EXIT_FENCED, EXIT_GIVEN_UP, EXIT_MISTAKE, EXIT_PREEMPTED, EXIT_STORAGE
from trainer.faults.inject import arm, distort_clock
from trainer.faults.options import Fault, FaultError, parse_fault
from trainer.host_threads import set_host_threads
from trainer.layout.plan import Plan
from trainer.layout.resolve import resolve
from trainer.presets import config_path
from trainer.rank.forked import use_device
from trainer.rank.instrument import instrument, record_compilation
from trainer.rank.join import connect_store, join_run, make_recorder
from trainer.rank.loop import train
from trainer.rank.session import make_session
from trainer.stop_budget import rank_grace_s
from trainer.torch_compat import Store
from trainer.training.build import build, pick_backend, pick_device

__all__ = ["main", "run_and_leave"]

IMPATIENCE_S = 1.0
"""Seconds after which a repeated SIGINT ends the process immediately."""
FENCE_INTERVAL_S = 1.0
"""Seconds between two checks of whether a later attempt has taken over the run. Each write checks this as well."""
SIGNALS = (signal.SIGTERM, signal.SIGINT)


def main(arguments: list[str] | None = None) -> int:
    """Run this rank to its end; returns the exit code. Unexpected errors are recorded and raised."""
    end_with_launcher()
    identity = Identity.from_environment()
    try:
        config, faults = _configuration(sys.argv[1:] if arguments is None else arguments)
        plan = resolve(config, identity.world_size)
        device = pick_device(config, identity.local_rank)
        set_host_threads(device)
        if device.type != "cpu":
            use_device(device, sys.argv[1:] if arguments is None else arguments)
        store = connect_store(identity)
        run, attempt = join_run(identity, store, config, plan, [fault.text for fault in faults])
    except (ConfigError, FaultError, RunError) as error:
        return _mistake(identity, error)

    fence.hold(run, attempt)
    distort_clock(faults, rank=identity.rank)
    recorder = make_recorder(identity, config, run, attempt, device)

    def left_without_checkpoint(number: int) -> None:
        recorder.event(event_kinds.PREEMPTED, signal=_name(number), checkpoint_step=None)

    stop = StopRequest(rank_grace_s(config.recovery.grace_s), on_unsaved=left_without_checkpoint)
    register(run, attempt, identity.rank)
    try:
        setup = _Setup(identity=identity, config=config, plan=plan, device=device, faults=faults, store=store, run=run)
        return _train(setup, stop, recorder)
    except (ConfigError, FaultError, CheckpointError) as error:
        recorder.event(event_kinds.EXCEPTION, **exception_fields(error))
        return _mistake(identity, error)
    except StorageError as error:
        recorder.event(event_kinds.EXCEPTION, **exception_fields(error))
        if identity.rank == 0:
            sys.stderr.write(f"rankscope: {error}\n")
        return EXIT_STORAGE
    except RunStopped as stopped:
        if identity.rank == 0:
            sys.stderr.write(f"rankscope: {stopped}\n")
        recorder.close()
        return EXIT_GIVEN_UP
    except fence.Fenced as fenced:
        sys.stderr.write(f"rankscope: rank {identity.rank}: {fenced}\n")
        recorder.event(event_kinds.FENCED, newest_attempt=fenced.newest)
        return EXIT_FENCED
    except BaseException as error:
        record_exception(recorder, error)
        raise


@dataclass(frozen=True, slots=True, kw_only=True)
class _Setup:
    """Facts of a rank before it builds its training."""

    identity: Identity
    config: Config
    plan: Plan
    device: torch.device
    faults: list[Fault]
    store: Store | None
    run: RunDir


def _train(setup: _Setup, stop: StopRequest, recorder: Recorder) -> int:
    """Create the process group, build the training and run its loop; returns the exit code."""
    identity, config, plan, device, run = setup.identity, setup.config, setup.plan, setup.device, setup.run
    if isinstance(recorder, TapeRecorder):
        stamp_waits(recorder.stamps)
    if setup.store is not None:
        backend = pick_backend(config, device)
        if config.probes.collectives:
            has_plugin = False
            if isinstance(recorder, TapeRecorder):
                has_plugin = record_nccl(recorder, log_status=identity.local_rank == 0)
                if device.type == "cuda":
                    offer_dump_pipe(run, recorder.attempt)
            install(recorder, check_nonfinite=config.probes.nonfinite_flags, has_plugin=has_plugin)
        dist.init_process_group(backend, store=setup.store, rank=identity.rank, world_size=identity.world_size)
    recorder.describe(**plan.coordinates(identity.rank))
    training = build(config, plan, device, recorder=recorder, with_weights=False)  # `Recovery.start` gives them values
    gradients = instrument(training, recorder)
    record_compilation(recorder)
    arm(setup.faults, training, recorder, run, rank=identity.rank, world_size=identity.world_size)
    session = make_session(
        training,
        recorder,
        run,
        gradients,
        asked_to_stop=stop,
        prints_progress=identity.rank == 0 and "RANKSCOPE_RUN_DIR" not in os.environ,
    )
    try:
        outcome = train(session)
    except BaseException:
        stop.record_unsaved()  # collectives fail if the grace period of a peer ends first
        raise
    finally:
        training.close()
    if outcome == "stopped" and identity.rank == 0:
        # If the request came from another rank, a machine is being preempted.
        saved = session.recovery.copies.disk.saved
        kind = event_kinds.INTERRUPTED if stop.signal == signal.SIGINT else event_kinds.PREEMPTED
        recorder.event(kind, signal=_name(stop.signal), checkpoint_step=saved[-1] if saved else None)
    recorder.close()
    # The group is not destroyed: DDP's reducer may hold its last reference, and torch would then join gloo's threads
    # while it holds the GIL that they wait for, so that the rank never ends. `run_and_leave` ends the process as it is.
    return EXIT_PREEMPTED if outcome == "stopped" and identity.attempt >= 0 else 0


def _name(number: int) -> str | None:
    return signal.Signals(number).name if number else None


def _configuration(arguments: list[str]) -> tuple[Config, list[Fault]]:
    parser = argparse.ArgumentParser(
        prog="trainer.rank.worker", description="One rank of a training; run it with torchrun."
    )
    parser.add_argument("config", nargs="?", type=Path, metavar="CONFIG", help="TOML file or preset; else all defaults")
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="SECTION.KEY=VALUE")
    parser.add_argument("--fault", action="append", default=[], dest="faults", metavar="KIND@step=N,rank=R")
    options = parser.parse_args(arguments)
    config_json = os.environ.get("RANKSCOPE_CONFIG")
    if config_json and options.config is None and not options.overrides:
        try:
            config = Config.model_validate_json(config_json)
        except ValidationError as error:
            raise ConfigError(f"RANKSCOPE_CONFIG: {error.errors()[0]}") from None
    else:
        config = load_config(options.config and config_path(options.config), options.overrides)
    return config, [parse_fault(text) for text in options.faults]


def _mistake(identity: Identity, error: Exception) -> int:
    if identity.rank == 0:
        sys.stderr.write(f"rankscope: {error}\n")
    elif isinstance(error, DamagedDataError):  # only this rank has read the damaged block
        sys.stderr.write(f"rankscope: rank {identity.rank}: {error}\n")
    return EXIT_MISTAKE


def run_and_leave() -> None:
    """Run `main` and end the process without the interpreter's clean-up, which after a failure may wait for ranks that
    are gone."""
    try:
        code = record(main)() or 0  # the launcher's error file gets the exception, too
    except SystemExit as request:
        code = int(request.code or 0)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class StopRequest:
    """Handles signals; it is installed once in a process, from the main thread. SIGTERM and SIGINT request a stop after
    the step, with a checkpoint. SIGINT again ends the process at once. Python runs a signal handler only when the main
    thread returns from C, which it may never do while waiting in a collective. So a separate thread, woken by the C
    handler through a pipe, measures the time.
    """

    def __init__(self, grace_s: float, on_unsaved: Callable[[int], None]) -> None:
        self.signal = 0
        """The first signal that requested a stop; 0 if there was none."""
        self.grace_s = grace_s
        self._on_unsaved = on_unsaved
        self._recording, self._is_recorded = threading.Lock(), False
        self._received_at: dict[int, float] = {}
        self._fence_at = 0.0
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))  # not in a forked data worker
        threading.Thread(target=self._count_down, args=(reader,), name="grace", daemon=True).start()
        for number in SIGNALS:
            signal.signal(number, self._received)

    def __call__(self) -> bool:
        if time.monotonic() >= self._fence_at:
            self._fence_at = time.monotonic() + FENCE_INTERVAL_S
            fence.check()
        return self.signal != 0

    def record_unsaved(self, number: int = 0) -> None:
        """Record once that this rank leaves without a checkpoint, if it was asked to stop."""
        number = number or self.signal
        with self._recording:
            if number and not self._is_recorded:
                self._is_recorded = True
                self._on_unsaved(number)

    def _received(self, number: int, frame: FrameType | None) -> None:
        # A launcher forwards its signal. So the first signal of another kind, or a signal right after the first, is the
        # same request. SIGTERM always is: a scheduler sends it to all processes of a job, and again at the time limit,
        # and the launcher may forward it late. Only a person at a terminal is impatient.
        now = time.monotonic()
        if number == signal.SIGINT and now - self._received_at.setdefault(number, now) > IMPATIENCE_S:
            os._exit(128 + number)
        self.signal = self.signal or number

    def _count_down(self, reader: int) -> None:
        while (number := os.read(reader, 1)[0]) not in SIGNALS:
            pass  # watch's signal for stacks, or another signal with a handler
        rest_while_running(self.grace_s)
        try:
            self.record_unsaved(number)
        finally:
            os._exit(128 + number)


if __name__ == "__main__":
    run_and_leave()
