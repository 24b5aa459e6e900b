"""Files of programs beside training: what they say is not attributed to a rank, and what is not understood is named."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from analyzers.evidence.diagnose_files import diagnose_files
from store.readers.formats import format_of
from store.readers.logs.file_names import host_of_log
from store.readers.programs import sacct
from store.readers.traces.kineto import read_trace
from store.readers.untrusted.external_files import SourceError
from tests.analyzers.evidence.written import diagnosed

XORG = """[  1527.587] (EE) Segmentation fault at address 0x0
Fatal server error:
[  1527.588] (EE) Caught signal 11 (Segmentation fault). Server aborting
"""
SEGFAULT = "[Tue Nov 24 04:41:44 2026] {name}[25]: segfault at 7f79 ip 7f7c sp 7f12 error 4 in {library}[7f00+d3d]\n"


def test_a_signal_of_the_display_server_names_no_rank(tmp_path: Path) -> None:
    assert diagnosed(tmp_path, "bug-report.log", XORG).fired == ()
    ucx = "[gpu-01:71   :0:71] Caught signal 11 (Segmentation fault: address not mapped to object at address (nil))\n"
    assert [one.cause for one in diagnosed(tmp_path, "rank_0.log", ucx).fired] == ["signal"]


def test_a_crash_that_only_the_kernel_saw(tmp_path: Path) -> None:
    text = SEGFAULT.format(name="pt_main_thread", library="libnccl.so.2")
    (finding,) = diagnosed(tmp_path, "dmesg-gpu-07.txt", text).fired
    assert (finding.cause, finding.status, finding.ranks) == ("signal", "suspect", ())
    assert "Process pt_main_thread (25) on gpu-07 died of SIGSEGV in libnccl.so.2" in finding.summary
    assert diagnosed(tmp_path, "dmesg-gpu-08.txt", SEGFAULT.format(name="Xorg", library="libc.so.6")).fired == ()
    (tmp_path / "train.log").write_text("step 1 loss 2.0\nTraining finished.\n")
    assert diagnose_files([tmp_path / "train.log", tmp_path / "dmesg-gpu-07.txt"]).fired == ()


def test_a_record_of_pstore_names_no_host() -> None:
    assert host_of_log(Path("crash/dmesg-erst-7530486857247752193")) is None
    assert host_of_log(Path("crash/dmesg-ramoops-0")) is None


@pytest.mark.parametrize("mark", ["|", "|#", ";", "\t", "::"])
def test_sacct_with_all_columns_and_any_delimiter(tmp_path: Path, mark: str) -> None:
    rows = (("Account", "AllocCPUS", "JobID", "State", "ExitCode"), ("lab", "8", "4711", "TIMEOUT", "0:0"))
    (tmp_path / "sacct.txt").write_text("\n".join(mark.join(row) for row in rows) + "\n")
    assert sacct.recognise((tmp_path / "sacct.txt").read_bytes())
    assert [event["kind"] for event in sacct.read(tmp_path / "sacct.txt").log_events] == ["slurm_cancelled"]


def test_a_log_line_with_a_job_and_a_state_is_no_sacct() -> None:
    assert not sacct.recognise(b"JobID=4711, State=TIMEOUT\nsqueue --format=JobID,State -u me\n")


BROWSER = [{"cat": "devtools.timeline", "name": "RunTask", "ph": "X", "ts": place, "dur": 2, "pid": 1}
           for place in range(9)]  # fmt: skip
OPERATOR = {"args": {"External id": 1}, "cat": "cpu_op", "dur": 3, "name": "aten::mm", "ph": "X", "pid": 1, "ts": 1}


def test_a_trace_of_another_program_is_not_a_device_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": BROWSER}))
    with pytest.raises(SourceError, match=r"not a trace of a supported profiler: .* devtools\.timeline"):
        read_trace(path, is_only=True)


def test_events_with_their_arguments_first_are_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "rank0.json"
    path.write_text(json.dumps([OPERATOR, {**OPERATOR, "ts": 9}], sort_keys=True))
    assert format_of(path) == "kineto"
    assert read_trace(path, is_only=True).device == "cpu"


def test_a_trace_with_megabytes_of_metadata_before_its_events_is_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "rank0.json"
    stacks = {str(frame): "x" * 100 for frame in range(40_000)}
    path.write_text(json.dumps({"stackFrames": stacks, "traceEvents": [OPERATOR, {**OPERATOR, "ts": 9}]}))
    assert format_of(path) == "kineto"
    assert read_trace(path, is_only=True).device == "cpu"


def test_one_damaged_file_never_hides_the_rest(tmp_path: Path) -> None:
    """A whole run's folder, packed or not, beside a file that is cut and one that is empty."""
    state: dict[str, Any] = {"global_step": 9, "max_steps": 9, "log_history": []}
    state["log_history"] = [{"step": step, "loss": 3.0 - step / 10} for step in range(1, 10)]
    text = json.dumps(state)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "a" / "trainer_state.json").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "b" / "trainer_state.json").write_text(text[: len(text) // 8])
    (tmp_path / "b" / "metrics.csv").touch()
    found = diagnose_files([tmp_path])
    assert found.verdict.startswith("The job reached its last step, 9 of 9")
    problems: Any = found.run["file_problems"]
    assert {one["path"] for one in problems} == {"b/metrics.csv", "b/trainer_state.json"}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("sacct.txt", "JobID|State|ExitCode\n4711|TIMEOUT|0:0\n"),
        ("step_trace_time.csv", "Step,Computing,Free\n1,80,9\n"),
    ],
)
def test_a_packed_file_is_read_as_the_file(tmp_path: Path, name: str, text: str) -> None:
    plain = diagnosed(tmp_path, name, text)
    packed = diagnosed(tmp_path, f"{name}.gz", gzip.compress(text.encode()))
    assert packed.verdict == plain.verdict
    assert packed.run["ended"] == plain.run["ended"]


