"""`rankscope note`: tags and a note on runs, which the table of runs shows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rankscope.terminal import FormatOption, echo, fail, print_json, wants_json

__all__ = ["EPILOG", "note"]

EPILOG = (
    "\b\nExamples:\nrankscope note runs/latest --tag baseline\n"
    "rankscope note runs/a runs/b --tag lr-sweep --text 'lr 3e-4, warm-up of 100 steps'\n"
    "rankscope note runs/latest --untag baseline --text ''\nrankscope note runs/latest"
)


def note(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs, e.g. runs/latest.", metavar="RUN...")],
    tag: Annotated[list[str] | None, typer.Option("--tag", metavar="TAG", help="Add a tag; repeatable.")] = None,
    untag: Annotated[list[str] | None, typer.Option("--untag", metavar="TAG", help="Remove a tag; repeatable.")] = None,
    text: Annotated[
        str | None, typer.Option("--text", metavar="TEXT", help="Replace the note; an empty one removes it.")
    ] = None,
    output: FormatOption = "text",
) -> None:
    """Keep tags and a note with runs. Without options, print them.

    They are in `notes.json` of each run's folder. The dashboard shows them and can filter by them, but not change them.
    """
    as_json = wants_json(output)
    from probes.tape.rundir import RunDir, RunError
    from store.runs.run_notes import NotesError, read_notes, write_notes

    try:
        folders = [RunDir.open(path) for path in runs]
        before = [read_notes(folder) for folder in folders]
        after = [notes.changed(add=tuple(tag or ()), remove=tuple(untag or ()), text=text) for notes in before]
        for folder, former, notes in zip(folders, before, after, strict=True):
            if notes != former:
                write_notes(folder, notes)
    except (RunError, NotesError) as error:
        fail(str(error))
    except OSError as error:
        fail(f"cannot write {error.filename or 'the notes'}: {error.strerror}")
    if as_json:
        pairs = zip(folders, after, strict=True)
        print_json([{"run": f.run_id, "tags": list(n.tags), "text": n.text} for f, n in pairs])
        return
    for folder, notes in zip(folders, after, strict=True):
        tags = ", ".join(notes.tags) or "no tags"
        echo(f"{folder.run_id}: {tags}{f'; {notes.text}' if notes.text else ''}")
