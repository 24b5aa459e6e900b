"""One simulated run: from a seed, a layout and a fault to everything that its ranks and its node recorded.

    recording = simulate(Scenario(seed=3, layout=Layout(dp_replicate=8), steps=80, fault=Fault(kind="hang", step=40)))
    write(recording, Path("runs/simulated"))          # see `tapes`

The same scenario gives the same recording, and a shorter one the beginning of the longer.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from .aftermath import tell_end
from .curves import Curves, Reading
from .engine import Engine
from .faults import CONTROL, Fault, adapted, condition, roles_of, stops_of, taints_of
from .layout import WORLD, Layout
from .noise import QUIET, Noise
from .program import PARAMETERS, Job, Op, step_program
from .records import Log

__all__ = ["Clock", "Event", "Recording", "Scenario", "introduction", "simulate"]

NODE = -1
GRADIENT_INTERVAL = 10
FINGERPRINT_INTERVAL = 10
MEMORY_COPY_INTERVAL = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """What is wrong with the nodes' wall clocks: seconds of skew by node, and a step back on one of them."""

    skew_s: tuple[float, ...] = ()
    step_back_s: float = 0.0
    step_back_node: int = 0
    step_back_after_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What to simulate. `recovers`: a bad step is refused, a good state restored, the batch left out."""

    seed: int
    layout: Layout
    steps: int = 60
    job: Job = field(default_factory=Job)
    noise: Noise = QUIET
    fault: Fault | None = None
    clock: Clock = field(default_factory=Clock)
    backend: str = "nccl"
    recovers: bool = True
    missing_tables: tuple[str, ...] = ()
    missing_ranks: tuple[int, ...] = ()


@dataclass(slots=True)
class Event:
    """One line of somebody's `events.jsonl`; `rank` -1: the node process."""

    rank: int
    time_ns: float
    kind: str
    step: int | None = None
    detail: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Recording:
    """Everything recorded, in ns since the run's begin."""

    scenario: Scenario
    log: Log
    events: list[Event]
    until: np.ndarray[Any, np.dtype[np.float64]]
    closed: bool
    stacks: dict[int, str] = field(default_factory=dict)


def simulate(scenario: Scenario) -> Recording:
    """Run the training."""
    return _Simulation(scenario).run()


