"""Profiler traces in the shapes that exist: metadata first, a bare array, one rank, other devices, those of 2021."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from analyzers.evidence.diagnose_files import diagnose_files
from store.readers.traces.kineto import RankTrace, read_trace
from store.readers.traces.trace_devices import is_communication
from tests.store.readers.trace_files import trace

STEPS = 12


def written(folder: Path, made: Any, name: str = "rank0.json") -> Path:
    path = folder / name
    path.write_text(made if isinstance(made, str) else json.dumps(made), encoding="utf-8")
    return path


def row(folder: Path) -> dict[str, Any]:
    diagnosis = diagnose_files([folder])
    (found,) = diagnosis.run["trace"]["ranks"]
    return dict(found)


def close(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """The same times in every shape: the trace's content does not depend on how it is wrapped."""
    for part in ("compute_ms", "communication_ms", "exposed_ms", "idle_ms", "step_ms"):
        assert found[part] == pytest.approx(expected[part], abs=0.01 * expected["step_ms"]), part


@pytest.fixture
def expected(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "plain").mkdir()
    written(tmp_path / "plain", trace(0, steps=STEPS))
    return row(tmp_path / "plain")


def test_events_after_megabytes_of_metadata(tmp_path: Path, expected: dict[str, Any]) -> None:
    made = trace(0, steps=STEPS)
    events = made.pop("traceEvents")
    written(tmp_path, {"hostProperties": "x" * (7 << 20), **made, "traceEvents": events})
    close(row(tmp_path), expected)


@pytest.mark.parametrize("end", ["]", "", ","])
def test_a_bare_array_also_without_its_end(tmp_path: Path, expected: dict[str, Any], end: str) -> None:
    events = trace(0, steps=STEPS)["traceEvents"]
    written(tmp_path, json.dumps(events)[:-1] + end)
    close(row(tmp_path), expected)


def test_one_trace_needs_no_rank(tmp_path: Path) -> None:
    made = trace(0, steps=STEPS)
    del made["distributedInfo"]
    written(tmp_path, made, "gpu-box_48213.1790857026.pt.trace.json")
    assert row(tmp_path)["rank"] == 0


def launched(events: list[dict[str, Any]], *, mark_us: float) -> Iterator[dict[str, Any]]:
    """The events as ROCm's profiler writes them: no marks on the device, marks of the host that are points, and a call
    of the host for each kernel, which its correlation names."""
    number = 0
    launch_us = 0.0
    for event in events:
        if event.get("cat") == "gpu_user_annotation":
            continue
        if event.get("cat") == "user_annotation" and event["name"].startswith("ProfilerStep#"):
            launch_us = event["ts"] + 20.0
            yield {**event, "dur": mark_us}
        elif event.get("cat") == "kernel":
            number += 1
            yield {"ph": "X", "cat": "cuda_runtime", "name": "hipLaunchKernel", "pid": 1, "tid": 1,
                   "ts": launch_us + number % 7, "dur": 4.0, "args": {"correlation": number}}  # fmt: skip
            yield {**event, "args": {**event["args"], "correlation": number}}
        else:
            yield event


def test_kernels_belong_to_the_step_that_launched_them(tmp_path: Path, expected: dict[str, Any]) -> None:
    made = trace(0, steps=STEPS)
    made["traceEvents"] = list(launched(made["traceEvents"], mark_us=16.0))
    written(tmp_path, made)
    found = row(tmp_path)
    assert found["steps"] >= STEPS - 2
    close(found, expected)


def test_trace_categories_of_2021_are_read(tmp_path: Path, expected: dict[str, Any]) -> None:
    old = {"kernel": "Kernel", "cpu_op": "Operator", "gpu_memcpy": "Memcpy", "user_annotation": "Operator"}
    made = trace(0, steps=STEPS)
    events = [event for event in made["traceEvents"] if event.get("cat") != "gpu_user_annotation"]
    made["traceEvents"] = [{**event, "cat": old.get(event.get("cat", ""), event.get("cat", ""))} for event in events]
    written(tmp_path, made)
    found = row(tmp_path)
    assert found["steps"] == STEPS
    assert found["compute_ms"] == pytest.approx(expected["compute_ms"], rel=0.15)


