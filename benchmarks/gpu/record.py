"""Record faults, time accounts and costs on a GPU with several ranks over real NCCL, the most informative jobs first.

python -m benchmarks.gpu.record --out recorded --minutes 7             # about thirty jobs on one GPU
python -m benchmarks.gpu.record --out recorded --cost --minutes 5      # cost of attaching per step, by part
python -m benchmarks.gpu.record --out recorded --device cpu --only hang

Each job runs in a separate process group: `rankscope run` of `benchmarks/gpu/loop.py`, or `rankscope train`. A finished
job is on disk before the next starts: a line of `results.jsonl` (seconds, exit code, verdict) and an archive in
`recordings.tar` with its run folder, output, marks and traces. Jobs that measure time run alone, under MPS if there is
a control daemon, so that kernels of both ranks run concurrently. Jobs in which a process dies run several at a time and
without MPS, since a fault ends all clients of the MPS server.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["JOBS", "Job", "main"]

ROOT = Path(__file__).resolve().parents[2]
LOOP = Path(__file__).with_name("loop.py")
STOP_WHEN = re.compile(r"^(HANG|CRITICAL|Hang)|did not reach|stands? still|no progress|is stuck", re.MULTILINE)
"""Pattern of a live verdict on a hang, after which the job is stopped by SIGINT as a user would."""
STEP_MS = re.compile(r"mean step of the second half ([\d.]+) ms")
NUM_TOGETHER = 5
NUM_FIRST = 5
GRACE_S = 40.0
_writing = threading.Lock()


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job to record: how the loop, or `train`, is started. `alone`: it measures times."""

    name: str
    alone: bool = False
    ranks: int = 2
    loop: dict[str, str] = field(default_factory=dict)
    train: tuple[str, ...] = ()
    traced: bool = False
    bare: bool = False
    """True for the loop under torchrun without Rankscope: the baseline for step times."""
    stop: bool = False
    """True if it does not end by itself: it gets SIGINT once its hang is reported."""


def _loop(style: str, fault: str, **options: str) -> dict[str, str]:
    return {
        "LOOP_STYLE": style,
        "LOOP_FAULT": fault,
        **{f"LOOP_{key.upper()}": value for key, value in options.items()},
    }


_WIDE = ("model.dim=512", "model.num_layers=6", "model.num_heads=8", "model.num_kv_heads=8", "data.seq_len=256")
_ONE = ("parallel.dp_shard=1",)
_FSDP2, _DDP = ("parallel.dp_shard=2",), ("parallel.dp_shard=1", "parallel.dp_replicate=2")
_TRACED = ("profiler.interval=40", "profiler.active_steps=2", "profiler.ranks=[]")
_NAN, _SLOW = ("nan_grad@step=40,rank=1",), ("slow_compute@step=60,rank=0,factor=1.5",)

_COST = {
    "bare": {},
    "run": {},
    "run_without_plugin": {"RANKSCOPE_NCCL_EVENTS": "none"},
    "run_without_kernels": {"RANKSCOPE_NCCL_EVENTS": "calls"},
}
"""Ways to start the loop, run alternately, to find where the cost of a step comes from."""
COST_JOBS = tuple(
    Job(
        name=f"cost_{style}_{way}_{turn}",
        alone=True,
        bare=way == "bare",
        loop=_loop(style, "none", steps="160", sizes="256,6,8,256") | more,
    )
    for turn in (1, 2)
    for style in ("fsdp2", "ddp")
    for way, more in _COST.items()
)
JOBS: tuple[Job, ...] = (
    Job(name="ddp_none", alone=True, traced=True, loop=_loop("ddp", "none")),
    Job(name="fsdp2_none", alone=True, traced=True, loop=_loop("fsdp2", "none")),
    Job(name="fsdp2_slow_device", alone=True, loop=_loop("fsdp2", "slow_device", at="40")),
    Job(name="train_fsdp2_faults", alone=True, train=(*_FSDP2, *_WIDE, "--fault", *_NAN, "--fault", *_SLOW)),
    Job(name="train_ddp_faults", alone=True, train=(*_DDP, *_WIDE, "--fault", *_NAN, "--fault", *_SLOW)),
    Job(name="ddp_slow_data", alone=True, loop=_loop("ddp", "slow_data", at="40")),
    Job(name="ddp_slow_between", alone=True, loop=_loop("ddp", "slow_between", at="40")),
    Job(name="ddp_slow_device", alone=True, loop=_loop("ddp", "slow_device", at="40")),
    Job(name="fsdp2_long_steps", alone=True, traced=True, loop=_loop("fsdp2", "none", sizes="1024,12,16,512")),
    Job(name="train_tp", alone=True, train=("parallel.tp=2", *_ONE, *_WIDE)),
    Job(name="train_pp", alone=True, train=("parallel.pp=2", *_ONE, *_WIDE)),
    Job(name="train_cp_ring", alone=True, train=("parallel.cp=2", "parallel.cp_exchange=ring", *_ONE, *_WIDE)),
    Job(name="train_ep", alone=True, train=("parallel.ep=2", "model.num_experts=4", *_ONE, *_WIDE)),
    Job(name="train_traced", alone=True, train=(*_FSDP2, *_WIDE, *_TRACED)),
    Job(name="train_offload_none", alone=True, ranks=1, train=(*_ONE, *_WIDE, "parallel.cpu_offload=none")),
    Job(name="train_offload_optimizer", alone=True, ranks=1, train=(*_ONE, *_WIDE, "parallel.cpu_offload=optimizer")),
    Job(name="train_offload_all", alone=True, ranks=1, train=(*_ONE, *_WIDE, "parallel.cpu_offload=all")),
    Job(name="stuck", stop=True, loop=_loop("ddp", "stuck")),
    Job(name="hang", stop=True, loop=_loop("ddp", "hang")),
    Job(name="fsdp2_stuck", stop=True, loop=_loop("fsdp2", "stuck")),
    Job(name="two_stuck", stop=True, ranks=4, loop=_loop("ddp", "stuck", rank="1,2")),
    Job(name="skip", stop=True, loop=_loop("manual", "skip")),
    Job(name="fsdp2_hang", stop=True, loop=_loop("fsdp2", "hang")),
    Job(name="nan_gradient_ddp", loop=_loop("ddp", "nan_gradient")),
    Job(name="nan_gradient_fsdp2", loop=_loop("fsdp2", "nan_gradient")),
    Job(name="nan_loss", loop=_loop("ddp", "nan_loss")),
    Job(name="illegal", loop=_loop("ddp", "illegal")),
    Job(name="kill", loop=_loop("ddp", "kill")),
    Job(name="exception", loop=_loop("fsdp2", "exception")),
    Job(name="exit", loop=_loop("ddp", "exit")),
    Job(name="oom", loop=_loop("ddp", "oom")),
    Job(name="train_oom", train=(*_FSDP2, *_WIDE, "--fault", "oom@step=40,rank=1")),
    Job(name="healthy_four_ranks", ranks=4, loop=_loop("fsdp2", "none", steps="150")),
)  # fmt: skip


