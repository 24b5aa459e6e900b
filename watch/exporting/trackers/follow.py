"""Process that feeds a live run into one experiment tracker until its standard input ends; started by `watch`.

    python -m watch.exporting.trackers.follow RUN --to tensorboard

The store serves as the queue: each poll reads what is new since the last one, so a tracker that is slow or temporarily
unavailable misses nothing and delays nothing. The last poll also ingests the ranks' record files (`tapes/`), because a
`watch` that had to exit quickly after a signal has not ingested the newest records. Progress is kept in
`RUN/trackers/<name>.json`, from which the next process continues.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import select
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from probes.settings.section import read
from probes.settings.sections import TrackersSettings
from probes.tape.rundir import RunDir, RunError
from store import Store, StoreError
from watch.exporting.trackers.feed import INSTALL, NAMES, TrackerFeed, open_tracker
from watch.exporting.trackers.tracker import TrackerError

__all__ = ["main"]


def _follow(run: RunDir, name: str, settings: TrackersSettings, is_closed: Callable[[float], bool]) -> None:
    """Feed the tracker until `is_closed(timeout_s)`. Raises TrackerError, ImportError."""
    path = run.path / "trackers" / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    lock_file = path.with_suffix(".lock").open("w")
    while not _locked(lock_file):  # the process of an earlier launch of the run is still finishing
        if is_closed(0.2):
            return
    progress: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        progress = json.loads(path.read_text(encoding="utf-8"))
    folder = Path(settings.tensorboard_dir) / run.run_id if settings.tensorboard_dir else None
    wandb = {"project": settings.wandb_project, "entity": settings.wandb_entity, "mode": settings.wandb_mode}
    tracker = open_tracker(name, run, folder if name == "tensorboard" else None, resumes=bool(progress), **wandb)
    feed = TrackerFeed(tracker, ranks=settings.ranks, progress=progress)
    period_s, is_over = settings.every_s, False
    while True:
        num_new = 1
        while num_new:
            try:  # open the store briefly for each piece, since the writer waits while it is open
                with Store.open(run, catch_up=is_over) as store:
                    num_new = feed.steps(store, is_over=is_over)
                    feed.findings(store)
            except StoreError as error:  # the store does not exist yet, or is locked: the next poll reads everything
                sys.stderr.write(f"{error}\n")
                break
            tracker.flush()
            fresh = path.with_suffix(".new")
            fresh.write_text(json.dumps(feed.progress), encoding="utf-8")
            fresh.replace(path)
        if is_over:
            break
        is_over = is_closed(period_s)
    try:
        with Store.open(run) as store:
            feed.finish(store)
    except StoreError:
        feed.finish(None)


def _locked(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the process. Returns 0 at the end of the run, 2 if the tracker cannot be written."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--to", choices=NAMES, required=True)
    options = parser.parse_args(arguments)

    def is_closed(timeout_s: float) -> bool:
        ready, _, _ = select.select([0], [], [], timeout_s)
        return bool(ready) and not os.read(0, 1)

    try:
        run = RunDir.open(options.run)
        _follow(run, options.to, read(TrackersSettings, run.manifest()), is_closed)
    except ImportError as error:
        sys.stderr.write(f"{error}: {INSTALL}\n")
        return 2
    except (RunError, TrackerError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