def test_an_error_file_of_torchelastic_that_is_cut(tmp_path: Path) -> None:
    """Its message is read; the traceback would end above the line that raised the error."""
    stack = (
        'Traceback (most recent call last):\n  File "/job/a.py", line 3, in main\n  File "/job/b.py", line 7, in f\n'
    )
    about = {"message": {"message": 'KeyError: "x"', "extraInfo": {"py_callstack": stack, "timestamp": "1"}}}
    (finding,) = diagnosed(tmp_path, "error.json", json.dumps(about)[:-60]).fired
    assert 'raised KeyError: "x"' in finding.summary
    assert "a.py" not in finding.summary


def test_json_lines_longer_than_the_head_are_named_as_such(tmp_path: Path) -> None:
    row = json.dumps({f"metric_{place}": place for place in range(2_000)})
    with pytest.raises(SourceError, match=r"is JSON with one object per line \(metric_0, metric_1"):
        diagnosed(tmp_path, "results.jsonl", f"{row}\n{row}\n")


@pytest.mark.parametrize(
    "text",
    [
        "JobID|JobName|State|ExitCode\n4711|train|RUNNING|0:0\n4711.0|python|RUNNING|0:0\n",
        "JobId=4711 JobName=train\n   JobState=RUNNING Reason=None Dependency=(null) ExitCode=0:0\n",
        "JOBID PARTITION NAME USER ST TIME NODES NODELIST(REASON)\n4711 gpu train me R 1:00 2 gpu-[01-02]\n",
        '{"jobs": [{"job_id": 4711, "job_state": ["RUNNING"], "exit_code": {"return_code": 0}}]}',
    ],
)
def test_a_job_that_has_not_ended_is_said_to_run(tmp_path: Path, text: str) -> None:
    found = diagnosed(tmp_path, "slurm.txt", text)
    assert found.fired == ()
    assert "lists job 4711 as RUNNING: it has not ended" in found.verdict
