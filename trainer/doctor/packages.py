"""Checks of the packages: PyTorch with its backends, and the extras.

    for check in package_checks(): ...

PyTorch is imported in a separate process, because an installation with incompatible libraries may kill the importing
process, and `rankscope analyze` works without torch.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import re
import shutil
import subprocess
import sys

from trainer.doctor.check import Check

__all__ = ["package_checks", "torch_checks"]

TORCH_S = 120.0
OLDEST_TORCH = (2, 11)
_TORCH = """
import json, torch, torch.distributed as dist
gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
print(json.dumps({
    "version": torch.__version__, "cuda": torch.version.cuda, "hip": getattr(torch.version, "hip", None), "gpus": gpus,
    "distributed": dist.is_available(),
    "backends": [b for b in ("nccl", "gloo", "mpi", "ucc") if dist.is_available() and dist.is_backend_available(b)],
}))
"""
EXTRAS = {
    "streamlit": ("dashboard", "the dashboard in the browser"),
    "opentelemetry-sdk": ("otel", "traces and metrics over OTLP"),
    "torchao": ("fp8", "matrix products in fp8 (train.float8)"),
    "py-spy": ("stacks", "stacks of processes that hang (rankscope stacks)"),
}
"""Distribution -> (extra that installs it, purpose)."""


def package_checks() -> list[Check]:
    """Python, PyTorch and the extras."""
    core = Check(name="python", status="ok", found=f"{platform.python_version()} at {sys.executable}")
    return [core, *torch_checks(), *(_extra(name, *extra) for name, extra in EXTRAS.items())]


def torch_checks() -> list[Check]:
    """PyTorch, the accelerator that it was built for, and the backends for communication."""
    install = "pip install 'rankscope[train]' (analyze, report and dashboard do not need it)"
    if _version("torch") is None:
        return [Check(name="torch", status="note", found="not installed: no training on this machine", remedy=install)]
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _TORCH], capture_output=True, text=True, timeout=TORCH_S, check=False
        )
        facts = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {}
        problem = (
            ""
            if facts
            else (done.stderr.strip().splitlines() or [f"import failed with exit code {done.returncode}"])[-1]
        )
    except subprocess.TimeoutExpired:
        facts, problem = {}, f"importing it takes more than {TORCH_S:.0f} s"
    except (IndexError, ValueError) as error:
        facts, problem = {}, f"no version reported: {error}"
    if not facts:
        remedy = "reinstall it for this driver and Python: https://pytorch.org/get-started/locally"
        return [Check(name="torch", status="failed", found=problem[:300], remedy=remedy)]
    return [_torch(facts), _accelerator(facts), _backends(facts)]


def _torch(facts: dict[str, object]) -> Check:
    version = str(facts["version"])
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if numbers < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        return Check(name="torch", status="failed", found=version, remedy=f"pip install 'torch>={oldest}'")
    return Check(name="torch", status="ok", found=version)


def _accelerator(facts: dict[str, object]) -> Check:
    built_for = f"CUDA {facts['cuda']}" if facts["cuda"] else f"ROCm {facts['hip']}" if facts["hip"] else "the CPU only"
    gpus = facts["gpus"]
    if isinstance(gpus, list) and gpus:
        return Check(name="torch device", status="ok", found=f"{len(gpus)} x {gpus[0]}, built for {built_for}")
    if facts["cuda"] or facts["hip"]:
        found = f"built for {built_for}, but no GPU is visible"
        return Check(name="torch device", status="warning", found=found, remedy="check nvidia-smi and the driver")
    return Check(name="torch device", status="note", found=f"built for {built_for}: ranks train over gloo")


def _backends(facts: dict[str, object]) -> Check:
    found = facts["backends"]
    backends = found if isinstance(found, list) else []
    if not backends:
        remedy = "install a build of PyTorch with torch.distributed"
        return Check(name="torch backends", status="failed", found="no backend for communication", remedy=remedy)
    if facts["gpus"] and "nccl" not in backends:
        remedy = "install a CUDA build of PyTorch"
        return Check(name="torch backends", status="warning", found=f"{', '.join(backends)}, no nccl", remedy=remedy)
    return Check(name="torch backends", status="ok", found=", ".join(backends))


def _extra(name: str, extra: str, purpose: str) -> Check:
    version = _version(name) or ("on the path" if name == "py-spy" and shutil.which(name) else None)
    if version is None:
        remedy = f"pip install 'rankscope[{extra}]'"
        return Check(name=name, status="note", found=f"not installed: no {purpose}", remedy=remedy)
    return Check(name=name, status="ok", found=version)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
