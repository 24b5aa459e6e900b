"""Measure the all-reduce under other settings of the communication library: algorithm, protocol, channels.

    settings = parse(["nccl", "NCCL_IB_QPS_PER_CONNECTION=4"])     # each a mapping of variables
    found = compare_settings(settings, place, nccl=True, num_bytes=1 << 26)     # on all ranks; readings on rank 0

A library reads its variables once, and may abort or hang a process with an impossible setting. So each reading is made
by new processes, one per rank, which connect through the store of the preflight. `python -m trainer.preflight.tuning`
is one such process.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from probes.attach.launch.own_process import own_process
from probes.attach.launch.parent_death import signal_at_parent_death
from trainer.preflight.joining import Place, join
from trainer.preflight.links import time_all_reduce
from trainer.preflight.verdict.readings import SettingReading
from trainer.torch_compat import PrefixStore

__all__ = ["NCCL", "SettingsError", "compare_settings", "parse", "variables_text"]

NCCL = "nccl"
"""Text that `parse` replaces by the settings below."""
_NCCL_SETTINGS: Sequence[Mapping[str, str]] = (
    *({"NCCL_ALGO": algorithm, "NCCL_PROTO": protocol}
      for algorithm in ("Ring", "Tree") for protocol in ("LL", "LL128", "Simple")),
    {"NCCL_ALGO": "NVLS"},
    {"NCCL_MAX_NCHANNELS": "8"},
    {"NCCL_MIN_NCHANNELS": "32"},
)  # fmt: skip
_SIZES = (1 << 16, 1 << 22)
"""Sizes in bytes that are measured in addition to the size of the preflight's all-reduce: typical gradient buckets and
tensor-parallel messages."""
_ROUNDS = 3
"""Number of rounds. The first measures every setting, the others only the fastest ones again. Each begins with a
reading without a setting."""
LIMIT_S = 90.0
"""Seconds for one reading: process start, and an all-reduce of three sizes. After that the processes are killed."""


class SettingsError(ValueError):
    """A text that is not a setting."""


def parse(texts: Sequence[str]) -> list[dict[str, str]]:
    """Parse texts of the form `NAME=VALUE NAME=VALUE`, each one setting; the text `nccl` adds a built-in
    list of NCCL settings. Raises SettingsError."""
    found: list[dict[str, str]] = []
    for text in texts:
        if text == NCCL:
            found += map(dict, _NCCL_SETTINGS)
            continue
        pairs = [word.partition("=") for word in text.split()]
        if not pairs or not all(name.isidentifier() and value for name, _, value in pairs):
            raise SettingsError(f"{text!r} is neither '{NCCL}' nor NAME=VALUE, or several of them with spaces between")
        found.append({name: value for name, _, value in pairs})
    return found


def variables_text(variables: Mapping[str, str]) -> str:
    """`NAME=VALUE NAME=VALUE`, as a shell accepts it."""
    return " ".join(f"{name}={value}" for name, value in variables.items())


def compare_settings(
    settings: Sequence[Mapping[str, str]], place: Place, *, nccl: bool, num_bytes: int
) -> list[SettingReading]:
    """Return all readings on rank 0, in the order of measurement; empty on other ranks. All ranks must call it."""
    sizes = sorted({min(size, num_bytes) for size in (*_SIZES, num_bytes)})
    readings: list[SettingReading] = []
    chosen: list[Mapping[str, str]] = [{}, *settings]
    for number in range(_ROUNDS):
        for index, variables in enumerate(chosen):
            if place.rank == 0:
                turn = f"reading {number + 1} of {_ROUNDS}, {index + 1} of {len(chosen)}"
                sys.stderr.write(f"rankscope: {turn}: {variables_text(variables) or 'no setting'}\n")
            reading = _in_new_processes(variables, place, f"{number}-{index}", nccl=nccl, sizes=sizes)
            if reading is not None:
                readings.append(reading)
        if not number:
            chosen = _agreed([{}, *_fastest_by_size(readings)], place)
    return readings


def _fastest_by_size(readings: Sequence[SettingReading]) -> list[Mapping[str, str]]:
    """The fastest settings, one for each message size at which they beat the unchanged environment; no duplicates."""
    fastest = []
    for size in readings[0].seconds if readings else ():
        best = min((reading for reading in readings if size in reading.seconds), key=lambda found: found.seconds[size])
        if best.variables and best.variables not in fastest:
            fastest.append(best.variables)
    return fastest


def _agreed(chosen: list[Mapping[str, str]], place: Place) -> list[Mapping[str, str]]:
    """Rank 0's list, on all ranks."""
    if place.rank == 0:
        place.store.set("tuning/chosen", json.dumps(chosen))
    place.store.wait(["tuning/chosen"], timedelta(seconds=LIMIT_S))
    return list(json.loads(place.store.get("tuning/chosen")))


def _in_new_processes(
    variables: Mapping[str, str], place: Place, name: str, *, nccl: bool, sizes: Sequence[int]
) -> SettingReading | None:
    """Start this rank's process and wait for it. Then wait for the processes of the other ranks."""
    request = json.dumps({"name": name, "nccl": nccl, "sizes": sizes})
    # The parents host the store; no child may create one.
    own = {**os.environ, **variables, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    command, environment = own_process("trainer.preflight.tuning", request, environment=own)
    problem, seconds = "", dict[str, float]()
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        if done.returncode == 0:
            seconds = json.loads(done.stdout.splitlines()[-1])
        else:
            problem = _last_line(done.stderr) or f"ended with code {done.returncode}"
    except subprocess.TimeoutExpired:
        problem = f"did not finish within {LIMIT_S:.0f} s"
    place.store.set(f"tuning/{name}/done/{place.rank}", problem)
    keys = [f"tuning/{name}/done/{rank}" for rank in range(place.world_size)]
    place.store.wait(keys, timedelta(seconds=2 * LIMIT_S))
    if place.rank:
        return None
    problems = [text for text in (place.store.get(key).decode() for key in keys) if text]
    measured = {} if problems else {int(size): value for size, value in seconds.items()}
    return SettingReading(variables=dict(variables), seconds=measured, problem=problems[0] if problems else "")


def _last_line(text: str) -> str:
    """Last line of the traceback. Without a traceback, the last line that the process printed."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line.partition(":")[0]]
    return (errors or lines or [""])[-1][:200]


def _child(request: Mapping[str, Any]) -> None:
    """Measure each size in this process; prints the seconds per all-reduce as JSON."""
    signal_at_parent_death(signal.SIGKILL)
    place = join(LIMIT_S)
    device = torch.device("cpu")
    if request["nccl"]:
        device = torch.device("cuda", place.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if request["nccl"] else "gloo", store=PrefixStore(f"tuning-{request['name']}", place.store),
        rank=place.rank, world_size=place.world_size, timeout=timedelta(seconds=LIMIT_S),
    )  # fmt: skip
    found = {size: time_all_reduce(device, size) for size in request["sizes"]}
    sys.stdout.write(f"{json.dumps(found)}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    _child(json.loads(sys.argv[1]))
