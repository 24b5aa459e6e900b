"""Plug-ins that hang, exit, change modules, or return what no report can show: one module each, written into a
folder as if packages had been installed there.

    site = install(tmp_path)            # for PYTHONPATH
    BAD["sleeps"].reason                  # what a user must be told
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["BAD", "Bad", "install"]

_HEAD = """
import os, sys, time
from rankscope.analyzers.analysis import Analysis
from rankscope.analyzers.finding import Finding
from rankscope.analyzers.kinds import Kind

def found(**more):
    return Finding(**{"analyzer": "NAME", "kind": "NAME", "severity": "critical", "status": "fired", "attempt": 0,
                      "ranks": (0,), "first_step": 3, "summary": "I am NAME.", "evidence": {"n": 1}, **more})

KINDS = (Kind(name="NAME", title="Bad"),)
"""
_TAIL = """
ANALYSES = (Analysis(kinds=("NAME",), run=run, live="each_tick"),)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bad:
    """A bad plug-in: the body of its analysis, and what a user is told."""

    body: str
    reason: str
    keeps: str = ""
    """Summary of a finding that is shown all the same."""
    tail: str = _TAIL
    only_live: bool = False


def _run(*lines: str) -> str:
    return "def run(source, scope):\n" + "".join(f"    {line}\n" for line in lines)


BAD = {
    "sleeps": Bad(body=_run("time.sleep(10 ** 6)"), reason="it took longer than"),
    "exit_import": Bad(body="sys.exit(3)\n" + _run("return []"), reason="cannot be loaded: SystemExit: 3"),
    "exit_run": Bad(body=_run("sys.exit(4)"), reason="SystemExit: 4 (exit_run.py:"),
    "exit_live": Bad(body=_run("if scope.is_live: os._exit(7)", "return []"), reason="exit code 7", only_live=True),
    "severity": Bad(body=_run("return [found(severity='huge')]"), reason="severity 'huge' is not one of critical"),
    "evidence": Bad(
        body=_run("return [found(evidence={'who': object()}), found(evidence={'ranks': {1, 2}}), found()]"),
        reason="evidence who is a object, which JSON cannot hold",
        keeps="I am evidence.",
    ),
    "figure": Bad(
        body=_run("return [found()]") + "def draw(source, finding):\n    yield 1 / 0\nFIGURES = {'figure': (draw,)}\n",
        reason="ZeroDivisionError: division by zero (figure.py:",
        keeps="I am figure.",
    ),
    "row": Bad(body="", reason="3 rows of steps: step is missing", tail=""),
    "claimed": Bad(
        body="KINDS = (Kind(name='straggler', title='Mine'),)\n"
        + _run("return [found(kind='straggler', summary='I am an evil straggler.')]"),
        reason="the kind straggler is one of Rankscope's, and cannot be replaced",
    ),
    "undeclared": Bad(body=_run("return [found(kind='other')]"), reason="kind 'other' is not one of its kinds"),
    "million": Bad(
        body=_run("return (found(first_step=n, summary=f'Number {n}.') for n in range(10 ** 6))"),
        reason="it returned more than 20 findings",
        keeps="Number 0.",
    ),
    "patched": Bad(
        body="import json\njson.dumps = lambda *a, **k: 'null'\n" + _run("return []"),
        reason="its answer is not valid",
    ),
    "answer": Bad(
        body='import json\njson.dumps = lambda *a, **k: \'{"result": {"kinds": [3]}}\'\n' + _run("return []"),
        reason="its answer is not valid",
    ),
    "number": Bad(
        body=_run("return [found(evidence={'x': float('nan')}), found(evidence={1: 2})]"),
        reason="a name in evidence is a int, not a string",
        keeps="I am number.",
    ),
    "memory": Bad(body=_run("kept = []", "while True: kept.append(bytearray(1 << 30))"), reason="MemoryError"),
}
_READER = """
def recognise(first): return first.startswith(b"#bad-rows")
def read(path): return {"steps": [{"rank": 0, "duration_ns": 1}] * 3 + [{"rank": 0, "step": 1, "duration_ns": 5}]}
"""


def install(folder: Path) -> Path:
    """Write the modules and their entry points."""
    info = folder / "bad-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bad\nVersion: 1.0\n")
    entries = "".join(f"{name} = {name}\n" for name in BAD if name != "row")
    (info / "entry_points.txt").write_text(f"[rankscope.analyzers]\n{entries}[rankscope.readers]\nrow = row\n")
    for name, bad in BAD.items():
        text = _READER if name == "row" else _HEAD + bad.body + bad.tail
        (folder / f"{name}.py").write_text(text.replace("NAME", name))
    return folder
