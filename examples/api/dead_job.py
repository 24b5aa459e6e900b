"""Diagnose a dead job's logs as a message for a chat: the verdict, further findings, then what was not judged.

python dead_job.py job.log dumps/
"""

from __future__ import annotations

import sys

import rankscope


def message(first: str, *more: str) -> str:
    """The message. Raises ValueError with one line if nothing can be read."""
    diagnosis = rankscope.open_files(first, *more).diagnose()
    lines = [diagnosis.verdict]
    lines += [f"- {finding.kind}: {finding.summary}" for finding in diagnosis.fired[1:]]
    lines += [f"(not judged) {finding.summary}" for finding in diagnosis.not_judged]
    return "\n".join(lines)


if __name__ == "__main__":
    print(message(*sys.argv[1:]))
