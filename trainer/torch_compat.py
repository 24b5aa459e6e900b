"""Private names of torch that the trainer uses: if a new version renames one, only this file changes.

    from trainer.torch_compat import Store, foreach_norm

`torch.distributed` exports stores, but type checkers do not see them. Tested versions: docs/compatibility.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C._distributed_c10d import FileStore, GradBucket, HashStore, PrefixStore, Store, TCPStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes

__all__ = [
    "COSTLY_COLLECTIVES",
    "TERMINATE_HANDLER",
    "FileStore",
    "GradBucket",
    "HashStore",
    "OpOverload",
    "PrefixStore",
    "Store",
    "TCPStore",
    "TorchDispatchMode",
    "disable_current_modes",
    "enable_micro_pipeline_tp",
    "foreach_copy",
    "foreach_mul",
    "foreach_norm",
    "graph_task_id",
    "ignore_profiler_marks",
    "is_rendezvous_host",
    "keep_device_busy",
    "storage_info",
]  # fmt: skip

TERMINATE_HANDLER = "_terminate_process_handler"
"""Name of torch's handler for signals that end a launcher, in `torch.distributed.elastic.multiprocessing.api`."""
OpOverload = torch._ops.OpOverload
COSTLY_COLLECTIVES = (
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
    torch.ops._c10d_functional.all_reduce.default,
)
_PROFILER_MARKS = (
    torch.ops.profiler._record_function_enter_new.default,
    torch.ops.profiler._record_function_exit._RecordFunction,
)
foreach_norm: Callable[..., Any] = torch._foreach_norm
foreach_mul: Callable[..., None] = torch._foreach_mul_
foreach_copy: Callable[..., None] = torch._foreach_copy_


def is_rendezvous_host(host: str) -> bool:
    """Return True if torch would host a c10d rendezvous at `host` on this machine. Raises OSError if the machine's name
    has no address.
    """
    from torch.distributed.elastic.rendezvous.utils import _matches_machine_hostname

    return bool(_matches_machine_hostname(host))


def graph_task_id() -> int:
    """ID of the backward pass that this thread is running; -1 if it is running none."""
    return int(torch._C._current_graph_task_id())


def ignore_profiler_marks() -> None:
    """Make selective activation checkpointing ignore FSDP's profiler ranges. FSDP's hooks on a module inside a
    checkpoint mark different ranges in the recomputation than in forward, which would raise an error."""
    from torch.utils import checkpoint

    checkpoint.SAC_IGNORED_OPS.update(_PROFILER_MARKS)


def storage_info(**place: Any) -> Any:
    """Location of a tensor in a distributed checkpoint: relative_path, offset, length."""
    # imported late, because it slows the launcher's start
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(**place)


def keep_device_busy(cycles: int) -> None:
    """Run a kernel for this number of CUDA clock cycles."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


def enable_micro_pipeline_tp(group_name: Any) -> None:
    """Let the compiler split matmuls and their collectives over a group into pieces that overlap."""
    import torch._inductor.config  # the import takes seconds, and is only needed with async tensor parallelism
    from torch.distributed import _symmetric_memory

    _symmetric_memory.enable_symm_mem_for_group(group_name)
    torch._inductor.config._micro_pipeline_tp = True
