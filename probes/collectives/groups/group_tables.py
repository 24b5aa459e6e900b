"""torch's registries of process groups: list groups, and replace one by another.

replace_new(made, recorded)              # while only torch's tables reference it
exchange([(plain, recorded), ...])       # wherever an attribute or a dict holds it
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from ...torch_compat import group_world, register_group, set_default_group

__all__ = ["alive_groups", "exchange", "replace_new", "tables"]


def alive_groups() -> list[Any]:
    """The process groups of this process."""
    return list(group_world().pg_map)


def tables() -> tuple[dict[Any, Any], ...]:
    """Torch's tables that have groups as keys."""
    world = group_world()
    return (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config, world.pg_to_tag)


def replace_new(old: Any, new: Any) -> None:
    """Register `new` instead of `old`, a group that was registered a moment ago."""
    for table in tables():
        if old in table:
            table[new] = table.pop(old)
    _register([(old, new)])


def exchange(pairs: Sequence[tuple[Any, Any]]) -> None:
    """Replace the first group of each pair with the second, in torch's registry and in every dict that holds it. In
    torch's tables the first group remains a key, besides the second one, because a local variable may still hold it.
    """
    if not pairs or not dist.is_initialized():
        return
    for old, new in pairs:
        for table in tables():
            if old in table:
                table[new] = table[old]
    _register(pairs)
    replacements = {id(old): new for old, new in pairs}
    default = group_world().default_pg
    if id(default) in replacements:
        set_default_group(replacements[id(default)])
    # A recorded group refers to its plain group. This reference must not be replaced below.
    recorded = {id(getattr(new, "__dict__", None)) for _, new in pairs}
    for holder in gc.get_referrers(*(old for old, _ in pairs)):
        # CPython may store an object's attributes without a dict until `__dict__` is read.
        values = holder if type(holder) is dict else getattr(holder, "__dict__", None)
        if type(values) is dict and values is not replacements and id(values) not in recorded:
            for key, value in list(values.items()):
                if id(value) in replacements and value is not replacements[id(value)]:
                    values[key] = replacements[id(value)]


def _register(pairs: Sequence[tuple[Any, Any]]) -> None:
    """Replace the groups in the C++ registry, and in torch's lists of groups by tag."""
    replacements = {id(old): new for old, new in pairs}
    for old, new in pairs:
        register_group(old.group_name, new)
    for entries in group_world().tags_to_pg.values():
        entries[:] = [replacements.get(id(entry), entry) for entry in entries]
