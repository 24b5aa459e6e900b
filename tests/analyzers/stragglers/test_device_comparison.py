"""A slow rank's GPU beside those of its peers, from readings through the real store."""

from __future__ import annotations

from pathlib import Path

import pytest

from analyzers.finding import Finding
from analyzers.stragglers.comparison.device_comparison import DeviceComparison
from probes.tape.format.names import NameWriter
from probes.tape.format.schema import TABLES
from probes.tape.format.writer import COMPLETE, TapeWriter
from probes.tape.rundir import NODE_RANK, RunDir
from store import Store
from tests.analyzers.stragglers.test_straggler import judged
from tests.factories import make_run

GPU = {"gpu_utilization_ratio": 0.98, "temperature_celsius": 61.0, "sm_clock_hertz": 1.98e9, "throttle_reasons": 4}
HOT = {"temperature_celsius": 91.0, "sm_clock_hertz": 1.2e9, "throttle_reasons": 0x20}


def sampled(run: RunDir, readings: dict[str, dict[str, float]]) -> None:
    """What a sampler would write: each device at every moment of the run."""
    with Store.open(run) as store:
        ((begin, end),) = store.rows("SELECT min(start_ns), max(start_ns + duration_ns) FROM steps")
        ((offset,),) = store.rows("SELECT any_value(clock_offset_ns) FROM ranks WHERE rank = 0")
    folder = run.node_dir(0)
    folder.mkdir(parents=True, exist_ok=True)
    names, tape = NameWriter(folder / "names.jsonl"), TapeWriter(folder, TABLES["health"], rank=NODE_RANK, attempt=0)
    for moment in range(begin - offset, end - offset, (end - begin) // 20):
        for device, values in readings.items():
            row = tape.unset_row()
            known = {"sample_ns": moment, "node": names("node-0"), "device": names(device), **values}
            for i, column in enumerate(TABLES["health"].columns):
                row[i] = known.get(column.name, row[i])  # type: ignore[assignment]
            tape.append(COMPLETE, *row)
    tape.close()
    names.close()


def finding_of(tmp_path: Path, readings: dict[str, dict[str, float]]) -> Finding:
    run = make_run(tmp_path, ranks=4, steps=60, slow={2: 1.5}, slow_from=20)
    for rank in range(4):
        path = run.rank_dir(0, rank) / "events.jsonl"
        text = path.read_text().replace('"device": "cpu"', f'"device": "cuda:{rank}", "device_uuid": "GPU-{rank}"')
        text = text.replace('"device":"cpu"', f'"device":"cuda:{rank}","device_uuid":"GPU-{rank}"')
        path.write_text(text)
    sampled(run, readings)
    with Store.open(run) as store:
        found, not_compared = judged(store)
    assert not_compared.status == "insufficient_data", "a GPU's time between phases"
    return found


def test_a_throttled_gpu_is_why(tmp_path: Path) -> None:
    found = finding_of(tmp_path, {f"GPU-{rank}": GPU | (HOT if rank == 2 else {}) for rank in range(4)})
    assert (found.ranks, found.cause, found.advice) == ((2,), "gpu_clock", "straggler-gpu-clock")
    assert "Its GPU runs at 1.20 GHz, its peers at 1.98 GHz: heat (driver), 91 degrees." in found.summary
    assert found.evidence["sm_clock_of_peers_hertz"] == pytest.approx(1.98e9)
    assert found.evidence["throttled_ratio"] == 1.0


def test_a_sound_gpu_is_not_blamed_and_its_readings_are_shown(tmp_path: Path) -> None:
    host = {"host": {"load_1m": 12.0, "num_cpus": 4}}
    found = finding_of(tmp_path, {f"GPU-{rank}": GPU for rank in range(4)} | host)  # type: ignore[arg-type]
    assert (found.ranks, found.cause) == ((2,), "compute")
    assert found.evidence["temperature_celsius"] == 61.0
    assert found.evidence["host_load_per_cpu"] == 3.0
    assert "throttle_reason" not in found.evidence


def test_without_readings_nothing_is_said(tmp_path: Path) -> None:
    run = make_run(tmp_path, ranks=4, steps=60, slow={2: 1.5}, slow_from=20)
    with Store.open(run) as store:
        (found,) = judged(store)
    assert found.cause == "compute"
    assert not [name for name in found.evidence if "clock" in name or "celsius" in name]


def test_a_clock_that_is_a_little_lower_explains_little() -> None:
    beside = DeviceComparison(clock_hertz=1.95e9, peers_clock_hertz=1.98e9)
    assert beside.explains(1.5) == ""
    assert beside.explains(1.02) != ""
    assert DeviceComparison().explains(1.5) == ""
