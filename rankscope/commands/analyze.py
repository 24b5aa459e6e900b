"""`rankscope analyze`: diagnose a job from its records: what went wrong, on which rank and why."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rankscope.terminal import FormatOption, console, echo, fail, print_json, wants_json

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from analyzers.diagnose import Diagnosis
    from analyzers.numerics.loss.why_spike import WhySpike
    from store import Store
    from store.open import Found

__all__ = ["EPILOG", "analyze", "judge_run"]

EPILOG = (
    "\b\nExamples:\nrankscope analyze runs/latest\nrankscope analyze job.log\n"
    "rankscope analyze logs/ dumps/ dmesg-gpu-01.txt\nrankscope analyze evidence.tar.gz\n"
    "rankscope analyze run-7.rankscope.tar.gz\n"
    "rankscope analyze runs\nrankscope analyze runs/latest --why-spike worst\n"
    "rankscope analyze logs/ --format json --fail-on warning"
)
SHOW_PROGRESS_BYTES = 256 << 20
MAX_LISTED_RUNS = 5


def analyze(
    paths: Annotated[
        list[Path],
        typer.Argument(help="Runs, files or folders: logs, dumps, traces, archives.", metavar="PATH..."),
    ],
    output: FormatOption = "text",
    fail_on: Annotated[
        str, typer.Option("--fail-on", metavar="critical|warning", help="Exit 1 if a finding is at least this severe.")
    ] = "",
    why_spike: Annotated[
        str,
        typer.Option(
            "--why-spike", metavar="STEP|worst", help="Explain a loss spike: ranks, samples and layers behind it."
        ),
    ] = "",
) -> None:
    """Diagnose a job from its records: what went wrong, on which rank, and why.

    A recorded run, live or dead:  rankscope analyze runs/latest

    Text logs of any launcher (torchrun, Slurm, Kubernetes, Ray), dmesg:  rankscope analyze logs/ dmesg.txt

    Flight-recorder dumps, profiler traces, NCCL's RAS and inspector:  rankscope analyze dumps/ traces/ ras.json

    A run that is published to an address (publish.address), live or not:  rankscope analyze s3://lake/rankscope/run-7
    (or s3://lake/rankscope, for the newest run there)

    A run that a colleague packed with `rankscope share`:  rankscope analyze run-7.rankscope.tar.gz

    Files are recognised by their content, also inside .gz, .zst, .xz, .bz2, .tar and .zip, and judged together.

    Exit codes: 0 reported, 1 a --fail-on condition holds, 2 wrong options, nothing to read, or damaged records of a
    run (the report covers what could be read).
    """
    as_json = wants_json(output)
    if fail_on not in ("", "critical", "warning"):
        fail(f"--fail-on {fail_on}: choose critical or warning")
    if why_spike and why_spike != "worst" and not why_spike.isdecimal():
        fail(f"--why-spike {why_spike}: give a step number or worst")

    from analyzers.diagnose import reaching
    from analyzers.numerics.loss.why_spike import SpikeError
    from probes.tape.format.reader import TapeError
    from probes.tape.rundir import RunError
    from store import StoreError
    from store.open import classify
    from store.published.address import AddressError
    from store.readers.untrusted.external_files import SourceError

    try:
        diagnosis, spike = _diagnosis(paths, why_spike)
    except (RunError, StoreError, TapeError, SourceError, SpikeError, AddressError) as error:
        fail(str(error))
    _print(diagnosis, spike, as_json, paths[0] if len(paths) == 1 else "")
    if damaged := diagnosis.damaged_records:
        others = f" (and {len(damaged) - 1} more files)" if len(damaged) > 1 else ""
        place = classify(paths[0]).run / damaged[0]["path"]
        fail(f"{place}: {damaged[0]['problem']}{others}; the report covers what could be read")
    if fail_on and (worst := reaching(diagnosis.findings, "critical" if fail_on == "critical" else "warning")):
        more = f" (and {len(worst) - 1} more)" if len(worst) > 1 else ""
        echo(f"rankscope: {worst[0].severity}: {worst[0].summary}{more}", err=True)
        raise typer.Exit(1)


def _diagnosis(paths: Sequence[Path], why_spike: str) -> tuple[Diagnosis, WhySpike | None]:
    from probes.tape.no_run import no_run_at
    from store.open import classify

    inputs = [classify(path) for path in paths]
    if missing := [found.path for found in inputs if found.kind == "missing"]:
        fail(no_run_at(missing[0], but=", and no log or folder either"))
    if len(inputs) == 1 and inputs[0].run_ids:
        echo(f"rankscope: {inputs[0].path} {_runs_text(inputs[0].run_ids)}", err=True)
        inputs = [classify(inputs[0].run)]
    runs = [found for found in inputs if found.kind in ("address", "run", "shared")]
    files = [found.path for found in inputs if found not in runs]
    if why_spike and (files or len(runs) != 1):
        fail(f"--why-spike {why_spike}: {f'{files[0]} is not a recorded run' if files else 'name only one run'}")
    if not files and len(runs) == 1:
        return _diagnosed_run(runs[0], why_spike)
    from analyzers.evidence.diagnose_files import diagnose_files

    if not runs:
        return diagnose_files(files, progress=_progress), None
    from analyzers.diagnose import conclude
    from analyzers.evidence.joining import join_recorded

    parts = [_diagnosed_run(run, "")[0] for run in runs]
    parts += [diagnose_files(files, progress=_progress)] if files else []
    facts = {**parts[0].run, "files_read": parts[-1].run.get("files_read")}
    facts["also_read"] = [part.run.get("run_id") for part in parts[1:]]
    of_runs = [finding for part in parts[: len(runs)] for finding in part.findings]
    of_files = [finding for part in parts[len(runs) :] for finding in part.findings]
    # Findings have ids that are unique only within a run. With several runs, a finding that is closed in one may have
    # the same id as an open one of another.
    closed = parts[0].closed if len(runs) == 1 else {}
    return conclude(join_recorded(of_runs, of_files), facts, closed=closed), None


def _runs_text(names: Sequence[str]) -> str:
    """Text with the number of runs in a folder or at an address, the newest one, and the next ones."""
    others = f"; others: {', '.join(names[1 : 1 + MAX_LISTED_RUNS])}" if len(names) > 1 else ""
    more = f" and {len(names) - 1 - MAX_LISTED_RUNS} more" if len(names) > 1 + MAX_LISTED_RUNS else ""
    return f"holds {len(names)} run{'s' * (len(names) > 1)}; newest: {names[0]}{others}{more}"


def judge_run(run: Path) -> Diagnosis:
    """Judge a live or dead run as the command does."""
    from store.open import classify

    return _diagnosed_run(classify(run), "")[0]


def _diagnosed_run(run: Found, why_spike: str) -> tuple[Diagnosis, WhySpike | None]:
    from analyzers.account.long_run import MEMORY_BYTES
    from analyzers.numerics.loss.why_spike import explain

    with _opened(run, memory_bytes=MEMORY_BYTES, spills=True) as (store, diagnosis):
        spike = explain(store, None if why_spike == "worst" else int(why_spike)) if why_spike else None
        return diagnosis, spike


@contextmanager
def _opened(found: Found, **options: Any) -> Iterator[tuple[Store, Diagnosis]]:
    """Open a run's folder or address, or a file of `rankscope share`, and yield the store and the diagnosis."""
    from probes.tape.rundir import RunDir
    from store.published.listing import newest_run
    from watch.sharing.published_run import published_run
    from watch.sharing.shared_run import shared_run
    from watch.verdicts.diagnosed_run import diagnosed_run

    run = found.path
    if found.kind == "address":
        address, names = newest_run(found.address)
        if names:
            echo(f"rankscope: {found.address} {_runs_text(names)}", err=True)
        with published_run(address, **options) as (store, diagnosis, note):
            if note:
                echo(f"rankscope: {address}: {note}", err=True)
            yield store, diagnosis
    elif found.kind == "shared":
        with shared_run(run, **options) as (store, diagnosis, note):
            if note:
                echo(f"rankscope: {run}: {note}", err=True)
            yield store, diagnosis
    else:
        with diagnosed_run(RunDir.open(run), **options) as opened:
            yield opened


def _print(diagnosis: Diagnosis, spike: WhySpike | None, as_json: bool, run: Path | str) -> None:
    if as_json:
        from analyzers.report.json import plain, to_json

        more = {} if spike is None else {"why_spike": plain(spike.to_json())}
        print_json(to_json(diagnosis) | more)
    elif spike is not None:
        from analyzers.report.terminal.why_spike_text import render as render_spike

        render_spike(spike, console())
    else:
        from analyzers.report.terminal.diagnosis_text import render

        render(diagnosis, console(), run)


def _progress(name: str, done: int, total: int) -> None:
    """Show one line of progress on a terminal while large input is read."""
    if total >= SHOW_PROGRESS_BYTES and sys.stderr.isatty():
        from probes.tape.redaction.printable import visible

        sys.stderr.write(f"\r\x1b[Kreading {visible(name[-60:])}: {100 * done // total} % of {total / 1e9:.1f} GB")
        sys.stderr.flush()
