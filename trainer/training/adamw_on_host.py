"""AdamW with moments in host memory, computed on the host (Rajbhandari et al. 2021, ZeRO-Offload).

    optimizer = AdamWOnHost(groups, lr=3e-4, betas=(0.9, 0.95), eps=1e-8)

Parameters and gradients stay on the device. A step copies each gradient to the host, applies torch's AdamW to a tensor
of zeros, and adds the resulting update to the parameter. The bus carries 4 bytes per number each way. The host keeps no
copy of the parameters, which a rollback would have to restore as well. All copies to the host are started at once, and
the host computes the first update while the other gradients arrive.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainer.training.adamw_fallback import local_tensor

__all__ = ["STATE_KEYS", "AdamWOnHost", "empty_state"]

STATE_KEYS = ("exp_avg", "exp_avg_sq", "step")


class AdamWOnHost(torch.optim.Optimizer):
    """AdamW with moments in host memory. `found_inf`: a number on the device; the update is skipped if it is not zero,
    as in torch's fused AdamW."""

    found_inf: Tensor | None = None

    def __init__(self, groups: list[dict[str, Any]], *, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self._updates = {parameter: _HostUpdate(parameter) for group in groups for parameter in group["params"]}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # nothing here computes a loss again
        """Update all parameters that have a gradient."""
        if self.found_inf is not None and bool(self.found_inf):
            return
        pairs = [(group, each) for group in self.param_groups for each in group["params"] if each.grad is not None]
        for _, parameter in pairs:
            self._updates[parameter].fetch(local_tensor(parameter.grad))
        for group, parameter in pairs:
            state = self.state[parameter]
            if not state:
                state |= {key: empty_state(parameter, key) for key in STATE_KEYS}
            update = self._updates[parameter].compute({key: local_tensor(state[key]) for key in STATE_KEYS}, group)
            own = local_tensor(parameter)
            own.mul_(1 - group["lr"] * group["weight_decay"]).add_(update.to(own.device, non_blocking=True))


class _HostUpdate:
    """Computes a parameter's update in each step, in host memory that is allocated once."""

    def __init__(self, parameter: Tensor) -> None:
        own = local_tensor(parameter)
        self._value = torch.empty_like(own, device="cpu", pin_memory=own.is_cuda)
        self._value.grad = torch.empty_like(self._value, pin_memory=own.is_cuda)
        self._adamw = torch.optim.AdamW([self._value], weight_decay=0.0, fused=True)
        self._arrived: torch.cuda.Event | None = None

    def fetch(self, gradient: Tensor) -> None:
        """Start the gradient's copy to the host."""
        assert self._value.grad is not None
        self._value.grad.copy_(gradient, non_blocking=True)
        if gradient.is_cuda:
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()

    def compute(self, state: dict[str, Tensor], group: dict[str, Any]) -> Tensor:
        """Compute the update from the fetched gradient; changes `state` in place."""
        if self._arrived is not None:
            # Both copies run on the compute stream, so the copy of the previous step's update has ended, too.
            self._arrived.synchronize()
        self._value.zero_()
        self._adamw.state[self._value] = state
        self._adamw.param_groups[0] |= {key: group[key] for key in ("lr", "betas", "eps")}
        self._adamw.step()
        return self._value


def empty_state(parameter: Tensor, key: str) -> Tensor:
    """One tensor of a parameter's state before its first update, on the host and sharded like the parameter."""
    if key == "step":
        return torch.zeros((), dtype=torch.float32)
    return torch.zeros_like(parameter.detach(), device="cpu")
