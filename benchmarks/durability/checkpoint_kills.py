"""SIGKILL at random moments during saves: the next load must be complete, and the run must continue bitwise
identically.

    python -m benchmarks.durability.checkpoint_kills  # 200 kills, alternating between one and two ranks: some minutes
    python -m benchmarks.durability.checkpoint_kills --kills 15 --ranks 1

A tiny run saves as often as possible. Each attempt is killed at a random moment during a save; of two ranks, a random
one is killed first and the other a moment later, as by a launcher. After each kill:

1. the next attempt must continue from the newest checkpoint that had been renamed to its final name,
2. no checkpoint may be condemned: a renamed folder must be complete,
3. every recorded loss must be bitwise identical to that of an undisturbed run.

The stage of the save that a kill hit is inferred from the remaining events and files. Exit code 1 if anything was
wrong.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import textwrap
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness import argument_parser, write_json

PRELOADED = ["torch", "torch.distributed.fsdp", "trainer.training.build", "trainer.rank.loop", "trainer.guard.recovery"]
SECTIONS: dict[str, dict[str, Any]] = {
    "model": {"dim": 32, "num_layers": 2, "num_heads": 2, "hidden_dim": 64, "max_seq_len": 16},
    # A fixed text: another one would have other loss spikes, which cause rollbacks.
    "data": {"seq_len": 16, "path": [textwrap.__file__]},
    "parallel": {"dp_shard": -1},
    "train": {"steps": 1_000_000, "global_batch_size": 4, "device": "cpu"},
    "optim": {"lr": 3e-3, "warmup_steps": 4, "schedule": "constant"},
    "checkpoint": {"interval": 1, "memory_interval": 4, "memory_survives": False},
}
REACH = 1.5
"""Range of kill times after the start of a save, as a multiple of the previous save's duration."""
DEADLINE_S = 60.0


@dataclass
class Outcome:
    """Outcome of all kills of one number of ranks."""

    world_size: int
    hits: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    last_step: int = 0
    compared_losses: int = 0

    @property
    def kills_inside(self) -> int:
        """Kills between the beginning of a save and its verification."""
        return sum(count for stage, count in self.hits.items() if stage != "between saves")


