"""How a job of OpenPBS ended, in the text and the JSON of `qstat -fx`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from analyzers.evidence.diagnose_files import diagnose_files
from store.readers.programs.qstat import read, recognise
from tests.analyzers.evidence.written import diagnosed


def attributes(status: int | None, state: str) -> dict[str, object]:
    ended = {"Exit_status": status, "obittime": "Thu Nov 26 10:00:12 2026"} if status is not None else {}
    return {"Job_Name": "train", "job_state": state, "exec_host": "gpu01/0*32", "comment": "Job run at Wed", **ended}


def as_text(*jobs: dict[str, object]) -> str:
    found = ""
    for number, job in enumerate(jobs):
        found += f"Job Id: {71122 + number}.pbs01\n"
        found += "".join(f"    {name} = {value}\n" for name, value in job.items())
        found += "    Variable_List = PBS_O_HOME=/home/ada,\n\tPBS_O_LANG=C\n\n"
    return found


def as_json(*jobs: dict[str, object]) -> str:
    listed = {f"{71122 + number}.pbs01": job for number, job in enumerate(jobs)}
    return json.dumps({"timestamp": 1790000000, "pbs_version": "22.05", "Jobs": listed}, indent=4)


@pytest.mark.parametrize("form", [as_text, as_json])
@pytest.mark.parametrize(
    ("status", "cause", "said"),
    [
        (-29, "time_limit", ""),
        (-27, "host_out_of_memory", ""),
        (3, "exit", "exit code 3"),
        (265, "signal", "SIGKILL"),
    ],
)
def test_the_end_of_a_job(tmp_path: Path, form: Callable[..., str], status: int, cause: str, said: str) -> None:
    text = form(attributes(status, "F"))
    assert recognise(text.encode())
    first = diagnosed(tmp_path, "qstat.txt", text).findings[0]
    assert (first.kind, first.cause) == ("rank_lost", cause)
    assert said in first.summary


def test_jobs_that_finished_or_run_and_unknown_ends(tmp_path: Path) -> None:
    path = tmp_path / "qstat.txt"
    path.write_text(as_text(attributes(-29, "F"), attributes(0, "F")))
    found = diagnose_files([path])
    assert found.verdict.startswith("The job finished (qstat.txt:")
    assert read(path).problem == "lists 2 jobs: only the last, 71123.pbs01, was read"
    path.write_text(as_text(attributes(None, "R")))
    assert read(path).problem == "lists job 71122 as RUNNING: it has not ended"
    path.write_text(as_text(attributes(-3, "F")))
    assert read(path).problem == "reports PBS' exit status -3, whose cause is not known"
