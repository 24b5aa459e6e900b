"""`rankscope sql`: one read-only statement over a run's records, without the duckdb program."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rankscope.terminal import LONGEST_S, RunArgument, console, echo, fail

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["EPILOG", "sql"]

EPILOG = (
    "\b\nExamples:\nrankscope sql runs/latest 'FROM steps LIMIT 5'\n"
    "rankscope sql runs/latest 'SELECT rank, median(loss) FROM steps GROUP BY rank' --format csv\n"
    "rankscope sql runs/latest --tables"
)
TEXT_WIDTH = 20
"""A column of texts this wide can be read; longer texts are folded."""
GAP = 2
"""Characters between two columns of a table."""


def sql(
    run: RunArgument,
    statement: Annotated[
        str, typer.Argument(metavar="SQL", help="One SELECT, FROM, DESCRIBE, SUMMARIZE or EXPLAIN.")
    ] = "",
    output: Annotated[
        str, typer.Option("--format", help="Output: text, csv or json.", metavar="text|csv|json")
    ] = "text",
    tables: Annotated[bool, typer.Option("--tables", help="List the tables and their rows, and exit.")] = False,
    max_rows: Annotated[int, typer.Option("--max-rows", min=1, help="Maximum number of rows.")] = 1000,
    limit_s: Annotated[float, typer.Option("--limit-s", min=0.1, max=LONGEST_S, help="Time limit (seconds).")] = 30.0,
) -> None:
    """Query a run's records with SQL, also while it trains. Read-only, without access to other files.

    The statement runs in a separate process, with 1 GiB of memory; it is ended at the time limit.
    --tables lists the tables, `DESCRIBE steps` the columns of one. Exit code 2: the statement failed; stderr says why.
    """
    if output not in ("text", "csv", "json"):
        fail(f"--format {output}: choose text, csv or json")
    if tables and statement:
        fail(f"--tables takes no statement: leave out one of --tables and {statement!r}")
    if not tables and not statement:
        fail("give a statement, e.g. 'FROM steps LIMIT 5', or --tables")
    from probes.tape.rundir import RunDir, RunError
    from store import Store, StoreError
    from store.sql.process import ask

    try:
        opened = RunDir.open(Path(run))
        if tables:
            with Store.open(opened) as store:
                answer = store.typed(_counts(store), max_rows=max_rows, limit_s=limit_s)
        else:
            answer = ask(opened, statement, max_rows=max_rows, limit_s=limit_s)
    except (RunError, StoreError) as error:
        listed = "; --tables lists the tables" if str(error).startswith("Catalog Error: Table") else ""
        fail(f"{error}{listed}")
    from rankscope.query_result import distinct_names

    _print(distinct_names(answer.names), answer.rows, output)
    if answer.is_cut:
        echo(f"rankscope: only the first {max_rows} rows are shown; --max-rows changes that", err=True)


def _counts(store: Any) -> str:
    """SQL statement that counts the rows of each table."""
    from probes.tape.format.schema import TABLES

    counts = [f"SELECT '{name}' AS name, count(*) AS num_rows FROM {name}" for name in TABLES if store.has(name)]
    return f"FROM ({' UNION ALL '.join(counts)}) ORDER BY num_rows DESC, name"


def _print(names: tuple[str, ...], rows: list[tuple[Any, ...]], output: str) -> None:
    if output == "json":
        import json

        echo(json.dumps([dict(zip(names, row, strict=True)) for row in rows], default=str))
    elif output == "csv":
        import csv
        import sys

        from probes.tape.redaction.printable import visible

        shown = ([visible(value) if isinstance(value, str) else value for value in row] for row in (names, *rows))
        csv.writer(sys.stdout).writerows(shown)
    else:
        from probes.tape.redaction.printable import visible

        titles = [visible(name) for name in names]
        texts = [["" if value is None else visible(str(value)) for value in row] for row in rows]
        numeric = [all(isinstance(row[index], (int, float, type(None))) for row in rows) for index in range(len(names))]
        screen = console()
        if rows and _width(titles, texts, numeric) > screen.width:
            _print_records(titles, texts)
        else:
            _print_table(screen, titles, texts, numeric)


def _width(titles: list[str], texts: list[list[str]], numeric: list[bool]) -> int:
    """Width below which a table would break a name or a number, or leave a text too little to be read."""
    widths = [len(title) for title in titles]
    for row in texts:
        for index, text in enumerate(row):
            widths[index] = max(widths[index], len(text) if numeric[index] else min(len(text), TEXT_WIDTH))
    return sum(widths) + GAP * (len(widths) - 1)


def _print_records(titles: list[str], texts: list[list[str]]) -> None:
    """Print a row as lines, one per column, because the terminal is too narrow for a table."""
    widest = max(len(title) for title in titles)
    for number, row in enumerate(texts, start=1):
        echo(f"row {number}")
        for title, text in zip(titles, row, strict=True):
            echo(f"  {title:{widest}}  {text}".rstrip())


def _print_table(screen: Console, titles: list[str], texts: list[list[str]], numeric: list[bool]) -> None:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title, is_number in zip(titles, numeric, strict=True):
        table.add_column(title, justify="right" if is_number else "left", overflow="fold")
    for row in texts:
        table.add_row(*row)
    screen.print(table, highlight=False, markup=False)
