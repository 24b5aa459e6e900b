"""The trainer on the device: MFU of an 8 B slice, ten faults, memory compared with the plan."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from benchmarks.gpu.check import ROOT, Check, Place, Result, failed, not_here, passed, run_script

__all__ = ["CHECKS"]

FAULTS = ("kill", "exception", "hang", "stop", "nan_grad", "slow_compute", "slow_data", "wrong_size", "bit_flip", "oom")
FEW_FAULTS = ("exception", "nan_grad")
"""The most informative short drills, for a shared CPU."""
PLAYED_FAULTS = (
    "host_stall", "loader_stall", "device_stall", "stuck_call", "dead_link", "mismatch_size", "slow_gpu", "slow_link",
    "dead_gpu", "ecc_error",
)  # fmt: skip
MAX_PEAK_ERROR = 0.10

_SLICE = ["--dim", "4096", "--layers", "4", "--heads", "32", "--vocab", "128256", "--seq-len", "2048", "--batch", "2"]
_PEAK = """
import json
from trainer.config.load import load_config
from trainer.layout.resolve import resolve
from trainer.plan.footprint.memory import rank_memory
from trainer.training.build import build
start()
sizes = json.loads(os.environ["CHECK_SIZES"])
config = load_config(None, [*sizes, f"train.device={DEVICE.type}", "parallel.dp_shard=-1", "parallel.dp_replicate=1"])
plan = resolve(config, dist.get_world_size())
planned = rank_memory(config, plan, pp_rank=0, device=DEVICE.type)
if ON_GPU:
    training = build(config, plan, DEVICE)
    for step in range(1, 4):
        training.forward_backward(training.batch(step - 1))
        training.step(step)
    torch.cuda.synchronize()
peak = torch.cuda.max_memory_allocated() if ON_GPU else 0
if dist.get_rank() == 0:
    print("PEAK " + json.dumps({"planned": planned.allocated, "peak": peak}), flush=True)
dist.destroy_process_group()
"""


def _slice(place: Place) -> Result:
    """MFU of four layers of an 8 B model, sharded over all GPUs."""
    if not place.has_gpu:
        return not_here("needs a GPU")
    file = place.folder / "slice.json"
    words = [sys.executable, "-m", "benchmarks.cost.throughput", "--quick", "--kind", "fsdp", "--precision", "bf16"]
    done = subprocess.run(
        [*words, *_SLICE, "--json", str(file)], cwd=ROOT, capture_output=True, text=True, timeout=400, check=False
    )  # fmt: skip
    if done.returncode:
        return failed(done.stderr.strip()[-160:] or "no message")
    row = json.loads(file.read_text())["loops"][0]
    mfu = row.get("ours_mfu_ratio")
    return failed("the peak of this device is unknown") if mfu is None else passed(f"MFU {mfu:.1%}", row=row)


def _drill(place: Place) -> Result:
    if place.device == "played":
        return _played_faults()
    faults = FAULTS if place.has_gpu else FEW_FAULTS
    words = [sys.executable, "-m", "rankscope", "drill", str(ROOT / "examples" / "gpt-demo.toml"), "--format", "json"]
    words += ["--faults", ",".join(faults), "--nproc-per-node", str(place.num_ranks)]
    words += ["--set", f"train.device={'cuda' if place.has_gpu else 'cpu'}", "--set", "parallel.dp_shard=-1"]
    limit_s = 580 if place.has_gpu else 1200  # a machine without a GPU is assumed to be shared
    done = subprocess.run(words, cwd=place.folder, capture_output=True, text=True, timeout=limit_s, check=False)
    try:
        report = json.loads(done.stdout[done.stdout.index("{") :])
    except ValueError:
        return failed(done.stderr.strip()[-160:] or f"exit code {done.returncode}")
    text = f"{len(faults)} faults, exit code {done.returncode}"
    return passed(text, report=report) if not done.returncode else failed(text, report=report)


def _played_faults() -> Result:
    """Check on virtual devices that each fault has its finding."""
    words = [sys.executable, "-m", "benchmarks.accuracy.played_nccl", "--seeds", "1", "--clean", "1", "--layout", "ddp"]
    words += [word for fault in PLAYED_FAULTS for word in ("--fault", fault)]
    words += ["--jobs", str(min(4, os.cpu_count() or 1))]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=1200, check=False)
    wrong = [line for line in done.stdout.splitlines() if " WRONG" in line]
    if done.returncode:
        return failed(f"{len(wrong)} of {len(PLAYED_FAULTS) + 1} runs judged wrongly", wrong=wrong)
    return passed(f"{len(PLAYED_FAULTS)} faults of virtual devices named; no finding in a clean run")


def _plan(place: Place) -> Result:
    """Compare the planned peak with `max_memory_allocated`."""
    sizes = ["model.dim=1024", "model.num_layers=8", "data.seq_len=512", "train.global_batch_size=8"]
    os.environ["CHECK_SIZES"] = json.dumps(sizes)
    done = run_script(place, "plan", _PEAK, ranks=1 if not place.has_gpu else None, is_attached=False)
    line = next((line for line in done.output.splitlines() if "PEAK " in line), "")
    if done.code or not line:
        return failed(done.last_line)
    found = json.loads(line[line.index("{") :])
    if not place.has_gpu:
        return not_here(f"planned {found['planned'] / 2**20:.0f} MiB; no measured peak on a CPU")
    error = found["planned"] / found["peak"] - 1
    text = f"planned {error:+.1%} of {found['peak'] / 2**20:.0f} MiB"
    return passed(text, **found) if abs(error) <= MAX_PEAK_ERROR else failed(text, **found)


CHECKS = (
    Check(name="MFU of an 8 B slice", run=_slice),
    Check(name="drill of ten faults", run=_drill),
    Check(name="planned and measured peak", run=_plan),
)
