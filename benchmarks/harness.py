"""Common parts of the benchmarks' command lines: arguments, JSON, Markdown, progress.

parser = argument_parser(__doc__, json=True)          # with `--json FILE`
print(markdown_head("case", "found", "seconds"))
print(markdown_row(name, found, f"{seconds:.1f}"), flush=True)
write_json(options.json, rows)                  # nothing without --json
"""

from __future__ import annotations

import argparse
import json as json_format
import sys
from pathlib import Path

__all__ = ["argument_parser", "markdown_head", "markdown_row", "progress", "write_json"]


def argument_parser(doc: str | None, *, json: bool = False) -> argparse.ArgumentParser:
    """Create a parser whose help is the module's docstring. `json`: add the option `--json FILE` for `write_json`."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    prog = f"python -m {spec.name.removesuffix('.__main__')}" if spec is not None else None
    parser = argparse.ArgumentParser(prog=prog, description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if json:
        parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    return parser


def write_json(path: Path | None, figures: object) -> None:
    """Write the figures if a file was given. A benchmark that may be interrupted calls it after each row."""
    if path is not None:
        path.write_text(json_format.dumps(figures, indent=1) + "\n", encoding="utf-8")


def markdown_head(*titles: str) -> str:
    """The two lines that begin a table."""
    return f"{markdown_row(*titles)}\n|{'---|' * len(titles)}"


def markdown_row(*cells: object) -> str:
    """One row of a table."""
    return f"| {' | '.join(map(str, cells))} |"


def progress(done: int, total: int, what: str) -> None:
    """Report a benchmark's progress on stderr, since stdout has its table."""
    print(f"{done}/{total} {what}", file=sys.stderr, flush=True)
