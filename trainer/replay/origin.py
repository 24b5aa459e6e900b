"""Origin of the first NaN or Inf of a step: module, operation, pass, rows, statistics of the inputs.

    with OriginWatch(training.modules) as watch:
        training.forward_backward(batch)
    watch.origin          # Origin(module="blocks.3.mlp.up", operation="mm", phase="forward", ...), or None

Hooks follow the modules. In forward, the origin is the first operation with finite inputs but non-finite outputs, in
the first module (innermost first) for which the same is true. In backward, a module begins when the gradient of its
output is known, and ends when the gradient of its input is known. The origin is the first operation that makes a NaN or
Inf from finite numbers.

A NaN from another rank arrives by a collective, so the module in which it arrives is a suspect without an operation.
Therefore, if several ranks report origins, the origins with an operation are right (`Origin.how`). All hooks are
removed at the end of the block, and they change nothing in the pass.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from torch import Tensor, nn

from probes.fail_open import failing_open
from trainer.replay.operations import OperationWatch, Suspect, in_backward, is_bad, statistics

__all__ = ["Origin", "OriginWatch"]

How = Literal["operation", "constant", "module", "parameter"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Origin of a NaN or Inf. `how` says what was found. operation: an operation with finite inputs; constant: an
    operation with a constant Inf as input; module: a module with finite inputs, in which no operation was found;
    parameter: a parameter that holds NaN or Inf."""

    module: str
    """Name in the whole model; `(loss)` for operations outside all modules."""
    operation: str
    phase: Literal["forward", "backward"]
    how: How
    microbatch: int
    bad_rows: tuple[int, ...] = ()
    num_rows: int = 0
    nonfinite_count: int = 0
    inputs: tuple[dict[str, Any], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """JSON form for an event, without the rows, which mean nothing without their batch."""
        return {name: value for name, value in asdict(self).items() if name not in ("bad_rows", "num_rows")}


class OriginWatch:
    """One pass; see the module's docstring."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        self.origin: Origin | None = None
        self._parts = parts
        self._operations = OperationWatch()
        # The modules whose forward pass is running: (name, number of suspects before it began).
        self._stack: list[tuple[str, int]] = []
        self._handles: list[Any] = []
        self._microbatches = [-1] * len(parts)
        self._microbatch = 0
        self._exit = contextlib.ExitStack()

    def __enter__(self) -> OriginWatch:
        for number, part in enumerate(self._parts):
            for name, module in part.named_modules():
                self._handles += [
                    module.register_forward_pre_hook(self._entering(name, number), with_kwargs=True),
                    # The hook is called even on an exception, because torch aborts a recomputation by an exception
                    # once it has the needed tensors.
                    module.register_forward_hook(self._leaving(name), with_kwargs=True, always_call=True),
                ]
        self._exit.enter_context(self._operations)
        return self

    def __exit__(self, *error: Any) -> None:
        self._exit.close()
        for handle in self._handles:
            handle.remove()
        if self.origin is None and not any(error):
            # The remaining operations belong to the loss or the backward pass, and not to a module's forward pass.
            self._from_operation(self._operations.take())

    # Forward.

    def _entering(self, name: str, part: int) -> Any:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            with failing_open("replay"):
                recomputes = in_backward()
                if not name and not recomputes:
                    self._microbatches[part] += 1
                    self._microbatch = self._microbatches[part]
                self._stack.append((name, self._operations.count))
                self._operations.module = name
                if not recomputes:
                    for tensor in _differentiable(args, kwargs):
                        tensor.register_hook(self._backward_leaves(name))  # type: ignore[no-untyped-call]  # torch: no types

        return enter

    def _leaving(self, name: str) -> Any:
        def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            with failing_open("replay"):
                since = self._pop(name)
                recomputes = in_backward()
                if not recomputes:
                    for tensor in _differentiable(output):
                        tensor.register_hook(self._backward_enters(name, self._microbatch))  # type: ignore[no-untyped-call]  # torch: no types
                if recomputes or self.origin is not None:
                    return
                if not any(is_bad(tensor) for tensor in _floats(output)):
                    self._operations.forget(since)
                elif not any(is_bad(tensor) for tensor in _floats((args, kwargs))):
                    self._from_module(name, module, (args, kwargs), since)

        return leave

    def _pop(self, name: str) -> int:
        since = self._operations.count
        while self._stack:
            popped, since = self._stack.pop()
            if popped == name:
                break
        self._operations.module = self._stack[-1][0] if self._stack else ""
        return since

    def _from_module(self, name: str, module: nn.Module, inputs: Any, since: int) -> None:
        """Find the origin in a module that made a non-finite output from finite inputs."""
        bad = [f"{name}.{own}" for own, parameter in module.named_parameters(recurse=False) if is_bad(parameter)]
        suspect = self._operations.take(since)
        if bad:
            described = tuple(statistics(tensor) for tensor in _floats(inputs))
            self._set_origin(bad[0], "", "parameter", in_backward(), inputs=described)
        elif suspect is not None:
            self._from_operation(suspect)
        else:
            self._set_origin(
                name, "", "module", in_backward(), inputs=tuple(statistics(tensor) for tensor in _floats(inputs))
            )

    def _from_operation(self, suspect: Suspect | None) -> None:
        if suspect is not None:
            self._set_origin(
                suspect.module,
                suspect.operation,
                "operation" if suspect.clean else "constant",
                suspect.in_backward,
                bad_rows=suspect.bad_rows,
                num_rows=suspect.num_rows,
                nonfinite_count=suspect.nonfinite_count,
                inputs=suspect.inputs,
            )

    def _set_origin(self, module: str, operation: str, how: How, backward: bool, **more: Any) -> None:
        self.origin = Origin(
            module=module or "(loss)",
            operation=operation,
            phase="backward" if backward else "forward",
            how=how,
            microbatch=self._microbatch,
            **more,
        )

    # Backward.

    def _backward_enters(self, name: str, microbatch: int) -> Any:
        def enter(gradient: Tensor) -> None:
            with failing_open("replay"):
                self._judge_backward()
                self._microbatch = microbatch
                now = self._operations.module
                if not (name == "" or now == name or now.startswith(f"{name}.")):
                    self._operations.module = name

        return enter

    def _backward_leaves(self, name: str) -> Any:
        def leave(gradient: Tensor) -> None:
            with failing_open("replay"):
                self._judge_backward()
                now = self._operations.module
                if name and (now == name or now.startswith(f"{name}.")):
                    self._operations.module = name.rpartition(".")[0]

        return leave

    def _judge_backward(self) -> None:
        """Judge a module's backward pass. In backward Inf is not used for masks, so the first suspect is the origin."""
        if self.origin is None:
            self._from_operation(self._operations.take())


def _floats(value: Any) -> list[Tensor]:
    return [tensor for tensor in _flat(value) if tensor.is_floating_point()]


def _differentiable(*values: Any) -> list[Tensor]:
    return [tensor for tensor in _flat(values) if tensor.requires_grad]


def _flat(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [tensor for item in value for tensor in _flat(item)] if isinstance(value, (list, tuple)) else []
