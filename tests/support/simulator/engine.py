"""Discrete-event engine: computes the times of programs, vectorised by numpy over the ranks of a role.

    engine = Engine(layout, job, noise, rng)
    engine.run([Role(lanes, ops, steps), ...])   # one program a role
    engine.log                                   # what the ranks would have recorded

1. Each rank has a separate clock. Work advances it by the work's time, with the rank's factor, noise and occasional
   preemption. A call records when it was made.
2. A collective starts when its last member has made its call and the group's previous transfer is over; it lasts
   latency + bytes moved / bandwidth. All members leave it together (a slow link in a ring delays the ranks behind it
   most, where the chunks arrive last). Waiting later for a call costs only its remaining time.
3. Calls of a group match in the order in which each member makes them, whatever their steps or sources are. Members
   with another operation or size never leave. Point-to-point calls match by pair and direction.
4. A rank that dies or gets stuck has no later times: its clock is infinite, and so are those of all ranks that wait for
   it. Their open records stay open, as on a tape.
5. Tensors carry a taint (not finite): work passes it from its inputs to its outputs, a reduction to all members.

Ranks with the same program form a role and advance together. If only some of them must wait, the role is split; if none
can go on, the waiting ones wait forever.
"""

from __future__ import annotations

import numpy as np

from probes.step_clock import GAPS, PHASE_COLUMNS
from probes.tape.format.schema import TABLES

from .calls import Calls
from .layout import Ints, Layout
from .noise import Noise
from .program import Call, Job, Recv, Send, SpanBegin, SpanEnd, StepBegin, Wait, Work
from .records import PHASES, CollectiveRow, Floats, Log, SpanRow, StepRow
from .roles import Role, Stop, awaited, positions_of
from .taints import Taints
from .transfers import Links

__all__ = ["Engine"]

NS = 1e9


