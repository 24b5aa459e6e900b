"""`rankscope share`: pack a run into one file for another engineer, without secrets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from probes.tape.typed_path import analyze_command
from rankscope import __version__
from rankscope.terminal import (
    FormatOption,
    RunArgument,
    console,
    echo,
    fail,
    print_json,
    refuse_bad_output,
    wants_json,
)

__all__ = ["EPILOG", "share"]

EPILOG = (
    "\b\nExamples:\nrankscope share runs/latest\nrankscope share runs/latest --out /tmp/run-7.tar.gz\n"
    "rankscope share runs/latest --last-steps 500\nrankscope analyze gpt-demo-20261122-091443.rankscope.tar.gz"
)


def share(
    run: RunArgument,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="File to write. Default: ./RUN.rankscope.tar.gz."),
    ] = None,
    last_steps: Annotated[
        int | None,
        typer.Option("--last-steps", min=1, help="Include rows of the newest steps only; reports cover all steps."),
    ] = None,
    output: FormatOption = "text",
) -> None:
    """Pack a run into one file for another engineer: records, reports, stacks and logs, with secrets redacted.

    `rankscope analyze FILE` gives the same verdict on any machine. Unpacked (tar -xzf FILE), the folder is a run for
    every other command: dashboard, report, sql, compare. Checkpoints, data, tapes and environment variables are left
    out. Read the file before you publish it: texts of errors, host names and paths stay as they are.
    """
    as_json = wants_json(output)
    refuse_bad_output("--out", out)
    from analyzers.report.files import ReportError
    from analyzers.verdict.verdict import without_unjudged
    from analyzers.wording import counted, size_text
    from probes.tape.format.reader import TapeError
    from probes.tape.rundir import RunDir, RunError
    from store import StoreError
    from watch.sharing.pack import pack, printable_name

    try:
        folder = RunDir.open(run)
        target = out or Path(f"{printable_name(folder)}.rankscope.tar.gz")
        if target.is_dir():
            fail(f"--out {target}: is a folder; name a file")
        packed = pack(folder, target, version=__version__, last_steps=last_steps)
    except (RunError, StoreError, TapeError, ReportError) as error:
        fail(str(error))
    for name in packed.left_out:
        echo(f"rankscope: skipped {name}", err=True)
    if as_json:
        print_json({
            "run": folder.run_id, "file": str(target), "bytes": packed.num_bytes, "texts": packed.num_texts,
            "verdict": packed.diagnosis.verdict, "skipped": list(packed.left_out),
        })  # fmt: skip
        return
    screen = console()
    screen.print(without_unjudged(packed.diagnosis.verdict).strip(), markup=False, highlight=False)
    texts = counted(packed.num_texts, "file")
    size = f"{size_text(packed.num_bytes)}{f', with {texts} of stacks and logs' if texts else ''}"
    screen.print(f"{target}  {size}. Next: {analyze_command(target)}", markup=False, highlight=False, soft_wrap=True)
