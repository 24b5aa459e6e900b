"""Find the reader of this package that recognises a file, and read it within the limits for untrusted files.

name = program_of(first)                     # "sacct", a module of this package; None if no reader recognises the file
rows = read_program(name, Path("sacct.txt"), shown="slurm/sacct.txt")
"""

from __future__ import annotations

import pkgutil
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType

from store.readers import programs
from store.readers.logs.plain_text import plain_bytes
from store.readers.programs.rows import ProgramRows
from store.readers.untrusted.confined import confined

__all__ = ["name_of", "program_of", "read_program", "text_of", "wraps_text"]

MAX_TEXT_BYTES = 1 << 30


@cache
def _modules() -> dict[str, ModuleType]:
    found = (import_module(f"{programs.__name__}.{module.name}") for module in pkgutil.iter_modules(programs.__path__))
    return {module.__name__.rpartition(".")[2]: module for module in found if hasattr(module, "recognise")}


def program_of(first: bytes) -> str | None:
    """Name of the module that recognises a file by its first bytes, or by their text without colours."""
    plain = plain_bytes(first)
    for text in (first,) if plain == first else (first, plain):
        found = next((name for name, module in _modules().items() if module.recognise(text)), None)
        if found is not None:
            return found
    return None


def name_of(program: str) -> str:
    """Description of a program's files in words."""
    return str(_modules()[program].NAME)


def wraps_text(program: str) -> bool:
    """Return True if a program's files wrap the lines of a text log."""
    return hasattr(_modules()[program], "lines")


def read_program(program: str, path: Path, *, shown: str) -> ProgramRows:
    """Read the rows of a file, called `shown` in the report. Raises SourceError."""
    rows: ProgramRows = confined(_modules()[program].read, path)
    for event in rows.log_events:
        event["source"] = shown
    return rows


def text_of(program: str, path: Path, into: Path) -> Path:
    """Write the text log that a file wraps to a file of the same name below `into`. Raises SourceError."""
    text: str = confined(_text, path, program)
    found = into / path.name
    found.write_text(text, encoding="utf-8")
    return found


def _text(path: Path, program: str) -> str:
    lines, num_chars = [], 0
    for line in _modules()[program].lines(path):
        lines.append(line)
        num_chars += len(line) + 1
        if num_chars > MAX_TEXT_BYTES:
            break
    return "\n".join(lines) + "\n"
