"""Slurm's and DCGM's reports as JSON, and the table of `nvidia-smi dmon`, as their versions write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from analyzers.evidence.diagnose_files import diagnose_files
from store.readers.programs import nvidia_smi_dmon


def slurm_job(state: Any, code: Any, **others: Any) -> str:
    job = {"account": "ml", "array": {"job_id": 0}, "job_id": 4711, "exit_code": code, "nodes": "gpu-03",
           "state": state, "time": {"end": 1790000000, "start": 1789990000}, **others}  # fmt: skip
    return json.dumps({"meta": {"Slurm": {"release": "23.11"}}, "errors": [], "jobs": [job]}, indent=1)


def plain(number: int, signal: int | None = None) -> dict[str, Any]:
    """The exit code as Slurm 21 and 22 write it."""
    return {"status": "SIGNALED", "return_code": number, "signal": {"signal_id": signal or 0, "name": "KILL"}}


def tagged(number: int, signal: int | None = None) -> dict[str, Any]:
    """The exit code as Slurm 23 and later write it."""
    value = {"set": signal is not None, "infinite": False, "number": signal or 0}
    return {"status": ["ERROR"], "return_code": {"set": True, "infinite": False, "number": number},
            "signal": {"id": value, "name": ""}}  # fmt: skip


STEP = {"step": {"id": "4711.0", "name": "python"}, "state": ["OUT_OF_MEMORY"], "exit_code": tagged(0, 9)}


@pytest.mark.parametrize(
    ("text", "cause", "said"),
    [
        (slurm_job({"current": ["TIMEOUT"], "reason": "TimeLimit"}, tagged(0)), "time_limit", ""),
        (slurm_job({"current": "NODE_FAIL", "reason": "None"}, plain(0)), "node_failed", "gpu-03"),
        (slurm_job({"current": ["FAILED"]}, tagged(3)), "exit", "exit code 3"),
        (slurm_job({"current": "FAILED"}, plain(0, 9)), "signal", "SIGKILL"),
        (slurm_job({"current": ["FAILED"]}, tagged(0, 9)), "signal", "SIGKILL"),
        (slurm_job({"current": ["FAILED"]}, tagged(1), steps=[STEP]), "host_out_of_memory", ""),
        (slurm_job(None, tagged(0), job_state=["PREEMPTED"]), "preempted", ""),
    ],
)  # fmt: skip
def test_the_end_of_a_job_is_read_from_slurms_json(tmp_path: Path, text: str, cause: str, said: str) -> None:
    (tmp_path / "sacct.json").write_text(text)
    first = diagnose_files([tmp_path / "sacct.json"]).findings[0]
    assert (first.kind, first.cause) == ("rank_lost", cause)
    assert said in first.summary
    place = next(number for number, line in enumerate(text.splitlines(), 1) if '"job_id": 4711' in line)
    assert first.evidence["lines"][0].startswith(f"sacct.json:{place}:")


def test_a_completed_job_of_slurms_json_finished(tmp_path: Path) -> None:
    (tmp_path / "sacct.json").write_text(slurm_job({"current": ["COMPLETED"]}, tagged(0)))
    assert diagnose_files([tmp_path]).verdict.startswith("The job finished (sacct.json:")


def dcgm(root: str, *tests: dict[str, Any]) -> str:
    return json.dumps({root: {"test_categories": [{"category": "Hardware", "tests": list(tests)}]}}, indent=1)


OLD = {"name": "GPU Memory", "results": [{"gpu_ids": "0", "status": "PASS"},
       {"gpu_ids": "3", "status": "FAIL", "warnings": ["Two rows could not be remapped."]}]}  # fmt: skip
NEW = {"name": "memory", "test_summary": {"status": "Fail"}, "results": [
       {"entity_group": "GPU", "entity_id": 0, "status": "Pass"},
       {"entity_group": "GPU", "entity_id": 3, "status": "Fail",
        "warnings": [{"error_id": 1, "warning": "Two rows could not be remapped."}]}]}  # fmt: skip
DENYLIST = {"name": "Denylist", "results": [{"gpu_ids": "0", "status": "FAIL", "warnings": ["nouveau is loaded"]}]}


@pytest.mark.parametrize("text", [dcgm("DCGM GPU Diagnostic", DENYLIST, OLD), dcgm("DCGM Diagnostic", NEW),
                                  "Ran diagnostic for group.\n" + dcgm("DCGM Diagnostic", NEW)])  # fmt: skip
def test_a_failed_test_is_read_from_dcgms_json(tmp_path: Path, text: str) -> None:
    (tmp_path / "diag.json").write_text(text)
    found = diagnose_files([tmp_path / "diag.json"])
    assert [(one.kind, one.cause) for one in found.fired] == [("rank_lost", "device_error")]
    assert "GPU 3 failed a DCGM test" in found.fired[0].summary
    assert "Two rows could not be remapped." in found.fired[0].summary


def health(value: str) -> str:
    """What `dcgmi health -c -j` prints: the texts of a system's incidents overflow its cell."""
    text = "Detected 9 NvLink errors for GPU 2's NvLink, which exceeds the threshold."
    systems = {"NVLINK system": {"overflow": [text], "value": value}, "SM system": {"value": "Warning"}}
    entity = {"children": {"Errors": {"children": systems}}, "value": value}
    body = {"GPU": {"children": {"2": entity}}, "Overall Health": {"value": value}}
    return json.dumps({"body": body, "header": ["Health Monitor Report"]}, indent=3)


def test_a_failure_is_read_from_the_json_of_dcgms_health(tmp_path: Path) -> None:
    path = tmp_path / "health.json"
    path.write_text(health("Failure"))
    (found,) = diagnose_files([path]).fired
    assert found.summary.startswith("GPU 2 failed a DCGM test (NVLINK system): Detected 9 NvLink errors")
    path.write_text(health("Warning"))
    assert diagnose_files([path]).fired == ()


DMON = "# gpu    pwr  gtemp  mtemp     sm    mem   mclk   pclk\n# Idx      W      C      C      %      %    MHz   MHz\n"


@pytest.mark.parametrize(
    ("text", "first_ns"),
    [
        (DMON + "    0    411     45      -     95      7   2619   1980\n", 1_000_000_000),
        ("#gpu, pwr, gtemp, mtemp, sm, mem, mclk, pclk\n0, 411, 45, -, 95, 7, 2619, 1980\n", 1_000_000_000),
        ("#Date       Time        gpu    pwr  gtemp     sm    mem   pclk\n#YYYYMMDD   HH:MM:SS    Idx      W      C  "
         "    %      %    MHz\n 20261126   10:00:00      0    411     45     95      7   1980\n",
         1_795_687_200_000_000_000),
    ],
)  # fmt: skip
def test_readings_are_read_from_dmon_in_its_forms(tmp_path: Path, text: str, first_ns: int) -> None:
    path = tmp_path / "dmon.txt"
    path.write_text(text + text)  # the header is printed again
    assert nvidia_smi_dmon.recognise(text.encode())
    rows = nvidia_smi_dmon.read(path).health
    assert len(rows) == 2
    assert rows[0]["sample_ns"] == first_ns
    assert (rows[0]["device"], rows[0]["power_watts"], rows[0]["temperature_celsius"]) == ("GPU 0", 411.0, 45.0)
    assert (round(rows[0]["gpu_utilization_ratio"], 9), rows[0]["sm_clock_hertz"]) == (0.95, 1.98e9)
