"""The collective and point-to-point methods of torch's `ProcessGroup`: operation, position of the input, and whether a
NaN in the input reaches other ranks.

METHODS["allreduce"]                # Method(op="all_reduce", input=0, reduces=True, spreads=False, peer=-1)
"""

from __future__ import annotations

from typing import NamedTuple

import torch.distributed as dist

__all__ = ["METHODS", "Method"]


class Method(NamedTuple):
    """A method of `ProcessGroup`: the operation, and the argument with its input."""

    op: str
    input: int = 0  # index among the arguments; -1: none
    reduces: bool = False
    spreads: bool = False  # it passes activations on, such as features for a contrastive loss, or tokens to experts
    peer: int = -1  # index of the other end's group rank; -1: none


METHODS = {
    "allreduce": Method("all_reduce", reduces=True),
    "allreduce_coalesced": Method("all_reduce", reduces=True),
    "reduce": Method("reduce", reduces=True),
    "reduce_scatter": Method("reduce_scatter", input=1, reduces=True),
    "broadcast": Method("broadcast"),
    "allgather": Method("all_gather", input=1, spreads=True),
    "allgather_coalesced": Method("all_gather", input=1),
    "gather": Method("gather", input=1),
    "scatter": Method("scatter"),  # only the root has an input; all have an output
    "alltoall": Method("all_to_all", input=1, spreads=True),
    "send": Method("send", peer=1),
    "recv": Method("recv", peer=1),
    "recv_anysource": Method("recv"),
    "barrier": Method("barrier", input=-1),
    "monitored_barrier": Method("barrier", input=-1),
    # These have one name up to torch 2.11 and another from 2.13 on; a version has either or both.
    "_allgather_base": Method("all_gather", input=1),
    "all_gather_single": Method("all_gather", input=1),
    "allgather_into_tensor_coalesced": Method("all_gather", input=1),
    "all_gather_single_coalesced": Method("all_gather", input=1),
    "_reduce_scatter_base": Method("reduce_scatter", input=1, reduces=True),
    "reduce_scatter_single": Method("reduce_scatter", input=1, reduces=True),
    "reduce_scatter_tensor_coalesced": Method("reduce_scatter", input=1, reduces=True),
    "reduce_scatter_single_coalesced": Method("reduce_scatter", input=1, reduces=True),
    "alltoall_base": Method("all_to_all", input=1, spreads=True),
    "all_to_all_single": Method("all_to_all", input=1, spreads=True),
}
METHODS = {name: method for name, method in METHODS.items() if hasattr(dist.ProcessGroup, name)}
