"""A CI gate: fails if a run has a critical finding, or is worse than the last good one.

python ci_gate.py runs/candidate runs/last-good
"""

from __future__ import annotations

import sys

import rankscope


def main(candidate: str, last_good: str) -> int:
    run = rankscope.open_run(candidate)
    critical = [finding for finding in run.findings if finding.severity == "critical" and finding.status == "fired"]
    for finding in critical:
        print(f"{finding.kind} on ranks {list(finding.ranks)}: {finding.summary}")
    compared = rankscope.open_run(last_good).compare(run)
    print(compared.sentence)
    return 1 if critical or compared.findings else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
