"""Each reader with a file of its format that is valid and holds nothing to judge: never "No problems found"."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import pytest

from analyzers.analysis import file_analyses
from analyzers.evidence.diagnose_files import diagnose_files
from store.readers.formats import FORMATS, format_of
from store.readers.programs.registry import _modules, program_of
from store.readers.untrusted.external_files import SourceError
from tests.analyzers.evidence import test_programs as programs
from tests.analyzers.evidence.test_device_reports import LINKS, NPUS
from tests.analyzers.evidence.test_gpu_tables import GPU, table
from tests.analyzers.evidence.test_pods import PODS
from tests.analyzers.evidence.test_rocm_smi import AMD_TABLE, TITLE
from tests.probes.profiling.played_memory import PlayedMemory
from tests.store.readers.test_execution_trace import trace
from tests.store.readers.test_inspector import line
from tests.store.readers.test_ras import ras_answer

Content = str | bytes | Callable[[Path], None]
PAGE = """<section class="content"><h1>FlightRecorder</h1>
<h2>Rank 0: http://a:1/handler/fr_trace_json?</h2> <pre>{"version": "2.10", "entries": []}</pre></section>"""
NO_CALLS = json.dumps({"version": "2.10", "nccl_version": "2.21", "pg_config": {}, "entries": []})
SMI = "timestamp, index, temperature.gpu, utilization.gpu [%]\n"
ANSWER = json.loads(ras_answer({"0xa": {0: 5, 1: 5, 2: 5}}))


def answer(change: Callable[[dict[str, Any]], None]) -> str:
    changed = json.loads(json.dumps(ANSWER))
    for communicator in changed["communicators"]:
        for rank in communicator["ranks"]:
            change(rank)
    return json.dumps(changed)


