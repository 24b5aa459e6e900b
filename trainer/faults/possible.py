"""Refuse faults that a run can never inject, before anything starts.

check_faults(faults, config, plan)     # FaultError: --fault nan_grad@step=400,rank=1: step = 400: the run has 200 steps
"""

from __future__ import annotations

from collections.abc import Sequence

from trainer.config.config import Config
from trainer.faults.options import Fault, FaultError
from trainer.layout.plan import Plan

__all__ = ["check_faults"]


def check_faults(faults: Sequence[Fault], config: Config, plan: Plan) -> None:
    """Raise FaultError for the first fault that needs a rank, step, tensor or setup which this run does not have."""
    for fault in faults:
        if reason := _reason(fault, config, plan):
            raise FaultError(f"--fault {fault.text}: {reason}")


def _reason(fault: Fault, config: Config, plan: Plan) -> str:
    """Reason why the run cannot inject the fault; empty if it can."""
    steps = config.train.steps
    if fault.rank >= plan.world_size:
        return f"rank = {fault.rank}: the run has {'only rank 0' if plan.world_size == 1 else _ranks(plan)}"
    if fault.step > steps:
        return f"step = {fault.step}: the run has {steps} steps"
    if fault.until and fault.until < fault.step:
        return f"until = {fault.until}: must be at least step = {fault.step}"
    match fault.kind:
        case "order_inversion" if plan.world_size < 2:
            return "needs more than one rank"
        case "missing_send" if plan.pp < 2:
            return "parallel.pp = 1: there is no pipeline; must be 2 or more"
        case "loader_killed" if not config.data.num_workers:
            return "data.num_workers = 0: there is no worker process; must be 1 or more"
    name = fault.parameter or fault.tensor
    if name and not {name, name.rpartition(".")[0]} & _parameter_names(config):
        return f"{'parameter' if fault.parameter else 'tensor'} = {name!r}: the model has no such parameter"
    return ""


def _ranks(plan: Plan) -> str:
    return f"ranks 0 to {plan.world_size - 1}"


def _parameter_names(config: Config) -> set[str]:
    import torch  # imported only if a fault names a tensor

    from trainer.model.transformer import Transformer

    with torch.device("meta"):
        return {name for name, _ in Transformer(config.model).named_parameters()}
