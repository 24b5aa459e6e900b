"""What proves a finding and what to do about it: never the verdict again, and in words."""

from __future__ import annotations

from typing import Any

import pytest

from analyzers.diagnose import conclude
from analyzers.finding import Finding
from analyzers.report.terminal.diagnosis_text import evidence_rows
from analyzers.report.wording import labels
from analyzers.report.wording.explained import next_step, why

GIB = 1 << 30
CASES: list[tuple[str, str, dict[str, Any], str, str]] = [
    ("data_bound", "periodic", {"data_ratio": 0.31, "data_ms": 66.0, "step_ms": 212.0, "data_highest_ms": 400.0,
                                "every_steps": 16, "starved_steps": 9, "steps": 150},
     "Loading takes 31 % of a step: 66 of 212 ms", "bridge the pause"),
    ("memory_growth", "leak", {"memory_first_bytes": GIB, "memory_last_bytes": 3 * GIB, "left_bytes": 2 * GIB},
     "from 1 GiB to 3 GiB", "kept between steps"),
    ("memory_limit", "host", {"highest_bytes": 79 * GIB, "total_bytes": 80 * GIB, "newest_bytes": 60 * GIB},
     "at most 79 GiB of 80 GiB", "/dev/shm"),
    ("memory_limit", "allocator", {"num_retries": 6, "num_seconds_with_retries": 3, "allocated_bytes": 70 * GIB,
                                   "reserved_bytes": 78 * GIB}, "6 retries in 3 seconds", "expandable_segments"),
    ("xid", "memory", {"count": 2, "node": "n1", "message": "NVRM: Xid 48", "action": "reset the device"},
     "The driver of n1 reported it 2 times, class memory: NVRM: Xid 48.", "Reset the device. See docs/runbook.md#"),
    ("gpu_memory_errors", "remap_failed", {"uncorrected": 3, "corrected": None}, "uncorrected 3", "replaced"),
    ("gpu_throttled", "thermal", {"throttled_ratio": 0.5, "readings": 40, "hottest_celsius": 91.0,
                                  "clock_median_hertz": 1.2e9}, "50 % of 40 readings", "air flow"),
    ("link_errors", "nvlink", {"nvlink_errors": 1200, "pcie_replays": None}, "1,200 errors on NVLinks", "nvidia-smi"),
    ("host_pressure", "disk", {"disk_free_bytes": GIB, "disk_free_lowest_bytes": GIB // 2},
     "1 GiB are free now", "Free space on that disk"),
    ("checkpoint_failed", "failed", {"reason": "No space left\nmore", "num_good_since": 0},
     "No space left, and nothing has been saved since", "make room on the disk"),
    ("checkpoint_age", "old", {"age_steps": 400, "interval_steps": 50, "lost_s": 80.0}, "400 steps", "before the next"),
    ("node_silent", "silent", {"silent_s": 12.0, "heard_again": False}, "for 12 s, and nothing has arrived since",
     "Ping the node"),
    ("excluded", "device", {"num_failures": 3}, "3 failures there", "dcgmi diag"),
    ("gradient_corrupted", "gradient", {"peak": 1e9, "peak_again": 0.5, "sigmas": 300.0, "count_on_device": 2},
     "0.5 when recomputed from the same state and batch (2 times on this device).", "take it out and test it"),
    ("expert_imbalance", "hot", {"expert": 3, "layer": 1, "load_ratio": 4.2, "limit_ratio": 3.0, "num_samples": 12},
     "4.2 times an even share", "balance_loss"),
    ("vanishing_gradients", "trend", {"blocks": ["blocks.0"], "num_blocks": 1, "num_blocks_of_model": 12, "norm": 1e-9,
                                      "norm_of_others": 0.1}, "norm is 1e-09 against 0.1", "residual branches"),
    ("exploding_gradients", "whole", {"rise_factor_ratio": 4000.0}, "4e+03 times", "Lower the rate"),
    ("non_finite", "backward", {"num_flagged_inputs": 3, "num_checked_inputs": 9, "op": "all_reduce", "seq": 7,
                                "process_group": "world", "judgement": "transient", "batch_index": 39},
     "3 of 9 inputs of collectives held NaN or Inf before their reduction, first in all_reduce #7 of world.",
     "Batch 39 was probably fine."),
    ("loss_spike", "batch", {"loss": 5.9, "loss_before": 2.1, "loss_z": 12.0, "grad_norm": 31.0},
     "12 sigma above its recent 2.1 at 5.9, gradient norm 31.", "--why-spike 10"),
    ("divergence", "trend", {"loss_lowest": 2.0, "loss_highest": 3.0, "rise_z": 9.0}, "9 times its noise", "Roll back"),
    ("loss_scale_collapse", "overflow", {"num_overflows": 5}, "5 steps overflowed", "bf16"),
    ("replica_mismatch", "parameter", {"replica_groups": ["dp"], "num_replicas": 4, "num_tensors": 1,
                                       "last_healthy_step": 20},
     "Bits differ over 4 replicas in 1 tensor, and the last check that agreed was at step 20.", "replace it"),
    ("gradient_noise", "larger_batch", {"samples": 40, "low_tokens": 1e6, "high_tokens": 2e6, "batch_tokens": 4096.0},
     "1e+06 to 2e+06 tokens, against 4.1e+03 in a batch", "loss by tokens"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "cause", "evidence", "proof", "remedy"), CASES)
def test_the_proof_is_not_the_verdict_again(
    kind: str, cause: str, evidence: dict[str, Any], proof: str, remedy: str
) -> None:
    finding = Finding(
        analyzer="a", kind=kind, severity="warning", status="fired", summary="VERDICT", cause=cause, evidence=evidence,
        first_step=10, last_step=90, advice=f"{kind}-{cause}",
    )  # fmt: skip
    assert proof in why(finding)
    assert "VERDICT" not in why(finding)
    assert "\n" not in why(finding)
    assert remedy in next_step(finding)
    bare = Finding(analyzer="a", kind=kind, severity="warning", status="fired", summary="VERDICT", cause=cause)
    assert "VERDICT" not in why(bare), "an older event may lack a number, and is explained all the same"


def test_evidence_has_names_and_units_that_people_read() -> None:
    rows = dict(
        evidence_rows(
            {
                "num_nonfinite_parameters": 1,
                "pattern": "since",
                "cpu_time_excess_ms": 22.364,
                "left_bytes": 12 * GIB,
                "clock_median_hertz": 1.98e9,
                "hottest_celsius": 91.0,
                "age_steps": 400,
                "comes_back": False,
                "loss_z": 12.5,
                "some_new_number_ms": 3,
                "first_wall_ns": 1,
            }
        )
    )
    assert rows == {
        "non-finite parameters": "1",
        "pattern": "since its first step",
        "more processor time": "22.364 ms",
        "left until full": "12 GiB",
        "clock median": "1,980 MHz",
        "hottest": "91 °C",
        "age of the checkpoint": "400 steps",
        "repeated by a replay": "no",
        "loss deviation": "12.5 sigma",
        "some new number": "3 ms",
    }


def test_labels_fit_their_column() -> None:
    assert [name for name in labels._LABELS.values() if len(name) > 24] == []


def test_the_verdict_counts_what_was_not_judged() -> None:
    kinds = ("checkpoint_age", "configuration", "data_bound")
    verdict = conclude([Finding.insufficient("a", kind, "no records") for kind in kinds], {"steps": 3}).verdict
    assert verdict == "No problems found (3 steps). 3 checks need more data: see `-v`."
