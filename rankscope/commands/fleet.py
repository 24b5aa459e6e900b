"""`rankscope fleet`: hosts and devices over many runs; those with more incidents than chance explains come first."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rankscope.terminal import console, echo, fail, print_json, refuse_no_runs_folder

if TYPE_CHECKING:
    from analyzers.fleet.fleet import Fleet, Member
    from analyzers.fleet.history import RunHistory
    from analyzers.fleet.speed_changes import ConfigurationSpeed
    from store.runs_folder import RunsFolder

__all__ = ["EPILOG", "fleet", "suspicious_hosts"]

EPILOG = (
    "\b\nExamples:\nrankscope fleet runs/\nrankscope fleet /data/team-a /data/team-b --format json\n"
    "sbatch $(rankscope fleet runs/ --exclude slurm) job.sh"
)
MAX_SHOWN = 10


def fleet(
    folders: Annotated[list[Path], typer.Argument(help="Folders of runs.", metavar="RUNS_DIR...")],
    output: Annotated[
        str, typer.Option("--format", help="Output: text, json or prometheus.", metavar="text|json|prometheus")
    ] = "text",
    exclude: Annotated[
        str,
        typer.Option("--exclude", help="Print only the suspicious hosts, for a scheduler.", metavar="slurm|kubernetes"),
    ] = "",
) -> None:
    """Compare hosts and devices over many runs: hours, incidents by kind, and which have more than chance explains.

    Runs of the same configuration are compared in order of start: when did their speed change permanently, and which
    versions changed at the same time? A finished run is diagnosed once and cached in RUNS_DIR/.fleet. Intervals cover
    90 %.
    """
    if output not in ("text", "json", "prometheus"):
        fail(f"--format {output}: choose text, json or prometheus")
    from analyzers.fleet.exclude_list import FORMS, exclude_list
    from analyzers.fleet.fleet import fleet as judge
    from store.runs_folder import RunsFolder

    if exclude and exclude not in FORMS:
        fail(f"--exclude {exclude}: choose {' or '.join(FORMS)}")
    if exclude and output != "text":
        fail(f"--exclude prints its own format: leave out --format {output}")
    given: set[Path] = set()
    for path in folders:
        refuse_no_runs_folder(path)
        if path.resolve() in given:
            fail(f"{path} is given twice: its runs would count twice; name each folder once")
        given.add(path.resolve())
    histories = [history for path in folders for history in _histories(RunsFolder(path))]
    if not histories:
        fail(f"{folders[0]} holds no run: name the folder that holds the runs")
    found = judge(histories)
    if exclude:
        excluded = exclude_list(found, exclude)
        echo(excluded or "rankscope: no host stands out", err=not excluded)
    elif output == "json":
        from dataclasses import asdict

        print_json(asdict(found) | {"mtbf_h": found.mtbf_h})
    elif output == "prometheus":
        from watch.exporting.prometheus.fleet_series import fleet_series

        echo(fleet_series(found).rstrip())
    else:
        _print(found)


def suspicious_hosts(path: Path) -> dict[str, str]:
    """Return {host: what happened on it} for hosts with more trouble in the runs of a folder than chance explains."""
    from analyzers.fleet.fleet import fleet as judge
    from analyzers.kinds import title_of
    from store.runs_folder import RunsFolder

    found = judge(_histories(RunsFolder(path)))
    return {
        host.name: f"{host.bad_runs} of {host.runs} runs ({', '.join(title_of(kind).lower() for kind in host.kinds)})"
        for host in found.hosts
        if host.is_suspicious
    }


def _histories(folder: RunsFolder) -> list[RunHistory]:
    """Return one history per run, and report runs that cannot be read."""
    from analyzers.fleet.cached_histories import read_histories

    found = read_histories(folder)
    for name, problem in found.problems.items():
        echo(f"rankscope: {name} is left out: {problem}", err=True)
    return found.histories


def _print(found: Fleet) -> None:
    from analyzers.fleet.fleet import COUNTED
    from analyzers.wording import counted

    screen = console()
    mtbf = f"one failure in {_hours(found.mtbf_h)}" if found.mtbf_h else "no failure"
    counts = (counted(len(found.hosts), "host"), counted(len(found.devices), "device"))
    parts = (counted(found.num_runs, "run"), _hours(found.hours), *counts, mtbf)
    screen.print(", ".join(part for part in parts if part), highlight=False)
    for title, members in (("host", found.hosts), ("device", found.devices)):
        if members:
            _print_members(title, members)
    suspicious = [member.name for member in (*found.hosts, *found.devices) if member.is_suspicious]
    if suspicious:
        screen.print(
            f"More trouble than chance explains: {', '.join(suspicious)}. Test them before the next job.",
            highlight=False, markup=False, soft_wrap=True,
        )  # fmt: skip
    else:
        screen.print("No host or device has more trouble than chance explains.", highlight=False)
    if found.speeds:
        _print_speeds(found.speeds)
    screen.print(COUNTED, style="dim", highlight=False, markup=False)


def _hours(hours: float) -> str:
    return f"{hours:,.1f} h" if hours >= 1 else f"{60 * hours:.1f} min"


def _rate(per_h: float) -> str:
    """Failures in 1,000 hours."""
    return f"{1e3 * per_h:,.0f}" if per_h >= 0.1 else f"{1e3 * per_h:.3g}"


def _print_members(title: str, members: tuple[Member, ...]) -> None:
    from rich import box
    from rich.table import Table

    from analyzers.kinds import title_of
    from analyzers.wording import number
    from probes.tape.redaction.printable import visible

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in (title, "runs", "hours", "runs with trouble", "per 1,000 h (90 %)", "by kind", ""):
        table.add_column(name, justify="left" if name in (title, "by kind", "") else "right", overflow="fold")
    shown = [member for member in members if member.is_suspicious or member.bad_runs][:MAX_SHOWN] or members[:1]
    for member in shown:
        rate = member.rate
        per_kh = f"{_rate(rate.mean_per_h)} ({_rate(rate.low_per_h)} to {_rate(rate.high_per_h)})"
        kinds = ", ".join(f"{title_of(kind).lower()} {count}" for kind, count in member.kinds.items())
        name = member.name if title == "host" else f"{member.name} on {member.host}"
        table.add_row(
            visible(name), str(member.runs), number(member.hours), str(member.bad_runs), per_kh, kinds,
            "suspicious" if member.is_suspicious else "",
        )  # fmt: skip
    console().print(table, markup=False)
    if len(members) > len(shown):
        console().print(f"{len(members) - len(shown)} more {title}s", style="dim", highlight=False)


def _print_speeds(speeds: tuple[ConfigurationSpeed, ...]) -> None:
    """Print changes of speed, and the number of configurations without a change."""
    from rich import box
    from rich.table import Table

    from probes.tape.redaction.printable import visible

    changed = [one for one in speeds if one.changes]
    if changed:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for name in ("configuration", "runs", "speed", "change", "p", "since run", "changed at the same time"):
            table.add_column(name, justify="right" if name in ("runs", "change", "p") else "left", overflow="fold")
        for one in changed[:MAX_SHOWN]:
            for change in one.changes:
                table.add_row(
                    visible(one.title), str(len(one.run_ids)),
                    f"{change.before:,.4g} -> {change.after:,.4g} {one.unit}", f"{100 * (change.ratio - 1):+.1f} %",
                    f"{change.p_value:.2g}", visible(change.first_run), visible(change.with_versions),
                )  # fmt: skip
        console().print(table, markup=False)
        if len(changed) > MAX_SHOWN:
            console().print(f"{len(changed) - MAX_SHOWN} more configurations", style="dim", highlight=False)
    counts = {status: sum(one.status == status for one in speeds) for status in ("no_change", "too_few_runs")}
    console().print(
        f"Speed of the same configuration: {len(changed)} changed, {counts['no_change']} without a change, "
        f"{counts['too_few_runs']} with too few runs to tell.",
        highlight=False,
    )  # fmt: skip