def profiled(rank: int, steps: int) -> str:
    """A trace of equal steps; without any, two kernels outside steps."""
    marks = [("user_annotation", f"ProfilerStep#{step}", 100 * step, 90) for step in range(steps)]
    spans = [*marks, *(("kernel", "gemm", 100 * step + 5, 50) for step in range(steps or 2))]
    events = [
        {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": 0, "tid": 7} for cat, name, ts, dur in spans
    ]
    about = {"rank": rank, "world_size": 2}
    return json.dumps({"schemaVersion": 1, "distributedInfo": about, "traceEvents": events})


def operations(path: Path) -> None:
    row = "0::BIGINT dp_rank, 0::BIGINT stage, 0::BIGINT step, 'forward-compute' optype, 0.0 start, 1.0 duration"
    duckdb.sql(f"COPY (SELECT {row}, 0::BIGINT microbatch) TO '{path}' (FORMAT parquet)")


def unused_memory() -> bytes:
    cuda = PlayedMemory()
    cuda.alloc(10 << 20, "model.py", 12)
    return pickle.dumps(cuda.snapshot())


CASES: Mapping[str, Mapping[str, Content]] = {
    "log: two lines": {"train.log": "hello\nworld\n"},
    "ras: no counts": {"ras.json": answer(lambda rank: rank.pop("collective_counts"))},
    "ras: no calls": {"ras.json": answer(lambda rank: rank.update(collective_counts={"AllReduce": 0}))},
    "ras: no communicator": {"ras.json": json.dumps({**ANSWER, "communicators": []})},
    "ras: one rank": {"ras.json": ras_answer({"0xa": {0: 5}})},
    "flight_recorder: no calls": {f"nccl_trace_rank_{rank}.json": NO_CALLS for rank in (0, 1)},
    "kineto: no steps": {f"trace_rank{rank}.json": profiled(rank, 0) for rank in (0, 1)},
    "kineto: three steps": {f"trace_rank{rank}.json": profiled(rank, 3) for rank in (0, 1)},
    "kineto: one rank": {"trace_rank0.json": profiled(0, 12)},
    "operations: one worker": {"job.parquet": operations},
    "inspector: one rank": {"nccl-0.log": "\n".join(line(0, seq, 100) for seq in range(80))},
    "inspector: two calls": {f"nccl-{rank}.log": "\n".join(line(rank, seq, 100, size=2) for seq in range(2))
                             for rank in (0, 1)},
    "execution_trace: one rank": {"et_0.json": trace(0, [("all_reduce", 5)])},
    "execution_trace: no common call": {"et_0.json": trace(0, [("all_reduce", 5)]),
                                        "et_1.json": trace(1, [("all_reduce", 5)], first=7)},
    "memory_snapshot: no failure": {"snapshot.pickle": unused_memory()},
    "page: no calls": {"page.html": PAGE},
    "sacct": {"sacct.txt": programs.SACCT.format(state="RUNNING")},
    "scontrol_node": {"nodes.txt": programs.NODES.split("\n\n")[0] + "\n"},
    "scontrol_job": {"job.txt": "JobId=3 JobName=a\n   JobState=RUNNING Reason=None ExitCode=0:0\n   NodeList=n1\n"},
    "dcgmi_table": {"diag.txt": programs.DIAG.format(result="Pass - All").replace("Fail", "Pass")},
    "dcgmi_dmon": {"dmon.txt": "#Entity   GPUTL  TMPTR\nID\nGPU 0     50  40\nGPU 0     51  40\n"},
    "dcgmi_json": {"diag.json": '{"DCGM Diagnostic": {"test_categories": []}}'},
    "squeue": {"squeue.txt": "JOBID NAME ST TIME NODES NODELIST(REASON)\n4711 a R 1:02 1 gpu-03\n"},
    "sinfo": {"reasons.txt": "REASON               USER      TIMESTAMP           NODELIST\n"},
    "mlflow_metrics": {"accuracy": "1790000000000 0.5 0\n1790000001000 0.6 1\n"},
    "slurm_json": {"sacct.json": '{"jobs": [{"job_id": 3, "exit_code": {}, "state": {"current": ["RUNNING"]}}]}'},
    "nvidia_smi_dmon": {"dmon.txt": "# gpu    pwr  gtemp\n# Idx      W      C\n    0     90     40\n"},
    "nvidia_smi_csv": {"smi.csv": SMI + "2026/11/25 10:00:00.000, 0, 40, 50 %\n"},
    "nvidia_smi_query": {"smi.txt": "==============NVSMI LOG==============\n\nAttached GPUs : 0\n"},
    "nvidia_smi_table": {"smi.txt": table(GPU, GPU)},
    "nvidia_smi_nvlink": {"links.txt": LINKS.format("26.562 GB/s")},
    "rocm_smi": {"rocm.txt": f"{TITLE}{AMD_TABLE}"},
    "amd_smi": {"amd.json": '{"gpu_data": [{"gpu": 0, "usage": {"gfx_activity": {"value": 9, "unit": "%"}}}]}'},
    "npu_smi": {"npus.txt": NPUS.format(health="OK")},
    "gpu_scrape": {"metrics.prom": 'DCGM_FI_DEV_GPU_TEMP{gpu="0",UUID="GPU-1"} 40\n'},
    "kubectl_get": {"pods.txt": PODS.format("Running", "Running")},
    "journald": {"journal.json": json.dumps({"__REALTIME_TIMESTAMP": "1790000000123456", "MESSAGE": "hello"}) + "\n"},
    "kubectl_describe": {"pod.txt": "Name:   pod-1\nNamespace:  a\nContainers:\n  main:\n    State:   Running\n"},
    "kubernetes_objects": {"pods.json": json.dumps({"apiVersion": "v1", "kind": "PodList", "items": []})},
    "kubernetes_yaml": {"pod.yaml": "apiVersion: v1\nkind: Pod\nmetadata:\n  name: a\nspec: {}\nstatus: {}\n"},
    "qstat": {"qstat.txt": "Job Id: 71.pbs\n    Job_Name = a\n    job_state = R\n"},
    "metrics_lines": {"metrics.jsonl": '{"step": 1, "lr": 0.1}\n{"step": 2, "lr": 0.1}\n'},
    "metrics_table": {"metrics.csv": "step,loss,lr\n1,,0.1\n2,,0.1\n"},
    "mllog": {"mllog.log": ':::MLLOG {"time_ms": 1, "key": "cache_clear", "value": true, "metadata": {}}\n'},
    "process_stacks": {"stack_rank0.txt": "Process 12: python train.py\nPython v3.11.4 (/usr/bin/python3.11)\n\n"
                                          'Thread 12 (active): "MainThread"\n    forward (train.py:3)\n'},
    "python_stacks": {"stack_rank0.txt": "Traceback for thread 12 (python) [] (most recent call last):\n"
                                         '    (Python) File "/w/train.py", line 3, in <module>\n        main()\n'},
    "trainer_state": {"trainer_state.json": json.dumps({"global_step": 0, "log_history": [], "max_steps": 10})},
    "wandb_history": {"history.jsonl": '{"_step": 0, "_timestamp": 1.0, "_runtime": 2}\n'},
}  # fmt: skip
ELSEWHERE = {"archive", "program", "plugin", "tensorboard_events", "wandb_file"}
"""Wrapped, named by its program, tested with the plug-ins; and two whose packages are no dependency of the tests."""


@pytest.mark.parametrize("case", CASES)
def test_a_file_with_nothing_to_judge_is_not_called_healthy(tmp_path: Path, case: str) -> None:
    for name, content in CASES[case].items():
        path = tmp_path / name
        if callable(content):
            content(path)
        else:
            path.write_bytes(content.encode() if isinstance(content, str) else content)
        read_as = format_of(path)
        program = program_of(path.read_bytes()[: 64 << 10])
        assert case.partition(":")[0] == (program if read_as == "program" else read_as)
    diagnosis = diagnose_files([tmp_path])
    assert not diagnosis.fired
    openings = ("Nothing was judged", "None of ", "The only line does not name")
    assert diagnosis.verdict.startswith(openings), diagnosis.verdict
    assert diagnosis.not_judged or diagnosis.run["file_problems"]


def test_each_reader_has_a_case() -> None:
    covered = {case.partition(":")[0] for case in CASES} | ELSEWHERE
    assert covered >= {*FORMATS, *_modules()}


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text("\n\n")
    with pytest.raises(SourceError, match="is empty"):
        diagnose_files([tmp_path])


def test_equal_counts_of_ras_are_checked_and_do_not_show_the_end_of_a_call(tmp_path: Path) -> None:
    (tmp_path / "ras.json").write_text(json.dumps(ANSWER))
    diagnosis = diagnose_files([tmp_path])
    assert diagnosis.verdict.startswith("Nothing was found in what could be judged.")
    (open_,) = diagnosis.not_judged
    assert "one report does not show whether the last call ends" in open_.summary


def test_an_end_stated_by_a_scheduler_is_the_verdict(tmp_path: Path) -> None:
    (tmp_path / "sacct.txt").write_text(programs.SACCT_P.format(state="COMPLETED"))
    assert diagnose_files([tmp_path]).verdict.startswith("The job finished (sacct.txt:2: ")


def test_an_analysis_that_fails_costs_its_own_findings_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(rows: Any) -> list[Any]:
        raise ZeroDivisionError("of rows")

    found = [replace(one, run=fails) if one.format == "inspector" else one for one in file_analyses()]
    monkeypatch.setattr("analyzers.evidence.diagnose_files.file_analyses", lambda: found)
    for rank in (0, 1):
        (tmp_path / f"nccl-{rank}.log").write_text("".join(line(rank, seq, 100, size=2) for seq in range(80)))
        (tmp_path / f"et_{rank}.json").write_text(trace(rank, [("all_reduce", 5 + rank)]))
    diagnosis = diagnose_files([tmp_path])
    assert [one.kind for one in diagnosis.fired] == ["hang"]
    assert any("ZeroDivisionError: of rows" in one.summary for one in diagnosis.not_judged)


def test_each_format_that_is_read_by_rank_has_one_analysis() -> None:
    read = [one.format for one in file_analyses()]
    assert sorted(read) == sorted(
        {"flight_recorder", "kineto", "operations", "inspector", "execution_trace", "memory_snapshot"}
    )
