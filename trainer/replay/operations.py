"""Watch every operation of a forward and backward pass for the first that makes a NaN or Inf.

    watch = OperationWatch()
    with watch:
        ...one forward and backward pass; `watch.module` is set by the hooks of the modules...
    watch.take()        # a Suspect: the first operation since the last `take` with finite input and bad output

The watch is a mode of torch's dispatcher, so it also sees the operations of autograd, and for a DTensor those on the
local part. An operation is a suspect if no input contained NaN or Inf but an output does. It is only a suspect, because
masks contain Inf on purpose: the module must confirm it by a non-finite output.

The watch costs a pass over each operation's output and synchronises the GPU, so it is only used in replays.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from probes.fail_open import failing_open
from trainer.torch_compat import OpOverload, TorchDispatchMode, disable_current_modes, graph_task_id

__all__ = ["OperationWatch", "Suspect", "in_backward", "is_bad", "statistics"]

MAX_INPUTS = 4
"""Maximum number of inputs of an operation that are described."""
_SKIP = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "set_", "resize_", "view", "alias")
"""Operations that return uninitialised memory or a view: their output is not checked."""


@dataclass(frozen=True, slots=True)
class Suspect:
    """An operation that made the first NaN or Inf of its module. `clean`: it had no constant Inf as input either."""

    operation: str
    module: str
    inputs: tuple[dict[str, Any], ...]
    bad_rows: tuple[int, ...]
    """Indices along the output's first dimension that hold NaN or Inf."""
    num_rows: int
    """Size of that dimension; 0 if its entries may be neither samples nor tokens."""
    nonfinite_count: int
    clean: bool
    in_backward: bool


def is_bad(tensor: Tensor) -> bool:
    """True if a tensor holds NaN or Inf; waits for the device. False for integers and empty tensors."""
    tensor = getattr(tensor, "_local_tensor", tensor)
    if not tensor.is_floating_point() or tensor.is_meta or not tensor.numel() or tensor.layout is not torch.strided:
        return False
    with disable_current_modes(), torch.no_grad():
        tensor = tensor.detach()
        if math.isfinite(tensor.sum(dtype=torch.float32).item()):
            # A sum with a NaN or Inf is never finite. (A sum that is not finite may be an overflow: check each number.)
            return False
        return not bool(torch.isfinite(tensor).all())


def statistics(tensor: Tensor) -> dict[str, Any]:
    """Shape, dtype, number of non-finite elements, and min, max and mean of the finite ones."""
    tensor = getattr(tensor, "_local_tensor", tensor)
    with disable_current_modes(), torch.no_grad():
        tensor = tensor.detach()
        found: dict[str, Any] = {"shape": "x".join(map(str, tensor.shape)) or "1", "dtype": str(tensor.dtype)[6:]}
        if not tensor.is_floating_point() or not tensor.numel():
            return found
        finite = tensor[torch.isfinite(tensor)]
        found["nonfinite_count"] = tensor.numel() - finite.numel()
        if finite.numel():
            low, high = torch.aminmax(finite)
            found |= {"min": low.item(), "max": high.item(), "mean": finite.mean(dtype=torch.float64).item()}
        return found


class OperationWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch: no types
    """The watch of one rank (see the module's docstring). It does not change any operation."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch: no types
        self.module = ""
        self._suspects: list[Suspect] = []

    def take(self, since: int = 0) -> Suspect | None:
        """Return the first suspect at or after position `since`, preferably one without a constant Inf. Drop all
        suspects at or after this position."""
        found, self._suspects[since:] = self._suspects[since:], []
        return next((suspect for suspect in found if suspect.clean), found[0] if found else None)

    @property
    def count(self) -> int:
        """Number of suspects so far: a position for `take`."""
        return len(self._suspects)

    def forget(self, since: int) -> None:
        """Drop the suspects at and after a position."""
        del self._suspects[since:]

    def __torch_dispatch__(self, func: Any, types: Sequence[Any], args: Any = (), kwargs: Any = None) -> Any:
        if any(kind not in (Tensor, nn.Parameter) for kind in types):
            return NotImplemented  # let DTensor first dispatch to operations on its local part
        kwargs = kwargs or {}
        checked = isinstance(func, OpOverload) and func.namespace == "aten"
        checked = checked and func._schema.name.removeprefix("aten::").lstrip("_") not in _SKIP
        inputs_bad = None
        if checked and func._schema.is_mutable:  # check the inputs now: the operation writes its result into them
            inputs_bad = self._any_bad(args, kwargs)
        out = func(*args, **kwargs)
        if checked:
            with failing_open("replay"):
                self._record(func, args, kwargs, out, inputs_bad)
        return out

    def _record(self, func: Any, args: Any, kwargs: Any, out: Any, inputs_bad: bool | None) -> None:
        bad = next((tensor for tensor in _tensors(out) if is_bad(tensor)), None)
        if bad is None or (inputs_bad if inputs_bad is not None else self._any_bad(args, kwargs)):
            return
        arguments = [*_leaves(args), *_leaves(kwargs)]
        tensors = [value for value in arguments if isinstance(value, Tensor)]
        if not tensors:
            return  # the operation has no tensor input, so it creates a constant
        constants = [value for value in arguments if isinstance(value, float)]
        rows, count = _bad_rows(bad)
        backward = in_backward()
        # A matrix from a backward pass may be the gradient of a weight, whose rows are neither samples nor tokens.
        has_rows = bad.dim() > (2 if backward else 1)
        self._suspects.append(
            Suspect(
                operation=func._schema.name.removeprefix("aten::"),
                module=self.module,
                inputs=tuple(statistics(tensor) for tensor in tensors[:MAX_INPUTS]),
                bad_rows=rows,
                num_rows=bad.shape[0] if has_rows else 0,
                nonfinite_count=count,
                clean=all(math.isfinite(value) for value in constants),
                in_backward=backward,
            )
        )

    def _any_bad(self, args: Any, kwargs: Any) -> bool:
        return any(is_bad(tensor) for tensor in (*_tensors(args), *_tensors(kwargs)))


def in_backward() -> bool:
    """True while autograd runs a backward pass in this thread."""
    return graph_task_id() != -1


def _bad_rows(tensor: Tensor) -> tuple[tuple[int, ...], int]:
    with disable_current_modes(), torch.no_grad():
        bad = ~torch.isfinite(tensor.detach())
        count = int(bad.sum())
        if not tensor.dim():
            return (), count
        return tuple(bad.flatten(1).any(1).nonzero().flatten().tolist() if tensor.dim() > 1 else ()), count


def _tensors(value: Any) -> Iterator[Tensor]:
    return (leaf for leaf in _leaves(value) if isinstance(leaf, Tensor))


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = value.values()
    if isinstance(value, (list, tuple)) or (isinstance(value, Iterable) and not isinstance(value, (Tensor, str))):
        for item in value:
            yield from _leaves(item)
    else:
        yield value
