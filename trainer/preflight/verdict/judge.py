"""Form the verdict of a preflight from its readings, without side effects. The rules are the same for any number of
nodes.

    report = judge(readings)
    report = judge(readings, past=earlier_readings, suspicious={"gpu-07": "trouble in 4 of 9 runs"})

Each check yields one line if all is well, or one line per node, device or link that stands out. A check that has no
reading says so, and never passes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from analyzers.robust import median_or_nan
from analyzers.wording import listed, percent, ranks_text, sentence, size_text
from trainer.preflight.tuning import variables_text
from trainer.preflight.verdict.judge_devices import device_lines
from trainer.preflight.verdict.judge_links import link_lines, rate_text, seconds_text
from trainer.preflight.verdict.policy import PreflightPolicy
from trainer.preflight.verdict.readings import RankReading, Readings, SettingReading, bus_bytes_per_s
from trainer.preflight.verdict.report import Line, PreflightReport, Status

__all__ = ["judge"]

NS_PER_S = 1e9
MAX_GROUPS = 4
DEFAULT_POLICY = PreflightPolicy()
CHECK = "tuning"
_PINNED = ("NCCL_ALGO", "NCCL_PROTO", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS", "NCCL_NCHANNELS_PER_NET_PEER")


def judge(
    readings: Readings,
    policy: PreflightPolicy = DEFAULT_POLICY,
    *,
    past: Sequence[Readings] = (),
    suspicious: Mapping[str, str] | None = None,
) -> PreflightReport:
    """The verdict. `past`: earlier preflights of the fleet. `suspicious`: {host of the fleet: trouble in earlier
    runs}."""
    lines = (
        *_presence(readings),
        *_agreement(readings, policy),
        *_clocks(readings, policy),
        *_space(readings, policy),
        *device_lines(readings, policy, past),
        *link_lines(readings, policy),
        *_all_reduce(readings),
        *setting_lines(readings),
        *_fleet(readings, suspicious),
    )
    return PreflightReport(lines=lines, readings=readings)


def _presence(readings: Readings) -> Iterator[Line]:
    """Ranks that did not answer, and ranks that could not measure."""
    nodes = readings.nodes()
    if readings.missing:
        text = f"{ranks_text(readings.missing)} of {readings.world_size} did not answer."
        yield Line(check="ranks", status="fail", text=sentence(text), ranks=readings.missing, is_incomplete=True)
    by_problem: dict[str, list[RankReading]] = {}
    for reading in readings.ranks:
        if reading.problem:
            by_problem.setdefault(reading.problem, []).append(reading)
    for problem, affected in by_problem.items():
        ranks = tuple(reading.rank for reading in affected)
        found = tuple(dict.fromkeys(reading.node for reading in affected))
        text = sentence(f"{ranks_text(ranks)} on {listed(found, 4)} could not measure: {problem}")
        yield Line(check="ranks", status="fail", text=text, nodes=found, ranks=ranks, is_incomplete=True)
    if not readings.missing and not by_problem:
        several = f"s on {len(nodes)} nodes" if len(nodes) > 1 else "s on one node"
        count = f"All {readings.world_size} rank{several}" if readings.world_size > 1 else "The only rank"
        yield Line(check="ranks", status="pass", text=f"{count} answered.")


def _agreement(readings: Readings, policy: PreflightPolicy) -> Iterator[Line]:
    """Facts and settings that are not the same on all ranks."""
    lines = [
        line
        for check, kind in (("versions", "facts"), ("settings", "settings"))
        for line in _differences(readings.ranks, check, kind, policy)
    ]
    yield from lines
    for check, kind in (("versions", "facts"), ("settings", "settings")):
        if readings.ranks and not any(line.check == check for line in lines):
            names = {name for reading in readings.ranks for name in getattr(reading, kind)}
            what = "versions and hardware facts" if kind == "facts" else "settings"
            same = "agree on all ranks" if readings.world_size > 1 else "were read"
            yield Line(check=check, status="pass", text=f"{len(names)} {what} {same}.")


def _differences(ranks: Sequence[RankReading], check: str, kind: str, policy: PreflightPolicy) -> Iterator[Line]:
    names = sorted({name for reading in ranks for name in getattr(reading, kind)})
    for name in names:
        values: dict[str, list[RankReading]] = {}
        for reading in ranks:
            values.setdefault(getattr(reading, kind).get(name, ""), []).append(reading)
        if len(values) < 2:
            continue
        ordered = sorted(values.items(), key=lambda item: -len(item[1]))
        usual, others = ordered[0], ordered[1:]
        parts = [f"{_value(value)} on {_on(having)}" for value, having in others[:MAX_GROUPS]]
        if len(others) > MAX_GROUPS:
            parts.append(f"{len(others) - MAX_GROUPS} other values elsewhere")
        num_nodes = len({reading.node for reading in usual[1]})
        rest = f"{_value(usual[0])} on {num_nodes} other node{'s' * (num_nodes != 1)}"
        odd = [reading for _, having in others for reading in having]
        status: Status = "fail" if kind == "facts" and name in policy.must_match else "warn"
        yield Line(
            check=check, status=status, text=f"{name} is {', '.join(parts)}, and {rest}.",
            nodes=tuple(dict.fromkeys(reading.node for reading in odd)), ranks=tuple(reading.rank for reading in odd),
        )  # fmt: skip


def _value(value: str) -> str:
    return value or "not set"


def _on(having: Sequence[RankReading]) -> str:
    return listed(list(dict.fromkeys(reading.node for reading in having)), 6)


def _clocks(readings: Readings, policy: PreflightPolicy) -> Iterator[Line]:
    """Judge clocks by their offset from the median of all nodes, so that a wrong clock of rank 0 does not make all
    other clocks look wrong."""
    offsets: dict[str, float] = {}
    for reading in readings.ranks:
        if reading.clock_offset_ns is not None:
            offsets.setdefault(reading.node, reading.clock_offset_ns / NS_PER_S)
    nodes = readings.nodes()
    if len(nodes) < 2:
        return
    without = [node for node in nodes if node not in offsets]
    if without:
        yield Line(check="clocks", status="warn", text=f"The clock of {listed(without, 6)} was not measured.",
                   nodes=tuple(without))  # fmt: skip
    if len(offsets) < 2:
        return
    usual = median_or_nan(list(offsets.values()))
    off = {node: offset - usual for node, offset in offsets.items() if abs(offset - usual) >= policy.warned_clock_s}
    for node, offset in sorted(off.items(), key=lambda item: -abs(item[1])):
        way = "ahead of" if offset > 0 else "behind"
        status: Status = "fail" if abs(offset) >= policy.failed_clock_s else "warn"
        text = f"The clock of {node} is {seconds_text(abs(offset))} {way} the others."
        yield Line(check="clocks", status=status, text=text, nodes=(node,))
    if not off:
        most = max(abs(offset - usual) for offset in offsets.values())
        text = f"{len(offsets)} clocks agree within {seconds_text(most)}."
        yield Line(check="clocks", status="pass", text=text)


def _space(readings: Readings, policy: PreflightPolicy) -> Iterator[Line]:
    """Free disk and free shared memory of each node."""
    for check, name, least in (
        ("disk", "disk_free_bytes", policy.least_disk_bytes),
        ("shared memory", "shared_free_bytes", policy.least_shared_bytes),
    ):
        free: dict[str, int] = {}
        for reading in readings.ranks:
            value = getattr(reading, name)
            if value is not None:
                free[reading.node] = min(value, free.get(reading.node, value))
        without = [node for node in readings.nodes() if node not in free]
        if without:
            text = f"Free {check} of {listed(without, 6)} is not known."
            yield Line(check=check, status="warn", text=text, nodes=tuple(without))
        short = {node: value for node, value in free.items() if value < least}
        for node, value in short.items():
            text = f"Node {node} has {size_text(value)} of free {check}, less than {size_text(least)}."
            yield Line(check=check, status="warn", text=text, nodes=(node,))
        if free and not short:
            text = f"At least {size_text(min(free.values()))} of {check} free on each node."
            yield Line(check=check, status="pass", text=text)


def _all_reduce(readings: Readings) -> Iterator[Line]:
    """Judge only whether the all-reduce worked, because there is nothing to compare its bandwidth with."""
    found = readings.all_reduce
    if found is not None:
        text = (
            f"An all-reduce of {size_text(found.num_bytes)} over {readings.world_size} ranks reaches "
            f"{rate_text(found.bus_bytes_per_s)} bus bandwidth, and one of 8 bytes takes "
            f"{seconds_text(found.latency_s)}."
        )
        yield Line(check="all-reduce", status="pass", text=text)
    elif readings.world_size > 1 and not readings.missing:
        yield Line(check="all-reduce", status="fail", text="The all-reduce was not measured.", is_incomplete=True)


def _fleet(readings: Readings, suspicious: Mapping[str, str] | None) -> Iterator[Line]:
    """Hosts of this job that had more trouble in earlier runs than chance explains."""
    if suspicious is None:
        return
    hosts = Counter(reading.host for reading in readings.ranks)
    found = sorted(set(hosts) & set(suspicious))
    for host in found:
        nodes = tuple(dict.fromkeys(reading.node for reading in readings.ranks if reading.host == host))
        text = f"Host {host} had more trouble in earlier runs than chance explains: {suspicious[host]}."
        yield Line(check="fleet", status="warn", text=text, nodes=nodes)
    if not found:
        share = f"{len(hosts)} host{'s' * (len(hosts) != 1)}"
        yield Line(check="fleet", status="pass", text=f"None of {share} stands out in the fleet's earlier runs.")


def setting_lines(readings: Readings) -> Iterator[Line]:
    """Lines on `--tune`: one per message size, one per problem of settings that could not run, and one for variables
    that already fix a choice.

    A setting counts as faster only if each of its readings is shorter than every reading without it, because readings
    vary and the fastest of ten is fast by chance.
    """
    yield from _pinned(readings)
    if not readings.settings:
        return
    usual = [reading for reading in readings.settings if not reading.variables]
    if failed := next((reading.problem for reading in usual if reading.problem), ""):
        text = sentence(f"Without a setting, the all-reduce in new processes failed, so nothing is compared: {failed}")
        yield Line(check=CHECK, status="warn", text=text)
        return
    for size in usual[0].seconds:
        yield Line(check=CHECK, status="pass", text=_compared(size, usual, readings))
    broken: dict[str, list[str]] = {}
    for reading in readings.settings:
        if reading.problem:
            broken.setdefault(reading.problem, []).append(variables_text(reading.variables))
    for problem, settings in broken.items():
        text = sentence(f"Could not run with {listed(settings, len(settings))}: {problem}")
        yield Line(check=CHECK, status="pass", text=text)


def _compared(size: int, usual: Sequence[SettingReading], readings: Readings) -> str:
    """Compare the fastest setting of a size with the library's choice."""
    own = [reading.seconds[size] for reading in usual]
    by_setting: dict[str, list[float]] = {}
    for reading in readings.settings:
        if reading.variables and size in reading.seconds:
            by_setting.setdefault(variables_text(reading.variables), []).append(reading.seconds[size])
    faster = {
        name: took for name, took in by_setting.items() if len(took) == len(own) and max(took) < min(own)
    }  # fmt: skip
    rate = rate_text(bus_bytes_per_s(size, min(own), readings.world_size))
    what = f"An all-reduce of {size_text(size)} reaches {rate} bus bandwidth without a setting"
    if not faster:
        return f"{what}; none of {len(by_setting)} settings is faster in each of {len(own)} readings."
    best = min(faster, key=lambda name: max(faster[name]))
    other = rate_text(bus_bytes_per_s(size, min(faster[best]), readings.world_size))
    return f"{what}, {other} with {best} ({percent(min(own) / min(faster[best]) - 1)} more)."


def _pinned(readings: Readings) -> Iterator[Line]:
    """Variables of rank 0 that override NCCL's choice by size; differences between ranks are reported elsewhere."""
    if readings.backend != "nccl" or not readings.ranks:
        return
    own = readings.ranks[0].settings
    if found := {name: own[name] for name in _PINNED if name in own}:
        text = (
            f"{variables_text(found)} is set: NCCL does not choose by message size and network any more. "
            "'--tune nccl' without it shows what that costs."
        )
        yield Line(check=CHECK, status="warn", text=text)