def test_an_unknown_device_is_named_and_never_taken_for_a_cpu(tmp_path: Path) -> None:
    made = trace(0, steps=STEPS)
    made["traceEvents"] = [
        {**event, "cat": "tpu_op"} if event.get("cat") == "kernel" else event for event in made["traceEvents"]
    ]
    found: RankTrace = read_trace(written(tmp_path, made))
    assert found.device == "tpu_op"
    assert "unknown category 'tpu_op'" in found.problem


@pytest.mark.parametrize(
    "name",
    [
        "void deep_ep::internode::dispatch<false, 3, false, 8>(int4*, float*, long*)",
        "void deep_ep::intranode::cached_notify_combine<8>(void**, int*, int, int)",
        "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(vllm::RankData*, vllm::RankSignals)",
        "nvshmemi_barrier_on_stream_kernel",
        "multimem_all_reduce_kernel<c10::BFloat16, 16>",
        "userbuffers_fp16_sum_inplace_gpu_rr_ag<4>",
        "rcclGenericKernel<1, false>(ncclDevKernelArgsStorage<4096ul>)",
    ],
)
def test_kernels_that_communicate_are_known_by_name(tmp_path: Path, expected: dict[str, Any], name: str) -> None:
    made = trace(0, steps=STEPS)
    for event in made["traceEvents"]:
        if event.get("cat") == "kernel" and event["name"].startswith("nccl"):
            event["name"] = name
    written(tmp_path, made)
    close(row(tmp_path), expected)


@pytest.mark.parametrize(
    "name",
    [
        "triton_poi_fused_all_gather_into_tensor_nccl_wait_tensor_3",
        "void at::native::reduce_kernel<512, 1>(at::native::ReduceOp<float>)",
        "void dispatch_fused_moe_kernel<float>()",
    ],
)
def test_kernels_that_compute_are_not_taken_for_communication(name: str) -> None:
    assert not is_communication(name)


@pytest.mark.parametrize(
    ("category", "runtime", "model", "device"),
    [
        ("kernel", "cuda_runtime", "NVIDIA H100 80GB HBM3", "cuda"),
        ("kernel", "cuda_runtime", "AMD Instinct MI300X", "rocm"),
        ("kernel", "hip_runtime", "", "rocm"),
        ("kernel", "xpu_runtime", "Intel(R) Data Center GPU Max 1550", "xpu"),
        ("mtia_ccp_events", "mtia_runtime", "", "mtia"),
        ("hpu_op", "hpu_op", "", "hpu"),
    ],
)
def test_devices_are_called_what_they_are(tmp_path: Path, category: str, runtime: str, model: str, device: str) -> None:
    made = trace(0, steps=STEPS)
    made["deviceProperties"] = [{"id": 0, "name": model}] if model else []
    for event in made["traceEvents"]:
        event["cat"] = category if event.get("cat") == "kernel" else event.get("cat", "")
    launch = {"ph": "X", "cat": runtime, "name": "launch", "pid": 1, "tid": 1, "ts": 1e9, "dur": 1.0, "args": {}}
    made["traceEvents"].append(launch)
    assert read_trace(written(tmp_path, made)).device == device


def test_ascends_overlap_analysis_is_read(tmp_path: Path) -> None:
    names = {9: "Overlap Analysis", 1: "Python"}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}} for pid, name in names.items()
    ]
    for step in range(STEPS):
        at = 1e6 + 100e3 * step
        events += [
            {"ph": "X", "name": f"ProfilerStep#{step}", "pid": 1, "tid": 1, "ts": at, "dur": 100e3},
            {"ph": "X", "name": "Computing", "pid": 9, "tid": 1, "ts": at, "dur": 60e3},
            {"ph": "X", "name": "Communication", "pid": 9, "tid": 2, "ts": at + 50e3, "dur": 30e3},
            {"ph": "X", "name": "Communication(Not Overlapped)", "pid": 9, "tid": 3, "ts": at + 60e3, "dur": 20e3},
            {"ph": "X", "name": "Free", "pid": 9, "tid": 4, "ts": at + 80e3, "dur": 20e3},
        ]
    written(tmp_path, events, "trace_view.json")
    found = row(tmp_path)
    assert found["device"] == "npu"
    assert (found["compute_ms"], found["exposed_ms"], found["idle_ms"]) == pytest.approx((60.0, 20.0, 20.0), abs=0.1)
