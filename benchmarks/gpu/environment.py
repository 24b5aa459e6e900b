"""Environment of the machine: versions, devices, the plugin, readings of NVML."""

from __future__ import annotations

import platform
import subprocess
import sys

import torch

from analyzers.health.utilisation import peak_flops_per_s
from benchmarks.gpu.check import Check, Place, Result, failed, not_here, passed, run_script
from probes.collectives.nccl_plugin.build import BuildError, library
from probes.tape.rundir import RunDir
from store import Store
from watch.health.nvml import Nvml, has_driver

__all__ = ["CHECKS"]


def _versions(place: Place) -> Result:
    found = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda or "none"}
    if place.has_gpu:
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        found["device"] = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
        found["capability"] = ".".join(map(str, torch.cuda.get_device_capability()))
    return passed(", ".join(f"{name} {value}" for name, value in found.items()), **found)


def _peak(place: Place) -> Result:
    if not place.has_gpu:
        return not_here("no GPU")
    name = torch.cuda.get_device_name()
    peak = peak_flops_per_s(name, "bf16")
    return passed(f"{name}: {peak / 1e12:.0f} TFLOP/s in bf16") if peak else failed(f"no MFU: {name} has no known peak")


def _plugin_is_built(place: Place) -> Result:
    try:
        return passed(f"{library().name}")
    except BuildError as error:
        return failed(str(error))


_CALLS = """
start()
value = torch.ones(1 << 20, device=DEVICE)
rows = torch.ones(dist.get_world_size() << 10, device=DEVICE)
for _ in range(20):
    dist.all_reduce(value)
    dist.all_gather_into_tensor(torch.empty(rows.numel() * dist.get_world_size(), device=DEVICE), rows)
if ON_GPU:
    torch.cuda.synchronize()
dist.barrier()
dist.destroy_process_group()
"""


def _calls_are_recorded(place: Place) -> Result:
    """Check that 20 all-reduces are recorded: complete, with a known name, and under their group's label."""
    done = run_script(place, "calls", _CALLS)
    if done.code:
        return failed(done.last_line)
    with Store.open(RunDir.open(done.run_dir)) as store:
        ((num, labels),) = store.rows(
            "SELECT count(*), string_agg(DISTINCT process_group) FROM collectives "
            "WHERE op = 'all_reduce' AND end_ns IS NOT NULL"
        )
        ((by_plugin, unfinished, unnamed, version),) = store.rows(
            "SELECT count(*), count(*) FILTER (kernel_end_ns IS NULL), count(*) FILTER (function LIKE '?%'), "
            "(SELECT max(interface_version) FROM nccl_communicators) FROM nccl_calls"
        )
    figures = {
        "all_reduces": num,
        "groups": labels,
        "nccl_calls": by_plugin,
        "unfinished": unfinished,
        "interface": version,
    }
    text = f"{num} all-reduces of {20 * place.num_ranks} in {labels}"
    is_right = num >= 20 * place.num_ranks
    if place.has_gpu:
        text += (
            f"; {by_plugin} calls by the plugin (interface {version}), {unfinished} without an end, {unnamed} unnamed"
        )
        is_right = is_right and by_plugin > 0 and not unfinished and not unnamed
    return passed(text, **figures) if is_right else failed(text, **figures)


def _other_programs(place: Place) -> Result:
    """Run a program that is not a Python script as ranks."""
    words = [
        sys.executable,
        "-m",
        "rankscope",
        "run",
        "--run-dir",
        str(place.folder / "other"),
        "--nproc-per-node",
        "1",
    ]
    done = subprocess.run([*words, "--no-python", "true"], capture_output=True, text=True, timeout=120, check=False)
    return passed("rankscope run --no-python") if not done.returncode else failed(done.stderr[-160:])


def _readings(place: Place) -> Result:
    if not has_driver():
        return not_here("no NVIDIA driver")
    readings = Nvml().read()
    known = sorted(readings[0].values)
    needed = {"temperature_celsius", "power_watts", "sm_clock_hertz", "gpu_utilization_ratio", "memory_used_bytes"}
    text = f"{len(readings)} devices, {len(known)} values each"
    return passed(text, columns=known) if needed <= set(known) else failed(f"{text}; not {sorted(needed - set(known))}")


CHECKS = (
    Check(name="versions", run=_versions),
    Check(name="peak of the device", run=_peak),
    Check(name="plugin is built", run=_plugin_is_built),
    Check(name="calls are recorded", run=_calls_are_recorded),
    Check(name="programs without Python", run=_other_programs),
    Check(name="readings of NVML", run=_readings),
)