def run_rank(folder: Path, rank: int, world_size: int, attempt: int, steps: int, interval: int) -> None:
    """Run one rank of one attempt until its end or its kill."""
    import torch
    import torch.distributed as dist

    from probes.tape.rundir import RunDir
    from probes.tape_recorder import TapeRecorder
    from trainer.config.config import Config
    from trainer.guard.recovery import Recovery
    from trainer.layout.resolve import resolve
    from trainer.rank.loop import Session, train
    from trainer.training.build import build

    torch.set_num_threads(1)
    if world_size > 1:
        store = dist.FileStore(str(folder / f"rendezvous-{attempt}"), world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    sections = SECTIONS | {
        "data": SECTIONS["data"] | {"cache_dir": str(folder / "cache")},
        "train": SECTIONS["train"] | {"steps": steps},
        "checkpoint": SECTIONS["checkpoint"] | {"interval": interval},
    }
    config = Config.model_validate(sections)
    run = RunDir(folder)
    run.checkpoints.mkdir(parents=True, exist_ok=True)
    recorder = TapeRecorder(run.rank_dir(attempt, rank), rank=rank, attempt=attempt, world_size=world_size)
    training = build(config, resolve(config, world_size), torch.device("cpu"), recorder=recorder)
    train(Session(training=training, recorder=recorder, recovery=Recovery(training, recorder, run, None)))
    recorder.close()
    os._exit(0)  # exit like a worker, without waiting for gloo's threads


class Killer:
    """Starts attempts of one run, kills them, and checks the remaining files."""

    def __init__(self, folder: Path, world_size: int, seed: int) -> None:
        self.folder = folder
        self.checkpoints = folder / "checkpoints"
        self.moments = random.Random(seed)
        self.outcome = Outcome(world_size)
        self.attempt = 0
        self.losses: dict[int, float] = {}
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOADED)

    def start(self, folder: Path, attempt: int, steps: int, interval: int) -> list[Any]:
        """Start the processes of one attempt."""
        world_size = self.outcome.world_size
        ranks = [
            self._context.Process(
                target=run_rank, args=(folder, rank, world_size, attempt, steps, interval), daemon=True
            )
            for rank in range(world_size)
        ]
        for rank in ranks:
            rank.start()
        return ranks

    def kill_once(self) -> None:
        """Run one attempt from its start to its kill, and check the remaining files."""
        newest_step = self.newest()
        ranks = self.start(self.folder, self.attempt, SECTIONS["train"]["steps"], 1)
        try:
            before_s = self._wait_for_a_save(ranks, self.moments.choice((2, 3)))
            time.sleep(self.moments.uniform(0, REACH * before_s))
        finally:
            first, *others = self.moments.sample(ranks, len(ranks))
            os.kill(first.pid, signal.SIGKILL)
            for rank in others:
                time.sleep(self.moments.uniform(0, 0.02))
                os.kill(rank.pid, signal.SIGKILL)
            for rank in ranks:
                rank.join(DEADLINE_S)
        self._inspect(newest_step)
        self.attempt += 1

    def newest(self) -> int:
        """Step of the newest checkpoint folder with its final name."""
        names = [path.name.removeprefix("step-") for path in self.checkpoints.glob("step-*")]
        return max((int(name) for name in names if name.isdigit()), default=0)

    def compare(self) -> None:
        """Compare all recorded losses with those of an undisturbed run."""
        whole = self.folder / "whole"
        whole.mkdir()
        for rank in self.start(whole, 0, self.outcome.last_step, 0):
            rank.join(DEADLINE_S * 3)
        expected = _losses(whole, 0)
        for step, loss in sorted(self.losses.items()):
            self.outcome.compared_losses += 1
            if expected.get(step) != loss:
                self.outcome.problems.append(f"step {step}: loss {loss!r}, not {expected.get(step)!r}")

    def _wait_for_a_save(self, ranks: list[Any], number: int) -> float:
        """Wait until this attempt begins its save with that number; return the duration of the previous save in
        seconds.
        """
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline and all(rank.is_alive() for rank in ranks):
            events = self._disk_events()
            durations_s = [
                event["duration_ns"] / 1e9 for event in events if event["state"] == "verified" and "bytes" in event
            ]
            if len([event for event in events if event["state"] == "writing"]) >= number:
                return float(durations_s[-1])
            time.sleep(0.001)
        raise RuntimeError(f"attempt {self.attempt}: no save was seen")

    def _disk_events(self) -> list[dict[str, Any]]:
        """Events of this attempt about checkpoints on disk."""
        from probes.tape.events import read_events
        from probes.tape.rundir import RunDir

        events, _, _ = read_events(RunDir(self.folder).rank_dir(self.attempt, 0) / "events.jsonl")
        return [event for event in events if event["kind"] == "checkpoint" and event["tier"] == "disk"]

    def _inspect(self, newest_step: int) -> None:
        from probes.tape.rundir import RunDir

        outcome, events = self.outcome, self._disk_events()
        outcome.hits[
            self._stage_hit([event for event in events if event["state"] in ("writing", "complete", "verified")])
        ] += 1
        for event in events:
            if event["state"] in ("condemned", "failed"):
                outcome.problems.append(f"attempt {self.attempt}: {event['step']} {event['state']}: {event['reason']}")
        losses = _losses(self.folder, self.attempt)
        if not losses or min(losses) != newest_step + 1:
            outcome.problems.append(
                f"attempt {self.attempt}: began at {min(losses, default=None)}, not {newest_step + 1}"
            )
        for step, loss in losses.items():
            if self.losses.setdefault(step, loss) != loss:
                outcome.problems.append(f"step {step}: loss {loss!r}, was {self.losses[step]!r}")
        outcome.last_step = max([outcome.last_step, *losses])
        shutil.rmtree(RunDir(self.folder).tapes, ignore_errors=True)

    def _stage_hit(self, events: list[dict[str, Any]]) -> str:
        if not events or events[-1]["state"] == "verified":
            return "between saves"
        if events[-1]["state"] == "complete":
            return "while it was read back"
        scratch = list(self.checkpoints.glob(f"step-{events[-1]['step']:08d}.*.tmp"))
        if not scratch:
            return "after the rename" if self.newest() == events[-1]["step"] else "before the first byte"
        names = {path.name for path in scratch[0].iterdir()}
        if "manifest.json" in names:
            return "before the rename"
        if ".metadata" in names or ".metadata.tmp" in names:
            return "while the manifest was written"
        return "while the shards were written"


def _losses(folder: Path, attempt: int) -> dict[int, float]:
    """Loss of every finished step on the tape of rank 0."""
    from probes.tape.format.reader import read_segment, segment_paths
    from probes.tape.rundir import RunDir

    found = {}
    for path in segment_paths(RunDir(folder).rank_dir(attempt, 0), "steps"):
        records = read_segment(path).records
        for record in records[records["duration_ns"] > 0]:
            found[int(record["step"])] = float(record["loss"])
    return found


def kill_inside_saves(folder: Path, *, kills: int, world_size: int, seed: int = 0) -> Outcome:
    """Kill until `kills` kills have hit a save; return the outcome. Raises RuntimeError if there is never a save."""
    folder.mkdir(parents=True, exist_ok=True)
    killer = Killer(folder, world_size, seed)
    while killer.outcome.kills_inside < kills and killer.attempt < 3 * kills:
        killer.kill_once()
    killer.compare()
    return killer.outcome


def main(arguments: list[str] | None = None) -> int:
    parser = argument_parser(__doc__, json=True)
    parser.add_argument("--kills", type=int, default=200, help="total number of kills during a save (200)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="numbers of ranks (1 2)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    outcomes = []
    for world_size in options.ranks:
        start = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="kills-") as name:
            share = -(-options.kills // len(options.ranks))
            outcome = kill_inside_saves(Path(name), kills=share, world_size=world_size, seed=options.seed)
        outcomes.append(outcome)
        print(f"{world_size} ranks: {outcome.kills_inside} kills inside a save, {time.monotonic() - start:.0f} s")
        for stage, count in outcome.hits.most_common():
            print(f"  {count:4d}  {stage}")
        print(f"  {outcome.compared_losses} losses compared over {outcome.last_step} steps")
        for problem in outcome.problems:
            print(f"  WRONG: {problem}")
    write_json(options.json, [vars(outcome) for outcome in outcomes])
    return int(any(outcome.problems for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
