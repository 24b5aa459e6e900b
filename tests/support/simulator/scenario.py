"""One simulated run: from a seed, a layout and a fault to everything that its ranks and its node recorded.

    recording = simulate(Scenario(seed=3, layout=Layout(dp_replicate=8), steps=80, fault=Fault(kind="hang", step=40)))
    write(recording, Path("runs/simulated"))          # see `tapes`

The same scenario gives the same recording, and a shorter one the beginning of the longer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from .aftermath import write_end
from .curves import Curves, Reading
from .engine import Engine
from .faults import CONTROL, adapted, condition, roles_of, stops_of, taints_of
from .introduction import introduction
from .program import PARAMETERS, Op, step_program
from .recording import Event, Recording, Scenario
from .samples import Samples, is_hit, parameter_name

__all__ = ["simulate"]

MEMORY_COPY_INTERVAL = 10


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
        self.samples = Samples(self.engine, self.job, scenario.seed, np.random.default_rng(seeds[3]))
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
        write_end(recording, self.engine)
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
        """The first step compiles, which takes about the same time on each rank."""
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
        """Fill in the steps' values; returns the last step and the next batch."""
        rows = self.engine.log.steps[self._first_row :]
        for step in steps:
            reading = self.curves.reading(step, batch, self.bad_taken)
            bad = self._fill(step, batch, reading, [row for row in rows if row.step == step])
            self.samples.take(step, reading, bad=bad, fault=self.fault)
            saves = self.job.checkpoint_interval and step % self.job.checkpoint_interval == 0
            if saves and not bad and np.isfinite(self.engine.now[0]):
                self._write_checkpoint(step)
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
        """Local loss of each rank: their mean is the global one; ranks of a tensor-parallel group have the same."""
        layout = self.layout
        num_data = layout.width // layout.tp
        mean_loss = reading.loss - reading.local_excess
        local = mean_loss * (1.0 + self.scenario.noise.local_loss_ratio * self._local_rng.standard_normal(num_data))
        local += mean_loss - local.mean()
        if reading.local_excess and self.fault is not None:
            hit = np.ones(num_data, bool) if self.fault.other < 0 else np.arange(num_data) == self.fault.other
            local += reading.local_excess * num_data / hit.sum() * hit
        return local[self.data_rank]

    def _nonfinite_counts(self) -> Any:
        """Non-finite elements by rank after the reduction, one or all of a block; None if there are none."""
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

    # Events.

    def _write_checkpoint(self, step: int) -> None:
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
            self._write_nonfinite(step)
            if self.scenario.on_devices:
                self._write_replay(step, batch)
        reason = "non_finite" if lost else "spike"
        at = float(now[0])
        self.events.append(Event(0, at, "batch_skipped", step, {"batch_index": batch, "reason": reason}))
        took = 0.2
        now += took * 1e9
        detail = {"from_step": step, "to_step": back, "tier": "memory", "reason": reason, "duration_s": took}
        self.events.append(Event(0, at + took * 1e9, "rollback", step, detail | {"skipped_batches": [batch]}))
        engine.taints.clear()
        if self.fault is not None and self.fault.kind != "bad_batch":  # that one recurs with its batch
            self.fault = self.curves.fault = replace(self.fault, step=10**9)
        return back

    def _write_nonfinite(self, step: int) -> None:
        counts = self._nonfinite_counts()
        local = self.engine.taints.of("local_loss")
        stages = self.layout.coordinates()["pp"]
        for rank in range(self.layout.num_ranks):
            names = [
                parameter_name(self.layout, int(stages[rank]), block, parameter)
                for block in range(self.layout.layers)
                if (bad := self.engine.taints.of(f"grad{block}")) is not None and bad[rank]
                for parameter in PARAMETERS
                if is_hit(self.engine.taints, parameter)
            ]
            detail = {
                "phase": "backward" if names else "",
                "parameters": names,
                "local_loss": float("nan") if local is not None and local[rank] else 3.0,
                "local_nonfinite_count": int(counts[rank]) if counts is not None else 0,
            }
            self.events.append(Event(rank, float(self.engine.now[rank]), "nonfinite", step, detail))

    def _write_replay(self, step: int, batch: int) -> None:
        """Write what `trainer.replay.triage` records of a step whose batch is skipped: the fault recurs.

        Each rank checks its own operations: a NaN that it produces is seen before any reduction, and one that a
        reduction produces is seen by no rank.
        """
        fault = self.fault
        made_by_rank = fault is not None and fault.kind in ("nan_grad", "inf_activation")
        for rank in range(self.layout.num_ranks):
            origin = None
            if fault is not None and made_by_rank and rank == fault.rank:
                stage = int(self.layout.coordinates()["pp"][rank])
                name = parameter_name(self.layout, stage, fault.block, PARAMETERS[0])
                phase = "backward" if fault.kind == "nan_grad" else "forward"
                origin = {"module": name.rpartition(".")[0], "operation": "", "phase": phase, "how": "module"}
            detail = {
                "verdict": "non_finite", "state": "same", "state_step": step - 1, "batch_index": batch,
                "came_back": True, "origin": origin, "samples": [], "num_samples": 1, "changed_samples": [],
                "data_rank": int(self.data_rank[rank]),
            }  # fmt: skip
            self.events.append(Event(rank, float(self.engine.now[rank]), "replay", step, detail))
