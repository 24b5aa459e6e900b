"""From a device that fails to the finding and the metrics: sampler, tape, store, analyzer."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from analyzers.health.analyze import device_health
from analyzers.scope import Scope
from probes.tape.events import EventWriter, read_events
from probes.tape.format.reader import TapeError, read_segment, segment_paths
from probes.tape.format.writer import COMPLETE
from probes.tape.rundir import NODE_RANK, RunDir
from store import Store
from tests.factories import empty_run
from tests.fakes import FakeNvml
from tests.waiting import wait_for
from watch.exporting.metrics.health_samples import health_samples
from watch.health.host import Host
from watch.health.nvml import Nvml, Xids
from watch.health.sampler import sampling


class SampledNode:
    """A node with two fake GPUs, sampled fifty times a second."""

    def __init__(self, tmp_path: Path) -> None:
        self.run: RunDir = empty_run(tmp_path)
        self.folder = self.run.node_dir(0)
        self.folder.mkdir(parents=True)
        self.events = EventWriter(self.folder / "events.jsonl", attempt=0, rank=NODE_RANK)
        self.nvml = FakeNvml()

    def sample(self, during: Callable[[], bool]) -> None:
        """Until `during` is true."""
        sources = [Host(self.run.path), Nvml(self.nvml)]
        with sampling(self.folder, sources, self.events, xids=Xids(self.nvml), period_s=0.02):
            wait_for(during, "what is sampled for")

    def num_events(self, kind: str) -> int:
        return sum(event["kind"] == kind for event in read_events(self.folder / "events.jsonl")[0])

    def readings(self) -> int:
        return self.nvml.asked["nvmlDeviceGetUtilizationRates"]

    def records(self) -> list[int]:
        """Numbers of complete records, one for each device that has some."""
        counts: Counter[int] = Counter()
        for path in segment_paths(self.folder, "health"):
            try:
                records = read_segment(path).records
            except TapeError:
                continue  # it is being made at this moment
            counts.update(records["device"][records["state"] == COMPLETE].tolist())
        return list(counts.values())

    def store(self) -> Store:
        return Store.open(self.run)


@pytest.fixture
def node(tmp_path: Path) -> SampledNode:
    return SampledNode(tmp_path)


def test_readings_reach_the_store_and_the_metrics(node: SampledNode) -> None:
    node.sample(lambda: len(node.records()) == 3 and min(node.records()) >= 5)
    with node.store() as store:
        counts = dict(store.rows("SELECT device, count(*) FROM health GROUP BY device"))
        samples = list(health_samples(store))
    assert set(counts) == {"host", "GPU-0", "GPU-1"}
    assert min(counts.values()) >= 5
    found = {(s.name, s.labels.get("device"), s.labels.get("reason")): s.value for s in samples}
    assert found["rankscope_gpu_power_watts", "GPU-1", None] == 612.5
    assert found["rankscope_gpu_throttled", "GPU-1", "thermal"] == 0
    assert found["rankscope_gpu_remap_pending", "GPU-0", None] == 0
    assert ("rankscope_host_memory_used_bytes", None, None) in found


def fails(name: str, value: Any) -> Callable[[FakeNvml], None]:
    return lambda nvml: setattr(nvml, name, lambda *_: value)


@pytest.mark.parametrize(
    ("breaks", "kind", "cause"),
    [
        (fails("nvmlDeviceGetCurrentClocksEventReasons", 0x20), "gpu_throttled", "thermal"),
        (fails("nvmlDeviceGetCurrentClocksEventReasons", 0x80), "gpu_throttled", "power"),
        (fails("nvmlDeviceGetCurrentClocksEventReasons", 0x08), "gpu_throttled", "hardware"),
        (fails("nvmlDeviceGetTotalEccErrors", 500), "gpu_memory_errors", "uncorrected"),
        (fails("nvmlDeviceGetRemappedRows", [1, 9, 1, 0]), "gpu_memory_errors", "remapped"),
        (fails("nvmlDeviceGetRemappedRows", [1, 9, 1, 1]), "gpu_memory_errors", "remap_failed"),
        (fails("nvmlDeviceGetPcieReplayCounter", 900), "link_errors", "pcie"),
        (fails("nvmlDeviceGetNvLinkErrorCounter", 50), "link_errors", "nvlink"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_fault_of_a_device_is_found(
    node: SampledNode, breaks: Callable[[FakeNvml], None], kind: str, cause: str
) -> None:
    broken_after: list[int] = []

    def later() -> bool:
        if node.readings() > 24 and not broken_after:
            broken_after.append(node.readings())
            breaks(node.nvml)
        return bool(broken_after) and node.readings() > 2.5 * broken_after[0]

    node.sample(later)
    with node.store() as store:
        fired = [
            finding for finding in device_health(store, Scope()) if finding.status == "fired" and finding.kind == kind
        ]
    assert {finding.cause for finding in fired} >= {cause}


@pytest.mark.parametrize(
    ("code", "cause"),
    [(79, "bus"), (62, "hardware"), (31, "application"), (48, "ecc"), (74, "nvlink"), (119, "driver")],
)
def test_each_class_of_xid_is_a_finding(node: SampledNode, code: int, cause: str) -> None:
    node.nvml.events.put((code, "GPU-1"))
    node.sample(lambda: node.num_events("xid") > 0)
    with node.store() as store:
        (found,) = [finding for finding in device_health(store, Scope()) if finding.kind == "xid"]
        (total,) = [s for s in health_samples(store) if s.name == "rankscope_gpu_xid_total"]
    assert found.cause == cause
    assert (total.labels, total.value) == ({"device": "GPU-1", "xid": str(code), "class": cause}, 1)


def test_a_driver_that_never_answers_holds_up_neither_the_host_nor_the_end(node: SampledNode) -> None:
    node.nvml.hangs.set()
    node.sample(lambda: sum(node.records()) >= 5)
    assert [thread for thread in threading.enumerate() if thread.name == "health NVML"], "it still waits for its answer"
    node.nvml.released.set()
    with node.store() as store:
        counts = dict(store.rows("SELECT device, count(*) FROM health GROUP BY device"))
    assert set(counts) == {"host"}
    assert counts["host"] >= 5


def test_a_failing_source_is_reported_once(node: SampledNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("watch.health.sampler.FAILED_PERIOD_S", 0.01)
    node.nvml.failing["nvmlInit"] = 1
    node.sample(lambda: node.nvml.asked["nvmlInit"] > 5 and node.num_events("health_failed") >= 2)
    told = [event for event in read_events(node.folder / "events.jsonl")[0] if event["kind"] == "health_failed"]
    assert sorted(event["source"] for event in told) == ["NVML", "XID"]
