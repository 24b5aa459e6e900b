"""Process groups that were made before anybody attached: their calls are recorded from now on.

    install(recorder)
    give_back = record_existing(models)
    ...
    give_back()                           # everybody has torch's own groups again

A group of torch's own cannot be told to record, so a `RecordedGroup` over the same backends takes its place: in torch's
tables, in its C++ register of names, and in every dict that refers to it, which are the attributes of whoever holds it
(FSDP2's parameter groups, device meshes, optimizers that shard their state). What only a local variable holds still
works, and is not recorded. DDP's reducer holds it in C++; it is built
anew, as torch does it when a DDP module is unpickled, provided that no gradient has passed through it yet: later its
buckets are in another order, and sums of other orders differ in their last bits.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d

from ..fail_open import failing_open
from .wrapped import RecordedGroup, recorded_over

__all__ = ["record_existing"]

logger = logging.getLogger("rankscope.probes")
_names: Any = torch._C._distributed_c10d


def record_existing(models: Iterable[nn.Module]) -> Callable[[], None]:
    """Put recorded groups in the place of those that exist; returns what undoes it."""
    if not dist.is_available() or not dist.is_initialized():
        return lambda: None
    recorded = {id(plain): recorded_over(plain) for plain in _groups() if type(plain) is not RecordedGroup}
    pairs = [(plain, recorded[id(plain)]) for plain in _groups() if id(plain) in recorded]
    for plain, group in pairs:
        for table in _tables():  # beside the old one, which a local variable may still hold
            if plain in table:
                table[group] = table[plain]
    _exchange(pairs)
    for model in models:
        for module in model.modules():
            if isinstance(module, nn.parallel.DistributedDataParallel):
                with failing_open("attach.ddp"):
                    _rebuild_reducer(module)

    # Nothing is held here: a group that the script destroys must be gone, its threads included.
    made = [weakref.ref(group) for _, group in pairs]
    del pairs, recorded

    def give_back() -> None:
        alive = [group for reference in made if (group := reference()) is not None and group in c10d._world.pg_map]
        plain = {c10d._world.pg_names[group]: group for group in _groups() if type(group) is not RecordedGroup}
        _exchange([(group, plain[c10d._world.pg_names[group]]) for group in alive])
        for group in alive:
            for table in _tables():
                table.pop(group, None)

    return give_back


def _groups() -> list[Any]:
    return list(c10d._world.pg_map)


def _tables() -> tuple[dict[Any, Any], ...]:
    """Torch's tables whose keys are groups."""
    world = c10d._world
    return (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config, world.pg_to_tag)


def _exchange(pairs: Sequence[tuple[Any, Any]]) -> None:
    """The second of each pair instead of the first: under its name, and wherever an attribute or a dict holds it."""
    if not pairs or not dist.is_initialized():
        return
    new = {id(old): replacement for old, replacement in pairs}
    for old, replacement in pairs:
        _names._unregister_process_group(old.group_name)
        _names._register_process_group(old.group_name, replacement)
    for entries in c10d._world.tags_to_pg.values():
        entries[:] = [new.get(id(entry), entry) for entry in entries]
    default = c10d._world.default_pg
    if id(default) in new:
        c10d._update_default_pg(new[id(default)])
    for holder in gc.get_referrers(*(old for old, _ in pairs)):
        # An object may keep its attributes without a dict of its own until somebody asks for it.
        values = holder if type(holder) is dict else getattr(holder, "__dict__", None)
        if type(values) is dict and values is not new:
            for key, value in list(values.items()):
                if id(value) in new and value is not new[id(value)]:
                    values[key] = new[id(value)]


def _rebuild_reducer(ddp: Any) -> None:
    """A reducer over the group that the module has now."""
    if type(ddp.process_group) is not RecordedGroup:
        return
    if ddp._comm_hooks or any(parameter.grad is not None for parameter in ddp.parameters()):
        logger.warning(
            "the all-reduces of DDP are not recorded: rankscope.attach came after its first backward pass or after "
            "register_comm_hook; attach right after the model and its optimizer are made"
        )
        return
    parameters, expect_sparse = ddp._build_params_for_reducer()
    names = ddp._build_debug_param_to_name_mapping(parameters)
    ddp._ddp_init_helper(parameters, expect_sparse, names, ddp.static_graph)
    if ddp.static_graph:
        ddp.reducer._set_static_graph()
        ddp.logger._set_static_graph()
