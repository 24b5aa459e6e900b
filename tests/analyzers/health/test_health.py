"""Readings of GPUs and hosts through the real store, and what is said of them."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest

from analyzers.finding import Finding, Severity
from analyzers.health.analyze import device_health
from analyzers.health.explain import WHY
from analyzers.health.figures import FIGURES
from analyzers.health.program_faults import failed_with
from analyzers.health.xids import asks_for_replacement, xid_table
from analyzers.live import LivePolicy, LiveState, live_findings, record_findings
from analyzers.report.wording.explained import next_step
from analyzers.run.records.event_log import EventLog
from analyzers.scope import Scope
from probes.tape.events import EventWriter
from probes.tape.format.names import NameWriter
from probes.tape.format.schema import TABLES
from probes.tape.format.writer import COMPLETE, TapeWriter
from probes.tape.rundir import NODE_RANK, RunDir
from store import Store
from tests.analyzers.judged import checked
from tests.analyzers.plain_run import plain_run
from tests.factories import RankWriter, empty_run

GPU = {"gpu_utilization_ratio": 0.98, "temperature_celsius": 61.0, "sm_clock_hertz": 1.98e9, "throttle_reasons": 4,
       "ecc_corrected_total": 3, "ecc_uncorrected_total": 0, "remapped_rows_total": 0, "pcie_replay_total": 2,
       "nvlink_errors_total": 0, "remap_pending": 0, "remap_failed": 0}  # fmt: skip
HOST = {"load_1m": 3.0, "num_cpus": 16, "disk_free_bytes": 1 << 40, "memory_used_bytes": 1 << 34,
        "memory_total_bytes": 1 << 38}  # fmt: skip


class Node:
    """What a sampler would write: readings a second apart, and events."""

    def __init__(self, tmp_path: Path, devices: tuple[str, str] = ("GPU-0", "GPU-1")) -> None:
        self.run: RunDir = empty_run(tmp_path)
        self.folder = self.run.node_dir(0)
        self.folder.mkdir(parents=True)
        self.names = NameWriter(self.folder / "names.jsonl")
        self.tape = TapeWriter(self.folder, TABLES["health"], rank=NODE_RANK, attempt=0)
        self.begin_ns = time.monotonic_ns() - 10**12
        for rank in range(2):
            identity = {"device": "cuda:0", "device_uuid": devices[rank]}
            RankWriter(self.run, rank, ranks=2, identity=identity).close()

    def read(self, device: str, second: int, **values: Any) -> None:
        row = self.tape.unset_row()
        values = {"sample_ns": self.begin_ns + second * 10**9, "node": "node-0", "device": device, **values}
        for i, column in enumerate(TABLES["health"].columns):
            value = values.pop(column.name, None)
            if value is not None:
                row[i] = self.names(value) if isinstance(value, str) else value
        assert not values
        self.tape.append(COMPLETE, *row)

    def minute(self, *, gpu: dict[str, Any] | None = None, host: dict[str, Any] | None = None) -> Node:
        """Sixty readings of a sound node; `gpu` and `host` change those of GPU-1 and of the host in the second half."""
        for second in range(60):
            late = second >= 30
            self.read("GPU-0", second, **GPU)
            self.read("GPU-1", second, **{**GPU, **((gpu or {}) if late else {})})
            self.read("host", second, **{**HOST, **((host or {}) if late else {})})
        return self

    def xid(self, code: int, device: str = "GPU-1") -> None:
        with_events = EventWriter(self.folder / "events.jsonl", attempt=0, rank=NODE_RANK)
        with_events.write("xid", step=7, xid=code, device=device, node="node-0", message="NVRM: Xid")
        with_events.close()

    def raised(self, rank: int, message: str) -> None:
        own = EventWriter(self.run.rank_dir(0, rank) / "events.jsonl", attempt=0, rank=rank)
        own.write("exception", step=7, type="AcceleratorError", message=message, traceback="")
        own.close()

    def findings(self) -> list[Finding]:
        self.names.close()
        self.tape.close()
        with Store.open(self.run) as store:
            return checked(device_health(store, Scope()))


def test_a_sound_node_is_silent(tmp_path: Path) -> None:
    assert Node(tmp_path).minute().findings() == []


@pytest.mark.parametrize(
    ("gpu", "kind", "cause", "severity"),
    [
        ({"throttle_reasons": 4 | 0x20}, "gpu_throttled", "thermal", "warning"),
        ({"throttle_reasons": 0x80}, "gpu_throttled", "power", "warning"),
        ({"throttle_reasons": 0x08}, "gpu_throttled", "hardware", "warning"),
        ({"ecc_uncorrected_total": 1}, "gpu_memory_errors", "uncorrected", "critical"),
        ({"ecc_corrected_total": 500}, "gpu_memory_errors", "corrected", "warning"),
        ({"remapped_rows_total": 1, "remap_pending": 1}, "gpu_memory_errors", "remapped", "warning"),
        ({"remap_failed": 1}, "gpu_memory_errors", "remap_failed", "critical"),
        ({"nvlink_errors_total": 9}, "link_errors", "nvlink", "warning"),
        ({"pcie_replay_total": 900}, "link_errors", "pcie", "warning"),
    ],
)
def test_what_changed_on_a_device_names_it_and_its_rank(
    tmp_path: Path, gpu: dict[str, Any], kind: str, cause: str, severity: str
) -> None:
    (finding,) = Node(tmp_path).minute(gpu=gpu).findings()
    assert (finding.kind, finding.cause, finding.severity, finding.ranks) == (kind, cause, severity, (1,))
    assert finding.evidence["device"] == "GPU-1"
    assert finding.summary.startswith("GPU-1 of node-0 (rank 1): ")
    assert finding.advice == f"{kind.replace('_', '-')}-{cause}"


@pytest.mark.parametrize(("slowed", "said"), [(1, "its only reading"), (3, "all of its 3 readings")])
def test_a_reason_in_all_of_a_few_readings_is_a_suspicion(tmp_path: Path, slowed: int, said: str) -> None:
    node = Node(tmp_path)
    for second in range(slowed):
        node.read("GPU-0", second, **GPU)
        node.read("GPU-1", second, **{**GPU, "throttle_reasons": 0x40})
    (finding,) = [one for one in node.findings() if one.kind == "gpu_throttled"]
    assert (finding.status, finding.cause, finding.ranks) == ("suspect", "thermal", (1,))
    assert f"slowed by heat (hardware) in {said}, up to" in finding.summary


def test_a_reason_in_some_of_a_few_readings_is_none(tmp_path: Path) -> None:
    node = Node(tmp_path)
    for second in range(4):
        node.read("GPU-1", second, **{**GPU, "throttle_reasons": 0x40 if second else 0})
    assert [one for one in node.findings() if one.kind == "gpu_throttled"] == []


def test_earlier_errors_and_idle_devices_are_not_reported(tmp_path: Path) -> None:
    node = Node(tmp_path)
    for second in range(60):
        old = {
            "ecc_uncorrected_total": 4,
            "ecc_corrected_total": 10**6,
            "pcie_replay_total": 10**5,
            "remapped_rows_total": 3,
        }
        idle = {"throttle_reasons": 0x40, "gpu_utilization_ratio": 0.0}
        node.read("GPU-0", second, **{**GPU, **old})
        node.read("GPU-1", second, **{**GPU, **idle})
        node.read("host", second, **HOST)
    assert node.findings() == []


COUNTERS = {"infiniband_errors_total": 7, "infiniband_downs_total": 1, "infiniband_congestion_total": 5,
            "tcp_segments_total": 10**6, "tcp_retransmits_total": 10**5, "cgroup_throttled_seconds_total": 9.0,
            "memory_pressure_ratio": 0.0, "cpu_pressure_ratio": 0.5, "io_pressure_ratio": 0.1}  # fmt: skip


@pytest.mark.parametrize(
    ("late", "kind", "cause"),
    [
        ({}, "", ""),
        ({"infiniband_downs_total": 2}, "link_errors", "infiniband_down"),
        ({"infiniband_errors_total": 5000}, "link_errors", "infiniband"),
        ({"tcp_retransmits_total": 120_000, "tcp_segments_total": 2_000_000}, "link_errors", "tcp"),
        ({"tcp_retransmits_total": 102_000, "tcp_segments_total": 2_000_000}, "", ""),
        ({"cgroup_throttled_seconds_total": 15.0}, "host_pressure", "cpu_limit"),
        ({"memory_pressure_ratio": 0.4}, "host_pressure", "memory"),
    ],
)
def test_counters_of_a_host(tmp_path: Path, late: dict[str, float], kind: str, cause: str) -> None:
    """What was counted before the run is not its own."""
    node = Node(tmp_path)
    for second in range(60):
        node.read("GPU-0", second, **GPU)
        node.read("host", second, **{**HOST, **COUNTERS, **(late if second >= 30 else {})})
    found = node.findings()
    assert [(one.kind, one.cause, one.advice) for one in found] == (
        [(kind, cause, f"{kind.replace('_', '-')}-{cause}")] if kind else []
    )
    with Store.open(node.run) as store:
        for one in found:
            (drawing,) = [drawing for draw in FIGURES[one.kind] for drawing in draw(store, one)]
            assert "node-0" in drawing.title
            assert WHY[one.kind](one)


def test_a_full_disk_and_an_overloaded_host_are_found(tmp_path: Path) -> None:
    (disk,) = Node(tmp_path / "a").minute(host={"disk_free_bytes": 1 << 30}).findings()
    assert (disk.kind, disk.cause, disk.status) == ("host_pressure", "disk", "fired")
    (queue,) = Node(tmp_path / "b").minute(host={"load_1m": 99.0}).findings()
    assert (queue.kind, queue.cause, queue.status) == ("host_pressure", "run_queue", "advice")


def test_a_slow_disk_is_advice(tmp_path: Path) -> None:
    """Slow in most readings; a checkpoint that is written slowly is not."""
    slow, usual = {"disk_write_latency_seconds": 0.4}, {"disk_write_latency_seconds": 0.002}
    (found,) = Node(tmp_path / "a").minute(host={**slow, "disk_read_latency_seconds": 0.01}).findings()
    assert (found.kind, found.cause, found.status) == ("host_pressure", "disk_latency", "advice")
    assert "400 ms a write in 50 % of the readings" in found.summary
    assert "50 % of the readings had writes from 100 ms on, with a median of 400 ms" in WHY[found.kind](found)
    node = Node(tmp_path / "b")
    for second in range(60):
        node.read("GPU-0", second, **GPU)
        node.read("host", second, **{**HOST, **(slow if second < 25 else usual)})
    assert node.findings() == []


def test_an_xid_of_a_program_on_a_device_of_several_ranks_blames_no_device(tmp_path: Path) -> None:
    """NVML names the device and no process: it may be of another job's, which shares it."""
    node = Node(tmp_path, devices=("GPU-0", "GPU-0")).minute()
    node.xid(43, "GPU-0")
    (found,) = node.findings()
    assert (found.kind, found.status, found.ranks) == ("xid", "advice", ())
    assert "take the device out" not in next_step(found)


