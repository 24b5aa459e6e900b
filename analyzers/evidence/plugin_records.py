"""Judge the steps, collectives and events that reader plug-ins returned, with all analyses, as the records of a run.

findings, facts, what_if = judge_rows(read, {"run_id": "job"})
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from analyzers.diagnose import diagnose
from analyzers.finding import Finding
from analyzers.whatif.what_if import WhatIf
from store.readers.memory_store import MemoryStore
from store.readers.plugin_formats import PluginRows

__all__ = ["judge_rows"]

_FACTS = ("num_ranks", "steps", "steps_not_measured_ratio", "steps_not_compared_ratio")


def judge_rows(
    read: Sequence[PluginRows], facts: Mapping[str, Any]
) -> tuple[list[Finding], dict[str, Any], WhatIf | None]:
    """The findings over the rows of all files together, the facts with what they add, and the what-if.

    Events of logs are judged with the other logs (`analyzers.logs`).
    """
    with MemoryStore() as store:
        for table in ("steps", "collectives", "events"):
            if rows := [row for one in read for row in one.tables[table]]:
                store.add(table, rows)
        diagnosis = diagnose(store, {"run_id": facts.get("run_id")})
    own = {name: diagnosis.run[name] for name in _FACTS if name in diagnosis.run}
    return list(diagnosis.findings), {**facts, **own}, diagnosis.what_if
