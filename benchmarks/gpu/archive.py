"""Pack the source tree, and the wheels that a PyTorch image lacks, for a machine without access to a registry.

python -m benchmarks.gpu.archive gpu.tar.gz --python 3.12
tar xzf gpu.tar.gz && cd rankscope && bash on-gpu.sh 12      # on the machine: twelve minutes, results in recorded/
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

__all__ = ["main"]

ROOT = Path(__file__).resolve().parents[2]
LACKING = (
    "duckdb",
    "pydantic",
    "pydantic-core",
    "annotated-types",
    "typing-inspection",
    "plotly",
    "prometheus-client",
    "typer",
    "nvidia-ml-py",
    "narwhals",
)
"""Packages that PyTorch images lack. They have numpy, jinja2, rich and pyarrow, which Hugging Face's libraries need."""
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
SCRIPT = """#!/bin/bash
# bash on-gpu.sh MINUTES: recordings, verdicts and MFU into recorded/
set -o pipefail
python3 -m pip install -q --no-index --no-deps --target .site wheels/*.whl || exit
export PYTHONPATH=$PWD/.site:$PWD PYTHONUNBUFFERED=1
python3 -m benchmarks.gpu.record --out recorded --minutes "${1:-12}"
python3 -m benchmarks.cost.mfu | tee recorded/mfu.json
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the archive."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.archive", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("archive", type=Path, help="tar.gz to write")
    parser.add_argument("--python", default="3.12", choices=["3.11", "3.12", "3.13"], help="Python of the machine")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="gpu-archive-") as name:
        wheels = Path(name)
        words = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", str(wheels)]
        words += ["--python-version", options.python, "--implementation", "cp"]
        words += [word for platform in PLATFORMS for word in ("--platform", platform)]
        words += ["-c", str(ROOT / "constraints.txt"), *LACKING]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"pip download: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
            return 1
        script = wheels / "on-gpu.sh"
        script.write_text(SCRIPT)
        tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        with tarfile.open(options.archive, "w:gz") as archive:
            for path in filter(None, tracked.split("\0")):
                if (ROOT / path).exists() and not path.startswith("tests/recorded/"):
                    archive.add(ROOT / path, f"rankscope/{path}")
            archive.add(script, "rankscope/on-gpu.sh")
            for wheel in sorted(wheels.glob("*.whl")):
                archive.add(wheel, f"rankscope/wheels/{wheel.name}")
    print(f"{options.archive}: {options.archive.stat().st_size / 2**20:.0f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
