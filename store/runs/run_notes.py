"""Tags and a note on a run, in `notes.json` in the run's folder.

    notes = read_notes(run)                     # RunNotes(tags=("baseline",), text="lr 3e-4, second try")
    write_notes(run, RunNotes(tags=("baseline",), text="..."))

They belong to the user and are not evidence: no analysis reads them, and `run.json` with its digest stays unchanged.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass

from probes.tape.files.safe_open import read_plain
from probes.tape.rundir import RunDir

__all__ = ["MAX_TAGS", "NAME", "NotesError", "RunNotes", "read_notes", "write_notes"]

NAME = "notes.json"
MAX_BYTES = 64 << 10
MAX_TAGS = 32
MAX_TEXT_CHARS = 2_000
_TAG = re.compile(r"[^\s,\x00-\x1f\x7f]{1,40}")


class NotesError(ValueError):
    """A tag or note is not valid; the message is one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunNotes:
    """Tags and a note of a run."""

    tags: tuple[str, ...] = ()
    """The tags in the order in which they were added, without duplicates."""
    text: str = ""

    def changed(self, *, add: tuple[str, ...] = (), remove: tuple[str, ...] = (), text: str | None = None) -> RunNotes:
        """Return a copy with tags added and removed, and the text replaced unless None. Raises NotesError."""
        for tag in add:
            if not _TAG.fullmatch(tag):
                raise NotesError(f"tag {tag[:60]!r}: up to 40 characters without spaces and commas")
        kept = [tag for tag in dict.fromkeys((*self.tags, *add)) if tag not in remove]
        if len(kept) > MAX_TAGS:
            raise NotesError(f"{len(kept)} tags: a run has at most {MAX_TAGS}")
        if text is not None and len(text) > MAX_TEXT_CHARS:
            raise NotesError(f"the note has {len(text):,} characters: at most {MAX_TEXT_CHARS:,} are kept")
        return RunNotes(tags=tuple(kept), text=self.text if text is None else text.strip())


def read_notes(run: RunDir) -> RunNotes:
    """Read a run's notes; empty if there are none, or if the file has another format."""
    try:
        found = json.loads(read_plain(run.path / NAME, MAX_BYTES))
    except (OSError, ValueError, RecursionError):
        return RunNotes()
    tags, text = (found.get("tags"), found.get("text")) if isinstance(found, dict) else (None, None)
    return RunNotes(
        tags=tuple(tag[:40] for tag in tags if isinstance(tag, str))[:MAX_TAGS] if isinstance(tags, list) else (),
        text=text[:MAX_TEXT_CHARS] if isinstance(text, str) else "",
    )


def write_notes(run: RunDir, notes: RunNotes) -> None:
    """Replace the notes atomically; without tags and text the file is deleted. Raises OSError."""
    path = run.path / NAME
    if notes == RunNotes():
        path.unlink(missing_ok=True)
        return
    fresh = run.path / f".{NAME}.{os.getpid()}"
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "w") as file:
        file.write(json.dumps({"tags": list(notes.tags), "text": notes.text}, indent=2) + "\n")
    fresh.replace(path)
