"""Synthetic logs of jobs with a known culprit, in the format of torchrun, srun, accelerate and DeepSpeed.

    python -m benchmarks.incidents.played --seeds 1000    # exit code 1 if a rank is named that is not a culprit

job = play(seed)
job.files      # {"node-0.log": "..."}
job.culprits   # {3}: the only ranks that a verdict may name

Victims are ended by the launcher, raise, abort or print nothing, and their lines are interleaved with the culprit's.
Each node writes a log, one of which may be missing. Earlier attempts may have died of another cause.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from analyzers.evidence.diagnose_files import diagnose_files
from analyzers.finding import Finding
from benchmarks.harness import argument_parser

__all__ = ["PlayedJob", "findings_of", "play"]

SIGNALS = {-11: ("SIGSEGV", "Segmentation fault"), -9: ("SIGKILL", "Killed"), -7: ("SIGBUS", "Bus error")}
CULPRIT_ERRORS = (
    ("ValueError", "could not convert string to float: 'abc'"),
    ("KeyError", "'input_ids'"),
    ("torch.OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB. GPU {local} has a total capacity of "
     "79.15 GiB of which 1.10 GiB is free."),
    ("RuntimeError", "CUDA error: device-side assert triggered"),
    ("RuntimeError", "CUDA error: an illegal memory access was encountered"),
    ("FileNotFoundError", "[Errno 2] No such file or directory: '/data/shard-17'"),
    ("AssertionError", ""),
)  # fmt: skip
VICTIM_ERRORS = (
    ("RuntimeError", "[../third_party/gloo/gloo/transport/tcp/pair.cc:598] Connection closed by peer [10.0.0.2]:29011"),
    ("torch.distributed.DistBackendError", "NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1970, "
     "remote process exited or there was a network error, NCCL version 2.21.5"),
    ("torch.distributed.DistNetworkError", "Connection reset by peer"),
    ("RuntimeError", "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 600000ms "
     "for recv operation to complete"),
)  # fmt: skip


@dataclass(slots=True, kw_only=True)
class PlayedJob:
    """Files of a job, its true culprits, and how it was made."""

    files: dict[str, str]
    culprits: set[int]
    how: str


@dataclass(slots=True)
class _Job:
    """Facts of a job, decided before lines are written."""

    random: random.Random
    num_nodes: int
    per_node: int
    launcher: str
    style: str
    fault: str
    culprit: int
    base_s: int = 50_000
    pids: dict[int, int] = field(default_factory=dict)

    @property
    def num_ranks(self) -> int:
        return self.num_nodes * self.per_node

    def prefix(self, rank: int) -> str:
        if self.style == "rank":
            return f"[rank{rank}]: "
        if self.style == "tee":
            return f"[default{rank % self.per_node}]:"
        return f"{rank}: " if self.style == "srun" else ""

    def clock(self, at_s: float) -> str:
        second = int(self.base_s + at_s)
        return f"{second // 3600:02d}:{second // 60 % 60:02d}:{second % 60:02d}"


def play(seed: int) -> PlayedJob:
    """Generate one job."""
    rng = random.Random(seed)
    launcher = rng.choice(("torchrun", "torchrun", "torchrun-old", "accelerate", "srun", "deepspeed"))
    style = "srun" if launcher == "srun" else rng.choice(("rank", "rank", "tee", "none"))
    style = "none" if launcher == "deepspeed" and style == "tee" else style  # tee is torchrun's
    num_nodes = rng.choice((1, 1, 2, 3))
    job = _Job(
        rng, num_nodes, rng.choice((2, 4, 8)) if num_nodes == 1 else 2, launcher, style,
        rng.choice(("signal", "signal", "exception", "exception", "exit", "hang", "network")), 0,
    )  # fmt: skip
    job.culprit = rng.randrange(job.num_ranks)
    job.pids = {rank: 4200 + 7 * rank for rank in range(job.num_ranks)}
    has_earlier_attempt = rng.random() < 0.2 and launcher.startswith("torchrun")
    nodes: list[list[str]] = [[] for _ in range(num_nodes)]
    if has_earlier_attempt:
        first = _Job(rng, num_nodes, job.per_node, launcher, style, rng.choice(("signal", "exception")), 0)
        first.culprit, first.pids, first.base_s = rng.randrange(job.num_ranks), job.pids, 40_000
        for node, lines in enumerate(_attempt(first)):
            nodes[node] += [*lines, "[default] Worker group FAILED. 3/3 attempts left; will restart worker group"]
    for node, lines in enumerate(_attempt(job)):
        nodes[node] += lines
    texts = ["\n".join(lines) + "\n" for lines in nodes]
    if rng.random() < 0.25:  # the writer was killed, so its last line is truncated
        texts = [text[: -rng.randrange(1, min(120, len(text)))] if len(text) > 1 else text for text in texts]
    files = {f"node-{node}.log": text for node, text in enumerate(texts)}
    if num_nodes > 1 and rng.random() < 0.3:  # one node's log was not collected
        files.pop(f"node-{rng.randrange(num_nodes)}.log")
    how = f"seed {seed}: {launcher} {style} {num_nodes}x{job.per_node} {job.fault} of rank {job.culprit}"
    return PlayedJob(files=files, culprits=set() if job.fault == "network" else {job.culprit}, how=how)


def _attempt(job: _Job) -> list[list[str]]:
    rng = job.random
    code = {"signal": rng.choice(tuple(SIGNALS)), "exception": 1, "exit": 3, "hang": 0, "network": 1}[job.fault]
    codes = {job.culprit: code} if job.fault not in ("hang", "network") else {}
    ended_s = {job.culprit: 0.0}
    streams: dict[int, list[str]] = {rank: [] for rank in range(job.num_ranks)}
    for rank, lines in streams.items():
        if rank == job.culprit and job.fault != "network":
            lines += _culprit_lines(job)
            continue
        kind = rng.choice(("silent", "terminated", "error", "error", "abort"))
        if job.fault == "hang":
            kind = "abort"
        if job.fault == "network":
            kind = "error"
        if kind == "error":
            lines += _traceback(job, rank, *rng.choice(VICTIM_ERRORS), frame="torch/distributed/distributed_c10d.py")
            codes[rank] = 1
        elif kind == "abort":
            lines += _watchdog(job, rank)
            codes[rank] = -6
        else:
            codes[rank] = -15
        ended_s[rank] = rng.choice((0.0, 0.0, 1.0, 5.0)) if kind in ("error", "abort") else 6.0
    out = []
    for node in range(job.num_nodes):
        ranks = range(node * job.per_node, (node + 1) * job.per_node)
        texts = _merged(rng, [streams[rank] for rank in ranks])
        out.append([*_training(job, ranks[0]), *texts, *_launcher_lines(job, node, ranks, codes, ended_s)])
    return out


def _training(job: _Job, rank: int) -> list[str]:
    return [f"{job.prefix(rank)}step {step} | loss {3.0 - step / 10:.3f} | lr 3.0e-04" for step in range(1, 4)]


def _culprit_lines(job: _Job) -> list[str]:
    if job.fault != "exception":
        return []
    name, text = job.random.choice(CULPRIT_ERRORS)
    return _traceback(job, job.culprit, name, text.format(local=job.culprit % job.per_node), frame="data/loader.py")


def _traceback(job: _Job, rank: int, name: str, text: str, *, frame: str) -> list[str]:
    prefix = job.prefix(rank)
    lines = ["Traceback (most recent call last):", '  File "train.py", line 88, in <module>', "    main()"]
    package = "/opt/conda/lib/python3.11/site-packages/" if frame.startswith("torch") else "/work/"
    lines += [f'  File "{package}{frame}", line 41, in wait', "    return work.wait()"]
    return [prefix + line for line in (*lines, f"{name}: {text}" if text else name)]


def _watchdog(job: _Job, rank: int) -> list[str]:
    head = f"[rank{rank}]:[E1122 {job.clock(1)}.{rank:06d} ProcessGroupNCCL.cpp:"
    outer = job.prefix(rank) if job.style in ("tee", "srun") else ""
    call = "WorkNCCL(SeqNum=812, OpType=ALLREDUCE, NumelIn=1048576, NumelOut=1048576, Timeout(ms)=600000)"
    return [
        f"{outer}{head}616] [Rank {rank}] Watchdog caught collective operation timeout: {call} ran for 600{rank:03d} "
        "milliseconds before timing out.",
        f"{outer}{head}1785] [PG ID 0 PG GUID 0(default_pg) Rank {rank}] Exception (either an error or timeout) "
        "detected by watchdog at work: 812, last enqueued NCCL work: 815, last completed NCCL work: 811.",
        f"{outer}{head}630] [Rank {rank}] To avoid data inconsistency, we are taking the entire process down.",
    ]


def _merged(rng: random.Random, streams: list[list[str]]) -> list[str]:
    """Interleave streams, each in order. Without prefixes, tracebacks are mostly written as a whole."""
    left = [list(lines) for lines in streams if lines]
    merged = []
    while left:
        lines = rng.choice(left)
        for _ in range(min(len(lines), rng.choice((1, 6, 6, 6)))):
            merged.append(lines.pop(0))
        left = [lines for lines in left if lines]
    return merged


def _launcher_lines(
    job: _Job, node: int, ranks: range, codes: dict[int, int], ended_s: dict[int, float]
) -> list[str]:  # fmt: skip
    failed = {rank: codes[rank] for rank in ranks if codes.get(rank)}
    if not failed:
        return []
    if job.launcher == "srun":
        return _srun(job, node, failed)
    if job.launcher == "deepspeed":
        return _deepspeed(job, ranks, failed, ended_s)
    return _torchrun(job, node, failed, ended_s)


def _srun(job: _Job, node: int, failed: dict[int, int]) -> list[str]:
    lines = []
    for rank, code in sorted(failed.items(), key=lambda item: item[0] != job.culprit):
        how = {-15: "Terminated", -6: "Aborted"}.get(code) or (SIGNALS[code][1] if code in SIGNALS else "")
        lines.append(f"srun: error: gpu-{node}: task {rank}: {how or f'Exited with exit code {code}'}")
    if job.random.random() < 0.5:
        lines.insert(1, f"slurmstepd: error: *** STEP 7100.0 ON gpu-{node} CANCELLED AT 2026-11-22T{job.clock(2)} ***")
        lines.insert(1, "srun: Terminating StepId=7100.0")
    return lines


def _deepspeed(job: _Job, ranks: range, failed: dict[int, int], ended_s: dict[int, float]) -> list[str]:
    head = f"[2026-11-22 {job.clock(3)},120]"
    first = min(failed, key=lambda rank: (ended_s[rank], rank != job.culprit))
    lines = [f"{head} [INFO] [launch.py:316:sigkill_handler] Killing subprocess {job.pids[rank]}" for rank in ranks]
    command = f"['/opt/conda/bin/python', '-u', 'train.py', '--local_rank={job.per_node - 1}', '--deepspeed']"
    return [
        *lines,
        f"{head} [ERROR] [launch.py:322:sigkill_handler] {command} exits with return code = {failed[first]}",
    ]


def _torchrun(job: _Job, node: int, failed: dict[int, int], ended_s: dict[int, float]) -> list[str]:
    poll_s = job.random.choice((0.1, 5.0))
    seen_s = {rank: (ended_s[rank] // poll_s + 1) * poll_s for rank in failed}
    first_s = min(seen_s.values())
    listed = {rank: code for rank, code in failed.items() if seen_s[rank] == first_s}
    if job.random.random() < 0.5:  # newer versions also list ranks that the launcher ended
        listed |= {rank: -15 for rank in failed if rank not in listed}
    root = min(listed, key=lambda rank: (seen_s[rank], rank))
    module = "torch.distributed.elastic.multiprocessing.api"
    file = "torch/distributed/elastic/multiprocessing/api.py"
    is_old = job.launcher == "torchrun-old"

    def logged(level: str, line: int, text: str) -> str:
        if is_old:
            return f"{'WARNING' if level == 'W' else 'ERROR'}:{module}:{text}"
        return f"{level}1122 {job.clock(first_s)}.{line:06d} 4100 {file}:{line}] {text}"

    lines = [logged("W", 897, f"Sending process {job.pids[rank]} closing signal SIGTERM")
             for rank in failed if seen_s[rank] > first_s]  # fmt: skip
    local = root % job.per_node
    lines.append(logged("E", 869, f"failed (exitcode: {failed[root]}) local_rank: {local} (pid: {job.pids[root]}) of "
                      "binary: /opt/conda/bin/python"))  # fmt: skip
    if job.random.random() < 0.3:
        return lines
    lines += ["Traceback (most recent call last):", '  File "/opt/conda/bin/torchrun", line 8, in <module>',
              "    sys.exit(main())", "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
              "=" * 60, "train.py FAILED", "-" * 60, "Failures:"]  # fmt: skip
    others = [rank for rank in listed if rank != root]
    for number, rank in enumerate(others, 1):
        lines += _row(job, node, number, rank, listed[rank], first_s if listed[rank] != -15 else seen_s[rank])
    lines += [] if others else ["  <NO_OTHER_FAILURES>"]
    lines += ["-" * 60, "Root Cause (first observed failure):", *_row(job, node, 0, root, listed[root], first_s)]
    return [*lines, "=" * 60]


def _row(job: _Job, node: int, number: int, rank: int, code: int, at_s: float) -> list[str]:
    name = {-6: "SIGABRT", -15: "SIGTERM"}.get(code) or (SIGNALS[code][0] if code in SIGNALS else "")
    text = f"Signal {-code} ({name}) received by PID {job.pids[rank]}" if name else "To enable traceback see: https://x"
    return [
        f"[{number}]:", f"  time      : 2026-11-22_{job.clock(at_s)}", f"  host      : gpu-{node}",
        f"  rank      : {rank} (local_rank: {rank % job.per_node})", f"  exitcode  : {code} (pid: {job.pids[rank]})",
        "  error_file: <N/A>", f"  traceback : {text}",
    ]  # fmt: skip


def findings_of(job: PlayedJob) -> Sequence[Finding]:
    """The findings on a job's files."""
    with TemporaryDirectory(prefix="rankscope-played-") as folder:
        for name, text in job.files.items():
            (Path(folder) / name).write_text(text, encoding="utf-8")
        return list(diagnose_files([Path(folder)]).fired)


def main() -> int:
    """Return 1 if any finding names a rank that is not a culprit."""
    parser = argument_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="number of jobs")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    options = parser.parse_args()
    named, wrong = 0, 0
    for seed in range(options.first, options.first + options.seeds):
        job = play(seed)
        ranks = {rank for finding in findings_of(job) for rank in finding.ranks}
        named += bool(ranks)
        if ranks - job.culprits:
            wrong += 1
            print(f"{job.how}: ranks {sorted(ranks - job.culprits)} are named")
    print(f"{options.seeds} jobs: {named} with a rank named, {wrong} with a wrong one")
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
