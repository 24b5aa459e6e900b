"""Judge the rows that readers of plug-ins made of a job's files, by all analyses of recorded runs.

judged = judge_plugin_rows(files.plugin_rows)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from analyzers.diagnose import diagnose
from analyzers.evidence.judged import Judged
from analyzers.run.records.not_recorded import without_switches
from store.readers.memory_store import MemoryStore
from store.readers.plugins.plugin_formats import PluginRows

__all__ = ["judge_plugin_rows"]

_FACTS = ("num_ranks", "steps", "steps_not_measured_ratio", "steps_not_compared_ratio")


def judge_plugin_rows(read: Sequence[PluginRows]) -> Judged:
    """The findings over the rows of all plug-ins' files together, what they add to the facts, and the what-if.

    The reasons for checks that were not made name no setting: Rankscope did not record the job. Events of logs are
    judged with the other logs (`job_lines`): a plug-in's steps are counted as its program counts them, and cannot
    stand in one table with the steps that a log printed.
    """
    with MemoryStore() as store:
        for table in ("steps", "collectives", "events"):
            if rows := [row for one in read for row in one.tables[table]]:
                store.add(table, rows)
        diagnosis = diagnose(store, {})
        ((num_ranks,),) = store.rows("SELECT count(DISTINCT rank) FROM steps WHERE rank >= 0")
    facts = {name: diagnosis.run[name] for name in _FACTS if name in diagnosis.run}
    facts["num_ranks"] = facts.get("num_ranks") or num_ranks or None
    findings = [replace(one, summary=without_switches(one.summary)) for one in diagnosis.findings
                if not (one.kind == "configuration" and one.status == "insufficient_data")]  # fmt: skip
    return Judged(findings={"plugin": findings}, facts=facts, what_if=diagnosis.what_if)