class _Simulation:
    def __init__(self, scenario: Scenario) -> None:
        self.scenario, self.layout = scenario, scenario.layout
        self.fault = scenario.fault
        seeds = np.random.SeedSequence(scenario.seed).spawn(4)
        self.rng = np.random.default_rng(seeds[0])
        self.job = adapted(scenario.job, self.fault, self.layout)
        self.engine = Engine(self.layout, self.job, scenario.noise, np.random.default_rng(seeds[1]))
        self.engine.stops = stops_of(self.fault)
        self.curves = Curves(np.random.default_rng(seeds[2]), scenario.noise, self.fault)
        self.gradient_rng = np.random.default_rng(seeds[3])
        self.events = introduction(scenario)
        self.data_rank = np.arange(self.layout.num_ranks) % self.layout.width // self.layout.tp
        self.skipped: set[int] = set()
        self.poisoned_from = 0
        self._first_row = 0
        self.bad_taken = False
        self._programs: dict[tuple[bool, bool], list[list[Op]]] = {}
        self._local_rng = np.random.default_rng(seeds[3].spawn(1)[0])
        self._gc = self._gc_steps()

    def run(self) -> Recording:
        self._warm_up()
        step, batch = 1, 0
        while step <= self.scenario.steps:
            chunk = [step]
            if self.fault is not None and self.fault.kind in CONTROL and step == self.fault.step:
                chunk = list(range(step, min(step + 3, self.scenario.steps + 1)))
            self._run_steps(chunk)
            step, batch = self._after(chunk, batch)
            if self.engine.is_stuck():
                break
            step += 1
        stuck = self.engine.is_stuck()
        recording = Recording(self.scenario, self.engine.log, self.events, self.engine.until, not stuck)
        tell_end(recording, self.engine)
        return recording

    # Time.

    def _run_steps(self, steps: list[int]) -> None:
        engine, step = self.engine, steps[0]
        condition(engine, self.fault, step, self.rng)
        planned, one_element = taints_of(self.fault, step, self.layout)
        engine.taints.begin_step(planned, one_element=one_element)
        engine.pauses = {step: self._gc[step]} if step in self._gc else {}
        if step in self._compile:
            engine.extra_s["forward"] += self._compile.pop(step) / self.layout.layers / self.layout.microbatches
        self._first_row = len(engine.log.steps)
        engine.run(roles_of(self._program(step), self.layout, steps, self.fault))

    def _program(self, step: int) -> list[list[Op]]:
        job = self.job
        checkpoint = bool(job.checkpoint_interval) and step % job.checkpoint_interval == 0
        evaluate = bool(job.evaluate_interval) and step % job.evaluate_interval == 0
        key = (checkpoint, evaluate)
        if key not in self._programs:
            self._programs[key] = [
                step_program(self.layout, job, stage, checkpoint=checkpoint, evaluate=evaluate)
                for stage in range(self.layout.pp)
            ]
        return self._programs[key]

    def _warm_up(self) -> None:
        """The first step compiles; that takes each rank about, and not exactly, the same time."""
        noise, count = self.scenario.noise, self.layout.num_ranks
        first = noise.compile_s * np.exp(0.05 * self.rng.standard_normal(count))
        self._compile = {1: first, 2: 0.15 * first, 3: 0.03 * first}

    def _gc_steps(self) -> dict[int, np.ndarray[Any, Any]]:
        """Pauses of the collector: each rank at its own steps; the first steps' compilation counts as work."""
        noise, count = self.scenario.noise, self.layout.num_ranks
        interval = noise.gc_interval_steps * self.rng.uniform(0.8, 1.2, count)
        phase = self.rng.uniform(0, interval)
        pauses: dict[int, np.ndarray[Any, Any]] = {}
        for step in range(4, self.scenario.steps + 1):
            hit = np.floor((step + phase) / interval) != np.floor((step - 1 + phase) / interval)
            if hit.any():
                pauses[step] = np.where(hit, noise.gc_pause_s * self.rng.uniform(0.7, 1.3, count), 0.0)
        return pauses

    # Numbers.

    def _after(self, steps: list[int], batch: int) -> tuple[int, int]:
        """Fill in what the steps' numbers were; returns the last step and the next batch after them."""
        rows = self.engine.log.steps[self._first_row :]
        for step in steps:
            reading = self.curves.reading(step, batch, self.bad_taken)
            bad = self._fill(step, batch, reading, [row for row in rows if row.step == step])
            self._sample(step, reading, bad)
            saves = self.job.checkpoint_interval and step % self.job.checkpoint_interval == 0
            if saves and not bad and np.isfinite(self.engine.now[0]):
                self._tell_checkpoint(step)
            batch += 1
            while batch in self.skipped:
                batch += 1
            if bad and self.scenario.recovers and not self.engine.is_stuck():
                return self._roll_back(step, batch - 1), batch
            if bad:
                self.bad_taken = True
                if (
                    self.poisoned_from == 0
                    and self.fault is not None
                    and self.fault.kind not in ("bad_batch", "lr_spike")
                ):
                    self.poisoned_from = step
                    self.engine.taints.poison_weights(self.layout.layers)
        return steps[-1], batch

    def _fill(self, step: int, batch: int, reading: Reading, rows: list[Any]) -> bool:
        """Set the values of a step's rows; returns whether the step was bad."""
        engine, count = self.engine, self.layout.num_ranks
        loss, norm = reading.loss, reading.grad_norm
        bad = False
        if engine.taints.any("loss"):
            loss, bad = np.nan, True
        if engine.taints.any("norm"):
            overflow = self.fault is not None and self.fault.kind == "overflow" and not self.poisoned_from
            norm, bad = (np.inf if overflow else np.nan), True
        local = self._local_losses(reading)
        lost = engine.taints.of("local_loss")
        if lost is not None:
            local = np.where(lost, np.nan, local)
        spiked = self.fault is not None and self._is_spike(step, batch)
        refused = self.scenario.recovers and (bad or spiked)
        nonfinite = self._nonfinite_counts()
        has_loss = self.layout.coordinates()["pp"] == self.layout.pp - 1
        memory = self.job.memory_bytes + self._local_rng.integers(-(1 << 22), 1 << 22, count)
        for row in rows:
            lanes = row.lanes
            row.values = {
                "tokens": self.job.local_tokens,
                "batch_index": batch,
                "loss": loss,
                "grad_norm": norm,
                "lr": reading.lr,
                "committed": int(not refused),
                "memory_bytes": memory[lanes],
            }
            if refused:
                del row.values["lr"]
            if has_loss[lanes[0]]:
                row.values["local_loss"] = local[lanes]
            if nonfinite is not None:
                row.values["nonfinite_count"] = nonfinite[lanes]
        return bad or spiked

    def _local_losses(self, reading: Reading) -> Any:
        """Each rank's own loss: their mean is the global one; ranks of a tensor-parallel group have the same."""
        layout = self.layout
        num_data = layout.width // layout.tp
        own = reading.loss - reading.local_excess
        local = own * (1.0 + self.scenario.noise.local_loss_ratio * self._local_rng.standard_normal(num_data))
        local += own - local.mean()
        if reading.local_excess and self.fault is not None:
            hit = np.ones(num_data, bool) if self.fault.other < 0 else np.arange(num_data) == self.fault.other
            local += reading.local_excess * num_data / hit.sum() * hit
        return local[self.data_rank]

    def _nonfinite_counts(self) -> Any:
        """Elements counted after the reduction, where anything was; one or all of a block's."""
        counts = np.zeros(self.layout.num_ranks, dtype=np.int64)
        each = (
            1 if self.engine.taints.one_element else self.job.block_bytes // 4 // self.layout.dp_shard // self.layout.tp
        )
        for block in range(self.layout.layers):
            bad = self.engine.taints.of(f"grad{block}")
            if bad is not None:
                counts += bad * each
        return counts if counts.any() else None

    def _is_spike(self, step: int, batch: int) -> bool:
        assert self.fault is not None
        if self.fault.kind == "bad_batch":
            return batch == self.fault.step - 1 and self.fault.factor >= 0.15
        return self.fault.kind == "lr_spike" and step == self.fault.step + 1 and not self.bad_taken

    def _sample(self, step: int, reading: Reading, bad: bool) -> None:
        """Rows of gradients and fingerprints, at their intervals or where a step went wrong."""
        layout, now = self.layout, self.engine.now.copy()
        if step % GRADIENT_INTERVAL == 0 or bad:
            stages = layout.coordinates()["pp"]
            for stage in range(layout.pp):
                ranks = np.flatnonzero((stages == stage) & np.isfinite(now))
                if len(ranks):
                    self._gradient_rows(ranks, step, stage, reading, now[ranks])
        if step % FINGERPRINT_INTERVAL == 0 and layout.dp_replicate > 1:
            self._fingerprint_rows(step, now)

    def _gradient_rows(self, ranks: Any, step: int, stage: int, reading: Reading, now: Any) -> None:
        engine, layout = self.engine, self.layout
        share = reading.grad_norm / np.sqrt(layout.layers * layout.pp * len(PARAMETERS) * layout.dp_shard * layout.tp)
        replicas = layout.coordinates()["dp_shard"][ranks] * layout.tp + layout.coordinates()["tp"][ranks]
        for block in range(layout.layers):
            bad = engine.taints.of(f"grad{block}")
            for parameter in PARAMETERS:
                name = self._parameter(stage, block, parameter)
                number = engine.log.names(name)
                # Replicas hold the same reduced gradient; shards hold parts of it.
                scale = np.exp(0.3 * self.gradient_rng.standard_normal(layout.dp_shard * layout.tp))[replicas]
                norm = share * scale
                largest = norm * 0.05
                count = np.zeros(len(ranks), dtype=np.int64)
                if bad is not None and bad[ranks].any() and self._is_hit(parameter):
                    hit = bad[ranks]
                    each = (
                        1 if engine.taints.one_element else self.job.block_bytes // 16 // layout.dp_shard // layout.tp
                    )
                    norm, largest = np.where(hit, np.nan, norm), np.where(hit, np.nan, largest)
                    count = hit * np.int64(each)
                engine.log.gradients.append((ranks, step, number, norm, largest, count, now))

    def _is_hit(self, parameter: str) -> bool:
        return not self.engine.taints.one_element or parameter == PARAMETERS[2]

    def _parameter(self, stage: int, block: int, parameter: str) -> str:
        return f"blocks.{stage * self.layout.layers + block}.{parameter}"

    def _fingerprint_rows(self, step: int, now: Any) -> None:
        layout, log, fault = self.layout, self.engine.log, self.fault
        ranks = np.flatnonzero(np.isfinite(now))
        at = layout.coordinates()
        part = (at["pp"] * layout.dp_shard + at["dp_shard"]) * layout.tp + at["tp"]
        for stage in range(layout.pp):
            own = ranks[at["pp"][ranks] == stage]
            for block in range(layout.layers):
                for parameter in PARAMETERS:
                    name = self._parameter(stage, block, parameter)
                    for prefix in ("", "exp_avg."):
                        hashes = _mix(
                            part[own], step * 1_000_003 + log.names(prefix + name) * 7_919 + self.scenario.seed
                        )
                        if fault is not None and self._is_flipped(step, block, parameter, prefix):
                            hashes = np.where(own == fault.rank, _mix(hashes, 77 + step), hashes)
                        log.fingerprints.append((own, step, 1, log.names(prefix + name), hashes, now[own]))

    def _is_flipped(self, step: int, block: int, parameter: str, prefix: str) -> bool:
        """A flipped parameter stays another one, because all replicas add the same update; so does a moment."""
        fault = self.fault
        if fault is None or step < fault.step or block != fault.block or parameter != PARAMETERS[2]:
            return False
        return fault.kind == "bit_flip_optimizer" or (fault.kind == "bit_flip" and prefix == "")

    # Events.

    def _tell_checkpoint(self, step: int) -> None:
        now = float(self.engine.now[0])
        stall = int(self.job.checkpoint_s * 1e9)
        size = self.job.block_bytes * self.layout.layers * self.layout.pp * 3
        for state, later in (("writing", 0.0), ("complete", 1.2e9), ("verified", 1.5e9)):
            detail = {"tier": "disk", "state": state, "path": f"checkpoints/step-{step:08d}", "bytes": size}
            detail |= {"duration_ns": int(later), "stall_ns": stall}
            self.events.append(Event(0, now + later, "checkpoint", step, detail))

    def _roll_back(self, step: int, batch: int) -> int:
        """All ranks go back to the last copy in memory; returns its step."""
        engine, now = self.engine, self.engine.now
        back = max(0, (step - 1) // MEMORY_COPY_INTERVAL * MEMORY_COPY_INTERVAL)
        self.skipped.add(batch)
        lost = engine.taints.any()
        if lost:
            self._tell_nonfinite(step)
        reason = "non_finite" if lost else "spike"
        at = float(now[0])
        self.events.append(Event(0, at, "batch_skipped", step, {"batch_index": batch, "reason": reason}))
        took = 0.2
        now += took * 1e9
        detail = {"from_step": step, "to_step": back, "tier": "memory", "reason": reason, "duration_s": took}
        self.events.append(Event(0, at + took * 1e9, "rollback", step, detail | {"skipped_batches": [batch]}))
        engine.taints.clear()
        if self.fault is not None and self.fault.kind != "bad_batch":  # that one comes with its batch
            self.fault = self.curves.fault = replace(self.fault, step=10**9)
        return back

    def _tell_nonfinite(self, step: int) -> None:
        counts = self._nonfinite_counts()
        local = self.engine.taints.of("local_loss")
        stages = self.layout.coordinates()["pp"]
        for rank in range(self.layout.num_ranks):
            names = [
                self._parameter(int(stages[rank]), block, parameter)
                for block in range(self.layout.layers)
                if (bad := self.engine.taints.of(f"grad{block}")) is not None and bad[rank]
                for parameter in PARAMETERS
                if self._is_hit(parameter)
            ]
            detail = {
                "phase": "backward" if names else "",
                "parameters": names,
                "local_loss": float("nan") if local is not None and local[rank] else 3.0,
                "local_nonfinite_count": int(counts[rank]) if counts is not None else 0,
            }
            self.events.append(Event(rank, float(self.engine.now[rank]), "nonfinite", step, detail))


def introduction(scenario: Scenario) -> list[Event]:
    """What launcher, watch and ranks write before the first step."""
    layout, at, nodes = scenario.layout, scenario.layout.coordinates(), scenario.layout.nodes()
    launched = {"nproc_per_node": layout.ranks_per_node, "max_restarts": 0}
    events = [
        Event(NODE, -2.0e9, "run_started", None, launched),
        Event(NODE, -1.9e9, "attempt_started", None, {"world_size": layout.num_ranks}),
        Event(NODE, -1.8e9, "watch_started", None, {"pid": 999}),
    ]
    members = {dim: layout.members(dim).tolist() for dim in (*layout.used_dims(), WORLD)}
    labels = {dim: layout.labels(dim) for dim in members}
    group_of = {dim: {rank: group for group in groups for rank in group} for dim, groups in members.items()}
    for rank in range(layout.num_ranks):
        identity = {
            "world_size": layout.num_ranks, "local_rank": rank % layout.ranks_per_node, "node_rank": int(nodes[rank]),
            "host": f"node-{nodes[rank]}", "pid": 10_000 + rank,
            "device": "cpu" if scenario.backend == "gloo" else f"cuda:{rank % layout.ranks_per_node}",
            **{dim: int(at[dim][rank]) for dim in at},
        }  # fmt: skip
        events.append(Event(rank, -1.0e9, "rank", 0, identity))
        for dim in members:
            detail = {"process_group": labels[dim][rank], "description": layout.description(dim)}
            events.append(Event(rank, -0.9e9, "process_group", 0, detail | {"members": group_of[dim][rank]}))
    return events


def _mix(values: Any, salt: int) -> Any:
    """A 62-bit hash of each number."""
    mixed = (np.asarray(values).astype(np.uint64) + np.uint64(salt % 2**63)) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(31)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    return (mixed ^ (mixed >> np.uint64(27))).astype(np.uint64).view(np.int64) >> 1
