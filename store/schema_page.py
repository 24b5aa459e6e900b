"""`docs/schema.md`, generated from the schema and the catalogue of events, so that it cannot drift.

python -m store.schema_page > docs/schema.md
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from itertools import groupby

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
    "nccl_communicators": (
        "Which communicators did each rank have, and how long did they live?",
        "SELECT attempt, rank, comm_name, num_ranks, comm_rank, (finalized_ns - created_ns) / 1e9 AS life_s\n"
        "FROM nccl_communicators\n"
        "ORDER BY attempt, rank, created_ns",
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
    "nccl_groups": (
        "Which communicator belongs to which process group?",
        "SELECT attempt, rank, communicator, process_group, members\n"
        "FROM nccl_groups\n"
        "ORDER BY attempt, rank, communicator",
    ),
    "health": (
        "How hot did each device get?",
        "SELECT node, device, max(temperature_celsius) AS max_celsius, max(power_watts) AS max_watts\n"
        "FROM health\n"
        "GROUP BY ALL\n"
        "ORDER BY max_celsius DESC NULLS LAST",
    ),
    "ranks": (
        "Where does each rank of the newest attempt run?",
        "SELECT rank, arg_max(host, wall_ns) AS host, arg_max(device, wall_ns) AS device\n"
        "FROM ranks\n"
        "WHERE attempt = (SELECT max(attempt) FROM ranks)\n"
        "GROUP BY rank\n"
        "ORDER BY rank",
    ),
    "process_groups": (
        "Which ranks are in which group?",
        "SELECT DISTINCT process_group, description, members\nFROM process_groups\nORDER BY process_group",
    ),
    "checkpoints": (
        "For how long did training stand still for checkpoints?",
        "SELECT tier, count(DISTINCT step) AS num_checkpoints, sum(stall_ns) / 1e9 AS stall_s\n"
        "FROM checkpoints\n"
        "WHERE state = 'complete'\n"
        "GROUP BY tier",
    ),
    "log_events": (
        "What did the logs say first, of the lines that name a cause?",
        "SELECT wall_ns, rank, host, source, line, kind, message\n"
        "FROM log_events\n"
        "ORDER BY wall_ns NULLS LAST, line\n"
        "LIMIT 20",
    ),
    "findings": (
        "What was found while the run lived?",
        "SELECT step, severity, finding_kind, cause, summary\nFROM findings\nORDER BY wall_ns",
    ),
    "events": (
        "The story of a run.",
        "SELECT make_timestamp(wall_ns // 1000) AS utc, rank, kind, step, detail ->> 'reason' AS reason\n"
        "FROM events\n"
        "WHERE kind NOT IN ('rank', 'process_group')\n"
        "ORDER BY wall_ns",
    ),
}
"""By table: a question, and the SQL that answers it."""

_INTRODUCTION = """\
# The tables of a run

Generated by `python -m store.schema_page > docs/schema.md`; the sources are `probes/tape/schema.py` and
`probes/tape/event_kinds.py`.

A run's store is `telemetry.duckdb` in its folder. Query it with `rankscope sql RUN "..."`, also while the run lives.
Any other DuckDB from 1.4 on opens it once the run has ended; of a run that lives open a copy (`cp telemetry.duckdb*
DIR/`). While the file itself is open elsewhere, also read-only, the writer waits, and all findings but hangs and deaths
wait with it. Records come in about a second after they were made.

* Times are nanoseconds since the Unix epoch (`make_timestamp(wall_ns // 1000)` shows them). The clocks of different
  nodes are not equal: compare ranks by durations and sequence numbers.
* A column without a type is a BIGINT. In a table whose rows are open, a row is written when the thing begins; what is
  known only at its end is NULL until then.
* NULL: not recorded, or not known yet. A loss or norm that is NaN is a NaN, not a NULL (`isnan(loss)`).
* `sum` of integers is HUGEINT; cast it where a client knows no such type.
* A step runs again with the same number after a rollback, and a restart begins a new `attempt`.
* A table named `..._open` or `..._done` is half of the view without the suffix; `ingest_...` are the writer's notes:
  `ingest_problems` lists files that could not be read, or not wholly.
"""


def markdown() -> str:
    """The whole page."""
    parts, described, explained = [_INTRODUCTION], set[tuple[str, str]](), set[tuple[str, str]]()
    for table in TABLES.values():
        parts.append("\n".join(_lines(table, described)) + "\n")
        described |= {(column.name, column.help) for column in store_columns(table)}
    return "\n".join([*parts, _EVENTS, *(_event_line(kind, explained) for kind in EVENT_KINDS.values()), ""])


def _lines(table: Table, described: set[tuple[str, str]]) -> Iterator[str]:
    """One table; columns with the name and meaning of a column of a table before it are only named."""
    question, sql = EXAMPLES[table.name]
    yield f"## {table.name}"
    yield ""
    yield table.help + _ORIGIN[table.source].format(kind=table.event_kind)
    if table.can_be_open:
        yield "Rows are open until it ends."
    yield ""
    known = [column for column in store_columns(table) if (column.name, column.help) in described]
    if known:
        yield f"- as above: {', '.join(f'`{column.name}`' for column in known)}"
    yield from _new_columns([column for column in store_columns(table) if column not in known])
    yield ""
    yield question
    yield ""
    yield "```sql"
    yield sql
    yield "```"


def _new_columns(columns: list[Column]) -> Iterator[str]:
    """A line each; neighbours that are the same part of different columns (`data_wait_ns`, ...) share one."""
    for part, group in groupby(columns, key=_part):
        names = list(group)
        if part and len(names) > 1:
            yield f"- {', '.join(f'`{column.name}`' for column in names)}: part of the column {part}"
        else:
            yield from (f"- `{column.name}`{_type(column)}{_unit(column)}: {column.help}" for column in names)


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
    return f"- `{kind.name}` ({kind.written_by}): {kind.meaning}{' ' if fields else ''}{', '.join(fields)}"


def _field(column: Column, explained: set[tuple[str, str]]) -> str:
    field = (column.name, column.help)
    is_new = column.help and field not in explained
    explained.add(field)
    return f"`{column.name}`" + (f" ({column.help})" if is_new else "")


_EVENTS = """\
## Kinds of events

The lines of `events.jsonl` and the rows of table `events`. Each has `wall_ns`, `attempt`, `rank` (-1: a node process),
`kind` and `step` (or null), and the fields of its kind; a field is explained where it first stands. A script may add
other kinds (`Attached.event`). In brackets: who writes it.
"""

_ORIGIN = {"tape": "", "event": " From events of kind `{kind}`.", "watch": "", "reader": "", "derived": ""}


if __name__ == "__main__":
    sys.stdout.write(markdown())
