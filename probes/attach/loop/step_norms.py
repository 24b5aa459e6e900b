"""The gradient norm of a step, taken from clipping or measured here; for sharded gradients, the norm of this rank's
shards.

    norms = StepNorms(recorder, values)
    norms.patch(phases, imports)         # observe the clipping of torch and FSDP1
    norms.backward_ended()               # a backward pass is over
    norms.clipped(norm, parameters)      # the norm by which torch clips the gradients of these
    norms.measure()                      # before the optimizer's step

A loop may clip parts of its model one by one; their norms are then combined. If parameters are clipped again, the first
norm counts, because only this norm is of unclipped gradients. After a new backward pass, the new norm counts. A rank
that holds shards knows only their norm. It is written as a series named after the ranks that hold the rest (`PART`),
and the store combines the parts (`store.derived.global_norms`), so no collective is needed.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from types import ModuleType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad

from ...collectives.gradients.input_gradient import INPUT_GRADIENT, InputGradientNorms
from ...collectives.groups.shard_groups import FSDP1, ranks_of_parts
from ...fail_open import failing_open
from ...gradients import GradientProbe
from ...recorder import Recorder
from ...step_scalars import StepScalars
from ..patching.on_import import OnImport

__all__ = ["PART", "StepNorms"]

PART = "grad_norm_part "
"""Prefix of the series of one rank's part; the ranks that share the gradients follow it."""
ORDER = ", order "
"""Precedes the norm's order at the end of that name. An order of 2 is left out."""
MAX_EXAMINED = 3
"""Maximum number of consecutive non-finite steps in which gradients are examined individually. More would add nothing.
"""


class _Phases(Protocol):
    """Phases of a loop, as `loop_hooks.LoopPhases` records them."""

    def replace(self, place: Any, name: str, wrapper: Callable[..., Any]) -> None: ...


