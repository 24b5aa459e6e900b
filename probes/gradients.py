"""Gradients, parameter by parameter: L2 norm, largest absolute value, number of NaN and Inf.

    probe = GradientProbe(recorder, model.named_parameters(), interval=50)
    loss.backward()
    probe.after_backward(step)              # at every 50th step
    bad = probe.examine(step)               # when a step went wrong: [("blocks.3.mlp.up.weight", 17), ...]

Each rank measures what it holds: the local shard of a sharded parameter, without any communication. On a GPU the
numbers of `after_backward` come back a step or more later, through pinned memory, so that nothing waits for the device.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .collectives.groups.shard_groups import ranks_of_fsdp1, ranks_of_parts
from .device.capture import is_capturing
from .fail_open import failing_open
from .recorder import Recorder
from .step_scalars import read_back
from .tape.format.schema import UNSET
from .tape.format.writer import COMPLETE
from .tape_recorder import TapeRecorder
from .torch_compat import foreach_norm

__all__ = ["MAX_IN_FLIGHT", "GradientProbe", "clean_name"]

_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")
_LAYOUTS = (torch.strided, torch.sparse_coo)
_UNKNOWN_COUNT = int(UNSET["i64"])
MAX_IN_FLIGHT = 8  # maximum number of readings still being copied from the device


def clean_name(name: str) -> str:
    """The parameter's name in the user's model, without prefixes and parts that wrappers add."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name.removeprefix("module.")


class _Reading(NamedTuple):
    """Two numbers per gradient, being copied from the device: row 0 the norms, row 1 the largest absolute values."""

    step: int
    indices: list[int]
    values: Tensor
    arrived: Any  # the CUDA event after the copy


