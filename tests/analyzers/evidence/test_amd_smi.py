"""What `amd-smi metric` prints as text and JSON, of several versions of ROCm, and `rocm-smi --json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from analyzers.evidence.diagnose_files import diagnose_files
from store.readers.programs import amd_smi, rocm_smi
from store.readers.untrusted.external_files import SourceError
from tests.analyzers.evidence.written import diagnosed

TEXT = """\
GPU: 3
    USAGE:
        GFX_ACTIVITY: 97 %
        UMC_ACTIVITY: 40 %
    POWER:
        SOCKET_POWER: 640 W
        THROTTLE_STATUS: N/A
    CLOCK:
        GFX_0:
            CLK: 2100 MHz
            MAX_CLK: 2105 MHz
        MEM_0:
            CLK: 900 MHz
    TEMPERATURE:
        EDGE: N/A
        HOTSPOT: 66 C
    ECC:
        TOTAL_CORRECTABLE_COUNT: 9
        TOTAL_UNCORRECTABLE_COUNT: {total}
    ECC_BLOCKS:
        UMC:
            CORRECTABLE_COUNT: 5
            UNCORRECTABLE_COUNT: {umc}
        GFX:
            CORRECTABLE_COUNT: 4
            UNCORRECTABLE_COUNT: {gfx}

GPU: 4
    USAGE:
        GFX_ACTIVITY: N/A
    TEMPERATURE:
        HOTSPOT: 60 C
"""


def unit(value: float, name: str) -> dict[str, Any]:
    return {"value": value, "unit": name}


def gpu(number: int, *, errors: int = 0, **more: Any) -> dict[str, Any]:
    return {
        "gpu": number,
        "usage": {"gfx_activity": unit(97, "%"), "umc_activity": "N/A"},
        "power": {"socket_power": unit(640, "W")},
        "clock": {"gfx_0": {"clk": unit(2100, "MHz")}},
        "temperature": {"edge": "N/A", "hotspot": unit(66, "C")},
        "ecc": {"total_correctable_count": 0, "total_uncorrectable_count": errors},
        **more,
    }


def test_readings_of_the_text(tmp_path: Path) -> None:
    path = tmp_path / "amd-smi-gpu-04.txt"
    path.write_text(TEXT.format(total=0, umc=0, gfx=0))
    assert amd_smi.recognise(path.read_bytes())
    first, second = amd_smi.read(path).health
    assert (first["node"], first["device"], first["sample_ns"]) == ("gpu-04", "GPU 3", 10**9)
    assert (first["temperature_celsius"], first["power_watts"], first["sm_clock_hertz"]) == (66, 640, 2.1e9)
    assert (first["gpu_utilization_ratio"], first["memory_bandwidth_ratio"]) == pytest.approx((0.97, 0.4))
    assert (first["ecc_corrected_total"], first["ecc_uncorrected_total"]) == (5, 0)
    assert (second["device"], second["temperature_celsius"]) == ("GPU 4", 60)
    assert "gpu_utilization_ratio" not in second
    assert diagnose_files([path]).fired == ()


@pytest.mark.parametrize("document", [{"gpu_data": [gpu(0), gpu(3)]}, [gpu(0), gpu(3)]])
def test_the_json_of_each_version_has_the_same_readings(tmp_path: Path, document: Any) -> None:
    path = tmp_path / "amd.json"
    path.write_text(json.dumps(document, indent=4))
    assert amd_smi.recognise(path.read_bytes())
    rows = amd_smi.read(path).health
    assert [row["device"] for row in rows] == ["GPU 0", "GPU 3"]
    assert (rows[1]["power_watts"], rows[1]["ecc_uncorrected_total"]) == (640, 0)


def test_errors_of_the_memory_and_of_other_blocks_are_told_apart(tmp_path: Path) -> None:
    (memory,) = diagnosed(tmp_path, "amd-smi.txt", TEXT.format(total=2, umc=2, gfx=0)).fired
    assert memory.kind == "gpu_memory_errors"
    assert "GPU 3 of an unnamed host: 2 uncorrectable ECC errors" in memory.summary
    (other,) = diagnosed(tmp_path, "amd-smi.txt", TEXT.format(total=1, umc=0, gfx=1)).fired
    assert "amd-smi counts 1 uncorrectable error in block GFX of GPU 3" in other.summary.replace("Amd", "amd")
    (total,) = diagnosed(tmp_path, "amd.json", json.dumps({"gpu_data": [gpu(0), gpu(3, errors=4)]})).fired
    assert "GPU 3 of an unnamed host: 4 uncorrectable ECC errors" in total.summary


def test_other_commands_and_damaged_json_are_not_taken_for_metrics(tmp_path: Path) -> None:
    assert not amd_smi.recognise(b"GPU: 0\n    BDF: 0000:03:00.0\n    UUID: a\n")
    assert not amd_smi.recognise(b'[{"gpu": 0, "process_list": []}]')
    path = tmp_path / "amd.json"
    path.write_text(json.dumps({"gpu_data": [gpu(0)]})[:-20])
    with pytest.raises(SourceError, match="cut off or not JSON"):
        amd_smi.read(path)


CARD = {"Temperature (Sensor junction) (C)": ["77.0"], "Average Graphics Package Power (W)": "350.0",
        "GPU use (%)": "12", "sclk clock speed:": "(2100Mhz)", "VRAM Total Memory (B)": "68719476736"}  # fmt: skip


def test_the_json_of_rocm_smi_is_read_as_its_text(tmp_path: Path) -> None:
    path = tmp_path / "rocm-smi-gpu-04.json"
    outputs = ({"card0": CARD, "card:11": CARD, "system": {"Driver version": "6.8"}}, {"card0": CARD})
    path.write_text("\n".join(map(json.dumps, outputs)))
    assert rocm_smi.recognise(path.read_bytes())
    rows = rocm_smi.read(path).health
    assert [(row["device"], row["sample_ns"]) for row in rows] == [("GPU 0", 10**9), ("GPU 11", 10**9),
                                                                   ("GPU 0", 2 * 10**9)]  # fmt: skip
    assert (rows[1]["node"], rows[1]["temperature_celsius"], rows[1]["power_watts"]) == ("gpu-04", 77, 350)
    assert rows[1]["sm_clock_hertz"] == 2.1e9
    assert diagnose_files([path]).fired == ()
    path.write_text(json.dumps(outputs[0])[:-20])
    with pytest.raises(SourceError, match="cut off or not JSON"):
        rocm_smi.read(path)