class StepNorms:
    """The gradient norms of one loop."""

    def __init__(self, recorder: Recorder, values: StepScalars, *, is_wanted: bool = True) -> None:
        self._recorder = recorder
        self._values = values
        self.probe: GradientProbe | None = None
        self._make_probe: Callable[[], GradientProbe] | None = None
        self.is_wanted = is_wanted
        """True if gradients are measured where the loop does not clip them."""
        self.measured: float | Tensor | None = None
        """The norm of the current step, if this rank knows it."""
        self.input_gradient = InputGradientNorms()
        self._order = 2.0  # order p of the p-norm by which the loop clips: 2, inf, 1, ...
        # Clippings since the last backward pass: (label of the ranks, order, this rank's norm).
        self._clips: list[tuple[str, float, Tensor]] = []
        self._clipped_by: list[tuple[Tensor, Iterable[Tensor]]] = []  # (norm that the loop passed, its parameters)
        self.num_clips = 0  # since the last backward pass
        self.is_global = True
        """True if each norm of `_clips` is of a model that is sharded over all ranks: they all know the same number."""
        self._after_backward = False
        self._is_measured = False  # True once measured after the newest backward pass
        self._examined = 0

    def patch(self, phases: _Phases, imports: OnImport) -> None:
        """Take the norms by which torch and FSDP1 clip, computed before clipping. `clip_grad_norm_` calls the private
        functions; loops that reduce the norm further, for example over pipeline stages, call the public ones."""
        phases.replace(clip_grad, "_get_total_norm", self._computes)
        phases.replace(nn.utils, "get_total_norm", self._computes)
        phases.replace(clip_grad, "_clip_grads_with_norm_", self._clips_by)
        phases.replace(nn.utils, "clip_grads_with_norm_", self._clips_by)
        imports.when(FSDP1, partial(self._patch_fsdp1, phases))

    def _patch_fsdp1(self, phases: _Phases, module: ModuleType) -> None:
        phases.replace(module.FullyShardedDataParallel, "clip_grad_norm_", self._fsdp1_clips)

    def measure_with(self, make: Callable[[], GradientProbe]) -> None:
        """Measure with another probe, made at the next update."""
        self.free()
        self._make_probe = make

    def free(self) -> None:
        """Free the parameters that are measured, until the next update."""
        if self.probe is not None:
            self.probe.close()
        self.probe = None

    def step_began(self) -> None:
        """Forget the norms of the previous step."""
        self.measured = None
        self._is_measured = False
        self._forget_clips()

    def backward_ended(self) -> None:
        """Note the end of a backward pass: norms taken from now on belong to its gradients."""
        self._after_backward = True
        self._is_measured = False
        self.num_clips = 0

    def clipped(self, norm: Any, parameters: Any = None, *, is_global: bool = False) -> None:
        """Take the norm that torch or FSDP computed for clipping: it is the norm before clipping, and costs nothing.

        `parameters`: list or tensor; None if unknown. `is_global`: the norm is known to be that of all ranks' shards.
        """
        self.num_clips += 1
        if not isinstance(norm, Tensor):
            return
        if self._after_backward or not isinstance(parameters, (list, tuple, Tensor)):
            self._forget_clips()
        given = [parameters] if isinstance(parameters, Tensor) else parameters or []
        if self._clipped_by and self._are_counted(norm, given):
            return
        self._clipped_by.append((norm, given))
        local = getattr(norm, "_local_tensor", None)
        if self._order > 0:
            ranks, part = ("", norm) if local is None else (ranks_of_parts(norm), local)
            self._clips.append((ranks, self._order, part.detach()))
            self.is_global &= not ranks and (is_global or any(map(_is_on_all_ranks, (norm, *given))))

    @property
    def is_bad(self) -> bool:
        """True if a norm by which the loop has clipped is NaN or Inf; False if only a device knows it."""
        return any(norm.is_cpu and not math.isfinite(norm.item()) for _, _, norm in self._clips)

    @property
    def is_of_shards(self) -> bool:
        """True if this rank knows only the part of its shards of a norm by which the loop has clipped."""
        return any(ranks for ranks, _, _ in self._clips)

    def _computes(self, real: Callable[..., Any], tensors: Any, norm_type: Any = 2.0, *args: Any, **kwargs: Any) -> Any:
        with failing_open("attach.norm"):
            self._order = float(norm_type)
        return real(tensors, norm_type, *args, **kwargs)

    def _clips_by(
        self, real: Callable[..., Any], parameters: Any, max_norm: Any, total_norm: Any, *args: Any, **kwargs: Any
    ) -> Any:
        with failing_open("attach.norm"):
            self.clipped(total_norm, parameters)
        return real(parameters, max_norm, total_norm, *args, **kwargs)

    def _fsdp1_clips(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        norm = real(*args, **kwargs)
        with failing_open("attach.norm"):
            self.clipped(norm, is_global=True)
        return norm

    def _are_counted(self, norm: Tensor, parameters: Iterable[Tensor]) -> bool:
        """Return True if an earlier norm covers these gradients: it is the same tensor, or shares a parameter."""
        if any(norm is earlier for earlier, _ in self._clipped_by):
            return True
        counted = {id(one) for _, earlier in self._clipped_by for one in earlier}
        return any(id(one) in counted for one in parameters)

    def _forget_clips(self) -> None:
        self._after_backward, self.is_global = False, True
        self._clips.clear()
        self._clipped_by.clear()

    def measure(self, divisor: Any = None) -> None:
        """Write the norm, or this rank's part of it, and at an interval each gradient. `divisor`: scale by which the
        optimizer divides the gradients itself. A second call before the next backward pass, as by an optimizer that
        calls the `step` of its base class, does nothing.
        """
        if self._is_measured:
            return
        if (input_norm := self.input_gradient.take_largest()) is not None:
            self._values.put(**{INPUT_GRADIENT: input_norm})
        if self.probe is None:
            if self._make_probe is None:
                return
            self.probe = self._make_probe()
        self._is_measured = True
        step = self._recorder.step_number
        self.probe.after_backward(step)
        parts = self._clip_norms()
        if not parts and self.is_wanted:
            parts = self.probe.norms()
            if divisor is not None:
                parts = {ranks: part / divisor for ranks, part in parts.items()}
        numbers = self._write(parts)
        if numbers and all(map(math.isfinite, numbers)):
            self._examined = 0
        elif numbers and self._examined < MAX_EXAMINED:
            self._examined += 1
            self._recorder.log(nonfinite_count=sum(count for _, count in self.probe.examine(step)))

    def updated_by_hand(self) -> None:
        """Write the norm that the loop clipped by; the gradients themselves may be gone."""
        self._write(self._clip_norms())

    def _clip_norms(self) -> dict[str, Tensor]:
        """Norms of everything clipped since the backward pass, keyed by the ranks that hold the rest. In the key, an
        order other than 2 follows the ranks, because the store combines norms by their order."""
        by_ranks: dict[tuple[str, float], list[Tensor]] = defaultdict(list)
        for ranks, order, norm in self._clips:
            by_ranks[ranks, order].append(norm)
        self._forget_clips()
        return {
            ranks if order == 2 or not ranks else f"{ranks}{ORDER}{order:g}": norms[0] if len(norms) == 1
            else _norm_of_norms(norms, order)
            for (ranks, order), norms in by_ranks.items()
        }  # fmt: skip

    def _write(self, parts: dict[str, Tensor]) -> list[float]:
        """Write the parts; returns the numbers that are available without waiting for a device."""
        norm = parts.pop("", None) if len(parts) == 1 else None
        numbers = [one.item() for one in (norm, *parts.values()) if one is not None and one.is_cpu]
        if norm is not None:
            self.measured = numbers[0] if norm.is_cpu else norm
            self._values.put(grad_norm=self.measured)
        for ranks, part in parts.items():
            self._values.put(**{f"{PART}{ranks}": part})
        return numbers


def _is_on_all_ranks(tensor: Any) -> bool:
    mesh = getattr(tensor, "device_mesh", None)
    return mesh is not None and mesh.size() == dist.get_world_size()


@torch.no_grad()
def _norm_of_norms(norms: list[Tensor], order: float) -> Tensor:
    device, dtype = norms[0].device, norms[0].dtype
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.reshape(()).to(device, dtype) for norm in norms]), order)
    return total
