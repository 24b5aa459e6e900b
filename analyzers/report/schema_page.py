"""`docs/schema.md`, generated from the schema, the catalogue of events and who reads them, so that it cannot drift.

python -m analyzers.report.schema_page > docs/schema.md
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import groupby

from analyzers.report.where_shown import SURFACES, shown, shown_event
from probes.tape.event_kinds import EVENT_KINDS, EventKind
from probes.tape.schema import TABLES, Column, Table
from store.ddl import SQL_TYPES, store_columns

__all__ = ["EXAMPLES", "markdown"]

EXAMPLES: dict[str, tuple[str, str]] = {
    "steps": (
        "Which rank does the most work in a step? Waiting for the others is not work.",
        "SELECT rank, median(duration_ns - collective_wait_ns) / 1e6 AS own_work_ms\n"
        "FROM steps\n"
        "WHERE duration_ns IS NOT NULL\n"
        "GROUP BY rank\n"
        "ORDER BY own_work_ms DESC",
    ),
    "spans": (
        "What is every rank doing that has not ended?",
        "SELECT attempt, rank, step, kind, microbatch\n"
        "FROM spans\n"
        "WHERE end_ns IS NULL\n"
        "ORDER BY attempt, rank, start_ns",
    ),
    "device_stalls": (
        "In which phase does each GPU stand still for communication, and for how long a step?",
        "SELECT rank, place, sum(end_ns - start_ns) / 1e6 / count(DISTINCT step) AS ms_a_step\n"
        "FROM device_stalls\n"
        "WHERE waits_for = 'communication'\n"
        "GROUP BY rank, place\n"
        "ORDER BY ms_a_step DESC",
    ),
    "collectives": (
        "Who arrives last? All leave a collective together, so it is the rank that waits the shortest.",
        "SELECT last_rank, count(*) AS num_calls\n"
        "FROM (\n"
        "    SELECT arg_min(rank, end_ns - issue_ns) AS last_rank\n"
        "    FROM collectives\n"
        "    WHERE end_ns IS NOT NULL AND peer IS NULL\n"
        "    GROUP BY attempt, process_group, seq\n"
        "    HAVING count(*) > 1\n"
        ")\n"
        "GROUP BY last_rank\n"
        "ORDER BY num_calls DESC",
    ),
    "gradients": (
        "Where did the first NaN or Inf stand?",
        "SELECT attempt, step, rank, parameter, nonfinite_count\n"
        "FROM gradients\n"
        "WHERE nonfinite_count > 0\n"
        "ORDER BY attempt, step, rank\n"
        "LIMIT 10",
    ),
    "scalars": (
        "How did a logged number change, over all ranks?",
        "SELECT name, step, avg(value) AS mean, min(value) AS least, max(value) AS most\n"
        "FROM scalars\n"
        "GROUP BY name, attempt, step\n"
        "ORDER BY name, attempt, step",
    ),
    "experts": (
        "How unevenly is a mixture of experts used?",
        "SELECT step, layer, expert, sum(tokens) AS tokens, sum(dropped) AS dropped,\n"
        "       sum(tokens) * count(*) OVER (PARTITION BY step, layer)\n"
        "       / sum(sum(tokens)) OVER (PARTITION BY step, layer) AS load\n"
        "FROM experts\n"
        "GROUP BY step, layer, expert\n"
        "ORDER BY load DESC\n"
        "LIMIT 10",
    ),
    "fingerprints": (
        "Which replicas disagree?",
        "SELECT attempt, step, replica_group, tensor, count(DISTINCT hash) AS num_hashes\n"
        "FROM (SELECT *, row_number() OVER (\n"
        "  PARTITION BY attempt, rank, step, replica_group, tensor ORDER BY taken_ns) AS turn FROM fingerprints)\n"
        "GROUP BY attempt, step, turn, replica_group, tensor\n"
        "HAVING num_hashes > 1",
    ),
    "nccl_calls": (
        "How long do kernels take, by operation and algorithm, and how long after the call do they start?",
        "SELECT function, algorithm, protocol, count(*) AS num_calls,\n"
        "       median(gpu_end_ns - gpu_start_ns) / 1e6 AS kernel_ms,\n"
        "       median(kernel_start_ns - launched_ns) / 1e6 AS queue_ms\n"
        "FROM nccl_calls\n"
        "WHERE kernel_end_ns IS NOT NULL\n"
        "GROUP BY ALL\n"
        "ORDER BY num_calls DESC",
    ),
    "collective_totals": (
        "How much did the ranks wait for each operation, in steps whose single calls are retired?",
        "SELECT step // 1000 * 1000 AS from_step, op, sum(calls) AS calls, sum(wait_ns) / 1e6 AS wait_ms\n"
        "FROM collective_totals\n"
        "GROUP BY ALL\n"
        "ORDER BY from_step, wait_ms DESC",
    ),
    "nccl_channels": (
        "Which channel of a communicator is slower than the others?",
        "SELECT rank, communicator, channel, median(gpu_end_ns - gpu_start_ns) / 1e6 AS channel_ms\n"
        "FROM nccl_channels\n"
        "GROUP BY ALL\n"
        "ORDER BY channel_ms DESC",
    ),
    "nccl_links": (
        "Which link waits longest for the network?",
        "SELECT rank, communicator, peer, channel, is_send, sum(network_wait_ns) / sum(num_steps) / 1e3 AS wait_us\n"
        "FROM nccl_links\n"
        "WHERE num_steps > 0\n"
        "GROUP BY ALL\n"
        "ORDER BY wait_us DESC",
    ),
    "checkpoints": (
        "For how long did training stand still for checkpoints?",
        "SELECT tier, count(DISTINCT step) AS num_checkpoints, sum(stall_ns) / 1e9 AS stall_s\n"
        "FROM checkpoints\n"
        "WHERE state = 'complete'\n"
        "GROUP BY tier",
    ),
    "events": (
        "The story of a run.",
        "SELECT make_timestamp(wall_ns // 1000) AS utc, rank, kind, step, detail ->> 'reason' AS reason\n"
        "FROM events\n"
        "WHERE kind NOT IN ('rank', 'process_group')\n"
        "ORDER BY wall_ns",
    ),
}
"""By table, where the SQL is more than its columns: a question, and the SQL that answers it."""

_INTRODUCTION = """\
# The tables of a run

