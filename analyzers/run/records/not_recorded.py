"""Put into words which records a check lacked; only the JSON report has the names of tables and columns.

not_recorded(["steps.loss", "steps.tokens"])
# "losses and token counts were not recorded (to record them: `rankscope.log`)"
missing(["steps.loss"])         # {"missing_records": ["steps.loss"]}, for the evidence
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

__all__ = ["missing", "not_recorded", "without_switches"]

_BY = re.compile(r" \(to record them: [^()]*\)")

_TABLES = {
    "checkpoints": "saves",
    "collectives": "collective calls",
    "events": "events of the run",
    "experts": "loads of the experts",
    "fingerprints": "fingerprints of the replicas",
    "gradients": "gradient norms by parameter",
    "health": "readings of GPUs and hosts",
    "ranks": "identities of the ranks",
    "spans": "activities within a step",
    "steps": "steps",
}
_COLUMNS = {
    "backward_ns": "backward times",
    "collective_wait_ns": "waits in collectives",
    "data_ns": "data loading times",
    "duration_ns": "durations of steps",
    "forward_ns": "forward times",
    "grad_norm": "gradient norms",
    "host": "host names",
    "local_grad_norm": "local gradient norms",
    "loss": "losses",
    "memory_bytes": "memory sizes",
    "optimizer_ns": "optimizer times",
    "phase": "phases of calls",
    "process_group": "process groups of calls",
    "seq": "numbers of calls",
    "tokens": "token counts",
    "world_size": "world sizes",
}
_SWITCHES = {
    "collectives": "`probes.collectives = true`",
    "experts": "`probes.expert_interval` above 0",
    "fingerprints": "`probes.fingerprint_interval` above 0",
    "gradients": "`probes.gradient_interval` above 0",
    "health": "`probes.health = true`",
    "steps.backward_ns": "`recorder.phase`",
    "steps.data_ns": "`recorder.phase`",
    "steps.forward_ns": "`recorder.phase`",
    "steps.grad_norm": "`rankscope.log`",
    "steps.local_grad_norm": "`probes.local_norm_interval` above 0",
    "steps.loss": "`rankscope.log`",
    "steps.optimizer_ns": "`recorder.phase`",
    "steps.tokens": "`rankscope.log`",
}
"""Setting or call that records a column or a table, if there is one."""


def not_recorded(absent: Sequence[str]) -> str:
    """A clause that names what was not recorded and what would record it. If no step was recorded, no setting helps.

    `absent`: as `source.lacking` returns it.
    """
    words = list(dict.fromkeys(map(_words, absent)))
    named = words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
    switches = list(dict.fromkeys(switch for name in absent if (switch := _switch(name))))
    by = f" (to record them: {', '.join(switches)})" if switches and "steps" not in absent else ""
    return f"{named} were not recorded{by}"


def without_switches(text: str) -> str:
    """The text without the hint on how to record them. It is for files of other tools, because these have no such
    settings."""
    return _BY.sub("", text)


def missing(absent: Sequence[str]) -> dict[str, Any]:
    """The missing tables and columns by name, for programs that read the evidence."""
    return {"missing_records": list(absent)}


def _words(name: str) -> str:
    table, _, column = name.partition(".")
    if column in _COLUMNS:
        return _COLUMNS[column]
    described = _TABLES.get(table, table.replace("_", " "))
    return f"the {column.removesuffix('_ns').replace('_', ' ')} of {described}" if column else described


def _switch(name: str) -> str:
    return _SWITCHES.get(name, "")  # "" for a column: its table is recorded, so the switch is already on
