"""Rankscope's front door: the command line.

    rankscope train examples/gpt-demo.toml --set train.steps=100
    rankscope analyze runs/latest

Each command imports what it needs when it runs, so `rankscope analyze` starts without torch and streamlit.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from trainer.drills.catalogue import CATALOGUE, MESHES

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["__version__", "main"]
__version__ = "0.1.0"

app = typer.Typer(
    name="rankscope",
    help="Train with telemetry on every rank, find the guilty one, and get the run back on its feet.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)

RunArgument = Annotated[Path, typer.Argument(help="A run's folder, e.g. runs/latest.", metavar="RUN")]


def _fail(message: str) -> NoReturn:
    """End with exit code 2 and one line on stderr."""
    typer.echo(f"rankscope: {message}", err=True)
    raise typer.Exit(2)


def _console() -> Console:
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=110, no_color=True)


@app.command(
    epilog="Examples:  rankscope train examples/gpt-demo.toml   |   "
    "rankscope train my.toml --nproc-per-node 4 --set optim.lr=1e-3   |   "
    "rankscope train --resume runs/latest --set train.steps=400   |   "
    "rankscope train my.toml --fault nan_grad@step=40,rank=2"
)
def train(
    config_path: Annotated[
        Path | None, typer.Argument(metavar="CONFIG", help="TOML file; without one, the defaults.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change one setting; repeatable.")
    ] = None,
    nproc_per_node: Annotated[
        int, typer.Option("--nproc-per-node", min=0, help="Ranks on this machine; 0: as many as the mesh needs.")
    ] = 0,
    faults: Annotated[
        list[str] | None,
        typer.Option(
            "--fault",
            metavar="KIND@step=N,rank=R",
            help=f"Break something on purpose; repeatable. KIND: {', '.join(CATALOGUE)}. See `drill --list`.",
        ),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="Go on with a run whose processes are gone, from its newest good checkpoint."),
    ] = None,
    nnodes: Annotated[
        str, typer.Option(metavar="N|MIN:MAX", help="Nodes of the run; with MIN:MAX it goes on while MIN are there.")
    ] = "1",
    node_rank: Annotated[int, typer.Option("--node-rank", min=0, help="Which node this is, from 0.")] = 0,
    rdzv_endpoint: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where the nodes meet: the same on all of them.")
    ] = "",
    force: Annotated[
        bool, typer.Option("--force", help="With --resume: also if it is alive, or was given up by the guard.")
    ] = False,
) -> None:
    """Train a model over several ranks, with every rank recorded and watched.

    Exit codes: 0 finished, 1 failed, 2 a mistake, 3 given up by the guard, 4 another launch has taken the run, 143 told
    to stop by SIGTERM and did so with a checkpoint, 130 the same by Ctrl-C.
    """
    from probes.rundir import RunError
    from trainer.begin import Options, begin
    from trainer.config import ConfigError
    from trainer.drills.faults import FaultError
    from trainer.recovery.node import MeetingError
    from trainer.resume import ResumeError

    options = Options(
        config_path=config_path,
        overrides=overrides or [],
        nproc=nproc_per_node,
        faults=faults or [],
        resume=resume,
        force=force,
        nnodes=nnodes,
        node_rank=node_rank,
        endpoint=rdzv_endpoint,
    )
    try:
        code = begin(options, version=__version__, console=_console())
    except (ConfigError, FaultError, MeetingError, ResumeError, RunError) as error:
        _fail(str(error))
    raise typer.Exit(code)


@app.command(
    epilog="Examples:  rankscope analyze runs/latest   |   "
    "rankscope analyze runs/latest --format json --fail-on warning"
)
def analyze(
    run: RunArgument,
    output: Annotated[str, typer.Option("--format", help="text or json.", metavar="text|json")] = "text",
    fail_on: Annotated[
        str, typer.Option("--fail-on", metavar="critical|warning", help="Exit 1 if a finding is at least this severe.")
    ] = "",
) -> None:
    """Say what went wrong in a run, on which rank and why. Works on the files of a live or a dead run.

    RUN may also be a folder of a run that never heard of us: PyTorch flight-recorder dumps, or profiler traces.
    """
    if output not in ("text", "json"):
        _fail(f"--format {output}: choose text or json")
    if fail_on not in ("", "critical", "warning"):
        _fail(f"--fail-on {fail_on}: choose critical or warning")
    import time

    from analyzers.diagnose import diagnose, reaches
    from analyzers.sources.recognise import SourceError, diagnose_foreign
    from probes.rundir import RunDir, RunError
    from probes.store import Store, StoreError, is_watched
    from probes.tape_reader import TapeError

    try:
        if run.exists() and not RunDir.is_run(run):
            folder, diagnosis = RunDir(run), diagnose_foreign(run)
        else:
            folder = RunDir.open(run)
            with Store.open(folder) as store:
                now_ns = time.time_ns() if is_watched(folder.stores()) else None
                diagnosis = diagnose(store, folder.manifest(), now_ns=now_ns, stacks_dir=folder.stacks)
    except (RunError, StoreError, TapeError, SourceError) as error:
        _fail(str(error))
    if output == "json":
        import json

        from analyzers.report.json import to_json

        typer.echo(json.dumps(to_json(diagnosis), indent=2))
    else:
        from analyzers.report.text import render

        render(diagnosis, _console())
    if damaged := diagnosis.damaged_tapes:  # the verdict above is of what could be read
        more = f" (and {len(damaged) - 1} more files)" if len(damaged) > 1 else ""
        _fail(f"{folder.path / damaged[0]['path']}: {damaged[0]['problem']}{more}")
    if fail_on and reaches(diagnosis.findings, "critical" if fail_on == "critical" else "warning"):
        raise typer.Exit(1)


@app.command(
    epilog="Examples:  rankscope drill examples/gpt-demo.toml   |   "
    "rankscope drill my.toml --faults F2,F22,kill+nan_grad   |   "
    "rankscope drill my.toml --mesh ddp,fsdp,fsdp*tp --seeds 5 --format json --html drill.html"
)
def drill(
    config_path: Annotated[
        Path | None, typer.Argument(metavar="CONFIG", help="TOML file; without one, the defaults.")
    ] = None,
    faults: Annotated[
        str, typer.Option("--faults", metavar="all|F2,nan_grad,...", help="What to break; A+B breaks two in one run.")
    ] = "all",
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Runs of each fault, at other steps and ranks.")] = 1,
    mesh: Annotated[
        str, typer.Option("--mesh", metavar="ddp,fsdp,...", help=f"Layouts to try: {', '.join(MESHES)}.")
    ] = "config",
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change one setting; repeatable.")
    ] = None,
    nproc_per_node: Annotated[
        int, typer.Option("--nproc-per-node", min=0, help="Ranks; 0: as many as the mesh of CONFIG needs.")
    ] = 0,
    limit_s: Annotated[float, typer.Option("--limit-s", min=10, help="A run that takes longer is ended.")] = 180.0,
    output: Annotated[str, typer.Option("--format", help="text or json.", metavar="text|json")] = "text",
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Also write a page.")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep every run; else those that went wrong.")] = False,
    list_faults: Annotated[bool, typer.Option("--list", help="Only list what can be broken.")] = False,
) -> None:
    """Train your own configuration with faults injected one after the other, and see what is noticed and survived."""
    if output not in ("text", "json"):
        _fail(f"--format {output}: choose text or json")
    from trainer.drills.table import print_faults

    if list_faults:
        print_faults(_console())
        return
    from trainer.begin import ranks_needed
    from trainer.config import ConfigError, load_config
    from trainer.drills.command import run_drill
    from trainer.drills.execute import Base
    from trainer.drills.scenario import DrillError, plan_drill

    changes = overrides or []
    try:
        config = load_config(config_path, changes)
        num_ranks = nproc_per_node or ranks_needed(config)
        plan = plan_drill(config, faults.split(","), meshes=mesh.split(","), seeds=seeds, num_ranks=num_ranks)
    except (ConfigError, DrillError) as error:
        _fail(str(error))
    base = Base(config=config_path, overrides=tuple(changes), num_ranks=num_ranks)
    raise typer.Exit(
        run_drill(base, plan, runs=Path(config.run.dir), output=output, html=html, keep=keep, limit_s=limit_s)
    )


@app.command(
    epilog="Examples:  rankscope report runs/latest   |   "
    "rankscope report runs/latest --markdown ticket.md   |   "
    "rankscope report runs/latest --chrome-trace trace.json.gz --steps 38:42"
)
def report(
    run: RunArgument,
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="One page that works offline.")] = None,
    markdown: Annotated[Path | None, typer.Option("--markdown", metavar="FILE", help="For an incident ticket.")] = None,
    chrome_trace: Annotated[
        Path | None, typer.Option("--chrome-trace", metavar="FILE", help="For Perfetto; .gz compresses it.")
    ] = None,
    steps: Annotated[
        str, typer.Option("--steps", metavar="FIRST:LAST", help="Steps of the trace; without it, all.")
    ] = "",
) -> None:
    """Write what `analyze` says as a file to hand on; without a FILE, RUN/reports/report.html."""
    import time

    from analyzers.diagnose import diagnose
    from analyzers.report.files import ReportError, step_range, write_reports
    from probes.rundir import RunDir, RunError
    from probes.store import Store, StoreError, is_watched
    from probes.tape_reader import TapeError

    try:
        folder = RunDir.open(run)
        if html is None and markdown is None and chrome_trace is None:
            html = folder.reports / "report.html"
        chosen = step_range(steps)
        with Store.open(folder) as store:
            now_ns = time.time_ns() if is_watched(folder.stores()) else None
            manifest = folder.manifest()
            diagnosis = diagnose(store, manifest, now_ns=now_ns, stacks_dir=folder.stacks)
            written = write_reports(
                store, diagnosis, manifest, html=html, markdown=markdown, chrome_trace=chrome_trace, steps=chosen,
                version=__version__,
            )  # fmt: skip
    except (RunError, StoreError, TapeError, ReportError) as error:
        _fail(str(error))
    for path, num_bytes in written:
        typer.echo(f"{path}  {num_bytes / 1e6:.1f} MB")


@app.command(
    epilog="Examples:  rankscope export runs/latest --out model.safetensors   |   "
    "rankscope export runs/latest/checkpoints/step-00000050 --out model.safetensors"
)
def export(
    path: Annotated[Path, typer.Argument(help="A run's folder, or that of a checkpoint.", metavar="RUN|CHECKPOINT")],
    out: Annotated[Path, typer.Option("--out", help="File to write, replaced if it is there.", metavar="FILE")],
    step: Annotated[int | None, typer.Option("--step", help="Step; without it, the newest good one.")] = None,
) -> None:
    """Write a checkpoint's whole weights into a safetensors file, after all its hashes were checked."""
    from trainer.checkpoint.export import export as export_weights
    from trainer.checkpoint.export import find_checkpoint
    from trainer.checkpoint.manifest import CheckpointError

    try:
        done = export_weights(find_checkpoint(path, step=step), out)
    except CheckpointError as error:
        _fail(str(error))
    except OSError as error:
        _fail(f"{out}: cannot be written: {error.strerror}")
    what = f"{done.num_parameters:,} parameters in {done.num_tensors} tensors, {done.num_bytes / 1e6:.1f} MB"
    _console().print(f"{out}: step {done.step} of {done.folder}: {what}", highlight=False, soft_wrap=True)


