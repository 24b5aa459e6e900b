"""Evidence and next step of the kinds of `numerics`."""

from __future__ import annotations

from typing import Any

import pytest

from tests.analyzers.explained import assert_explains


@pytest.mark.parametrize(
    ("kind", "cause", "evidence", "proof", "remedy"),
    [
        (
            "expert_imbalance",
            "hot",
            {"expert": 3, "layer": 1, "load_ratio": 4.2, "limit_ratio": 3.0, "num_samples": 12},
            "4.2 times an even share",
            "balance_loss",
        ),
        (
            "vanishing_gradients",
            "trend",
            {"blocks": ["blocks.0"], "num_blocks": 1, "num_blocks_of_model": 12, "norm": 1e-9, "norm_of_others": 0.1},
            "norm is 1e-09 against 0.1",
            "residual branches",
        ),
        ("exploding_gradients", "whole", {"rise_factor_ratio": 4000.0}, "4,000 times", "Lower the rate"),
        (
            "non_finite",
            "backward",
            {
                "num_flagged_inputs": 3,
                "num_checked_inputs": 9,
                "op": "all_reduce",
                "seq": 7,
                "process_group": "world",
                "replay_verdict": "transient",
                "batch_index": 39,
            },
            "Before the reduction 3 of 9 checked inputs of collectives held NaN or Inf, "
            "first in all_reduce #7 of world.",
            "Batch 39 was probably fine.",
        ),
        (
            "non_finite",
            "reduction",
            {"num_flagged_inputs": 1, "num_checked_inputs": 24},
            "Only 1 of 24 checked inputs of collectives held NaN or Inf, all of them in calls after that reduction.",
            "Reduce gradients in fp32",
        ),
        (
            "loss_spike",
            "batch",
            {"loss": 5.9, "loss_before": 2.1, "loss_z": 12.0, "grad_norm": 31.0},
            "The loss is 5.9, 12 sigma above its recent level of 2.1, gradient norm 31.",
            "--why-spike 10",
        ),
        (
            "divergence",
            "trend",
            {"loss_lowest": 2.0, "loss_highest": 3.0, "rise_z": 9.0},
            "9 times its noise",
            "Roll back",
        ),
        ("loss_scale_collapse", "overflow", {"num_overflows": 5}, "5 steps overflowed", "bf16"),
        (
            "gradient_noise",
            "larger_batch",
            {"samples": 40, "low_tokens": 1e6, "high_tokens": 2e6, "batch_tokens": 4096.0},
            "1,000,000 to 2,000,000 tokens, against 4,096 in a batch",
            "loss by tokens",
        ),
        (
            "gradient_noise",
            "larger_batch",
            {"samples": 40, "low_tokens": 1e6, "high_tokens": None, "batch_tokens": 4096.0},
            "the noise scale is at least 1,000,000 tokens, against 4,096 in a batch",
            "loss by tokens",
        ),
    ],
)
def test_evidence_and_next_step(kind: str, cause: str, evidence: dict[str, Any], proof: str, remedy: str) -> None:
    assert_explains(kind, cause, evidence, proof=proof, remedy=remedy)