@pytest.mark.parametrize("devices", [("GPU-0", "GPU-1"), ("GPU-0", "GPU-0")])
def test_an_xid_of_a_rank_that_ended_of_a_cuda_error_is_evidence_of_its_end(
    tmp_path: Path, devices: tuple[str, str]
) -> None:
    node = Node(tmp_path, devices=devices).minute()
    node.xid(43, devices[1])
    node.xid(13, devices[1])
    node.raised(1, "CUDA error: device-side assert triggered")
    assert node.findings() == []
    with Store.open(node.run) as store:
        store_log = EventLog.load(store, ("xid", "exception"))
        for event in store_log.of("xid"):
            assert failed_with(event, store_log, (0, 1)) == (1,)


def test_a_hardware_xid_stays_a_finding_where_a_rank_ended_of_it(tmp_path: Path) -> None:
    node = Node(tmp_path).minute()
    node.xid(94)
    node.raised(1, "CUDA error: uncorrectable ECC error encountered")
    assert [finding.kind for finding in node.findings()] == ["xid"]


def test_an_xid_is_reported_with_what_to_do(tmp_path: Path) -> None:
    node = Node(tmp_path).minute()
    node.xid(79)
    node.xid(79)
    node.xid(31, "GPU-0")
    node.xid(4711, "GPU-2")
    found = {finding.evidence["xid"]: finding for finding in node.findings()}
    lost, fault, unknown = found[79], found[31], found[4711]
    assert (lost.cause, lost.severity, lost.ranks, lost.evidence["count"]) == ("bus", "critical", (1,), 2)
    assert "fallen off the bus" in lost.summary
    assert "reboot" in lost.evidence["action"]
    assert (fault.cause, fault.severity, fault.ranks) == ("application", "warning", (0,))
    assert (unknown.cause, unknown.ranks, unknown.summary) == ("unknown", (), "XID 4711 on GPU-2: an unknown code.")


