"""The printed report of a hang that watchdogs logged: each rank's call, the odd rank, commands that can be copied."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from analyzers.diagnose import Diagnosis
from analyzers.evidence.diagnose_files import diagnose_files
from analyzers.report.terminal.diagnosis_text import evidence_rows, render
from analyzers.report.terminal.safe_console import SafeConsole
from analyzers.report.wording.explained import next_step

LINE = (
    "[rank{rank}]:[E ProcessGroupNCCL.cpp:685] [Rank {rank}] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum={seq}, OpType={op}, NumelIn={size}, NumelOut={size}, Timeout(ms)=600000) ran for 600000 "
    "milliseconds before timing out.\n"
)


@pytest.fixture
def diagnosis(tmp_path: Path) -> Diagnosis:
    log = tmp_path / "nccl.log"
    calls = {rank: (48212, "ALLGATHER", 1024) if rank == 5 else (48213, "ALLREDUCE", 4096) for rank in range(8)}
    log.write_text(
        "".join(LINE.format(rank=rank, seq=seq, op=op, size=size) for rank, (seq, op, size) in calls.items())
    )
    return diagnose_files([log])


def test_each_ranks_call_stands_in_the_rows_and_the_odd_rank_in_the_next_step(diagnosis: Diagnosis) -> None:
    (finding,) = diagnosis.fired
    rows = dict(evidence_rows(finding))
    assert rows["calls they are in"] == (
        "ALLREDUCE #48213 of 4,096 elements: ranks 0-4, 6 and 7; ALLGATHER #48212 of 1,024 elements: rank 5"
    )
    assert not {"collective", "sequence number", "sequence numbers", "seen on hosts only"} & rows.keys()
    assert rows["what devices ran"] == "not recorded"
    assert next_step(finding).startswith("Find the collective that rank 5 called more or less often than the others.")


def test_what_is_to_be_copied_is_whole_and_nothing_is_padded(diagnosis: Diagnosis) -> None:
    output = io.StringIO()
    render(diagnosis, SafeConsole(file=output, width=110, no_color=True))
    text = " ".join(output.getvalue().split())
    for command in diagnosis.fired[0].evidence["collect"]:
        assert f"collect {command}" in text
    assert [line for line in output.getvalue().splitlines() if line != line.rstrip()] == []
