"""Count the kernels of a step on a CPU: operators that compute, and inductor's fused kernels.

inductor.cpp.enable_kernel_profile = True           # before anything is compiled, or fused ones have no name
kernels_a_step(loop.step, 3).total()
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

__all__ = ["is_fused", "kernels_a_step"]

_NO_KERNEL = (
    "aten::view", "aten::as_strided", "aten::transpose", "aten::t", "aten::reshape", "aten::expand", "aten::slice",
    "aten::select", "aten::unsqueeze", "aten::squeeze", "aten::detach", "aten::alias", "aten::_unsafe_view",
    "aten::split", "aten::permute", "aten::empty", "aten::empty_strided", "aten::empty_like", "aten::narrow",
    "aten::new_empty", "aten::resize_", "aten::set_", "aten::is_nonzero", "aten::item", "aten::_local_scalar_dense",
    "aten::to", "aten::flatten", "aten::detach_", "aten::unflatten_dense_tensors",
    "aten::resolve_conj", "aten::resolve_neg", "aten::lift_fresh", "aten::result_type", "aten::chunk",
)  # fmt: skip
"""Operators that neither move nor compute data, or only call another operator."""


def is_fused(name: str) -> bool:
    """True for a kernel that inductor generated."""
    return "cpp_fused" in name


def _computes(name: str) -> bool:
    return (name.startswith(("aten::", "fsdp::")) or is_fused(name)) and name not in _NO_KERNEL


def _computes_below(event: FunctionEvent) -> bool:
    """True if it calls an operator that computes, which is counted instead. (A matrix product calls only
    `resolve_conj`.)
    """
    return any(_computes(child.name) or _computes_below(child) for child in event.cpu_children)


def kernels_a_step(step: Callable[[], object], steps: int) -> Counter[str]:
    """Mean number of kernels per step by name, over `steps` steps, without collectives."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        for _ in range(steps):
            step()
    found = Counter(event.name for event in profiled.events() if _computes(event.name) and not _computes_below(event))
    return Counter({name: round(calls / steps) for name, calls in found.items()})
