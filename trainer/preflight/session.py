"""Take part in a preflight as one rank: measure, exchange, and get the same verdict as all others.

    session = Session(join(120.0), Options(), PreflightPolicy())
    exit_code, report = session.run(judge, strict=False)       # the report on rank 0, None on the others

1. Each rank reports itself. Rank 0 waits for all ranks or a deadline, and publishes which rank is on which node.
2. Devices are measured. GPUs are measured simultaneously, as in training. If ranks share processor cores, the cores are
   measured by one rank after the other. Slow devices are measured again.
3. Clocks are measured, then links in rounds of disjoint pairs, then the all-reduce. Slow links are measured again, and
   the better reading counts.
4. Rank 0 gathers, judges and publishes the exit code.

Everything is exchanged through the store of the job, so that a broken network is reported and does not block.
"""

from __future__ import annotations

import json
import shutil
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from probes.tape.run_facts import settings
from trainer.error_text import first_line
from trainer.preflight.facts import boot_id, device_model, facts, node_key
from trainer.preflight.joining import Place
from trainer.preflight.layout import Hello, Layout
from trainer.preflight.links import answer_clock, clock_offsets, measure_all_reduce, measure_link
from trainer.preflight.rounds import Pair, repeat_rounds
from trainer.preflight.speeds import DeviceSpeed, device_speed
from trainer.preflight.tuning import compare_settings
from trainer.preflight.verdict.judge_devices import slow_devices
from trainer.preflight.verdict.judge_links import slow_pairs
from trainer.preflight.verdict.policy import PreflightPolicy
from trainer.preflight.verdict.readings import AllReduceReading, LinkReading, RankReading, Readings, SettingReading
from trainer.preflight.verdict.report import PreflightReport
from trainer.torch_compat import PrefixStore

__all__ = ["Options", "Session"]

COMMUNICATION_S = 60.0
"""Seconds after which a message counts as failed."""
GOODBYE_S = 10.0
MOST_ALL_REDUCE_BYTES = 1 << 26
ALL_REDUCE_S = 0.1
"""The size of the all-reduce is chosen so that the slowest link needs this number of seconds for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Settings of one preflight."""

    timeout_s: float = 120.0
    """Seconds to wait for other ranks."""
    runs: Path = Path("runs")
    """Folder for runs. Its free space is checked."""
    settings: tuple[str, ...] = ()
    """Names of environment variables that are compared between ranks, besides those that are always compared."""
    tune: Sequence[Mapping[str, str]] = ()
    """Sets of environment variables with which the all-reduce is measured for comparison."""


