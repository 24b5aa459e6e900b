"""Which settings the plan knows nothing of yet: better no number than a wrong one.

uncovered(config, plan)          # "parallel.cp = 2", or nothing
"""

from __future__ import annotations

from trainer.config import Config
from trainer.mesh_plan import Plan

__all__ = ["uncovered"]


def uncovered(config: Config, plan: Plan) -> str:
    """The first setting that memory or traffic depend on and the plan does not model; empty if it models all."""
    parallel, default = config.parallel, type(config.parallel)()
    if config.model.num_experts:
        return f"model.num_experts = {config.model.num_experts}"
    if plan.cp > 1:
        return f"parallel.cp = {plan.cp}"
    for key in ("zero1", "cpu_offload", "gradient_compression"):
        if getattr(parallel, key) != getattr(default, key):
            return f"parallel.{key} = {str(getattr(parallel, key)).lower()}"
    return ""
