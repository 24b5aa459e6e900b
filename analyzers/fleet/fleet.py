"""Hosts and devices over many runs, ranked by how often runs had incidents on them; and changes of speed.

    found = fleet(histories)
    found.hosts[0].name, found.hosts[0].is_suspicious     # "gpu-07", True
    found.mtbf_h                                          # hours of runs between failures that ended an attempt
    found.speeds[0].status                                # "slower": configurations whose speed changed

Runs with an incident are counted, not incidents, so that one bad hour does not make a machine suspicious.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from analyzers.fleet.history import Incident, RunHistory
from analyzers.fleet.rates import Prior, Rate, fit, posterior, tail
from analyzers.fleet.speed_changes import ConfigurationSpeed, speeds
from analyzers.policy import SHARED

__all__ = ["COUNTED", "Fleet", "FleetPolicy", "Member", "fleet"]


COUNTED = (
    "Trouble is a finding on one host that hardware can cause (such as a death by a signal, a hang outside of the "
    "user's code, an XID, memory or link errors, a straggler, a NaN that a replay did not reproduce). A failure is "
    "an attempt ended by a death, a hang, or a lost node or launcher, whatever the cause."
)
"""Notes on the meaning of the counts."""
MAX_ROUNDS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPolicy:
    """When a host or device stands out."""

    family_error_ratio: float = 0.05
    """Probability that at least one member of a healthy fleet stands out by chance (ratio). Source: convention; each
    member is tested at this value divided by the number of members (Bonferroni)."""
    trimmed_ratio: float = 0.1
    """Share of members that the first estimate of the usual rate leaves out: those with the highest rates (ratio).
    Source: convention for robust estimates; members that do not stand out are included in the next estimate."""
    least_hours: float = 0.1
    """Minimum exposure that each run adds (hours): a run of 0.01 h that fails in its start-up counts as 0.1 h, because
    its machines were exposed to failures. Source: convention; start-up of a large job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A host or device."""

    name: str
    host: str
    runs: int
    hours: float
    bad_runs: int
    """Runs in which it had an incident."""
    kinds: Mapping[str, int]
    """Incidents by kind."""
    cost_s: float
    rate: Rate
    chance: float
    """Probability that an ordinary member has as many incidents, or more."""
    is_suspicious: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Counts over all runs. Members with the highest rates come first."""

    num_runs: int
    hours: float
    restarts: int
    failures: int
    """Attempts ended by a death, a hang, or a lost node or launcher, but not by a person, a scheduler or the guard."""
    hosts: tuple[Member, ...]
    devices: tuple[Member, ...]
    speeds: tuple[ConfigurationSpeed, ...] = ()
    """Configurations with at least two runs; those that became slower come first."""

    @property
    def mtbf_h(self) -> float | None:
        """Hours between failures, over all runs; None if there was none."""
        return self.hours / self.failures if self.failures else None


@dataclass(slots=True)
class _Tally:
    host: str = ""
    runs: int = 0
    hours: float = 0.0
    exposure_h: float = 0.0
    """Hours to which the member's rate refers; each run counts for at least `FleetPolicy.least_hours`."""
    bad_runs: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    cost_s: float = 0.0


def fleet(histories: Sequence[RunHistory], policy: FleetPolicy = FleetPolicy()) -> Fleet:
    """Judge all members together. Incidents that a suspicious device explains do not count against its host."""
    devices: dict[str, _Tally] = defaultdict(_Tally)
    for history in histories:
        by_device = [(incident.device, incident) for incident in history.incidents]
        _add(devices, history, history.host_of_device, by_device, policy)
    ranked = tuple(_compared_within_hosts(_ranked(devices, policy), policy))
    explained = {member.name for member in ranked if member.is_suspicious}
    hosts: dict[str, _Tally] = defaultdict(_Tally)
    for history in histories:
        by_host = [(incident.host, incident) for incident in history.incidents if incident.device not in explained]
        _add(hosts, history, {host: host for host in history.hosts}, by_host, policy)
    return Fleet(
        num_runs=len(histories),
        hours=sum(history.hours for history in histories),
        restarts=sum(history.restarts for history in histories),
        failures=sum(history.failures for history in histories),
        hosts=_ranked(hosts, policy),
        devices=ranked,
        speeds=speeds([history.speed for history in histories if history.speed is not None]),
    )


