"""`rankscope export`: write a run in other formats: weights, an experiment tracker, Parquet, a trace."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rankscope.terminal import FormatOption, console, fail, print_json, wants_json

if TYPE_CHECKING:
    from probes.tape.rundir import RunDir

__all__ = ["EPILOG", "export"]

EPILOG = (
    "\b\nExamples:\nrankscope export runs/latest --out model.safetensors\n"
    "rankscope export runs/latest --to llama --out llama/\n"
    "rankscope export s3://bucket/runs/gpt-20261122 --out model.safetensors\n"
    "rankscope export runs/latest --to tensorboard\n"
    "rankscope export runs/latest --to wandb --project llm\n"
    "rankscope export runs/latest --to parquet --out s3://lake/rankscope\n"
    "rankscope export runs/latest --to chrome-trace --out trace.json.gz --steps 38:42"
)


class Target(StrEnum):
    """Output formats."""

    safetensors = "safetensors"
    llama = "llama"
    tensorboard = "tensorboard"
    wandb = "wandb"
    parquet = "parquet"
    chrome_trace = "chrome-trace"


def export(
    path: Annotated[
        str,
        typer.Argument(
            help="Folder of a run or checkpoint; for weights also a run's address (s3://...).",
            metavar="RUN|CHECKPOINT",
        ),
    ],
    to: Annotated[
        Target,
        typer.Option("--to", help="Format: weights, a tracker's run, Parquet tables, or a trace for Perfetto."),
    ] = Target.safetensors,
    out: Annotated[
        str,
        typer.Option("--out", metavar="FILE|FOLDER|URL", help="Destination. Default: the run's folder."),
    ] = "",
    step: Annotated[
        int | None, typer.Option("--step", help="Weights of this step. Default: the last complete checkpoint.")
    ] = None,
    steps: Annotated[str, typer.Option("--steps", metavar="FIRST:LAST", help="Steps of the trace. Default: all.")] = "",
    ranks: Annotated[
        str, typer.Option("--ranks", help="Ranks whose values go to the tracker: none, sampled (eight) or all.")
    ] = "sampled",
    project: Annotated[str, typer.Option("--project", help="W&B project.")] = "rankscope",
    mode: Annotated[str, typer.Option("--mode", help="W&B mode: online or offline. Default: W&B's own.")] = "",
    output: FormatOption = "text",
) -> None:
    """Write a run for other programs: weights as safetensors, a tracker's run, Parquet files, or a Chrome trace."""
    as_json = wants_json(output)
    is_weights = to in (Target.safetensors, Target.llama)
    if step is not None and not is_weights:
        fail(f"--step {step} is for --to safetensors and llama")
    if steps and to is not Target.chrome_trace:
        fail(f"--steps {steps} is for --to chrome-trace")
    if is_weights:
        _report(_weights(path, out, step, as_llama=to is Target.llama), as_json)
        return
    from probes.tape.format.reader import TapeError
    from probes.tape.rundir import RunDir, RunError
    from store import StoreError

    try:
        run = RunDir.open(Path(path))
        if to is Target.chrome_trace:
            done = _trace(run, out, steps)
        elif to is Target.parquet:
            done = _tables(run, out)
        else:
            done = _tracker(run, to.value, out, ranks, project, mode)
    except (RunError, StoreError, TapeError) as error:
        fail(str(error))
    _report(done, as_json)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Exported:
    """Written files: lines to print and values for JSON."""

    lines: tuple[str, ...]
    values: dict[str, object]


def _report(done: _Exported, as_json: bool) -> None:
    if as_json:
        print_json(done.values)
        return
    for line in done.lines:
        console().print(line, highlight=False, soft_wrap=True, markup=False)


def _weights(path: str, out: str, step: int | None, *, as_llama: bool) -> _Exported:
    """Export the weights; all hashes of the checkpoint are verified first."""
    if not out:
        example = "folder for the model, e.g. --out llama/" if as_llama else "file, e.g. --out model.safetensors"
        fail(f"--out is missing: name the {example}")
    from probes.tape.rundir import RunDir, RunError
    from trainer.checkpoint.disk_tier.manifest import CheckpointError, StorageError
    from trainer.checkpoint.export import export as export_weights
    from trainer.checkpoint.export import export_llama, find_checkpoint, proven_step
    from trainer.checkpoint.remote.fetched_run import fetched_run
    from trainer.config.load import ConfigError, changed_config

    try:
        with fetched_run(path, step=step) as local:
            folder = find_checkpoint(local, step=step)
            proven = proven_step(folder)
            if as_llama:
                run = RunDir.open(folder.parent.parent)
                done = export_llama(folder, Path(out), changed_config(run.private_manifest()["config"], []).model)
            else:
                done = export_weights(folder, Path(out))
    except (CheckpointError, StorageError, ConfigError, RunError) as error:
        fail(str(error))
    except OSError as error:
        fail(f"{out}: cannot be written ({error.strerror or error}): choose another place")
    from analyzers.wording import size_text

    what = f"{done.num_parameters:,} parameters in {done.num_tensors} tensors, {size_text(done.num_bytes)}"
    lines = [f"{out}: step {done.step} of {path if '://' in path else done.folder}: {what}"]
    if proven is not None:
        lines.append(
            f"No healthy steps followed this checkpoint. The newest checkpoint "
            f"with healthy steps after it: --step {proven}."
        )
    values: dict[str, object] = {
        "path": out, "step": done.step, "num_parameters": done.num_parameters, "num_tensors": done.num_tensors,
        "bytes": done.num_bytes, "newest_confirmed_step": proven,
    }  # fmt: skip
    return _Exported(lines=tuple(lines), values=values)