def test_an_xid_names_the_rank_that_its_device_has_since_another_was_left_out(tmp_path: Path) -> None:
    node = Node(tmp_path).minute()
    identity = {"device": "cuda:0", "device_uuid": "GPU-1"}
    RankWriter(node.run, 0, ranks=1, attempt=1, identity=identity).close()
    node.xid(64)
    (found,) = [finding for finding in node.findings() if finding.kind == "xid"]
    assert found.ranks == (0,)


def test_the_table_of_xids_is_whole() -> None:
    table = xid_table()
    assert len(table["xid"]) >= 50
    assert {"13", "31", "48", "63", "64", "74", "79", "94", "95", "119"} <= set(table["xid"])
    for code, about in table["xid"].items():
        assert code.isdecimal()
        assert set(about) == {"class", "severity", "action", "meaning"}
        assert about["severity"] in get_args(Severity)
        assert about["action"] in table["action"]
        assert re.fullmatch(r"[a-z]+", about["class"])
    assert table["source"].startswith("https://docs.nvidia.com/")


def test_an_xid_is_reported_once_in_a_live_run() -> None:
    store = plain_run(steps=10)
    store.event("xid", wall_ns=10**15, xid=79, device="GPU-1", node="node-0", message="")
    state = LiveState(policy=LivePolicy(periodic_ticks=1))
    assert [f.kind for f in live_findings(store, state, 10**15 + 8 * 10**9) if f.kind == "xid"] == ["xid"]
    assert [f for f in live_findings(store, state, 10**15 + 8 * 10**9) if f.kind == "xid"] == []


