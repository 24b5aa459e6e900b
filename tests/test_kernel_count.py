"""Kernels a step as `benchmarks.cost.kernels` counts them: operators that compute, not views."""

from __future__ import annotations

import torch

from benchmarks.cost.kernels import is_fused, kernels_a_step


def test_only_operators_that_compute_are_counted() -> None:
    left, right = torch.ones(4, 6), torch.ones(4, 6)

    def step() -> None:
        (left.t() @ right).view(2, 18)[0].exp_().exp_()

    assert kernels_a_step(step, 3) == {"aten::mm": 1, "aten::exp_": 2}


def test_what_inductor_wrote_is_told_by_its_name() -> None:
    assert is_fused("graph_0_cpp_fused__to_copy_add_mean_1")
    assert not is_fused("aten::_fused_adamw_")
