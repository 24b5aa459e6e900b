"""The table that `nvidia-smi` prints without options, of two drivers, alone and at the head of a job's log."""

from __future__ import annotations

from pathlib import Path

import pytest

from analyzers.evidence.diagnose_files import diagnose_files
from store.readers.programs.nvidia_smi_table import read, recognise

RULE = "+-----------------------------------------+----------------------+----------------------+\n"
HEAD = """\
Thu Nov 26 10:00:00 2026
+---------------------------------------------------------------------------------------+
| NVIDIA-SMI {driver}             Driver Version: {driver}   CUDA Version: 12.2     |
|-----------------------------------------+----------------------+----------------------+
| GPU  Name                 Persistence-M | Bus-Id        Disp.A | Volatile Uncorr. ECC |
| Fan  Temp   Perf          Pwr:Usage/Cap |         Memory-Usage | GPU-Util  Compute M. |
|                                         |                      |               MIG M. |
|=========================================+======================+======================|
"""
GPU = """\
|   {index}  NVIDIA H100 80GB HBM3          On  | 00000000:1{index}:00.0 Off |                    0 |
| N/A   3{index}C    P0             69W / 700W |      0MiB / 81559MiB |     9{index}%      Default |
|                                         |                      |             Disabled |
"""
OLD_GPU = """\
|   {index}  Tesla V100-SXM2...  On   | 00000000:1{index}:00.0 Off |                    0 |
| 40%   3{index}C    P0    69W / 300W |      0MiB / 32510MiB |     9{index}%      Default |
"""
LOST = """\
|   {index}  ERR!                           On   | 00000000:1{index}:00.0 Off |                 ERR! |
|ERR!  ERR! ERR!             ERR! / ERR! |    GPU is lost       |    ERR!         ERR! |
|                                         |                      |                 ERR! |
"""
END = "| Processes:                                      |\n|  No running processes found                     |\n"


def table(*gpus: str, driver: str = "535.129.03") -> str:
    return HEAD.format(driver=driver) + "".join(gpu.format(index=n) + RULE for n, gpu in enumerate(gpus)) + END


@pytest.mark.parametrize("gpu", [GPU, OLD_GPU])
def test_a_lost_gpu_is_named_by_its_bus_and_host(tmp_path: Path, gpu: str) -> None:
    path = tmp_path / "nvidia-smi-gpu-03.txt"
    path.write_text(table(gpu, gpu, LOST, gpu))
    (lost,) = diagnose_files([path]).fired
    assert (lost.kind, lost.cause) == ("rank_lost", "device_error")
    assert lost.summary == "GPU 00000000:12:00.0 of gpu-03 does not answer its driver."
    rows = read(path).health
    assert [(row["device"], row["temperature_celsius"]) for row in rows] == [
        ("GPU 0", 30),
        ("GPU 1", 31),
        ("GPU 3", 33),
    ]
    assert rows[1]["gpu_utilization_ratio"] == pytest.approx(0.91)
    path.write_text(table(gpu, gpu))
    assert diagnose_files([path]).fired == ()


def test_a_log_that_begins_with_the_table_is_a_log() -> None:
    text = table(GPU, GPU) + "".join(f"step: {n} loss: 2.1\n" for n in range(9))
    assert not recognise(text.encode())
    assert recognise(("$ nvidia-smi\n" + table(GPU) + table(GPU)).encode())