def test_missing_readings_are_reported(tmp_path: Path) -> None:
    (nothing,) = Node(tmp_path / "a").findings()
    assert (nothing.status, "readings of GPUs and hosts were not recorded" in nothing.summary) == (
        "insufficient_data",
        True,
    )
    node = Node(tmp_path / "b")
    node.read("host", 0, **HOST)
    (hosts_only,) = node.findings()
    assert (hosts_only.status, "only hosts have readings" in hosts_only.summary) == ("insufficient_data", True)
    node = Node(tmp_path / "c")
    node.read("GPU-0", 0, **{**GPU, "ecc_corrected_total": None, "nvlink_errors_total": None})
    summaries = {finding.summary for finding in node.findings()}
    assert "The GPUs' ECC, NVLink errors are unknown: not read or not supported." in summaries
    assert any("only GPUs have readings" in summary for summary in summaries)
    node = Node(tmp_path / "d")
    node.read("GPU-0", 0, **GPU)
    node.read("host", 0, **{**HOST, "num_cpus": None})
    (unknown,) = node.findings()
    assert unknown.summary == "These readings of the hosts are unknown: number of CPUs."


@pytest.mark.parametrize(("seconds", "fires"), [(60, False), (300, True)])
def test_a_disk_that_fills_up_is_reported_once_its_rate_is_a_trend(tmp_path: Path, seconds: int, fires: bool) -> None:
    node = Node(tmp_path)
    for second in range(seconds):
        node.read("host", second, **{**HOST, "disk_free_bytes": (100 << 30) - second * (100 << 20)})
    found = [finding for finding in node.findings() if finding.kind == "host_pressure"]
    assert [finding.cause for finding in found] == ["disk"] * fires
    assert [finding.summary for finding in found] == [
        "Host node-0 has 70.8 GiB free for the run, full in 12 min at the current rate."
    ] * fires


def test_a_disk_that_no_longer_fills_up_is_over() -> None:
    store, state = plain_run(steps=60), LiveState(policy=LivePolicy(periodic_ticks=1))

    def look(free: Callable[[int], int], seconds: range) -> list[Finding]:
        store.add("health", [
            {"node": "node-0", "device": "host", "sample_ns": second * 10**9, **HOST, "disk_free_bytes": free(second)}
            for second in seconds
        ])  # fmt: skip
        found = record_findings(store, state, 10**18)
        return [finding for finding in found if finding.kind == "host_pressure"]

    (fills,) = look(lambda second: (100 << 30) - second * (100 << 20), range(300))
    assert fills.status == "fired"
    (over,) = look(lambda second: 70 << 30, range(300, 1200))
    assert over.status == "ok"
    assert over.summary == "Over: Host node-0 had 70.8 GiB free for the run, full in 12 min at that rate."


@pytest.mark.parametrize(
    "free",
    [
        lambda second: (30 << 30) - (second > 90) * (5 << 30),  # another program installed something
        lambda second: (28 << 30) - second * (10 << 20),  # 48 min to go, seen for 3 min
    ],
)
def test_a_disk_is_not_said_to_fill_up_from_one_drop_or_a_short_look(
    tmp_path: Path, free: Callable[[int], int]
) -> None:
    node = Node(tmp_path)
    for second in range(180):
        node.read("host", second, **{**HOST, "disk_free_bytes": free(second)})
    assert [finding for finding in node.findings() if finding.kind == "host_pressure"] == []


@pytest.mark.parametrize(("xid", "expected"), [(64, True), (79, False), (13, False), (None, False), (9999, False)])
def test_xids_after_which_the_device_is_replaced(xid: int | None, expected: bool) -> None:
    finding = Finding(
        analyzer="health", kind="xid", severity="critical", status="fired", summary="XID.", evidence={"xid": xid}
    )
    assert asks_for_replacement(finding) is expected