def _trace(run: RunDir, out: str, steps: str) -> _Exported:
    from analyzers.report.files import ReportError, step_range, write_trace_file
    from analyzers.wording import size_text
    from store import Store

    file = Path(out) if out else run.reports / "trace.json.gz"
    try:
        chosen = step_range(steps)
        with Store.open(run) as store:
            num_events, num_bytes = write_trace_file(store, file, steps=chosen)
    except ReportError as error:
        fail(str(error))
    line = f"{file}: {num_events:,} events, {size_text(num_bytes)}; opens in ui.perfetto.dev"
    return _Exported(lines=(line,), values={"path": str(file), "events": num_events, "bytes": num_bytes})


def _tables(run: RunDir, out: str) -> _Exported:
    from store import Store
    from store.parquet import ParquetError, write_tables

    place = out or str(run.path / "parquet")
    manifest = run.manifest()
    try:
        with Store.open(run) as store:
            created_ns = int(manifest.get("created_wall_ns", 0) or 0)
            done = write_tables(store, place, run_id=run.run_id, created_ns=created_ns, manifest=manifest)
    except ImportError as error:
        fail(f"{error}: pip install pyarrow fsspec (and what fsspec needs for {place.partition('://')[0]}://)")
    except ParquetError as error:
        fail(str(error))
    from analyzers.wording import size_text

    rows, num_bytes = sum(file.num_rows for file in done), sum(file.num_bytes for file in done)
    files = f"{len(done)} file{'s' * (len(done) != 1)}"
    lines = (
        f"{place}: {rows:,} row{'s' * (rows != 1)} in {files}, {size_text(num_bytes)}",
        f"duckdb -c \"FROM read_parquet('{place}/table=steps/**/*.parquet', hive_partitioning = true)\"",
    )
    return _Exported(lines=lines, values={"path": place, "rows": rows, "files": len(done), "bytes": num_bytes})


def _tracker(run: RunDir, name: str, out: str, ranks: str, project: str, mode: str) -> _Exported:
    from analyzers.diagnose import diagnose
    from probes.settings.section import read
    from probes.settings.sections import TrackersSettings
    from store import Store, is_watched
    from store.published.copy_time import stored_until_ns
    from watch.exporting.trackers.feed import INSTALL, TrackerFeed, open_tracker
    from watch.exporting.trackers.tracked_steps import RANKS
    from watch.exporting.trackers.tracker import TrackerError

    if ranks not in RANKS:
        fail(f"--ranks {ranks}: choose {', '.join(RANKS)}")
    if mode not in ("", "online", "offline"):
        fail(f"--mode {mode}: choose online or offline")
    manifest = run.manifest()
    if not out and name in read(TrackersSettings, manifest).to and is_watched(run.stores()):
        fail(f"{run.path} is being written to {name} while it trains: wait until it ends, or choose another --out")
    try:
        with Store.open(run) as store:
            tracker = open_tracker(name, run, Path(out) if out else None, project=project, mode=mode)
            feed = TrackerFeed(tracker, ranks=ranks)
            num_steps = 0
            while taken := feed.steps(store, is_over=True):
                num_steps += taken
                tracker.flush()
            now_ns = stored_until_ns(run) if is_watched(run.stores()) else None
            diagnosis = diagnose(store, manifest, now_ns=now_ns, stacks_dir=run.stacks)
            for finding in (*diagnosis.fired, *diagnosis.advised):
                tracker.finding(finding.to_json(), feed.ended_s(finding.first_step), is_news=False)
            feed.finish(store, verdict=diagnosis.verdict)
    except ImportError as error:
        fail(f"{error}: {INSTALL}")
    except TrackerError as error:
        fail(str(error))
    num = len(diagnosis.fired)
    lines = (
        f"{tracker.place}: {num_steps} step{'s' * (num_steps != 1)}, {num} finding{'s' * (num != 1)}",
        tracker.next_step,
    )
    return _Exported(lines=lines, values={"path": str(tracker.place), "steps": num_steps, "findings": num})