def _add(
    tallies: dict[str, _Tally],
    history: RunHistory,
    host_of: Mapping[str, str],
    incidents: Sequence[tuple[str, Incident]],
    policy: FleetPolicy,
) -> None:
    """Add one run with its members and their hosts. `incidents`: (name of the member for which it counts, incident)."""
    bad: set[str] = set()
    for name, incident in incidents:
        if name in host_of:
            tallies[name].kinds[incident.kind] += 1
            tallies[name].cost_s += incident.cost_s
            bad.add(name)
    for name, host in host_of.items():
        tally = tallies[name]
        tally.host = host
        tally.runs += 1
        tally.hours += history.hours
        tally.exposure_h += max(history.hours, policy.least_hours)
        tally.bad_runs += name in bad


def _ranked(tallies: Mapping[str, _Tally], policy: FleetPolicy) -> tuple[Member, ...]:
    """Rank the members. The prior is estimated from members that do not stand out, so that several bad members do not
    make each other look normal.
    """
    by_rate = sorted(tallies, key=lambda name: tallies[name].bad_runs / max(tallies[name].exposure_h, 1e-9))
    suspicious = set(by_rate[math.ceil(len(by_rate) * (1 - policy.trimmed_ratio)) :])
    for _ in range(MAX_ROUNDS):
        others = [tally for name, tally in tallies.items() if name not in suspicious]
        prior = fit([tally.bad_runs for tally in others], [tally.exposure_h for tally in others])
        found = {name for name, tally in tallies.items() if _stands_out(tally, prior, len(tallies), policy)}
        if found == suspicious:
            break
        suspicious = found
    members = [
        Member(
            name=name, host=tally.host, runs=tally.runs, hours=tally.hours, bad_runs=tally.bad_runs,
            kinds=dict(tally.kinds.most_common()), cost_s=tally.cost_s,
            rate=posterior(prior, count=tally.bad_runs, hours=tally.exposure_h),
            chance=tail(prior, count=tally.bad_runs, hours=tally.exposure_h), is_suspicious=name in suspicious,
        )
        for name, tally in tallies.items()
    ]  # fmt: skip
    return tuple(sorted(members, key=lambda one: (not one.is_suspicious, -one.rate.mean_per_h, one.name)))


def _compared_within_hosts(devices: Sequence[Member], policy: FleetPolicy) -> list[Member]:
    """Keep a device suspicious only if it has more than its share of the incidents of its host. Otherwise the host is
    suspected."""
    bad_runs: Counter[str] = Counter()
    num_devices: Counter[str] = Counter()
    for device in devices:
        bad_runs[device.host] += device.bad_runs
        num_devices[device.host] += 1
    limit = policy.family_error_ratio / max(1, len(devices))

    def stands_out(device: Member) -> bool:
        total, num = bad_runs[device.host], num_devices[device.host]
        return device.is_suspicious and (num == 1 or _binomial_tail(device.bad_runs, total, 1 / num) < limit)

    judged = [replace(device, is_suspicious=stands_out(device)) for device in devices]
    return sorted(judged, key=lambda device: not device.is_suspicious)


def _binomial_tail(count: int, total: int, share: float) -> float:
    """Probability that at least `count` of `total` incidents fall on a member with this share of the exposure."""
    return sum(math.comb(total, k) * share**k * (1 - share) ** (total - k) for k in range(count, total + 1))


def _stands_out(tally: _Tally, prior: Prior, num_members: int, policy: FleetPolicy) -> bool:
    limit = policy.family_error_ratio / max(1, num_members)
    return tally.bad_runs >= SHARED.repeats and tail(prior, count=tally.bad_runs, hours=tally.exposure_h) < limit
