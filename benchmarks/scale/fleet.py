"""After how many runs does the fleet report name bad hosts and devices, and does it ever name a good one?

    python -m benchmarks.scale.fleet --runs 200 --hosts 64 --seeds 20
    python -m benchmarks.scale.fleet --speeds --seeds 400       # detection of changes in speed

Simulated histories: each run uses eight of the hosts for some hours. A good host has an incident in one of fifty runs,
a bad host or device in two of five. Incidents have the form that `history_of` produces.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from analyzers.fleet.fleet import fleet
from analyzers.fleet.history import Incident, RunHistory
from analyzers.fleet.run_speed import RunSpeed
from analyzers.fleet.speed_changes import speeds
from benchmarks.harness import argument_parser

__all__ = ["BAD_DEVICE", "BAD_HOSTS", "SPEED_NOISE", "histories", "speed_runs"]

BAD_HOSTS = ("host-03", "host-17", "host-42")
BAD_DEVICE = "GPU-29-5"
HOSTS_A_RUN = 8
GPUS_A_HOST = 8
GOOD, BAD = 0.02, 0.4
SPEED_NOISE = 0.02
"""Relative standard deviation of a run's speed around that of its configuration."""
_KINDS = ("rank_lost", "hang", "straggler", "xid", "non_finite")


def histories(num_runs: int, *, num_hosts: int, seed: int) -> list[RunHistory]:
    """Histories of runs in order of time."""
    rng = random.Random(seed)
    found = []
    for number in range(num_runs):
        taken = rng.sample(range(num_hosts), HOSTS_A_RUN)
        hours = rng.uniform(2.0, 30.0)
        hosts = tuple(f"host-{host:02}" for host in taken)
        devices = {f"GPU-{host:02}-{gpu}": f"host-{host:02}" for host in taken for gpu in range(GPUS_A_HOST)}
        incidents = []
        for name in hosts:
            if rng.random() < (BAD if name in BAD_HOSTS else GOOD):
                device = f"GPU-{name[-2:]}-{rng.randrange(GPUS_A_HOST)}"
                incidents.append(Incident(kind=rng.choice(_KINDS), cause="", host=name, device=device))
        if BAD_DEVICE in devices and rng.random() < BAD:
            incidents.append(Incident(kind="xid", cause="replace", host=devices[BAD_DEVICE], device=BAD_DEVICE))
        found.append(
            RunHistory(
                run_id=f"run-{number}", hours=hours, restarts=len(incidents), failures=len(incidents), hosts=hosts,
                host_of_device=devices, incidents=tuple(incidents),
            )
        )  # fmt: skip
    return found


def speed_runs(
    seed: int, *parts: tuple[int, float], noise: float = SPEED_NOISE, configuration: str = "a", tokens: bool = True
) -> list[RunSpeed]:
    """Runs of one configuration; `parts`: (number of runs, their speed), each with another version of torch."""
    rng = random.Random(seed)
    found = []
    for part, (count, level) in enumerate(parts):
        for _ in range(count):
            speed = level * math.exp(noise * rng.gauss(0, 1))
            found.append(
                RunSpeed(
                    run_id=f"run-{len(found)}", started_ns=len(found) + 1,
                    configuration={"train.compile": configuration},
                    versions={"torch": f"2.{part}", "python": "3.11"}, num_steps=100, step_ms=100 / speed,
                    tokens_per_s=1e4 * speed if tokens else None,
                )
            )  # fmt: skip
    return found


def print_speed_changes(num_seeds: int) -> None:
    """Print how often a change is reported for runs of one configuration, without a change and with one of 5 %."""
    print(f"{'before':>6} {'after':>6} {'slower by':>10} {'reported':>9} {'within one run':>15}  of {num_seeds}")
    for before, after, level in [
        *((count, 0, 1.0) for count in (12, 14, 20, 40)),
        *((before, after, 0.95) for before, after in ((7, 7), (10, 10), (20, 5), (20, 3))),
    ]:
        parts = ((before, 1.0), (after, level))
        judged = [speeds(speed_runs(seed, *parts))[0].changes for seed in range(num_seeds)]
        located = sum(any(abs(change.index - before) <= 1 for change in changes) for changes in judged)
        print(f"{before:>6} {after:>6} {1 - level:>10.0%} {sum(map(bool, judged)):>9} {located:>15}")


def suspicious(known: Sequence[RunHistory]) -> set[str]:
    """Names that are reported as suspicious."""
    found = fleet(known)
    return {member.name for member in (*found.hosts, *found.devices) if member.is_suspicious}


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--hosts", type=int, default=64)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--speeds", action="store_true", help="measure changes of speed instead of bad hosts")
    options = parser.parse_args()
    if options.speeds:
        return print_speed_changes(options.seeds)
    bad = {*BAD_HOSTS, BAD_DEVICE}
    print(f"{'runs':>5}  {'of four bad found':>18}  {'good ones named':>16}")
    for num_runs in range(20, options.runs + 1, 20):
        named = [suspicious(histories(num_runs, num_hosts=options.hosts, seed=seed)) for seed in range(options.seeds)]
        hit = sum(len(one & bad) for one in named) / len(named)
        print(f"{num_runs:>5}  {hit:>18.2f}  {sum(len(one - bad) for one in named):>16}")


if __name__ == "__main__":
    main()