class Engine:
    """State of all ranks, in ns since the run's begin."""

    def __init__(self, layout: Layout, job: Job, noise: Noise, rng: np.random.Generator) -> None:
        count = layout.num_ranks
        self.layout, self.job, self.noise, self.rng = layout, job, noise, rng
        self.log = Log(layout)
        self.now = np.zeros(count)
        self.until = np.full(count, np.inf)
        """Time of each rank's last record: it died, or all ranks were stopped."""
        self.factor = {place: np.ones(count) for place in (*PHASES, *GAPS)}
        """Factor of each rank's time for a kind of work."""
        self.extra_s = {place: np.zeros(count) for place in (*PHASES, *GAPS)}
        """Seconds added to each piece of a kind of work, without CPU time."""
        self.busy_s = {place: np.zeros(count) for place in (*PHASES, *GAPS)}
        """Seconds added to each piece of a kind of work, as CPU time."""
        self.taken_ratio = np.zeros(count)
        """Seconds that other processes take of the rank's core per second that it computes."""
        self.links = Links(layout, job, noise, rng)
        self.stops: list[Stop] = []
        self.stopped: dict[int, float] = {}
        self.pauses: dict[int, Floats] = {}
        """{step: seconds by rank of garbage collection in it}."""
        self.collections_s = np.zeros(count)
        """Seconds by rank of garbage collection in every step."""
        self.taints = Taints(count)
        self.speed = np.exp(noise.rank_ratio * rng.standard_normal(count))
        self.step_noise = 1.0
        self._wait = np.zeros(count)
        self._phase_ns = np.zeros((count, len(PHASES)))
        self._phase_wait = np.zeros((count, 4))
        self._gap_ns, self._gap_wait = np.zeros((count, len(GAPS))), np.zeros((count, len(GAPS)))
        self._gap_start, self._gap_start_wait = np.zeros(count), np.zeros(count)
        self._cpu = np.zeros(count)
        self._gc = np.zeros(count)
        self._run_delay = np.zeros(count)
        self.calls = Calls(layout, self.log, self.taints, self.links, self.now, call_s=noise.call_s)
        self._span_phase = {phase: number for number, phase in enumerate(PHASES)}
        names = [column.name for column in TABLES["steps"].columns]
        self._gap_before = {phase: GAPS.index(names[PHASE_COLUMNS[phase].gap].removesuffix("_ns")) for phase in PHASES}

    def run(self, roles: list[Role]) -> None:
        """Run programs to their ends, or until no rank can go on."""
        self._draw_step_noise()
        active = list(roles)
        with np.errstate(invalid="ignore"):
            while active:
                moved = False
                for role in list(active):
                    moved |= self._advance(role)
                active = [role for role in active if role.pc < len(role.ops)]
                if active and not moved and not self._split(active):
                    for role in active:
                        self._give_up(role)
        self.calls.forget_ended()

    def _draw_step_noise(self) -> None:
        self.step_noise = float(np.exp(self.noise.step_ratio * self.rng.standard_normal()))

    def is_stuck(self) -> bool:
        """Return True if any rank has stopped for good."""
        return not np.isfinite(self.now).all()

    # Moving a role.

    def _advance(self, role: Role) -> bool:
        start = role.pc
        ops, count = role.ops, len(role.ops)
        while role.pc < count:
            if role.waiting is not None:
                if not self._try_wait(role):
                    break
                role.pc += 1
                continue
            op = ops[role.pc]
            kind = type(op)
            if kind is Work:
                self._work(role, op)  # type: ignore[arg-type]
            elif kind is Call:
                if not self._call(role, op):  # type: ignore[arg-type]
                    continue
            elif kind is Wait:
                role.waiting = ("handles", op.handles)  # type: ignore[union-attr]
                continue
            elif kind is SpanBegin:
                self._begin_span(role, op)  # type: ignore[arg-type]
            elif kind is SpanEnd:
                self._end_span(role)
            elif kind is Send:
                self._message(role, op, "send")  # type: ignore[arg-type]
            elif kind is Recv:
                role.waiting = ("p2p", self._message(role, op, "recv"))  # type: ignore[arg-type]
                continue
            elif kind is StepBegin:
                self._begin_step(role)
            else:
                self._end_step(role)
            role.pc += 1
        return role.pc > start

    def _work(self, role: Role, op: Work) -> None:
        lanes, noise, rng = role.lanes, self.noise, self.rng
        now = self.now[lanes]
        if op.seconds > 0.0 or self.extra_s[op.what].any() or self.busy_s[op.what].any():
            size = len(lanes)
            own = (op.seconds * NS) * self.factor[op.what][lanes]
            if op.what == "data":
                own = own * np.exp(noise.data_ratio * rng.standard_normal(size))
                own[rng.random(size) < noise.data_miss_probability] *= noise.data_miss_factor
            else:
                own = own * (self.step_noise * self.speed[lanes])
                own *= np.exp(noise.compute_ratio * rng.standard_normal(size))
            own = own + self.busy_s[op.what][lanes] * NS
            taken = self._stolen(op.seconds, size) + own * self.taken_ratio[lanes]
            self._run_delay[lanes] += taken
            wall = own + taken + self.extra_s[op.what][lanes] * NS
            if op.what == "forward" and op.block == 0 and role.step in self.pauses and op.microbatch <= 0:
                own, wall = self._collect(lanes, self.pauses[role.step][lanes] * NS, own, wall)
            if op.what == "after_optimizer":
                own, wall = self._collect(lanes, self.collections_s[lanes] * NS, own, wall)
            self._cpu[lanes] += own
            if self.stops:
                wall = self._stop(role, op, now, wall)
            self.now[lanes] = now + wall
        self.taints.work(lanes, op.reads, op.writes)

    def _collect(self, lanes: Ints, pause: Floats, own: Floats, wall: Floats) -> tuple[Floats, Floats]:
        """Add garbage collection to a piece of work."""
        self._gc[lanes] += pause
        return own + pause, wall + pause

    def _stolen(self, seconds: float, size: int) -> Floats:
        """Seconds of preemption by the operating system."""
        stolen = np.zeros(size)
        hits = self.rng.poisson(self.noise.preemptions_per_s * seconds * size)
        if hits:
            np.add.at(
                stolen, self.rng.integers(0, size, hits), self.rng.exponential(self.noise.preemption_s * NS, hits)
            )
        return stolen

    def _stop(self, role: Role, op: Work, now: Floats, wall: Floats) -> Floats:
        for stop in self.stops:
            if stop.step != role.step or stop.what != op.what or stop.rank in self.stopped:
                continue
            if stop.microbatch not in (-1, op.microbatch) or stop.block not in (-1, op.block):
                continue
            at = np.flatnonzero(role.lanes == stop.rank)
            if len(at):
                moment = float(now[at[0]] + stop.fraction * wall[at[0]])
                self.stopped[stop.rank] = moment
                if stop.dies:
                    self.until[stop.rank] = min(self.until[stop.rank], moment)
                wall[at[0]] = np.inf
        return wall

    # Calls.

    def _call(self, role: Role, op: Call) -> bool:
        """Make the call; False if the role must wait for its end."""
        part = self.calls.collective(role, op)
        if not op.handle:
            role.waiting = ("call", part)
            return False
        role.handles.setdefault(op.handle, []).append(part)
        part[1].wait[:] = 0.0
        return True

    def _message(self, role: Role, op: Send | Recv, kind: str) -> tuple[object, CollectiveRow]:
        """Send or receive; the sender goes on."""
        part = self.calls.message(role, op, kind)
        if kind == "send":
            part[1].wait[:] = 0.0
            role.handles.setdefault("sends", []).append(part)
        return part

    # Waiting.

    def _try_wait(self, role: Role) -> bool:
        """Finish the wait of a role if all calls that it waits for have an end, which may be infinite."""
        assert role.waiting is not None
        kind, what = role.waiting
        parts = awaited(role)
        if not all(self.calls.is_ready(key, role.lanes).all() for key, _ in parts):
            return False
        for key, row in parts:
            positions = positions_of(row, role.lanes)
            end, now = row.end[positions], self.now[role.lanes]
            later = np.maximum(now, end)
            if kind == "handles":
                waited = later - now
                row.wait[positions] += waited
            else:
                waited = end - row.issue[positions]
                row.wait[positions] = waited
            self._wait[role.lanes] += waited
            self.now[role.lanes] = later
            if kind == "p2p" and key is not None:
                self._receive_taint(role, key)
        if kind == "handles":
            for handle in what:  # type: ignore[attr-defined]
                role.handles.pop(handle, None)
        role.waiting = None
        return True

    def _receive_taint(self, role: Role, key: object) -> None:
        tensor = role.ops[role.pc].tensor  # type: ignore[union-attr]
        self.taints.receive(role.lanes, tensor, self.calls.sent(key))

    def _split(self, active: list[Role]) -> bool:
        """Split off the ranks of a waiting role that can go on; returns True if there were any."""
        for role in list(active):
            ready = np.ones(len(role.lanes), dtype=bool)
            for key, _ in awaited(role):
                ready &= self.calls.is_ready(key, role.lanes)
            if ready.any():
                active.append(role.split(~ready))
                return True
        return False

    def _give_up(self, role: Role) -> None:
        """Set an infinite end for what this role waits for: no other rank can go on."""
        self.now[role.lanes] = np.inf
        role.pc = len(role.ops)

    # Spans and steps.

    def _begin_span(self, role: Role, op: SpanBegin) -> None:
        lanes = role.lanes
        constants = (role.step, op.microbatch, op.stage, self.log.names(op.kind))
        row = SpanRow(lanes, self.now[lanes], np.full(len(lanes), np.inf), -self._wait[lanes], constants)
        role.spans.append(row)
        self.log.spans.append(row)

    def _end_span(self, role: Role) -> None:
        row = role.spans.pop()
        positions, lanes = positions_of(row, role.lanes), role.lanes
        row.end[positions] = self.now[lanes]
        waited = -row.wait[positions]
        row.wait[positions] += self._wait[lanes]
        phase = self._span_phase.get(self.log.names.texts[row.constants[3] - 1])
        if phase is not None:
            self._phase_ns[lanes, phase] += row.end[positions] - row.start[positions]
            if phase < 4:
                self._phase_wait[lanes, phase] += row.wait[positions]
            self._add_gap(lanes, self._gap_before[PHASES[phase]], row.start[positions], waited)
            self._gap_start[lanes], self._gap_start_wait[lanes] = self.now[lanes], self._wait[lanes]

    def _add_gap(self, lanes: Ints, gap: int, until: Floats, waited: Floats) -> None:
        """Add the time since the last phase, as the step clock does."""
        took = until - self._gap_start[lanes]
        self._gap_ns[lanes, gap] += took
        self._gap_wait[lanes, gap] += np.clip(waited - self._gap_start_wait[lanes], 0.0, took)

    def _begin_step(self, role: Role) -> None:
        role.step = role.steps[role.begun]
        role.begun += 1
        lanes, size = role.lanes, len(role.lanes)
        self._phase_ns[lanes] = self._phase_wait[lanes] = self._gap_ns[lanes] = self._gap_wait[lanes] = 0.0
        self._gap_start[lanes], self._gap_start_wait[lanes] = self.now[lanes], self._wait[lanes]
        self._cpu[lanes] = self._gc[lanes] = self._run_delay[lanes] = 0.0
        row = StepRow(
            lanes, self.now[lanes], np.full(size, np.inf), np.zeros((size, len(PHASES))), np.zeros((size, 4)),
            np.zeros((size, len(GAPS))), np.zeros((size, len(GAPS))), -self._wait[lanes], np.zeros(size),
            np.zeros(size), np.zeros(size), role.step,
        )  # fmt: skip
        role.step_row = row
        self.log.steps.append(row)
        if role.begun > 1:
            self._draw_step_noise()

    def _end_step(self, role: Role) -> None:
        row, lanes = role.step_row, role.lanes
        assert row is not None
        positions = positions_of(row, lanes)
        row.end[positions] = self.now[lanes]
        row.phase_ns[positions], row.wait_ns[positions] = self._phase_ns[lanes], self._phase_wait[lanes]
        self._add_gap(lanes, len(GAPS) - 1, self.now[lanes], self._wait[lanes])
        row.gap_ns[positions], row.gap_wait_ns[positions] = self._gap_ns[lanes], self._gap_wait[lanes]
        row.total_wait_ns[positions] += self._wait[lanes]
        row.cpu_ns[positions], row.gc_ns[positions] = self._cpu[lanes], self._gc[lanes]
        row.run_delay_ns[positions] = self._run_delay[lanes]
        self.now[lanes] += 20e-6 * NS  # the loop's work between two steps