class Recorder:
    """Runs jobs and records them into a folder until the time is up."""

    def __init__(self, out: Path, *, device: str, minutes: float) -> None:
        self.out, self.device = out, device
        self.work = out.parent / f"{out.name}-work"
        self.end_s = time.monotonic() + 60 * minutes
        self._background = ThreadPoolExecutor(2 if device == "cuda" else 1)
        out.mkdir(parents=True, exist_ok=True)
        self.work.mkdir(parents=True, exist_ok=True)

    def run(self, job: Job, *, mps: Path | None = None) -> None:
        """Run one job to its end; its results are analyzed and packed in the background."""
        left_s = self.end_s - time.monotonic()
        if left_s < 20:
            self._write({"job": job.name, "skipped": "no time left"})
            return
        folder = self.work / job.name
        folder.mkdir(parents=True, exist_ok=True)
        begin_s = time.monotonic()
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                self._command(job, folder),
                cwd=folder,
                env=self._environment(job, folder, mps),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            found = self._wait(job, process, folder / "log", min(left_s, 100.0))
        line = {"job": job.name, "wall_s": round(time.monotonic() - begin_s, 1), **found}
        self._background.submit(self._finish, job, folder, line)

    def close(self) -> None:
        """Wait for analyses and packing in the background."""
        self._background.shutdown()

    def _finish(self, job: Job, folder: Path, line: dict[str, object]) -> None:
        try:
            if step := STEP_MS.search((folder / "log").read_text(errors="replace")):
                line["step_ms"] = float(step[1])
            if not job.bare:
                line["verdict"] = self._analyze(folder)
            self._pack(job, folder)
        except Exception as error:  # the other recordings are still useful
            line["error"] = f"{type(error).__name__}: {error}"
        self._write(line)

    def _command(self, job: Job, folder: Path) -> list[str]:
        start = [sys.executable, "-m", "rankscope"]
        count = ["--nproc-per-node", str(job.ranks)]
        if job.bare:
            return [sys.executable, "-m", "torch.distributed.run", *count, str(LOOP)]
        if not job.train:
            return [*start, "run", "--run-dir", str(folder / "run"), *count, str(LOOP)]
        sets = [word for word in job.train if "=" in word and "@" not in word]
        faults = [word for word in job.train if "@" in word]
        words = [word for setting in (*sets, f"train.device={self.device}", f"run.dir={folder}", "run.name=run")
                 for word in ("--set", setting)]  # fmt: skip
        words += [word for fault in faults for word in ("--fault", fault)]
        return [*start, "train", str(ROOT / "examples" / "gpt-demo.toml"), *count, *words]

    def _environment(self, job: Job, folder: Path, mps: Path | None) -> dict[str, str]:
        paths = [str(LOOP.with_name("one_gpu")), str(ROOT), os.environ.get("PYTHONPATH", "")]
        found = os.environ | job.loop | {"LOOP_DEVICE": self.device, "PYTHONPATH": os.pathsep.join(paths)}
        if job.traced:
            found["LOOP_MARKS"] = str(folder)
        if mps:
            # MPS gives a client two hardware queues; streams that share one wait for each other.
            found["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"
            found |= {"CUDA_MPS_PIPE_DIRECTORY": str(mps / "pipe"), "CUDA_MPS_LOG_DIRECTORY": str(mps / "log")}
        return found

    def _wait(self, job: Job, process: subprocess.Popen[bytes], log: Path, limit_s: float) -> dict[str, object]:
        """Wait for the end, and send SIGINT once a hang is reported. Returns the seconds of both since the start."""
        begin_s, found = time.monotonic(), dict[str, object]()
        stopped_s, seen = 0.0, 0
        while process.poll() is None:
            time.sleep(0.2)
            now_s = time.monotonic()
            text = log.read_text(errors="replace")
            if stopped_s and "verdict_after_signal_s" not in found and "Verdict" in text[seen:]:
                found["verdict_after_signal_s"] = round(now_s - stopped_s, 1)
            if job.stop and not stopped_s and (STOP_WHEN.search(text) or now_s - begin_s > 0.6 * limit_s):
                found["reported_s"] = round(now_s - begin_s, 1) if STOP_WHEN.search(text) else None
                stopped_s, seen = now_s, len(text)
                os.kill(process.pid, signal.SIGINT)
            if now_s - begin_s > limit_s or (stopped_s and now_s - stopped_s > GRACE_S):
                found["killed"] = True
                break
        if stopped_s:
            found["end_after_signal_s"] = round(time.monotonic() - stopped_s, 1)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        found["code"] = process.wait()
        return found

    def _analyze(self, folder: Path) -> list[str]:
        """First lines of `rankscope analyze` on the job's run."""
        run = next((one for one in (folder / "run", *folder.glob("run-*")) if one.is_dir()), None)
        if run is None:
            return ["no run folder"]
        if run.name != "run":
            run = run.rename(folder / "run")
        paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(
            [sys.executable, "-m", "rankscope", "analyze", str(run)],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": paths},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        (folder / "analysis").write_text(done.stdout + done.stderr)
        return (done.stdout or done.stderr).strip().splitlines()[:8]

    def _pack(self, job: Job, folder: Path) -> None:
        """Append the recording, without its store, to the archive of all."""
        for store in (*folder.glob("run/*.duckdb*"), folder / "run" / "reports"):
            shutil.rmtree(store, ignore_errors=True) if store.is_dir() else store.unlink(missing_ok=True)
        for checkpoint in folder.glob("run/checkpoints/*"):
            shutil.rmtree(checkpoint, ignore_errors=True)
        packed = self.work / f"{job.name}.tar.xz"
        with tarfile.open(packed, "w:xz") as archive:
            archive.add(folder, job.name, filter=lambda member: None if member.isfifo() else member)
        with _writing, tarfile.open(self.out / "recordings.tar", "a") as archive:
            archive.add(packed, packed.name)

    def _write(self, line: dict[str, object]) -> None:
        with _writing, (self.out / "results.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)


@contextlib.contextmanager
def multi_process_service(folder: Path) -> Iterator[Path | None]:
    """Start CUDA's MPS with separate pipes; None if there is no daemon."""
    daemon = shutil.which("nvidia-cuda-mps-control")
    if daemon is None:
        yield None
        return
    for name in ("pipe", "log"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    environment = os.environ | {
        "CUDA_MPS_PIPE_DIRECTORY": str(folder / "pipe"),
        "CUDA_MPS_LOG_DIRECTORY": str(folder / "log"),
    }
    started = subprocess.run([daemon, "-d"], env=environment, capture_output=True, text=True, check=False)
    try:
        yield folder if not started.returncode else None
    finally:
        subprocess.run(
            [daemon], input="quit\n", env=environment, capture_output=True, text=True, timeout=20, check=False
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Record the jobs."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.record", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="results.jsonl and recordings.tar")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--minutes", type=float, default=12.0, help="time for all jobs; none starts in the last 20 s")
    parser.add_argument("--only", action="append", metavar="TEXT", help="jobs whose name contains this; repeatable")
    parser.add_argument("--cost", action="store_true", help="only the loop, with and without Rankscope")
    options = parser.parse_args(arguments)
    recorder = Recorder(options.out.resolve(), device=options.device, minutes=options.minutes)
    known = COST_JOBS if options.cost else JOBS
    chosen = [job for job in known if not options.only or any(text in job.name for text in options.only)]
    alone = [job for job in chosen if job.alone]
    with multi_process_service(recorder.work / "mps") as mps:
        for job in alone[:NUM_FIRST]:
            recorder.run(job, mps=mps)
        with ThreadPoolExecutor(NUM_TOGETHER if options.device == "cuda" else 1) as pool:
            list(pool.map(recorder.run, [job for job in chosen if not job.alone and "oom" not in job.name]))
        for job in alone[NUM_FIRST:]:
            recorder.run(job, mps=mps)
    for job in chosen:
        if "oom" in job.name:  # takes the whole device
            recorder.run(job)
    recorder.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
