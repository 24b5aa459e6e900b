"""Prometheus' answers to queries for GPUs' metrics: the JSON of its HTTP API, and the text of `promtool query`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from analyzers.evidence.diagnose_files import diagnose_files
from store.readers.programs.gpu_scrape import read, recognise
from store.readers.untrusted.external_files import SourceError
from tests.analyzers.evidence.written import diagnosed

START_S = 1_790_000_000
LABELS = {"Hostname": "gpu-07", "pci_bus_id": "00000000:5D:00.0"}


def matrix(**series: list[float]) -> str:
    """The values of each metric for GPUs 0 and 1, of which only the last one's differ from the first."""
    result = [
        {"metric": {"__name__": f"DCGM_FI_DEV_{name}", "gpu": str(gpu), "UUID": f"GPU-{gpu}", **LABELS},
         "values": [[START_S + 15 * place, str(values[0] if gpu == 0 else value)]
                    for place, value in enumerate(values)]}
        for name, values in series.items() for gpu in range(2)
    ]  # fmt: skip
    return json.dumps({"status": "success", "data": {"resultType": "matrix", "result": result}})


THROTTLED = {"SM_CLOCK": [1980.0] * 10 + [600.0] * 30, "CLOCK_THROTTLE_REASONS": [0.0] * 10 + [72.0] * 30}


def test_metrics_that_follow_each_other_are_joined_by_their_times(tmp_path: Path) -> None:
    path = tmp_path / "range.json"
    path.write_text(matrix(**THROTTLED))
    assert recognise(path.read_bytes())
    rows = read(path).health
    assert len(rows) == 80
    assert all({"sm_clock_hertz", "throttle_reasons"} <= row.keys() for row in rows)
    assert (rows[-1]["device"], rows[-1]["sample_ns"]) == ("GPU-1", (START_S + 585) * 10**9)
    (found,) = diagnose_files([path]).fired
    assert found.kind == "gpu_throttled"
    assert found.summary.startswith("GPU-1 of gpu-07: slowed by heat")


def promtool(value: int) -> str:
    return f'DCGM_FI_DEV_XID_ERRORS{{Hostname="gpu-07", gpu="3", UUID="GPU-3"}} => {value} @[{START_S}.123]\n'


@pytest.mark.parametrize("form", ["vector", "promtool"])
def test_the_last_xid_is_read_from_either_form(tmp_path: Path, form: str) -> None:
    def answer(xid: int) -> str:
        metric = {"__name__": "DCGM_FI_DEV_XID_ERRORS", "gpu": "3", "UUID": "GPU-3", "Hostname": "gpu-07"}
        result = [{"metric": metric, "value": [START_S + 0.123, str(xid)]}]
        vector = json.dumps({"status": "success", "data": {"resultType": "vector", "result": result}})
        return vector if form == "vector" else promtool(xid)

    (found,) = diagnosed(tmp_path, "answer.txt", answer(79)).fired
    assert (found.status, found.cause) == ("suspect", "device_error")
    assert "of gpu-07 may have failed: its last error, at an unknown time, is XID 79" in found.summary
    assert diagnosed(tmp_path, "answer.txt", answer(0)).fired == ()


def test_a_range_of_promtool_lists_its_values_below_each_metric(tmp_path: Path) -> None:
    path = tmp_path / "range.txt"
    values = "".join(f"{60 + n} @[{START_S + 15 * n}]\n" for n in range(3))
    other = 'go_goroutines{job="a"} =>\n5 @[1790000000]\n'
    text = "".join(f'DCGM_FI_DEV_GPU_TEMP{{gpu="{gpu}", UUID="GPU-{gpu}"}} =>\n{values}' for gpu in range(2))
    path.write_text(text + other)
    rows = read(path).health
    assert [(row["device"], row["temperature_celsius"]) for row in rows] == [
        (f"GPU-{gpu}", 60 + n) for n in range(3) for gpu in range(2)
    ]
    assert rows[-1]["sample_ns"] == (START_S + 30) * 10**9


def test_other_answers_are_not_taken_and_a_cut_one_is_named(tmp_path: Path) -> None:
    assert not recognise(matrix(SM_CLOCK=[1.0]).replace("DCGM_FI_DEV_", "node_").encode())
    path = tmp_path / "range.json"
    path.write_text(matrix(SM_CLOCK=[1.0])[:-9])
    with pytest.raises(SourceError, match="cut off or not JSON"):
        read(path)
