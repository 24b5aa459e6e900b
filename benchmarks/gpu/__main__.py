"""Acceptance test on a GPU, some ten minutes. On a CPU or simulated devices it runs the checks that are possible there.

python -m benchmarks.gpu                             # the GPUs of this machine, else the CPU
python -m benchmarks.gpu --device played --json gpu.json --markdown gpu.md
python -m benchmarks.gpu --only budget --only "calls are recorded"
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.gpu import cost, crashes, environment, training
from benchmarks.gpu.check import Check, Place, Result, perform

__all__ = ["CHECKS", "main"]

CHECKS: tuple[Check, ...] = (*environment.CHECKS, *crashes.CHECKS, *cost.CHECKS, *training.CHECKS)


def markdown(results: Sequence[Result]) -> str:
    """The results as a Markdown table."""
    rows = [f"| {one.name} | {one.status} | {one.detail.replace('|', '/')} |" for one in results]
    return "\n".join(["| check | result | details |", "|---|---|---|", *rows]) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks; return 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu", "played"], help="default: cuda if there is a GPU")
    parser.add_argument("--ranks", type=int, help="default: all GPUs, or 2")
    parser.add_argument("--only", action="append", metavar="TEXT", help="checks whose name contains this; repeatable")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table")
    options = parser.parse_args(arguments)
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    num_ranks = options.ranks or (torch.cuda.device_count() if device == "cuda" else 2)
    results = []
    with tempfile.TemporaryDirectory(prefix="gpu-checks-") as folder:
        place = Place(device=device, num_ranks=num_ranks, folder=Path(folder))
        for check in CHECKS:
            if options.only and not any(text in check.name for text in options.only):
                continue
            result = perform(check, place)
            results.append(result)
            print(f"{result.status:8}  {result.name:34} {result.seconds:6.1f} s  {result.detail}", flush=True)
    if options.json:
        found = {"device": device, "ranks": num_ranks, "results": [one.to_json() for one in results]}
        options.json.write_text(json.dumps(found, indent=1, default=str) + "\n")
    if options.markdown:
        options.markdown.write_text(markdown(results))
    counts = {status: sum(one.status == status for one in results) for status in ("pass", "fail", "not here")}
    print(", ".join(f"{number} {status}" for status, number in counts.items()))
    return int(counts["fail"] > 0)


if __name__ == "__main__":
    sys.exit(main())