@app.command(
    epilog="Examples:  rankscope compare runs/before runs/after   |   "
    "rankscope compare runs/before runs/after --format json --fail-on warning"
)
def compare(
    run_a: Annotated[Path, typer.Argument(help="The run to compare with.", metavar="RUN_A")],
    run_b: Annotated[Path, typer.Argument(help="The run that is compared.", metavar="RUN_B")],
    output: Annotated[str, typer.Option("--format", help="text or json.", metavar="text|json")] = "text",
    fail_on: Annotated[
        str, typer.Option("--fail-on", metavar="warning", help="Exit 1 if RUN_B is slower beyond doubt.")
    ] = "",
) -> None:
    """Say what changed between two runs: settings, speed, phases, loss, findings, goodput."""
    if output not in ("text", "json"):
        _fail(f"--format {output}: choose text or json")
    if fail_on not in ("", "warning"):
        _fail(f"--fail-on {fail_on}: choose warning")
    from contextlib import ExitStack

    from analyzers.compare import Side
    from analyzers.compare import compare as compare_sides
    from analyzers.diagnose import diagnose, reaches
    from probes.rundir import RunDir, RunError
    from probes.store import Store, StoreError
    from probes.tape_reader import TapeError

    try:
        with ExitStack() as stores:
            sides = []
            for path in (run_a, run_b):
                folder = RunDir.open(path)
                store = stores.enter_context(Store.open(folder))
                diagnosis = diagnose(store, folder.manifest(), stacks_dir=folder.stacks)
                sides.append(Side(source=store, manifest=folder.manifest(), diagnosis=diagnosis))
            comparison = compare_sides(*sides)
    except (RunError, StoreError, TapeError) as error:
        _fail(str(error))
    if output == "json":
        import json

        from analyzers.report.json import plain

        typer.echo(json.dumps(plain(comparison.to_json()), indent=2, allow_nan=False))
    else:
        from analyzers.report.compare_text import render

        render(comparison, _console())
    if fail_on and reaches(comparison.findings, "warning"):
        raise typer.Exit(1)


@app.command(epilog="Example:  rankscope rebuild runs/latest")
def rebuild(run: RunArgument) -> None:
    """Make a run's store anew from its tapes, e.g. after it was deleted or damaged."""
    from probes.rundir import RunDir, RunError
    from probes.store import StoreError
    from probes.store import rebuild as rebuild_store

    try:
        folder = RunDir.open(run)
        result = rebuild_store(folder)
    except (RunError, StoreError) as error:
        _fail(str(error))
    rows = sum(result.rows.values())
    _console().print(
        f"{folder.store()}: {rows:,} rows from {len(list(folder.rank_dirs()))} rank folders", highlight=False
    )


@app.command(epilog="Example:  rankscope watch runs/latest")
def watch(
    run: RunArgument,
    node_rank: Annotated[int, typer.Option("--node-rank", min=0, help="Index of this node.")] = 0,
) -> None:
    """Record and supervise a run that trains on this node (`train` starts it by itself)."""
    from trainer.recovery.watch import main as watch_main

    raise typer.Exit(watch_main([str(run), "--node-rank", str(node_rank)]))


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(f"rankscope {__version__}")


def main() -> None:
    """Entry of the `rankscope` command."""
    app()


if __name__ == "__main__":
    main()
