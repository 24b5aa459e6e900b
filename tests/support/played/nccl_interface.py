"""Drive the plugin's function tables as NCCL does, through ctypes: every version, without a GPU.

    plugin = PlayedNccl(library, version=5)
    comm = plugin.communicator(name="dp", comm_hash=7, num_ranks=8, rank=3)
    call = comm.collective("AllReduce", count=1024, channels=2)
    call.launched(); kernel = call.kernel(0, 100); kernel.stop(250)

The structs are defined again, from NCCL's published headers, to check the plugin's.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    Union,
    byref,
    c_bool,
    c_char_p,
    c_int,
    c_size_t,
    c_uint8,
    c_uint32,
    c_uint64,
    c_void_p,
)
from pathlib import Path
from typing import Any

GROUP, COLL, P2P, PROXY_OP, PROXY_STEP, KERNEL, CE_COLL = 1, 2, 4, 8, 16, 64, 4096
KERNEL_STOP = 22
VERSIONS = (1, 2, 3, 4, 5, 6, 7)
FUNCTIONS_V1 = ("Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce", "SendRecv", "Send", "Recv")


def _struct(name: str, *fields: tuple[str, Any]) -> type[Structure]:
    return type(name, (Structure,), {"_fields_": list(fields)})


def _text_or_number(version: int) -> Any:
    return c_uint8 if version == 1 else c_char_p


def _coll(version: int) -> type[Structure]:
    kind = _text_or_number(version)
    named = [("name", c_char_p), ("commHash", c_uint64)] if version < 4 else []
    start = [
        ("seqNumber", c_uint64),
        ("func", kind),
        ("sendBuff", c_void_p),
        ("recvBuff", c_void_p),
        ("count", c_size_t),
        ("root", c_int),
        ("datatype", kind),
    ]
    middle = [("op", c_uint32)] if version == 1 else []
    middle += [("trafficBytes", c_size_t)] if version < 3 else []
    end = [("nChannels", c_uint8), ("nWarps", c_uint8), ("algo", kind), ("proto", kind)]
    end += [("isCollnet", c_int), ("isNvls", c_int)] if version == 1 else []
    end += [("parentGroup", c_void_p)] if version >= 5 else []
    end += [("kernelVariant", c_char_p), ("isSymColl", c_bool), ("userTag", c_uint64)] if version >= 7 else []
    return _struct(f"Coll{version}", *named, *start, *middle, *end)


def _p2p(version: int) -> type[Structure]:
    kind = _text_or_number(version)
    named = [("name", c_char_p), ("commHash", c_uint64)] if version < 4 else []
    fields = [("func", kind), ("buff", c_void_p), ("datatype", kind), ("count", c_size_t), ("peer", c_int)]
    fields += [("nChannels", c_uint8)] if version >= 4 else []
    fields += [("parentGroup", c_void_p)] if version >= 5 else []
    fields += [("userTag", c_uint64)] if version >= 7 else []
    return _struct(f"P2p{version}", *named, *fields)


PROXY_OP_STRUCT = _struct(
    "ProxyOp",
    ("pid", c_int),
    ("channelId", c_uint8),
    ("peer", c_int),
    ("nSteps", c_int),
    ("chunkSize", c_int),
    ("isSend", c_int),
)


def descriptor(version: int) -> type[Structure]:
    """`ncclProfilerEventDescr_v<version>_t`."""
    kernel = [("channelId", c_uint8)] + ([("pTimer", c_uint64)] if version >= 4 else [])
    ce_coll = [
        ("seqNumber", c_uint64),
        ("func", c_char_p),
        ("sendBuff", c_void_p),
        ("recvBuff", c_void_p),
        ("count", c_size_t),
        ("root", c_int),
        ("datatype", c_char_p),
        ("syncStrategy", c_char_p),
        ("intraBatchSync", c_bool),
        ("batchSize", c_uint32),
        ("numBatches", c_uint32),
        ("ceSeqNum", c_uint32),
        ("stream", c_void_p),
    ]
    members: list[tuple[str, Any]] = [
        ("coll", _coll(version)),
        ("p2p", _p2p(version)),
        ("proxyOp", PROXY_OP_STRUCT),
        ("proxyStep", _struct("ProxyStep", ("step", c_int))),
    ]
    members += [("kernelCh", _struct("KernelCh", *kernel))] if version >= 3 else []
    members += [("ceColl", _struct("CeColl", *ce_coll))] if version >= 6 else []
    union = type(f"Events{version}", (Union,), {"_fields_": members})
    kind = c_uint8 if version <= 4 else c_uint64
    fields = [("type", kind), ("parentObj", c_void_p), ("rank", c_int), ("event", union)]
    return type(f"Descriptor{version}", (Structure,), {"_anonymous_": ("event",), "_fields_": fields})


class StateArguments(Union):
    """`ncclProfilerEventStateArgs`, the members that carry values."""

    _fields_ = (
        ("proxyOp", _struct("OpState", ("transSize", c_size_t), ("steps", c_int))),
        ("proxyStep", _struct("StepState", ("transSize", c_size_t))),
        ("kernelCh", _struct("KernelState", ("pTimer", c_uint64))),
    )


def _table(version: int) -> type[Structure]:
    log = c_void_p
    if version <= 3:
        init = CFUNCTYPE(c_int, POINTER(c_void_p), POINTER(c_int))
    elif version == 4:
        init = CFUNCTYPE(c_int, POINTER(c_void_p), POINTER(c_int), c_char_p, c_uint64, c_int, c_int, c_int, log)
    else:
        init = CFUNCTYPE(c_int, POINTER(c_void_p), c_uint64, POINTER(c_int), c_char_p, c_int, c_int, c_int, log)
    return _struct(
        f"Profiler{version}",
        ("name", c_char_p),
        ("init", init),
        ("startEvent", CFUNCTYPE(c_int, c_void_p, POINTER(c_void_p), c_void_p)),
        ("stopEvent", CFUNCTYPE(c_int, c_void_p)),
        ("recordEventState", CFUNCTYPE(c_int, c_void_p, c_int, c_void_p)),
        ("finalize", CFUNCTYPE(c_int, c_void_p)),
    )


class PlayedNccl:
    """The plugin as one version of NCCL sees it. Every returned code is asserted to be success."""

    def __init__(self, library: Path, version: int) -> None:
        self.version = version
        self._library = ctypes.CDLL(os.fspath(library))
        self.table = _table(version).in_dll(self._library, f"ncclProfiler_v{version}")
        self.descriptor = descriptor(version)
        self.mask = 0

    def communicator(
        self, *, name: str = "", comm_hash: int = 1, num_ranks: int = 2, rank: int = 0, nodes: int = 1
    ) -> PlayedCommunicator:
        """Initialise a communicator."""
        context, mask, text = c_void_p(), c_int(-1), name.encode() or None
        if self.version <= 3:
            code = self.table.init(byref(context), byref(mask))
        elif self.version == 4:
            code = self.table.init(byref(context), byref(mask), text, comm_hash, nodes, num_ranks, rank, None)
        else:
            code = self.table.init(byref(context), comm_hash, byref(mask), text, nodes, num_ranks, rank, None)
        assert code == 0
        self.mask = mask.value
        return PlayedCommunicator(self, context.value, name, comm_hash, rank)

    def start(self, context: int | None, event: Structure) -> int | None:
        """`startEvent`."""
        handle = c_void_p(0xDEAD)
        assert self.table.startEvent(context, byref(handle), byref(event)) == 0
        assert handle.value != 0xDEAD
        return handle.value

    def stop(self, handle: int | None) -> None:
        """`stopEvent`."""
        assert self.table.stopEvent(handle) == 0

    def state(self, handle: int | None, state: int, arguments: StateArguments | None = None) -> None:
        """`recordEventState`."""
        assert self.table.recordEventState(handle, state, None if arguments is None else byref(arguments)) == 0


class PlayedCommunicator:
    """One communicator."""

    def __init__(self, nccl: PlayedNccl, context: int | None, name: str, comm_hash: int, rank: int) -> None:
        self.nccl, self.context, self.name, self.comm_hash, self.rank = nccl, context, name, comm_hash, rank
        self._seq: dict[str, Iterator[int]] = {}

    def _text(self, text: str) -> Any:
        return FUNCTIONS_V1.index(text) if self.nccl.version == 1 else text.encode()

    def _constant(self, text: str, number: int) -> Any:
        return number if self.nccl.version == 1 else text.encode()

    def _set_communicator(self, fields: Structure) -> None:
        if self.nccl.version < 4:
            fields.name, fields.commHash = self.name.encode() or None, self.comm_hash

    def collective(self, function: str, *, count: int, channels: int = 1, seq: int = 0, root: int = 0) -> PlayedCall:
        """Begin to enqueue a collective of float32."""
        event = self.nccl.descriptor(type=COLL, rank=self.rank)
        self._set_communicator(event.coll)
        event.coll.seqNumber, event.coll.count, event.coll.root = seq, count, root
        event.coll.func, event.coll.datatype = self._text(function), self._constant("ncclFloat32", 7)
        event.coll.nChannels, event.coll.nWarps = channels, 4
        event.coll.algo, event.coll.proto = self._constant("RING", 1), self._constant("SIMPLE", 2)
        return PlayedCall(self, self.nccl.start(self.context, event))

    def point_to_point(self, function: str, *, peer: int, count: int, channels: int = 1) -> PlayedCall:
        """Begin to enqueue a send or receive of float32."""
        event = self.nccl.descriptor(type=P2P, rank=self.rank)
        self._set_communicator(event.p2p)
        event.p2p.func, event.p2p.datatype = self._text(function), self._constant("ncclFloat32", 7)
        event.p2p.count, event.p2p.peer = count, peer
        if self.nccl.version >= 4:
            event.p2p.nChannels = channels
        return PlayedCall(self, self.nccl.start(self.context, event))

    def by_copy_engine(self, function: str, *, count: int) -> PlayedCall:
        """Begin a collective by copy engines (version 6 on)."""
        event = self.nccl.descriptor(type=CE_COLL, rank=self.rank)
        event.ceColl.func, event.ceColl.datatype, event.ceColl.count = function.encode(), b"ncclBfloat16", count
        return PlayedCall(self, self.nccl.start(self.context, event))

    def group(self) -> int | None:
        """A group event, which NCCL starts regardless of the mask."""
        return self.nccl.start(self.context, self.nccl.descriptor(type=GROUP))

    def finalize(self) -> None:
        """End the communicator."""
        assert self.nccl.table.finalize(self.context) == 0


class PlayedCall:
    """One call, from its enqueuing on."""

    def __init__(self, communicator: PlayedCommunicator, handle: int | None) -> None:
        self.communicator, self.handle, self.nccl = communicator, handle, communicator.nccl

    def launched(self) -> None:
        """The call was handed to the device."""
        self.nccl.stop(self.handle)

    def kernel(self, channel: int, gpu_ns: int) -> PlayedKernel:
        """The kernel starts on a channel."""
        event = self.nccl.descriptor(type=KERNEL, parentObj=self.handle)
        event.kernelCh.channelId = channel
        if self.nccl.version >= 4:
            event.kernelCh.pTimer = gpu_ns
        return PlayedKernel(self.nccl, self.nccl.start(self.communicator.context, event))

    def proxy_op(self, *, channel: int, peer: int, steps: int, is_send: bool, pid: int = 0) -> PlayedOp:
        """The proxy begins an operation; a `pid` of another process stands for one of a neighbour (PXN)."""
        event = self.nccl.descriptor(type=PROXY_OP, parentObj=self.handle, rank=self.communicator.rank)
        fields = event.proxyOp
        fields.pid, fields.channelId, fields.peer = pid or os.getpid(), channel, peer
        fields.nSteps, fields.chunkSize, fields.isSend = steps, 1 << 19, is_send
        context = self.communicator.context if not pid else 0x7FFF_DEAD_BEE0
        return PlayedOp(self.nccl, context, self.nccl.start(context, event))

    def run(self, channels: int, start_ns: int = 1000, duration_ns: int = 500) -> None:
        """Launch, then start and stop the kernel on all channels."""
        self.launched()
        kernels = [self.kernel(channel, start_ns + channel) for channel in range(channels)]
        for channel, kernel in enumerate(kernels):
            kernel.stop(start_ns + channel + duration_ns)


class PlayedKernel:
    """The kernel of a call on one channel."""

    def __init__(self, nccl: PlayedNccl, handle: int | None) -> None:
        self.nccl, self.handle = nccl, handle

    def stop(self, gpu_ns: int) -> None:
        """The kernel stops on this channel; NCCL reports the GPU's timer from version 4 on."""
        if self.nccl.version >= 4:
            arguments = StateArguments()
            arguments.kernelCh.pTimer = gpu_ns
            self.nccl.state(self.handle, KERNEL_STOP, arguments)
        self.nccl.stop(self.handle)


class PlayedOp:
    """One operation of a proxy thread."""

    def __init__(self, nccl: PlayedNccl, context: int | None, handle: int | None) -> None:
        self.nccl, self.context, self.handle = nccl, context, handle

    def step(self, number: int) -> int | None:
        """A network transfer begins."""
        event = self.nccl.descriptor(type=PROXY_STEP, parentObj=self.handle)
        event.proxyStep.step = number
        return self.nccl.start(self.context, event)

    def step_state(self, handle: int | None, state: int, size: int = 0) -> None:
        """A transfer changes its state."""
        arguments = StateArguments()
        arguments.proxyStep.transSize = size
        self.nccl.state(handle, state, arguments)

    def progress(self, steps: int, size: int) -> None:
        """Steps so far, as NCCL up to 2.26 reports them."""
        arguments = StateArguments()
        arguments.proxyOp.transSize, arguments.proxyOp.steps = size, steps
        self.nccl.state(self.handle, 2, arguments)

    def stop(self) -> None:
        """The operation ends."""
        self.nccl.stop(self.handle)
