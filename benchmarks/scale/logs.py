"""Time and memory for reading one large log: a gigabyte from a job of many ranks, with the cause of its death at the
end.

    python -m benchmarks.scale.logs                     # 1 GB; exit code 1 beyond 500 MB of memory or a wrong verdict
    python -m benchmarks.scale.logs --mb 10000 --max-s 600

The log is written first and then read in a separate process, whose peak memory the kernel reports. Time is checked only
with `--max-s`; use an idle machine.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.harness import argument_parser

MAX_MEMORY_MB = 500
RANKS = 64
BLOCK_LINES = 20_000
_READ = """
import json, resource, sys
from pathlib import Path
from analyzers.evidence.diagnose_files import diagnose_files
found = diagnose_files([Path(sys.argv[1])])
first = found.fired[0]
print(json.dumps({"ranks": first.ranks, "cause": first.cause, "verdict": found.verdict,
                  "problems": len(found.run["file_problems"]),
                  "mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}))
"""


def main() -> int:
    """Exit 1 if the verdict is wrong, or memory or time are above their limits."""
    parser = argument_parser(__doc__)
    parser.add_argument("--mb", type=int, default=1000, help="size of the log, megabytes")
    parser.add_argument("--max-mb", type=float, default=MAX_MEMORY_MB, help="limit of the peak memory, megabytes")
    parser.add_argument("--max-s", type=float, help="limit of the time, seconds")
    options = parser.parse_args()
    with TemporaryDirectory(prefix="rankscope-logs-") as folder:
        path = Path(folder) / "job.log"
        write_log(path, options.mb << 20)
        found, took_s = diagnose_in_child(path)
        size_mb = path.stat().st_size / 2**20
    print(f"{size_mb:,.0f} MB in {took_s:.1f} s, {found['mb']:.0f} MB of memory: {found['cause']} of {found['ranks']}")
    is_right = (found["cause"], found["ranks"]) == ("exception", [RANKS - 3])
    return int(not is_right or found["mb"] > options.max_mb or (options.max_s is not None and took_s > options.max_s))


def diagnose_in_child(path: Path) -> tuple[dict[str, Any], float]:
    """Diagnose files in a separate process. Returns the findings, with the peak memory (MB), and the duration in
    seconds.
    """
    begin_s = time.monotonic()
    done = subprocess.run([sys.executable, "-c", _READ, str(path)], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1]), time.monotonic() - begin_s


def write_log(path: Path, num_bytes: int) -> None:
    """Write interleaved steps, warnings and NCCL lines of all ranks; at the end one rank raises and the others lose the
    connection.
    """
    rng = np.random.default_rng(7)
    with path.open("w", encoding="utf-8") as file:
        block = 0
        while file.tell() < num_bytes:
            file.write("".join(_line(int(rank), block) for rank in rng.integers(0, RANKS, BLOCK_LINES)))
            block += 1
        culprit = RANKS - 3
        file.write(
            f"[rank{culprit}]: Traceback (most recent call last):\n"
            f'[rank{culprit}]:   File "/job/train.py", line 7, in step\n'
            f"[rank{culprit}]: KeyError: 'label'\n"
        )
        for rank in range(RANKS):
            if rank != culprit:
                file.write(f"[rank{rank}]: RuntimeError: [gloo/transport/tcp/pair.cc:525] Connection closed by peer\n")


def _line(rank: int, block: int) -> str:
    kind = (rank * 7 + block) % 11
    if kind == 0:
        return f"[rank{rank}]: step: {block} loss: {2.5 - 1e-4 * block:.4f} grad_norm: 1.2 lr: 0.0003\n"
    if kind == 1:
        return (
            f"gpu-{rank // 8:02}:90{rank}:91{rank} [{rank % 8}] NCCL INFO Channel 00/0 : {rank} -> {rank + 1} via P2P\n"
        )
    if kind == 2:
        return f"[rank{rank}]: UserWarning: failed to find a device for memory pinning in this version, exit ignored\n"
    return (
        f"[rank{rank}]: 2026-03-01 08:30:00,123 INFO trainer: tokens per second 123456, data {block} of shard {kind}\n"
    )


if __name__ == "__main__":
    raise SystemExit(main())
