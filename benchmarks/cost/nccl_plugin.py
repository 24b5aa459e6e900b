"""Measure the NCCL plugin without a GPU: its cost per call, and the records it keeps when its process is killed.

python -m benchmarks.cost.nccl_plugin                    # 10 million events from four threads, 200 kills
python -m benchmarks.cost.nccl_plugin --kills 0 --repeats 9

A driver in C (`nccl_driver.c`) calls the plugin's function table as NCCL does.

* Cost: CPU time per event and per call, the minimum of several repetitions. Each thread records its own calls and their
  kernels to tapes on disk.
* Kills: the driver writes each completed call to a file and is killed by SIGKILL at a random moment. Then its tapes are
  compared with that file.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.harness import argument_parser, write_json
from probes.collectives.nccl_plugin.build import FLAGS, compile_plugin
from probes.tape.format.reader import read_segment, segment_paths
from probes.tape.format.writer import COMPLETE

__all__ = ["Cost", "Kill", "compile_driver", "kill_driver", "measure", "start_driver"]

BUDGET_NS = 200.0  # budget for one recorded event on the host
SHAPES = ((5, 1, 0), (5, 4, 0), (5, 1, 2), (5, 4, 2), (7, 4, 2), (4, 4, 2), (3, 4, 2), (1, 4, 2), (5, 4, 16))
"""Interface version, number of threads, channels per call."""
_PLUGIN = Path(__file__).resolve().parents[2] / "probes" / "collectives" / "nccl_plugin"
_DRIVER = Path(__file__).resolve().with_name("nccl_driver.c")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """One measurement: CPU time of the threads that call the plugin, in nanoseconds."""

    version: int
    threads: int
    channels: int
    num_events: int
    event_ns: float
    call_ns: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """One killed driver: the calls it had completed, and those missing on its tapes."""

    version: int
    completed: int
    lost: int
    """Completed calls that the tape does not show as complete."""
    gaps: int
    """Calls that are missing on the tape although a later call of their communicator is there."""
    in_flight: int
    """Calls that are in flight according to the tape."""


def compile_driver(target: Path, flags: Sequence[str] = ()) -> None:
    """Compile the driver. Raises CalledProcessError."""
    words = ["cc", *FLAGS, *flags, f"-I{_PLUGIN}", str(_DRIVER), "-o", str(target), "-ldl"]
    subprocess.run(words, check=True, capture_output=True, text=True)


def start_driver(
    driver: Path, library: Path, tape: Path, *, words: Sequence[object], events: str = "", output: int | None = None
) -> subprocess.Popen[str]:
    """Start the driver, which records to `tape`."""
    tape.mkdir(exist_ok=True)
    environment = os.environ | {
        "RANKSCOPE_NCCL_DIR": str(tape),
        "RANKSCOPE_NCCL_RANK": "0",
        "RANKSCOPE_NCCL_ATTEMPT": "0",
        "RANKSCOPE_NCCL_EVENTS": events,
    }
    return subprocess.Popen(
        [str(driver), str(library), *map(str, words)],
        env=environment,
        stdout=subprocess.PIPE if output is None else output,
        stderr=subprocess.PIPE,
        text=True,
    )


def measure(
    driver: Path, library: Path, folder: Path, *, version: int, threads: int, channels: int, calls: int
) -> Cost:
    """Record `calls` calls in each of `threads` threads and measure the CPU time of these threads."""
    tape = folder / f"time-{version}-{threads}-{channels}"
    words = [version, threads, calls, "time", channels]
    with start_driver(driver, library, tape, words=words) as process:
        output, problem = process.communicate()
    if process.returncode:
        raise RuntimeError(problem)
    _, thread_ns, num_events = map(int, output.split())
    for path in tape.iterdir():
        path.unlink()
    return Cost(
        version=version,
        threads=threads,
        channels=channels,
        num_events=num_events,
        event_ns=thread_ns / num_events,
        call_ns=thread_ns / (calls * threads),
    )


def kill_driver(driver: Path, library: Path, folder: Path, *, version: int, after_s: float) -> Kill:
    """Kill a driver of four threads after `after_s`, and compare what it reported with its tapes."""
    tape, report = folder / f"kill-{time.monotonic_ns()}", folder / "report"
    with (
        open(report, "wb") as file,
        start_driver(driver, library, tape, words=[version, 4, 0, "endless"], output=file.fileno()) as process,
    ):
        deadline = time.monotonic() + 60
        while not segment_paths(tape, "nccl_calls") and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.001)
        time.sleep(after_s)
        process.send_signal(signal.SIGKILL)
        process.wait()
    written = np.fromfile(report, dtype="<i8")
    result = _compare(tape, version, int(written[-1]) if len(written) else 0)
    for path in tape.iterdir():
        path.unlink()
    return result


def _records(tape: Path, table: str) -> npt.NDArray[Any] | None:
    """All records of a table; None if there are none. A segment whose writer died creating it holds only zeros."""
    paths = [path for path in segment_paths(tape, table) if path.read_bytes().strip(b"\0")]
    return np.concatenate([read_segment(path).records for path in paths]) if paths else None


def _compare(tape: Path, version: int, completed: int) -> Kill:
    calls, communicators = _records(tape, "nccl_calls"), _records(tape, "nccl_communicators")
    if calls is None or communicators is None:  # killed before its first record
        return Kill(version=version, completed=completed, lost=completed, gaps=0, in_flight=0)
    reporting = communicators["communicator"][communicators["comm_hash"] == 0]  # from the reporting thread
    reported = calls[np.isin(calls["communicator"], reporting)]
    on_tape = reported["nccl_seq"][reported["state"] == COMPLETE]
    gaps = 0
    for communicator in communicators["communicator"]:
        numbers = calls["nccl_seq"][calls["communicator"] == communicator]
        gaps += int(numbers.max(initial=-1)) + 1 - len(np.unique(numbers))
    return Kill(
        version=version,
        completed=completed,
        lost=len(np.setdiff1d(np.arange(completed), on_tape)),
        gaps=gaps,
        in_flight=int(np.count_nonzero(calls["state"] != COMPLETE)),
    )


def main() -> None:
    """Print the tables, and write JSON if requested."""
    parser = argument_parser(__doc__, json=True)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--events", type=int, default=10_000_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    generator = random.Random(options.seed)
    costs: list[Cost] = []
    kills: list[Kill] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        library, driver = folder / "plugin.so", folder / "driver"
        compile_plugin(library)
        compile_driver(driver)
        print("version  threads  channels      events  ns/event  ns/call")
        for version, threads, channels in SHAPES:
            events_per_call = 2 + (0 if version < 3 else 2 if version < 4 else 3) * channels
            calls = max(1, options.events // (threads * events_per_call))
            found = [
                measure(driver, library, folder, version=version, threads=threads, channels=channels, calls=calls)
                for _ in range(options.repeats)
            ]
            cost = min(found, key=lambda one: one.event_ns)
            costs.append(cost)
            mark = "" if cost.event_ns <= BUDGET_NS else f"  above {BUDGET_NS:.0f} ns"
            shape = f"{version:7}  {threads:7}  {channels:8}  {cost.num_events:10}"
            print(f"{shape}  {cost.event_ns:8.1f}  {cost.call_ns:7.1f}{mark}")
        for _ in range(options.kills):
            version = generator.choice((4, 5, 6, 7))
            kills.append(kill_driver(driver, library, folder, version=version, after_s=generator.uniform(0, 0.3)))
    if kills:
        print(
            f"{len(kills)} kills: {sum(kill.completed for kill in kills)} calls completed and reported, "
            f"{sum(kill.lost for kill in kills)} lost, {sum(kill.gaps for kill in kills)} gaps, "
            f"{sum(kill.in_flight for kill in kills)} in flight on the tapes"
        )
    write_json(options.json, {"costs": [*map(asdict, costs)], "kills": [*map(asdict, kills)]})


if __name__ == "__main__":
    main()
