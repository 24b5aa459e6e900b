"""Private names of torch that the probes use: if a new version renames one, only this file changes.

    from ..torch_compat import foreach_norm, queue_callback

A name that a version may lack is None, or its caller catches the error. Tried versions: docs/compatibility.md.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.utils._pytree as _pytree
from torch.autograd import Variable
from torch.utils.data import dataloader

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore as TCPStore  # public, but not to a type checker

__all__ = [
    "BASE_LOADER_ITERATOR",
    "COMPILE_CALLBACKS",
    "COMPILE_METRICS",
    "DEFAULT_GROUP_SETTER",
    "SAVE",
    "SINGLE_PROCESS_LOADER_ITERATOR",
    "STORE_MAKER",
    "add_trace_metadata",
    "between_graphs",
    "default_store",
    "experimental_profiler_config",
    "foreach_norm",
    "fsdp_param_group",
    "functional_collectives",
    "graph_task_id",
    "group_configs",
    "group_world",
    "is_profiler_enabled",
    "memory_snapshot",
    "queue_callback",
    "record_memory_history",
    "register_group",
    "run_uncompiled",
    "set_default_group",
    "tree_leaves",
    "tree_map",
]  # fmt: skip

BASE_LOADER_ITERATOR: Any = dataloader._BaseDataLoaderIter
SINGLE_PROCESS_LOADER_ITERATOR: Any = dataloader._SingleProcessDataLoaderIter
SAVE = (torch.serialization, "_save")
"""Module and name of the function through which `torch.save` writes."""
DEFAULT_GROUP_SETTER = "_update_default_pg"
"""Function of torch.distributed.distributed_c10d that receives each new default group."""
STORE_MAKER = "_create_c10d_store"
"""Function of torch.distributed.rendezvous that opens the store of a host and port, or connects to it."""
COMPILE_METRICS = "torch._dynamo.utils"
"""Module in which the compiler counts recompilations and graph breaks."""
COMPILE_CALLBACKS = "torch._dynamo.callback"
"""Module with the compiler's callbacks; importing it takes seconds, so it is used only if it is loaded already."""

foreach_norm: Callable[..., Any] = torch._foreach_norm
tree_leaves: Callable[..., list[Any]] = _pytree.tree_leaves
tree_map: Callable[..., Any] = _pytree.tree_map


def run_uncompiled(function: Any) -> None:
    """Keep the compiler away from `function`, and from what it calls, where no compiled code calls it. A compiled
    function traces it like any other."""
    try:
        from torch._C._dynamo.eval_frame import (
            _FrameAction,
            _FrameExecStrategy,
            set_code_exec_strategy,
        )
    except ImportError:  # torch 2.6
        return
    function.__code__ = function.__code__.replace()  # other functions may have the same code
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))


def between_graphs(call: Callable[..., Any], *, left_out: Callable[[], object] = bool) -> Callable[..., Any]:
    """Wrap a hook so that the compiler does not trace it, and a compiled caller calls it between two graphs. A caller
    that must be one graph (`fullgraph=True`) never calls it: `left_out` is called whenever such a caller is compiled.
    """

    def uncompiled(*args: Any) -> Any:
        return call(*args)

    def may_break() -> bool:  # evaluated by the compiler, while it compiles
        tracer = getattr(sys.modules["torch._dynamo.symbolic_convert"].tls, "current_tx", None)
        if getattr(tracer, "one_graph", True) or getattr(tracer, "error_on_graph_break", False):
            left_out()
            return False
        return True

    def hook(*args: Any) -> Any:
        if torch.compiler.is_compiling() and not may_break():
            return None
        return uncompiled(*args)

    uncompiled._torchdynamo_disable = True  # type: ignore[attr-defined]
    may_break._dynamo_marked_constant = True  # type: ignore[attr-defined]
    run_uncompiled(uncompiled)
    return hook


def graph_task_id() -> int:
    """Id of the backward pass that this thread is running; -1 if none."""
    return int(torch._C._current_graph_task_id())


def queue_callback(callback: Callable[[], None]) -> None:
    """Run `callback` when the current backward pass has computed all gradients."""
    Variable._execution_engine.queue_callback(callback)


def group_world() -> Any:
    """Return torch's tables of process groups: pg_map, pg_names, pg_group_ranks, tags_to_pg, default_pg."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._world


def set_default_group(group: Any) -> None:
    from torch.distributed import distributed_c10d

    distributed_c10d._update_default_pg(group)


def register_group(name: str, group: Any) -> None:
    """Register `group` in C++ under `name`, replacing the registered one."""
    c10d: Any = torch._C._distributed_c10d
    c10d._unregister_process_group(name)
    c10d._register_process_group(name, group)


def default_store() -> Any:
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def group_configs() -> Any:
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_all_pg_configs()


def functional_collectives() -> Any:
    """Return the module with the `wait_tensor` that tensors of functional collectives call."""
    from torch.distributed import _functional_collectives

    return _functional_collectives


def fsdp_param_group() -> Any:
    """Return the module in which FSDP2 looks up its reduction function."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group

    return _fsdp_param_group


def is_profiler_enabled() -> bool:
    return bool(torch._C._autograd._profiler_enabled())


def add_trace_metadata(key: str, value: str) -> None:
    torch._C._autograd._add_metadata_json(key, value)


def experimental_profiler_config(**options: Any) -> Any:
    """Return torch's experimental profiler options. Raises TypeError if this torch lacks an option."""
    from torch._C._profiler import _ExperimentalConfig

    return _ExperimentalConfig(**options)


def memory_snapshot() -> Any:
    return torch.cuda.memory._snapshot()


def record_memory_history(**options: Any) -> None:
    torch.cuda.memory._record_memory_history("all", **options)
