"""`rankscope preflight`: check versions, settings, clocks, devices and links of all nodes before a job."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rankscope.terminal import (
    LONGEST_S,
    FormatOption,
    console,
    echo,
    fail,
    print_json,
    refuse_no_runs_folder,
    wants_json,
)

if TYPE_CHECKING:
    from trainer.preflight.verdict.readings import Readings
    from trainer.preflight.verdict.report import PreflightReport

__all__ = ["EPILOG", "preflight"]

EPILOG = (
    "\b\nExamples:\nrankscope preflight\n"
    "torchrun --nproc-per-node 8 -m rankscope preflight\n"
    "srun --ntasks-per-node 8 rankscope preflight --fleet /data/runs\n"
    "rankscope preflight --nproc-per-node 4 --format json\n"
    "rankscope preflight --nproc-per-node 8 --tune nccl"
)


def preflight(
    output: FormatOption = "text",
    strict: Annotated[bool, typer.Option("--strict", help="Also exit with 1 on a warning.")] = False,
    settings: Annotated[
        list[str] | None,
        typer.Option("--env", metavar="NAME", help="Compare this environment variable too; repeatable."),
    ] = None,
    fleet: Annotated[
        Path | None,
        typer.Option(metavar="RUNS_DIR", help="Compare with earlier preflights and runs of this folder."),
    ] = None,
    runs: Annotated[
        Path, typer.Option("--runs", metavar="FOLDER", help="Folder in which runs will be written.")
    ] = Path("runs"),
    nproc_per_node: Annotated[
        int,
        typer.Option("--nproc-per-node", min=0, help="Ranks to start without a launcher; 0: one per GPU, else one."),
    ] = 0,
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=1.0, max=LONGEST_S, help="Seconds to wait for a rank.")
    ] = 120.0,
    tune: Annotated[
        list[str] | None,
        typer.Option(
            "--tune",
            metavar="SETTING",
            help="Time the all-reduce with these variables ('NAME=VALUE NAME=VALUE'), or with each of NCCL's "
            "algorithms, protocols and channel counts ('nccl'); repeatable. Each setting takes some 10 s.",
        ),
    ] = None,
) -> None:
    """Check all nodes before a job: versions, settings, clocks, disk, speed of devices, memory and links.

    Start it as the job will be started, with torchrun, srun or `rankscope run`, or alone on one machine. Each device,
    link and node is compared with its peers, and with --fleet with its own past.

    Exit codes: 0 nothing failed, 1 a check failed (or warned, with --strict), 2 wrong options, 3 a rank did not answer
    or the ranks could not communicate.
    """
    as_json = wants_json(output)
    from trainer.preflight.tuning import SettingsError, parse

    try:
        tried = parse(tune or ())
    except SettingsError as error:
        fail(f"--tune {error}")
    from probes.attach.launch.parent_death import signal_at_parent_death
    from trainer.preflight.joining import JoinError, is_launched, join
    from trainer.preflight.launching import CODE_FILE, launch_preflight, usual_ranks

    if runs.is_file():
        fail(f"--runs {runs} is a file: name a folder")
    if fleet is not None:
        refuse_no_runs_folder(fleet)
    nproc = nproc_per_node or usual_ranks()
    if not is_launched() and nproc > 1:
        raise typer.Exit(launch_preflight(_words(as_json, strict, settings, fleet, runs, timeout_s, tune), nproc=nproc))

    from trainer.preflight.session import Options, Session
    from trainer.preflight.verdict.policy import PreflightPolicy

    if CODE_FILE in os.environ:
        signal_at_parent_death(signal.SIGKILL)  # the launcher is the parent, and is killed if the command gets a signal
    try:
        place = join(timeout_s)
    except JoinError as error:
        echo(f"rankscope: {error}", err=True)
        raise typer.Exit(3) from None
    options = Options(timeout_s=timeout_s, runs=runs, settings=tuple(settings or ()), tune=tried)
    session = Session(place, options, PreflightPolicy())
    code, report = session.run(lambda readings: _judged(readings, fleet), strict=strict)
    if report is not None:
        _show(report, as_json)
    if code_file := os.environ.get(CODE_FILE):
        if place.local_rank == 0:
            Path(code_file).write_text(str(code))
        code = 0
    sys.stdout.flush()
    raise typer.Exit(code)


def _words(
    as_json: bool, strict: bool, settings: list[str] | None, fleet: Path | None, runs: Path, timeout_s: float,
    tune: list[str] | None,
) -> list[str]:  # fmt: skip
    words = ["--runs", str(runs), "--timeout", str(timeout_s)]
    words += ["--format", "json"] * as_json + ["--strict"] * strict
    words += [word for name in settings or () for word in ("--env", name)]
    words += [word for text in tune or () for word in ("--tune", text)]
    return words + (["--fleet", str(fleet)] if fleet is not None else [])


def _judged(readings: Readings, fleet: Path | None) -> PreflightReport:
    """The verdict. With a folder, the fleet's earlier readings are included, and these readings are added to it."""
    from trainer.preflight.verdict.judge import judge
    from trainer.preflight.verdict.past import read_past, save_readings

    if fleet is None:
        return judge(readings)
    from rankscope.commands.fleet import suspicious_hosts

    report = judge(readings, past=read_past(fleet), suspicious=suspicious_hosts(fleet))
    try:
        save_readings(readings, fleet)
    except OSError as error:
        echo(f"rankscope: this preflight was not saved: {error}", err=True)
    return report


def _show(report: PreflightReport, as_json: bool) -> None:
    if as_json:
        print_json(report.to_json())
        return
    from trainer.preflight.text import print_report

    print_report(report, console())
