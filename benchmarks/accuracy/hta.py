"""Compute, communication, exposed and idle time of traces, compared with HolisticTraceAnalysis on the same files.

    python -m venv /tmp/hta && /tmp/hta/bin/pip install HolisticTraceAnalysis
    python -m benchmarks.accuracy.hta --python /tmp/hta/bin/python                # synthetic traces, one row per shape
    python -m benchmarks.accuracy.hta --python /tmp/hta/bin/python traces/*.json  # recorded traces
    python -m benchmarks.accuracy.hta --reports TraceLens/tests/traces            # TraceLens' published reports

HolisticTraceAnalysis (HTA) runs in a separate interpreter, so that its dependencies cannot conflict with Rankscope's.
HTA's shares are of the time from the first to the last kernel, Rankscope's of the steps' windows. They agree for steps
without gaps between them, as in a training loop. TraceLens publishes traces with reports (`gpu_timeline.csv`), whose
shares are of the time from the first to the last kernel, or of a step. Exit code 1 if a share differs by more than a
percentage point.
"""

from __future__ import annotations

import csv
import gzip
import json
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.harness import argument_parser, markdown_head, markdown_row
from store.readers.traces.kineto import read_trace
from store.readers.traces.rank_traces import breakdown

PARTS = ("compute", "communication", "exposed", "copies", "idle")
MAX_POINTS = 1.0
STEPS = 20
SHAPES = ("plain", "no device marks", "gzip", "copies", "many streams", "mostly idle", "ROCm", "events after metadata")
HTA = """
import json, sys, warnings
warnings.filterwarnings("ignore")
from hta.trace_analysis import TraceAnalysis
path = sys.argv[1]
analysis = TraceAnalysis(trace_files={0: path}, trace_dir="")
times = analysis.get_temporal_breakdown(visualize=False).iloc[0]
kinds, _ = analysis.get_gpu_kernel_breakdown(visualize=False)
total = float(times["idle_time(us)"] + times["compute_time(us)"] + times["non_compute_time(us)"])
share = {str(row["kernel_type"]): float(row["sum"]) / total for _, row in kinds.iterrows()}
pick = lambda *words: sum(v for k, v in share.items() if all(w in k for w in words))
print(json.dumps({
    "compute": pick("COMPUTATION"), "communication": pick("COMMUNICATION"),
    "exposed": share.get("COMMUNICATION", 0.0) + share.get("COMMUNICATION overlapping MEMORY", 0.0),
    "idle": float(times["idle_time(us)"]) / total, "copies": share.get("MEMORY", 0.0),
}))
"""


def main() -> int:
    """Print a table; return 1 if a share differs by more than `MAX_POINTS`."""
    parser = argument_parser(__doc__)
    reference = parser.add_mutually_exclusive_group(required=True)
    reference.add_argument("--python", help="interpreter with HolisticTraceAnalysis installed")
    reference.add_argument("--reports", type=Path, help="folder of traces with TraceLens' reports")
    parser.add_argument("traces", nargs="*", type=Path, help="recorded traces to use instead of synthetic ones")
    options = parser.parse_args()
    tool = "HTA" if options.python else "TraceLens"
    print(markdown_head("trace", *(f"{part}: Rankscope, {tool}" for part in PARTS), "largest difference, points"))
    worst = 0.0
    with TemporaryDirectory(prefix="rankscope-hta-") as folder:
        files = [(path.name, path) for path in options.traces] or [
            (shape, write_trace(Path(folder), shape, seed)) for seed, shape in enumerate(SHAPES)
        ]
        if options.reports:
            files = [(str(path.relative_to(options.reports)), path) for path in traces_with_report(options.reports)]
        for name, path in files:
            ours = rankscope_shares(path)
            expected = hta_shares(path, options.python) if options.python else tracelens_shares(path)
            difference = 100 * max(abs(ours[part] - expected[part]) for part in PARTS)
            worst = max(worst, difference)
            cells = [f"{100 * ours[part]:.1f} %, {100 * expected[part]:.1f} %" for part in PARTS]
            print(markdown_row(name, *cells, f"{difference:.2f}"), flush=True)
    return int(worst > MAX_POINTS)


def rankscope_shares(path: Path) -> dict[str, float]:
    """Rankscope's shares of the steps' time."""
    parts = breakdown(read_trace(path, is_only=True))
    total = float(parts["step"].sum())
    return {part: float(parts[part].sum()) / total for part in PARTS}


def hta_shares(path: Path, python: str) -> dict[str, float]:
    """HTA's shares of the time from the first to the last kernel."""
    done = subprocess.run([python, "-c", HTA, str(path)], capture_output=True, text=True, timeout=600)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        raise SystemExit(f"HTA cannot read {path}: {done.stderr.strip().splitlines()[-1:]}")
    found: dict[str, float] = json.loads(lines[-1])
    return found


def traces_with_report(folder: Path) -> list[Path]:
    """Traces with a TraceLens report next to them."""
    return sorted(
        path for path in folder.rglob("*.json.gz") if any(report_path.exists() for report_path in _reports(path))
    )


