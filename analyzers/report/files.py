"""Write reports to a temporary name and rename them, so that no reader sees a half-written report.

    write_reports(store, diagnosis, manifest, html=Path("report.html"), markdown=Path("ticket.md"))

Raises ReportError with a message of one line if a file cannot be written.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from analyzers.diagnose import Diagnosis
from analyzers.source import Source

__all__ = ["ReportError", "step_range", "write_page", "write_reports", "write_trace_file"]


class ReportError(Exception):
    """Raised if a report cannot be made. Its one line says what failed, where, and what to do."""


def step_range(text: str) -> tuple[int, int] | None:
    """`38:42` as (38, 42), `40` as (40, 40), nothing as None. Raises ReportError."""
    if not text:
        return None
    first, _, last = text.partition(":")
    if not (first.isdecimal() and (last or first).isdecimal() and len(text) < 40) or int(first) > int(last or first):
        raise ReportError(f"--steps {text[:40]}: write a range of steps as FIRST:LAST, e.g. 38:42")
    return int(first), int(last or first)


def write_reports(
    source: Source,
    diagnosis: Diagnosis,
    manifest: Mapping[str, Any],
    *,
    html: Path | None = None,
    markdown: Path | None = None,
    chrome_trace: Path | None = None,
    steps: tuple[int, int] | None = None,
    version: str = "",
) -> list[tuple[Path, int]]:
    """Write the requested reports. Returns the files with their sizes in bytes."""
    written = []
    if html is not None:
        from analyzers.report.html.diagnosis_page import render

        with _replacing(html) as fresh:
            fresh.write_bytes(render(source, diagnosis, manifest, version=version))
        written.append(html)
    if markdown is not None:
        from analyzers.report.markdown import to_markdown

        with _replacing(markdown) as fresh:
            fresh.write_bytes(to_markdown(diagnosis, manifest).encode("utf-8", "replace"))
        written.append(markdown)
    if chrome_trace is not None:
        write_trace_file(source, chrome_trace, steps=steps)
        written.append(chrome_trace)
    return [(path, path.stat().st_size) for path in written]


def write_trace_file(source: Source, path: Path, *, steps: tuple[int, int] | None = None) -> tuple[int, int]:
    """Write a Chrome trace, compressed if its name ends in .gz. Returns its numbers of events and bytes. Raises
    ReportError.
    """
    from analyzers.report.chrome_trace.write import write_trace

    _refuse_unrecorded(source, steps)
    with _replacing(path) as fresh:
        num_events = write_trace(source, fresh, steps=steps, compressed=path.suffix == ".gz")
    return num_events, path.stat().st_size


def _refuse_unrecorded(source: Source, steps: tuple[int, int] | None) -> None:
    if steps is None or not source.has("steps"):
        return
    ((first, last, num),) = source.rows(
        "SELECT min(step), max(step), count(*) FILTER (step BETWEEN ? AND ?) FROM steps", [*steps]
    )
    if not num:
        has = f"the run has steps {first} to {last}" if last is not None else "the run has no steps"
        raise ReportError(f"--steps {steps[0]}:{steps[1]}: not recorded; {has}")


def write_page(path: Path, page: bytes) -> int:
    """Write a page, replacing an existing file, and return its size in bytes. Raises ReportError."""
    with _replacing(path) as fresh:
        fresh.write_bytes(page)
    return len(page)


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A temporary file next to `path` that replaces it at the end."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield fresh
        fresh.replace(path)
    except OSError as error:
        raise ReportError(f"{path}: cannot be written ({error.strerror or error}): choose another place") from error
    finally:
        with contextlib.suppress(OSError):
            fresh.unlink(missing_ok=True)