Generated by `python -m analyzers.report.schema_page > docs/schema.md` from `probes/tape/schema.py`,
`probes/tape/event_kinds.py` and the modules that read them.

The store of a run is `telemetry.duckdb` in its folder. `rankscope sql RUN "..."` queries it, also while the run trains;
records arrive about a second after they were made. Another DuckDB (1.4 or newer) can open it once the run has ended. Of
a running one open a copy (`cp telemetry.duckdb* DIR/`): while another program holds the file, even read-only, nothing
is ingested, and only hangs and deaths are still found.

* Times are nanoseconds since the Unix epoch: `make_timestamp(wall_ns // 1000)`. Clocks of nodes differ: compare ranks
  by durations and sequence numbers.
* A column without a type is a BIGINT. `sum` of integers is HUGEINT; cast it where a client knows no such type.
* NULL: not recorded, or not known yet. A loss or norm that is NaN is a NaN, not a NULL (`isnan(loss)`).
* A table marked "open rows" gets a row at the beginning; columns known only at its end are NULL until then.
* A step runs again with the same number after a rollback; a restart begins a new `attempt`.
* A table `..._open` or `..._done` is half of the view without the suffix; `ingest_...` belong to the writer
  (`ingest_problems`: files that could not be read completely).
* [In brackets](#where-each-record-is-shown): where a table is shown; S marks columns that only SQL reaches.

<a id="where-each-record-is-shown"></a>

| letter | shown in |
|---|---|
| F | findings: an analyzer reads it |
| G | goodput and the time of steps, in reports, pages and metrics |
| P | pages of the dashboard |
| R | reports and other commands (`top`, `compare`, `fleet`, `export`, ...) |
| X | exporters: metrics, OpenTelemetry, trackers, alerts |
| S | `rankscope sql` only: keys and details |
"""

_WRITERS = {
    "tape": "Written by the rank.", "event": "Written as events `{kind}`.", "watch": "Written by watch.",
    "reader": "Written by readers of files.", "derived": "Written by watch while it ingests.",
}  # fmt: skip


def markdown() -> str:
    """The whole page."""
    parts, described, explained = [_INTRODUCTION], set[tuple[str, str]](), set[tuple[str, str]]()
    for table in TABLES.values():
        parts.append("\n".join(_lines(table, described)) + "\n")
        described |= {(column.name, column.help) for column in store_columns(table)}
    return "\n".join([*parts, _EVENTS, *(_event_line(kind, explained) for kind in EVENT_KINDS.values()), ""])


def _lines(table: Table, described: set[tuple[str, str]]) -> Iterator[str]:
    """One table; columns with the name and meaning of a column of a table before it are only named."""
    yield f"## {table.name}"
    yield ""
    usual = _usual(table)
    written = _WRITERS[table.source].format(kind=table.event_kind)
    yield f"{table.help} {written}{' Open rows.' * table.can_be_open} [{usual}]"
    yield ""
    known = [column for column in store_columns(table) if (column.name, column.help) in described]
    if known:
        groups = groupby(sorted(known, key=lambda one: _shown(table, one)), key=lambda one: _shown(table, one))
        yield f"- as above: {', '.join(_names(list(group)) + letters for letters, group in groups)}"
    yield from _new_columns(table, [column for column in store_columns(table) if column not in known])
    if table.name in EXAMPLES:
        question, sql = EXAMPLES[table.name]
        yield f"\n{question}\n\n```sql\n{sql}\n```"


def _new_columns(table: Table, columns: list[Column]) -> Iterator[str]:
    """A line each; neighbours that are the same part of different columns (`data_wait_ns`, ...) share one."""
    for (part, letters), group in groupby(columns, key=lambda column: (_part(column), _shown(table, column))):
        names = list(group)
        if part and len(names) > 1:
            yield f"- {_names(names)}{letters}: part of the column {part}"
        else:
            yield from (f"- `{one.name}`{_type(one)}{_unit(one)}{letters}: {one.help}" for one in names)


def _names(columns: list[Column]) -> str:
    return ", ".join(f"`{column.name}`" for column in columns)


def _usual(table: Table) -> str:
    """Letters of most columns of the table."""
    counts = Counter(_of_column(table, column) for column in store_columns(table))
    return counts.most_common(1)[0][0]


def _of_column(table: Table, column: Column) -> str:
    return _letters(shown(table.name, column.name)) or "S"


def _shown(table: Table, column: Column) -> str:
    """`` [S]`` behind a column that only SQL reaches, in a table that is shown elsewhere."""
    return " [S]" if _of_column(table, column) == "S" != _usual(table) else ""


def _letters(surfaces: Iterable[str]) -> str:
    return "".join(sorted(SURFACES[name] for name in surfaces))


def _part(column: Column) -> str:
    """``without `_wait`: blocked in collectives`` of a column `data_wait_ns` of that part of data_ns, else empty."""
    found = re.match(r"part of (\w+)_ns:? (.*?)(?:;|$)", column.help)
    if found is None:
        return ""
    return f"without `{column.name.removeprefix(found[1]).removesuffix('_ns')}`: {found[2]}"


def _type(column: Column) -> str:
    sql = SQL_TYPES[column.type]
    return "" if sql == "BIGINT" else f" {sql}"


def _unit(column: Column) -> str:
    """The unit behind the type, where the name does not end in it."""
    unit = {"1": "", "By": "bytes", "Cel": "celsius", "Hz": "hertz"}.get(column.unit, column.unit)
    return f" ({unit})" if unit and not column.name.endswith(f"_{unit}") else ""


def _event_line(kind: EventKind, explained: set[tuple[str, str]]) -> str:
    """A kind; a field that an event before it explained in the same words is only named."""
    of_table = TABLES[kind.table].columns if kind.table else ()
    fields = [f"columns of [{kind.table}](#{kind.table})"] if of_table else []
    fields += [_field(column, explained) for column in kind.fields[len(of_table) :]]
    letters = _letters({*shown_event(kind.name), "pages"})
    where = "" if letters == "P" else f" [{letters}]"
    return f"- `{kind.name}`{where} ({kind.written_by}): {kind.meaning}{' ' if fields else ''}{', '.join(fields)}"


def _field(column: Column, explained: set[tuple[str, str]]) -> str:
    field = (column.name, column.help)
    is_new = column.help and field not in explained
    explained.add(field)
    return f"`{column.name}`" + (f" ({column.help})" if is_new else "")


_EVENTS = """\
## Kinds of events

The lines of `events.jsonl` and the rows of table `events`, all on the page of events [P]. Each has `wall_ns`,
`attempt`, `rank` (-1: a node process), `kind` and `step` (or null), and the fields of its kind, explained where they
first stand. A script may add other kinds (`Attached.event`). In parentheses: who writes it.
"""


if __name__ == "__main__":
    sys.stdout.write(markdown())