class Session:
    """One rank's part of a preflight."""

    def __init__(self, place: Place, options: Options, policy: PreflightPolicy) -> None:
        self.place, self.options, self.policy = place, options, policy
        self.device = torch.device("cpu")
        if torch.cuda.is_available():
            self.device = torch.device("cuda", place.local_rank % torch.cuda.device_count())
            torch.cuda.set_device(self.device)
        self._started_s = time.monotonic()
        self._reading = RankReading(rank=place.rank, node="")
        self._links: list[LinkReading] = []
        self._all_reduce: AllReduceReading | None = None
        self._settings: list[SettingReading] = []

    def run(self, judge: Callable[[Readings], PreflightReport], *, strict: bool) -> tuple[int, PreflightReport | None]:
        """Measure together with all other ranks. Returns (exit code, report); the report is None except on rank 0."""
        layout = self._meet()
        self._measure_node(layout)
        self._measure_device(layout)
        if layout.is_complete and layout.world_size > 1:
            try:
                self._communicate(layout)
            except Exception as error:  # a broken network raises errors of many types, which the report shows
                self._reading = replace(self._reading, problem=_problem(error))
            finally:
                if dist.is_initialized():
                    dist.destroy_process_group()
        return self._conclude(layout, judge, strict=strict)

    # 1. Which ranks are present.

    def _meet(self) -> Layout:
        own = Hello(
            host=socket.gethostname(), node_key=node_key(), boot_id=boot_id(), local_rank=self.place.local_rank,
            is_gpu=self.device.type == "cuda",
        )  # fmt: skip
        self._set(f"hello/{self.place.rank}", asdict(own))
        if self.place.rank == 0:
            hellos = self._gather("hello", range(self.place.world_size))
            found = Layout.of({rank: Hello(**values) for rank, values in hellos.items()}, self.place.world_size)
            self._set("layout", found.to_json())
        return Layout.of_json(self._get("layout", self.options.timeout_s * 2))

    # 2. The node and its device.

    def _measure_node(self, layout: Layout) -> None:
        place = self.options.runs.absolute()
        folder = next(path for path in (place, *place.parents) if path.is_dir())
        self._reading = replace(
            self._reading,
            local_rank=self.place.local_rank,
            node=layout.node_of[self.place.rank],
            host=socket.gethostname(),
            device=device_model(self.device),
            facts=facts(self.device),
            settings=settings(self.options.settings),
            disk_free_bytes=_free_bytes(folder),
            shared_free_bytes=_free_bytes(Path("/dev/shm")),
        )

    def _measure_device(self, layout: Layout) -> None:
        """Measure the device. If it is slower than its peers, measure it again."""
        measuring = [rank for rank in layout.node_of if layout.measures_speed(rank)]
        self._measure_speed(layout, measuring, "speed")
        if self.place.rank == 0:
            found = self._gather("speed", measuring)
            readings = Readings(
                world_size=layout.world_size,
                ranks=tuple(RankReading(**{**values, "rank": rank}) for rank, values in found.items()),
            )
            slow = {
                rank
                for field in ("matmul_flops_per_s", "memory_bytes_per_s")
                for rank in slow_devices(readings, field, self.policy)
            }
            self._set("slow-devices", sorted(slow))
        self._measure_speed(layout, self._get("slow-devices", self.options.timeout_s * 2), "speed-again")

    def _measure_speed(self, layout: Layout, ranks: Sequence[int], key: str) -> None:
        if self.place.rank not in ranks:
            return
        before = layout.turn_before(self.place.rank)
        while before is not None and before not in ranks:
            before = layout.turn_before(before)
        if before is not None:
            self._get(f"{key}/{before}", self.options.timeout_s)
        try:
            self._reading = _faster(self._reading, device_speed(self.device))
        except RuntimeError as error:  # the device is broken; the next rank must not wait for this one
            self._reading = replace(self._reading, problem=_problem(error))
        self._set(f"{key}/{self.place.rank}", asdict(self._reading))

    # 3. Between the ranks.

    def _communicate(self, layout: Layout) -> None:
        backend = "cpu:gloo,cuda:nccl" if layout.is_gpu else "gloo"
        dist.init_process_group(
            backend, store=PrefixStore("group", self.place.store), rank=self.place.rank,
            world_size=self.place.world_size, timeout=timedelta(seconds=COMMUNICATION_S),
        )  # fmt: skip
        device = self.device if layout.is_gpu else torch.device("cpu")
        self._compare_clocks(layout)
        self._run_rounds(layout.rounds(), device)
        self._set(f"links/{self.place.rank}", [asdict(link) for link in self._links])
        if self.place.rank == 0:
            found = self._gather("links", layout.node_of)
            links = [LinkReading(**values) for own in found.values() for values in own]
            repeats = repeat_rounds(slow_pairs(links, self.policy))
            slowest = min((link.bytes_per_s for link in links), default=0.0)
            num_bytes = int(min(MOST_ALL_REDUCE_BYTES, max(1 << 16, slowest * ALL_REDUCE_S)))
            self._set("repeats", {"rounds": repeats, "num_bytes": num_bytes})
        last = self._get("repeats", COMMUNICATION_S)
        self._run_rounds([[(a, b) for a, b in pairs] for pairs in last["rounds"]], device)
        self._all_reduce = measure_all_reduce(device, last["num_bytes"])
        if self.options.tune:
            self._settings = compare_settings(
                self.options.tune, self.place, nccl=layout.is_gpu, num_bytes=last["num_bytes"]
            )

    def _compare_clocks(self, layout: Layout) -> None:
        """Measure clock offsets: rank 0 asks the first rank of each other node."""
        leaders = layout.leaders()
        if self.place.rank == 0:
            offsets = {0: (0, 0), **clock_offsets([rank for rank in leaders if rank])}
            self._set("clocks", {str(rank): offset for rank, offset in offsets.items()})
        elif self.place.rank in leaders:
            answer_clock(0)
        if self.place.rank in leaders:
            offset_ns, error_ns = self._get("clocks", COMMUNICATION_S)[str(self.place.rank)]
            self._reading = replace(self._reading, clock_offset_ns=offset_ns, clock_error_ns=error_ns)

    def _run_rounds(self, rounds: Sequence[Sequence[Pair]], device: torch.device) -> None:
        """Measure this rank's pair in each round; if a link is measured twice, the better reading counts."""
        for pairs in rounds:
            own = next((pair for pair in pairs if self.place.rank in pair), None)
            if own is None:
                continue
            partner = own[0] if own[1] == self.place.rank else own[1]
            new = measure_link(partner, device)
            old = next((link for link in self._links if link.target == partner), None)
            if old is not None:
                self._links.remove(old)
                rate, latency_s = max(old.bytes_per_s, new.bytes_per_s), min(old.latency_s, new.latency_s)
                new = replace(new, bytes_per_s=rate, latency_s=latency_s)
            self._links.append(new)

    # 4. The verdict.

    def _conclude(
        self, layout: Layout, judge: Callable[[Readings], PreflightReport], *, strict: bool
    ) -> tuple[int, PreflightReport | None]:
        own = {"reading": asdict(self._reading), "links": [asdict(link) for link in self._links]}
        self._set(f"done/{self.place.rank}", own)
        if self.place.rank != 0:
            code = int(self._get("verdict", self.options.timeout_s + COMMUNICATION_S))
            self._set(f"goodbye/{self.place.rank}", True)
            return code, None
        found = self._gather("done", layout.node_of)
        rounds = layout.rounds()
        readings = Readings(
            world_size=layout.world_size,
            ranks=tuple(RankReading(**values["reading"]) for values in found.values()),
            links=tuple(LinkReading(**link) for values in found.values() for link in values["links"]),
            all_reduce=self._all_reduce,
            settings=tuple(self._settings),
            backend="nccl" if layout.is_gpu else "gloo",
            num_rounds=len(rounds),
            duration_s=round(time.monotonic() - self._started_s, 3),
        )
        report = judge(readings)
        code = report.exit_code(strict=strict)
        self._set("verdict", code)
        self._gather("goodbye", [rank for rank in found if rank], timeout_s=GOODBYE_S)  # the store lives in this rank
        return code, report

    # The store.

    def _set(self, key: str, value: Any) -> None:
        self.place.store.set(key, json.dumps(value))

    def _get(self, key: str, timeout_s: float) -> Any:
        """Wait for a value in the store. Raises DistStoreError after `timeout_s`."""
        self.place.store.wait([key], timedelta(seconds=timeout_s))
        return json.loads(self.place.store.get(key))

    def _gather(self, key: str, ranks: Any, timeout_s: float | None = None) -> dict[int, Any]:
        """{rank: value} of the ranks that answer before the deadline."""
        deadline_s = time.monotonic() + (self.options.timeout_s if timeout_s is None else timeout_s)
        found = {}
        for rank in ranks:
            left_s = deadline_s - time.monotonic()
            try:
                if left_s <= 0 and not self.place.store.check([f"{key}/{rank}"]):
                    continue  # after the deadline, do not wait for each of perhaps thousands of ranks
                found[rank] = self._get(f"{key}/{rank}", max(0.05, left_s))
            except dist.DistError:
                continue
        return found


def _faster(old: RankReading, own: DeviceSpeed) -> RankReading:
    """Combine two readings of a device, with the better value of each measurement."""
    waits = [wait for wait in (old.core_wait_ratio, own.core_wait_ratio) if wait is not None]
    return replace(
        old,
        matmul_flops_per_s=max(own.matmul_flops_per_s, old.matmul_flops_per_s or 0.0),
        memory_bytes_per_s=max(own.memory_bytes_per_s, old.memory_bytes_per_s or 0.0),
        core_wait_ratio=min(waits, default=None),
    )


def _free_bytes(folder: Path) -> int | None:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def _problem(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"
