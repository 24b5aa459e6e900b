"""Names and texts that try to be more than text, and a run that is full of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from probes.tape.rundir import RunDir
from tests.factories import RankWriter, make_run

SCRIPT = "</script><script>window.owned=1</script><img src=x onerror=window.owned=1>"
TEXTS = (
    SCRIPT,
    "{{ 7*7 }}{% raw %}",
    "\x1b[31mred\x1b]0;title\x07",
    "\u202egnp.exe\u2066\u200b",
    "<a href='javascript:window.owned=1'>click</a><b>bold</b>",
    "[x](javascript:window.owned=1) ![i](http://example.org/i.png) <!-- -->\n# head\n```\n| a |",
    "\ud800 lone",
    "x" * 50_000,
)
_SAID: dict[str, Any] = {
    "id": "straggler-1-r2", "analyzer": "straggler", "finding_kind": "straggler", "severity": "critical",
    "status": "fired", "finding_ranks": [2], "first_step": 40, "last_step": 50, "cause": "compute", "summary": SCRIPT,
    "evidence": {}, "advice": SCRIPT, "cost_s": None,
}  # fmt: skip
DAMAGED_FINDINGS: tuple[dict[str, Any], ...] = (
    {"evidence": {"stacks": {"0": 5, SCRIPT: [None, {}]}, "phase_factors_ratio": 5, "message": 7}},
    {"finding_ranks": "x"},
    {"finding_ranks": {"a": [1]}},
    {"finding_ranks": [None, 2]},
    {"finding_ranks": 7, "id": "straggler-1"},
    {"first_step": "x"},
    {"severity": ["critical"]},
    {"status": {}},
    {"evidence": "none"},
    {"cost_s": "dear"},
    {"finding_kind": TEXTS[3], "id": f"{TEXTS[3]}-1-40-r2"},
)
"""What is not what an analyzer writes, in place of the columns of a finding."""


def hostile_run(tmp_path: Path) -> RunDir:
    """A run in which everything that can be named has such a name; rank 2 is slow and rank 1 raises."""
    manifest: dict[str, Any] = {
        "config": {"run": {"name": SCRIPT}, SCRIPT: {text[:100]: text for text in TEXTS}},
        "command": list(TEXTS),
        "mesh": {SCRIPT: 2},
    }
    run = make_run(
        tmp_path, ranks=4, steps=60, slow={2: 1.6}, kill={1: 55}, parameters=TEXTS[:4], gradients_every=5,
        nan={3: 20}, **manifest,
    )  # fmt: skip
    writer = RankWriter(run, rank=1, attempt=1, ranks=4)
    for number, text in enumerate(TEXTS):
        name = text.encode("utf-8", "replace").decode()[:500]
        writer.append(
            "collectives", 1, step=56, seq=number, bytes=10, issue_ns=writer.now_ns + number,
            process_group=name, op=name, dtype=name, shape=name, phase=name, caller=name,
        )  # fmt: skip
        writer.append("spans", 1, step=56, kind=name, start_ns=writer.now_ns + number)
        writer.event("exception", type=text, message=text + "\n" + text, traceback=text, step=56)
        writer.event(text, reason=text)
        writer.event("rollback", from_step=40, to_step=30, tier=text, reason=text, skipped_batches=[1])
    for damage in DAMAGED_FINDINGS:
        writer.event("finding", **(_SAID | damage))
    writer.append("steps", 1, step=56, start_ns=writer.now_ns)
    writer.close(clean=False)
    return run