def _reports(trace: Path) -> tuple[Path, ...]:
    name = trace.name.removesuffix(".json.gz")
    return tuple(
        trace.parent / report_path / "gpu_timeline.csv"
        for report_path in (f"{name}_perf_report_csvs", "perf_report_csvs", "perf_csvs")
    )


def tracelens_shares(trace: Path) -> dict[str, float]:
    """TraceLens' published shares of a trace."""
    report = next(report_path for report_path in _reports(trace) if report_path.exists())
    with report.open(newline="") as lines:
        share = {row["type"]: float(row["percent"]) / 100 for row in csv.DictReader(lines)}
    idle = sum(value for kind, value in share.items() if kind.endswith("idle_time"))
    return {
        "compute": share["computation_time"], "communication": share["total_comm_time"],
        "exposed": share["exposed_comm_time"], "copies": share["exposed_memcpy_time"], "idle": idle,
    }  # fmt: skip


def write_trace(folder: Path, shape: str, seed: int) -> Path:
    """Write a synthetic trace of a training loop: compute, hidden and exposed reductions, gaps, copies."""
    rng = np.random.default_rng(seed)
    events: list[dict[str, Any]] = []
    now, correlation = 1e6, 0
    gap_us = 900.0 if shape == "mostly idle" else 30.0
    for step in range(STEPS):
        begin = now
        for _ in range(40):
            long_us = float(rng.uniform(150, 900))
            correlation = _launched(events, "gemm_bf16_128x128", now, long_us, 7, correlation, shape)
            if shape == "many streams" and rng.random() < 0.5:
                begin_us = now + long_us / 3
                correlation = _launched(events, "elementwise_kernel", begin_us, long_us, 9, correlation, shape)
                long_us *= 4 / 3
            if rng.random() < 0.3:
                begin_us, took = now + long_us * 0.4, long_us * float(rng.uniform(0.2, 1.4))
                correlation = _launched(events, _NCCL, begin_us, took, 20, correlation, shape)
            if shape == "copies" and rng.random() < 0.3:
                long_us *= 2.1  # behind any communication of this kernel
                after = now + long_us
                correlation = _launched(events, "Memcpy HtoD (Pinned -> Device)", after, 60.0, 5, correlation, shape)
                long_us += 60
            now += long_us + float(rng.exponential(gap_us))
        correlation = _launched(events, _NCCL, now, float(rng.uniform(800, 3000)), 20, correlation, shape)
        now = max(event["ts"] + event["dur"] for event in events) + 5.0
        events.append(_mark("user_annotation", step, begin - 300.0, now - begin, 1))
        if shape != "no device marks":
            events.append(_mark("gpu_user_annotation", step, begin, now - begin, 7))
    trace: dict[str, Any] = {
        "schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "GPU", "totalGlobalMem": 8 << 30}],
        "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 1}, "traceEvents": events, "traceName": "t",
        "baseTimeNanoseconds": 0,
    }  # fmt: skip
    if shape == "events after metadata":
        trace["traceEvents"] = trace.pop("traceEvents")  # to the end
    blob = json.dumps(trace).encode()
    path = folder / f"{shape.replace(' ', '_')}.json{'.gz' if shape == 'gzip' else ''}"
    path.write_bytes(gzip.compress(blob) if shape == "gzip" else blob)
    return path


_NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"


def _launched(
    events: list[dict[str, Any]], name: str, ts: float, dur: float, stream: int, correlation: int, shape: str
) -> int:
    """Append a kernel and the runtime call that launched it; return the next correlation id."""
    is_copy = name.startswith("Memcpy")
    runtime = "cuda_runtime" if shape != "ROCm" else "hip_runtime"
    call = "cudaMemcpyAsync" if is_copy else "cudaLaunchKernel"
    if shape == "ROCm":
        call = "hipMemcpyAsync" if is_copy else "hipLaunchKernel"
        name = name.replace("ncclDevKernel", "ncclKernel")
    events.append(
        {"ph": "X", "cat": runtime, "name": call, "pid": 1, "tid": 1, "ts": ts - 200.0, "dur": 5.0,
         "args": {"correlation": correlation, "External id": correlation}}
    )  # fmt: skip
    events.append(
        {"ph": "X", "cat": "gpu_memcpy" if is_copy else "kernel", "name": name, "pid": 0, "tid": stream, "ts": ts,
         "dur": dur, "args": {"device": 0, "stream": stream, "correlation": correlation, "External id": correlation}}
    )  # fmt: skip
    return correlation + 1


def _mark(category: str, step: int, ts: float, dur: float, tid: int) -> dict[str, Any]:
    pid = 1 if category == "user_annotation" else 0
    return {"ph": "X", "cat": category, "name": f"ProfilerStep#{step}", "pid": pid, "tid": tid, "ts": ts, "dur": dur,
            "args": {"External id": 0}}  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