class GradientProbe:
    """Writes the `gradients` tape of one rank."""

    def __init__(
        self,
        recorder: Recorder,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        interval: int,
        models: Iterable[nn.Module] = (),
    ) -> None:
        """`models`: models of which FSDP1 may shard the parameters."""
        self._recorder = recorder
        self._interval = interval
        self._parameters = [(clean_name(name), parameter) for name, parameter in named_parameters]
        self._models = tuple(models)
        self._ranks: list[str] = []  # label of the ranks that share each parameter; known once the model is wrapped
        self._in_flight: deque[_Reading] = deque()
        if isinstance(recorder, TapeRecorder):
            self._numbers = [recorder.name(name) for name, _ in self._parameters]
            self._append = recorder.tape("gradients").append
            recorder.at_close.append(self.flush)

    def after_backward(self, step: int) -> None:
        """Record all gradients if `step` is a multiple of the interval (0: never). Waits for nothing."""
        if not self._recorder.enabled:
            return
        is_due = self._interval > 0 and step % self._interval == 0
        if not is_due and not self._in_flight:
            return  # nothing to do in most steps; returning here avoids the cost of a context manager
        if is_capturing():
            return  # our kernels would become part of the graph, and a query would end the capture
        with failing_open("gradients"), torch.no_grad():
            self.flush()
            if not is_due:
                return
            for (device, _), gradients in self._groups().items():
                indices = [index for index, _ in gradients]
                values = _norms([gradient for _, gradient in gradients])
                if device.type == "cpu":
                    self._write(step, indices, values, [gradient for _, gradient in gradients])
                elif len(self._in_flight) < MAX_IN_FLIGHT:
                    self._in_flight.append(_Reading(step, indices, *read_back(values)))

    @torch.no_grad()
    def norms(self) -> dict[str, Tensor]:
        """L2 norms of this rank's parts of gradients, by the ranks that share the gradient ("" for whole gradients).

        Empty without gradients. On a GPU it is also empty between the measured steps, because a norm has to read all
        gradients.
        """
        if is_capturing():
            return {}
        is_due = self._interval > 0 and self._recorder.step_number % self._interval == 0
        found: dict[str, list[Tensor]] = defaultdict(list)
        for index, gradient in self._local_gradients():
            if not gradient.is_cpu and not is_due:
                return {}
            values = _values(gradient)
            if values.numel():
                found[self._shared_by(index)].append(values)
        return {
            ranks: torch.nn.utils.get_total_norm(gradients)
            for ranks, gradients in found.items()
            if len({gradient.device for gradient in gradients}) == 1
        }

    def _shared_by(self, index: int) -> str:
        if not self._ranks:
            by_fsdp1 = ranks_of_fsdp1(self._models)
            self._ranks = [by_fsdp1.get(id(one)) or ranks_of_parts(one) for _, one in self._parameters]
        return self._ranks[index]

    @torch.no_grad()
    def examine(self, step: int) -> list[tuple[str, int]]:
        """Record all gradients now, and return the names and counts of those with NaN or Inf, in model order. Only for
        a bad step, because it waits for the device.
        """
        found: dict[int, int] = {}
        if self._recorder.enabled:
            with failing_open("gradients"):
                for gradients in self._groups().values():
                    tensors = [gradient for _, gradient in gradients]
                    indices = [index for index, _ in gradients]
                    found |= self._write(step, indices, _norms(tensors).cpu(), tensors)
        return [(self._parameters[index][0], found[index]) for index in sorted(found)]

    def close(self) -> None:
        """Write what has been measured, and let the parameters be freed unless a reading is still to come."""
        self.flush()
        if isinstance(self._recorder, TapeRecorder) and not self._in_flight:
            self._recorder.at_close.remove(self.flush)

    def flush(self) -> None:
        """Write the readings that have come back from the device."""
        while self._in_flight and self._in_flight[0].arrived.query():
            reading = self._in_flight.popleft()
            self._write(reading.step, reading.indices, reading.values, None)

    def _write(self, step: int, indices: list[int], values: Tensor, gradients: list[Tensor] | None) -> dict[int, int]:
        """Append one record per gradient; returns {index of the parameter: number of NaN and Inf}, if there are any.

        A gradient of an earlier step no longer exists: if it was not finite, its count is unknown.
        """
        nonfinite: dict[int, int] = {}
        norms, largest = values.tolist()
        for place, index in enumerate(indices):
            norm, max_abs, count = norms[place], largest[place], 0
            if not (math.isfinite(norm) and math.isfinite(max_abs)):
                count = _UNKNOWN_COUNT if gradients is None else int((~torch.isfinite(gradients[place])).sum())
            if count > 0:
                nonfinite[index] = count
            self._append(COMPLETE, step, self._numbers[index], norm, max_abs, count)
        return nonfinite

    def _local_gradients(self) -> Iterator[tuple[int, Tensor]]:
        """Yield (index of the parameter, local gradient) for each gradient that can be measured."""
        for index, (_, parameter) in enumerate(self._parameters):
            gradient: Any = parameter.grad
            if gradient is None:
                continue
            gradient = getattr(gradient, "_local_tensor", gradient)  # of a DTensor, without a node for autograd
            if gradient.numel() and gradient.is_floating_point() and gradient.layout in _LAYOUTS:
                yield index, gradient

    def _groups(self) -> dict[tuple[torch.device, torch.dtype], list[tuple[int, Tensor]]]:
        found: dict[tuple[torch.device, torch.dtype], list[tuple[int, Tensor]]] = defaultdict(list)
        for index, gradient in self._local_gradients():
            values = _values(gradient)
            if values.numel():
                found[gradient.device, gradient.dtype].append((index, values))
        return found


def _values(gradient: Tensor) -> Tensor:
    """The gradient's values; for a sparse gradient, such as an embedding's, its coalesced rows."""
    return gradient if gradient.layout is torch.strided else gradient.coalesce().values()


def _norms(gradients: list[Tensor]) -> Tensor:
    """L2 norms and largest absolute values, shape (2, number of gradients). NaN and Inf propagate."""
    wide = torch.float64 if gradients[0].dtype is torch.float64 else torch.float32
    norms = foreach_norm(gradients, 2, dtype=wide)
    if gradients[0].is_cpu:  # on a CPU, `aminmax` is twenty times as fast as the maximum norm; on a GPU that is fused
        pairs = [torch.aminmax(gradient) for gradient in gradients]
        largest = [torch.maximum(pair.max, -pair.min).to(wide) for pair in pairs]
    else:
        largest = list(foreach_norm(gradients, math.inf, dtype=wide))
    return torch.stack((torch.stack(tuple(norms)), torch.stack(largest)))
