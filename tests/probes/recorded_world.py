"""A gloo world whose process groups are recorded, for workers of `run_ranks`.

def worker(rank, world_size, folder):
    with recorded_world(rank, world_size, folder) as recorder:
        dist.all_reduce(...)
    return rows(recorder, "collectives")
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from probes.collectives.wrapped import install, uninstall
from probes.tape.format.names import read_names
from probes.tape.format.reader import read_segment, segment_paths
from probes.tape.format.schema import TABLES, UNSET
from probes.tape_recorder import TapeRecorder
from tests.processes import end_group


@contextmanager
def recorded_world(
    rank: int, world_size: int, folder: str, name: str = "", *, record: bool = True, timeout_s: float = 60.0
) -> Iterator[TapeRecorder]:
    """Replace the default group by one that is recorded (or by a plain one), with errors of probes raised.

    `name` tells several worlds of one worker apart; a rank's records are in `<folder>/<name>rank-<r>`.
    """
    os.environ["RANKSCOPE_FAIL_LOUD"] = "1"
    end_group()
    recorder = TapeRecorder(Path(folder) / f"{name}rank-{rank}", rank=rank, attempt=0, world_size=world_size)
    if record:
        install(recorder)
    store = dist.FileStore(str(Path(folder) / f"{name}recorded-store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_s))
    try:
        yield recorder
    finally:
        uninstall()
        recorder.close()


def rows(directory: Path, table: str) -> list[dict[str, Any]]:
    """The records of a rank's tape as plain dicts: names resolved, None where nothing was recorded."""
    names, _ = read_names(directory / "names.jsonl")
    found = []
    for path in segment_paths(directory, table):
        segment = read_segment(path)
        for record in segment.records:
            row: dict[str, Any] = {"state": int(record["state"])}
            for column in TABLES[table].columns:
                value = record[column.name].item()
                if column.type == "name":
                    row[column.name] = names.get(value, "")
                elif column.type == "f64":  # its sentinel is one NaN among many
                    unset = record[column.name].tobytes() == np.float64(UNSET["f64"]).tobytes()
                    row[column.name] = None if unset else value
                else:
                    row[column.name] = None if value == UNSET[column.type] else value
            found.append(row)
    return found
