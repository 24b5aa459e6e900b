"""Record calls of process groups that were created before the process attached.

    install(recorder)
    record_existing(models)
    ...
    uninstall()                           # restores torch's groups everywhere

A plain torch group has no attributes to set, so a `RecordedGroup` over it replaces it in torch's tables, in the C++
registry of names, and in every dict that refers to it. This includes the attributes of objects (FSDP2's parameter
groups, device meshes, optimizers that shard their state). A group that only a local variable holds still works,
unrecorded. DDP's reducer holds its group in C++, so it is rebuilt, as torch does when it unpickles a DDP module. It is
rebuilt only before its first backward pass: later its buckets are in another order, which changes the last bits of the
sums. NCCL groups and the reducers over them are not replaced.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import nn

from ..fail_open import failing_open, record_error
from ..torch_compat import group_world
from .groups.group_tables import alive_groups, exchange
from .wrapped import RecordedGroup, announce, recorded_over

__all__ = ["record_existing"]

logger = logging.getLogger("rankscope.probes")


def record_existing(models: Iterable[nn.Module]) -> None:
    """Replace existing groups with recorded ones; for groups that cannot be replaced, only write the event that
    describes them."""
    if not dist.is_available() or not dist.is_initialized():
        return
    pairs = []
    for plain in alive_groups():
        if (group := recorded_over(plain)) is not plain:
            pairs.append((plain, group))
        elif ranks := group_world().pg_group_ranks.get(plain):
            announce(plain, sorted(ranks, key=ranks.__getitem__))
    exchange(pairs)
    for model in models:
        for module in model.modules():
            if isinstance(module, nn.parallel.DistributedDataParallel):
                with failing_open("attach.ddp"):
                    _rebuild_reducer(module)


def _rebuild_reducer(ddp: Any) -> None:
    """Rebuild DDP's reducer over the module's current group."""
    if type(ddp.process_group) is not RecordedGroup:
        return
    hook = ddp._comm_hooks or ddp._get_ddp_logging_data().get("comm_hook")  # a built-in hook is only in the latter
    if hook or any(parameter.grad is not None for parameter in ddp.parameters()):
        logger.warning(
            "the all-reduces of DDP are not recorded: rankscope.attach came after its first backward pass or after "
            "register_comm_hook; attach right after the model and its optimizer are made"
        )
        return
    parameters, expect_sparse = ddp._build_params_for_reducer()
    names = ddp._build_debug_param_to_name_mapping(parameters)
    ddp.reducer = ddp.logger = None  # free the old buckets first: they take as much memory as all gradients
    try:
        ddp._ddp_init_helper(parameters, expect_sparse, names, ddp.static_graph)
    except Exception as error:
        record_error("attach.ddp", error)
        ddp.process_group = ddp.process_group.plain
        ddp._ddp_init_helper(parameters, expect_sparse, names, ddp.static_graph)
    if ddp.static_graph:
        ddp.reducer._set_static_graph()
        ddp.logger._set_static_graph()
