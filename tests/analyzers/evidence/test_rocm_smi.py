"""What `rocm-smi` prints, of two versions: readings of GPUs, and errors that RAS counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from analyzers.evidence.diagnose_files import diagnose_files
from store.readers.programs.rocm_smi import read, recognise

TITLE = "\n============================ ROCm System Management Interface ============================\n"
AMD_TABLE = """\
====================================== Concise Info ======================================
GPU  Temp (DieEdge)  AvgPwr  SCLK     MCLK     Fan  Perf  PwrCap  VRAM%  GPU%
0    41.0c           402.0W  1602Mhz  1200Mhz  0%   auto  560.0W   81%   97%
1    39.0c           398.0W  1590Mhz  1200Mhz  0%   auto  560.0W   81%   95%
==========================================================================================
"""
RAS = """\
======================================== RAS Info ========================================
GPU[0]: \tRAS INFO
         Block       Status    Correctable Error  Uncorrectable Error
           UMC      ENABLED                    0                    0
           GFX      ENABLED                    4                    0
__________________________________________________________________________________________
GPU[1]: \tRAS INFO
         Block       Status    Correctable Error  Uncorrectable Error
           UMC      ENABLED                    2                  {umc}
           GFX      ENABLED                    0                  {gfx}
__________________________________________________________________________________________
==========================================================================================
"""
END = "================================== End of ROCm SMI Log ===================================\n"


def written(folder: Path, text: str) -> Path:
    path = folder / "rocm-smi-gpu-04.txt"
    path.write_text(TITLE + text + END, encoding="utf-8")
    return path


def test_readings_of_the_table_and_of_single_values(tmp_path: Path) -> None:
    single = "GPU[2]\t\t: Temperature (Sensor junction) (C): 77.0\nGPU[2]\t\t: GPU use (%): 12\n"
    path = written(tmp_path, AMD_TABLE + single)
    assert recognise(path.read_bytes())
    first, second, third = read(path).health
    assert (first["node"], first["device"], first["temperature_celsius"]) == ("gpu-04", "GPU 0", 41)
    assert (first["power_watts"], first["sm_clock_hertz"]) == (402, 1.602e9)
    assert second["gpu_utilization_ratio"] == pytest.approx(0.95)
    assert (third["device"], third["temperature_celsius"]) == ("GPU 2", 77)
    assert diagnose_files([path]).fired == ()


@pytest.mark.parametrize(
    ("umc", "gfx", "kind", "text"),
    [
        (3, 0, "gpu_memory_errors", "GPU 1 of gpu-04: 3 uncorrectable ECC errors"),
        (0, 1, "rank_lost", "Rocm-smi counts 1 uncorrectable error in block GFX of GPU 1 of gpu-04"),
    ],
)
def test_uncorrectable_errors_are_told_by_gpu_and_corrected_ones_are_not(
    tmp_path: Path, umc: int, gfx: int, kind: str, text: str
) -> None:
    (found,) = diagnose_files([written(tmp_path, AMD_TABLE + RAS.format(umc=umc, gfx=gfx))]).fired
    assert (found.kind, found.ranks) == (kind, ())
    assert text.casefold() in found.summary.casefold()
    assert diagnose_files([written(tmp_path, AMD_TABLE + RAS.format(umc=0, gfx=0))]).fired == ()


def test_a_jobs_log_below_the_table_is_a_log() -> None:
    steps = "".join(f"step {number} loss {3 - number / 10:.2f}\n" for number in range(6))
    assert not recognise((TITLE + AMD_TABLE + END + steps).encode())
