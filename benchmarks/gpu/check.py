"""A check, where it runs, and its result; scripts that are started as ranks.

def torch_is_there(place: Place) -> Result:
    return passed(f"torch {torch.__version__}")
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

__all__ = ["Check", "Place", "Result", "Script", "failed", "not_here", "passed", "perform", "run_script"]

ROOT = Path(__file__).resolve().parents[2]
ONE_GPU = Path(__file__).resolve().with_name("one_gpu")
"""With this folder on the path, several ranks can share a GPU."""
Status = Literal["pass", "fail", "not here"]
Device = Literal["cuda", "cpu", "played"]
PREAMBLE = """
import os
import torch
import torch.distributed as dist

ON_GPU = os.environ["CHECK_DEVICE"] == "cuda"
LOCAL_RANK = int(os.environ["LOCAL_RANK"])
DEVICE = torch.device("cuda", LOCAL_RANK % torch.cuda.device_count()) if ON_GPU else torch.device("cpu")
if ON_GPU:
    torch.cuda.set_device(DEVICE)
torch.set_num_threads(1)


def start():
    dist.init_process_group("nccl" if ON_GPU else "gloo", device_id=DEVICE if ON_GPU else None)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """`cuda`: the GPUs of this machine; `cpu`: gloo; `played`: virtual devices for the checks that support them, else
    as `cpu`.
    """

    device: Device
    num_ranks: int
    folder: Path

    @property
    def has_gpu(self) -> bool:
        return self.device == "cuda"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """`detail` is one line; `figures` are for the JSON."""

    status: Status
    detail: str
    figures: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One row of the table."""

    name: str
    run: Callable[[Place], Result]


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """Result of a script."""

    code: int
    output: str
    run_dir: Path

    @property
    def last_line(self) -> str:
        """Newest line of its output."""
        lines = [line for line in self.output.strip().splitlines() if line.strip()]
        return lines[-1][:160] if lines else "no output"


def passed(detail: str, **figures: Any) -> Result:
    """Result of a passed check."""
    return Result(status="pass", detail=detail, figures=figures)


def failed(detail: str, **figures: Any) -> Result:
    """Result of a failed check."""
    return Result(status="fail", detail=detail, figures=figures)


def not_here(detail: str) -> Result:
    """Result of a check that this machine cannot run."""
    return Result(status="not here", detail=detail)


def perform(check: Check, place: Place) -> Result:
    """Run a check; an exception is a failure."""
    start = time.perf_counter()
    try:
        result = check.run(place)
    except Exception as error:
        result = failed(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200])
    return replace(result, name=check.name, seconds=round(time.perf_counter() - start, 1))


def run_script(
    place: Place, name: str, body: str, *, ranks: int | None = None, is_attached: bool = True, limit_s: float = 240.0
) -> Script:
    """Start a script as ranks under `rankscope run`, or under torchrun if it is not attached, and wait for its end."""
    folder = place.folder / name
    folder.mkdir()
    script = folder / "script.py"
    script.write_text(PREAMBLE + textwrap.dedent(body))
    count = ["--nproc-per-node", str(ranks or place.num_ranks)]
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", *count, str(script)]
    if is_attached:
        words = [sys.executable, "-m", "rankscope", "run", "--run-dir", str(folder / "run"), *count, str(script)]
    environment = os.environ | {
        "CHECK_DEVICE": "cuda" if place.has_gpu else "cpu",
        "PYTHONPATH": os.pathsep.join([str(ONE_GPU), str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "RANKSCOPE_FAIL_LOUD": "1",
        "OMP_NUM_THREADS": "1",
    }
    try:
        done = subprocess.run(
            words, env=environment, cwd=folder, capture_output=True, text=True, timeout=limit_s, check=False
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Script(code=-1, output=f"did not end within {limit_s:.0f} s", run_dir=folder / "run")
    return Script(code=done.returncode, output=done.stdout + done.stderr, run_dir=folder / "run")
