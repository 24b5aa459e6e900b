"""Base of optimizers that update some groups of parameters by themselves and leave the others to AdamW.

class MuonAdamW(AdamWFallback):
    mark = "muon"                              # it updates groups with `muon = True`
    def _update(self, parameter, group, skipped): ...
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

__all__ = ["AdamWFallback", "local_tensor"]


class AdamWFallback(torch.optim.Optimizer):
    """`found_inf`: a number on the device; the update is skipped if it is not zero, as in torch's fused AdamW."""

    mark: ClassVar[str]
    """Key of a parameter group that marks it for this class instead of AdamW."""
    found_inf: Tensor | None = None

    def __init__(self, groups: list[dict[str, Any]], defaults: dict[str, Any], **adamw: Any) -> None:
        """`adamw`: arguments of `torch.optim.AdamW`; its learning rate and weight decay apply to all groups."""
        self._adamw = torch.optim.AdamW([dict(group) for group in groups if not group[self.mark]], **adamw)
        super().__init__(groups, {**self._adamw.defaults, **defaults})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # nothing here computes a loss again
        """Update all parameters that have a gradient."""
        # Read each time: `load_state_dict` replaces groups and state.
        self._adamw.param_groups = [group for group in self.param_groups if not group[self.mark]]
        self._adamw.state = self.state
        self._adamw.found_inf = self.found_inf  # type: ignore[attr-defined]  # as torch's GradScaler does
        self._adamw.step()
        skipped = None if self.found_inf is None else self.found_inf.bool()
        for group in self.param_groups:
            for parameter in group["params"] if group[self.mark] else ():
                if parameter.grad is not None:
                    self._update(parameter, group, skipped)

    def _update(self, parameter: Tensor, group: dict[str, Any], skipped: Tensor | None) -> None:
        raise NotImplementedError


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's shard of a tensor (or the whole tensor), detached; writing to it writes to `tensor`."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
