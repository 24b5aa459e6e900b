"""Time and memory of a folder of 2,000 files of one dead job: dumps, logs, traces, tables of steps and of GPUs.

    python -m benchmarks.scale.folder                   # exit code 1 if another rank is named, or 500 MB exceeded
    python -m benchmarks.scale.folder --max-s 30

One rank raises; its dump lacks the last call, in which all others wait. Time is checked only with `--max-s`; use an
idle machine.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.accuracy.hta import write_trace
from benchmarks.harness import argument_parser
from benchmarks.scale.logs import diagnose_in_child
from benchmarks.scale.ranks import make_dumps

MAX_MEMORY_MB = 500
TRACES = 64


def main() -> int:
    """Exit 1 if the verdict is wrong, or memory or time are above their limits."""
    parser = argument_parser(__doc__)
    parser.add_argument("--files", type=int, default=2000, help="number of files")
    parser.add_argument("--max-mb", type=float, default=MAX_MEMORY_MB, help="limit of the peak memory, megabytes")
    parser.add_argument("--max-s", type=float, help="limit of the time, seconds")
    options = parser.parse_args()
    with TemporaryDirectory(prefix="rankscope-folder-") as folder:
        path = Path(folder) / "job"
        ranks = write(path, options.files)
        files = [file for file in path.rglob("*") if file.is_file()]
        size_mb = sum(file.stat().st_size for file in files) / 2**20
        found, took_s = diagnose_in_child(path)
    print(
        f"{len(files):,} files, {size_mb:,.0f} MB in {took_s:.1f} s, {found['mb']:.0f} MB of memory: {found['verdict']}"
    )
    is_right = found["ranks"] == [ranks // 3] and not found["problems"]
    return int(not is_right or found["mb"] > options.max_mb or (options.max_s is not None and took_s > options.max_s))


def write(path: Path, num_files: int) -> int:
    """Write the files; returns the number of ranks, each with a dump, a log and a table of its steps."""
    ranks = (num_files - TRACES) * 4 // 15
    make_dumps(path / "dumps", ranks, 100)
    for name in ("logs", "tables", "gpus", "traces"):
        (path / name).mkdir()
    for rank in range(ranks):
        (path / "logs" / f"rank_{rank}.log").write_text(_log(rank, ranks), encoding="utf-8")
        rows = "".join(f"{step},{2.5 - 1e-3 * step:.4f}\n" for step in range(0, 200, 10))
        (path / "tables" / f"rank_{rank}_metrics.csv").write_text("step,train_loss\n" + rows, encoding="utf-8")
    with TemporaryDirectory() as folder:
        trace = write_trace(Path(folder), "plain", 0).read_text(encoding="utf-8")
    for rank in range(TRACES):
        named = trace.replace('"rank": 0, "world_size": 1', f'"rank": {rank}, "world_size": {TRACES}')
        (path / "traces" / f"rank{rank}.pt.trace.json").write_text(named, encoding="utf-8")
    for host in range(num_files - 3 * ranks - TRACES):
        (path / "gpus" / f"gpu-{host:03}.csv").write_text(_gpus(), encoding="utf-8")
    return ranks


def _log(rank: int, ranks: int) -> str:
    lines = [f"[rank{rank}]: step: {step} loss: {2.5 - 1e-3 * step:.4f} lr: 0.0003\n" for step in range(200)]
    if rank == ranks // 3:
        lines.append(
            f'[rank{rank}]: Traceback (most recent call last):\n[rank{rank}]:   File "/job/train.py", line 7, in step\n'
            f"[rank{rank}]: KeyError: 'label'\n"
        )
    return "".join(lines)


def _gpus() -> str:
    lines = [
        f"2026/03/01 08:{minute:02}:00.000, 00000000:{bus:02X}:00.0, 55, 97 %\n"
        for minute in range(30)
        for bus in range(8)
    ]
    return "timestamp, pci.bus_id, temperature.gpu, utilization.gpu [%]\n" + "".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
