"""Cost of the probes per step: kernels, copies, events and synchronisations (by torch.profiler), and time."""

from __future__ import annotations

import json
import subprocess
import sys

from benchmarks.gpu.check import ROOT, Check, Place, Result, failed, not_here, passed, run_script

__all__ = ["CHECKS"]

MAX_EVENTS, MAX_COPIES, MAX_KERNELS = 10, 2, 1
"""Allowed additions per step under DDP without clipping. The copies are the loss and the norm of the gradient that
reaches the first layer; the kernel computes that norm."""
MAX_RATIO = 1.01

_COUNT = """
import json, sys
import rankscope
from torch.profiler import ProfilerActivity, profile
start()
model = torch.nn.parallel.DistributedDataParallel(
    torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(8)]).to(DEVICE))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = torch.ones(32, 256, device=DEVICE)
def step():
    loss = model(data).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
def counted(steps=10):
    for _ in range(5):
        step()
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if ON_GPU else [])
    with profile(activities=activities) as profiler:
        for _ in range(steps):
            step()
    found = {"kernels": 0, "copies": 0, "events": 0, "syncs": 0}
    for event in profiler.events():
        name, on_device = event.name, "CUDA" in str(event.device_type)
        if on_device and "emcpy" in name: found["copies"] += 1
        elif on_device and "emset" not in name: found["kernels"] += 1
        elif name.startswith("cudaEventRecord"): found["events"] += 1
        elif "Synchronize" in name: found["syncs"] += 1
        elif not ON_GPU and name.startswith("aten::"):
            found["copies" if name in ("aten::copy_", "aten::_local_scalar_dense") else "kernels"] += 1
    return {key: value / steps for key, value in found.items()}
bare = counted()
attached = rankscope.attach(model, optimizer)
ours = counted()
if dist.get_rank() == 0:
    print("COUNTED " + json.dumps({"bare": bare, "ours": ours}), flush=True)
attached.detach()
dist.destroy_process_group()
"""
_SYNC = """
import rankscope
start()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64).to(DEVICE))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
rankscope.attach(model, optimizer)
data = torch.ones(16, 64, device=DEVICE)
def step():
    model(data).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
for _ in range(5):
    step()
torch.cuda.set_sync_debug_mode("error")
for _ in range(20):
    step()
torch.cuda.set_sync_debug_mode("default")
dist.destroy_process_group()
"""


def _budget(place: Place) -> Result:
    done = run_script(place, "budget", _COUNT, is_attached=False)
    line = next((line for line in done.output.splitlines() if "COUNTED " in line), "")
    if done.code or not line:
        return failed(done.last_line)
    counts = json.loads(line[line.index("{") :])
    more = {key: round(counts["ours"][key] - counts["bare"][key], 2) for key in counts["bare"]}
    text = ", ".join(f"{value:+g} {key}" for key, value in more.items()) + " a step"
    if not place.has_gpu:
        return passed(f"{text} (CPU operators; on a CPU every buffer is checked)", **counts)
    good = (
        more["kernels"] <= MAX_KERNELS
        and more["copies"] <= MAX_COPIES
        and more["events"] <= MAX_EVENTS
        and more["syncs"] <= 0
    )
    return passed(text, **counts) if good else failed(text, **counts)


def _no_synchronisation(place: Place) -> Result:
    if not place.has_gpu:
        return not_here("needs a GPU")
    done = run_script(place, "sync", _SYNC, is_attached=False)
    return passed("20 attached steps under set_sync_debug_mode('error')") if not done.code else failed(done.last_line)


def _alternating(place: Place) -> Result:
    """Time steps with and without probes, alternating in the same processes."""
    file = place.folder / "throughput.json"
    sizes = ["--dim", "768", "--layers", "12", "--heads", "12", "--vocab", "50304", "--seq-len", "1024",
             "--batch", "16"]  # fmt: skip
    words = [sys.executable, "-m", "benchmarks.cost.throughput", "--quick", "--kind", "ddp", "--json", str(file)]
    words += ["--precision", "bf16", *sizes] if place.has_gpu else ["--ranks", "2", "--blocks", "4"]
    limit_s = 300 if place.has_gpu else 900
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=limit_s, check=False)
    if done.returncode:
        return failed(done.stderr.strip()[-160:] or "no message")
    row = json.loads(file.read_text())["loops"][0]
    ratio = 1 / row["ratio"] if row.get("ratio") else float("nan")
    text = f"a step takes {ratio:.3f}x as long as a bare one; {row.get('ours_tokens_per_s', 0):.0f} tokens/s"
    mfu = row.get("ours_mfu_ratio")
    text += f", MFU {100 * mfu:.1f} %" if mfu else ""
    if not place.has_gpu:
        return passed(f"{text} (only shows that it runs; times on a busy CPU are not judged)", row=row)
    return passed(text, row=row) if ratio <= MAX_RATIO else failed(text, row=row)


CHECKS = (
    Check(name="kernels, copies, events, syncs", run=_budget),
    Check(name="no synchronisation", run=_no_synchronisation),
    Check(name="probe cost and MFU, 124 M", run=_alternating),
)
