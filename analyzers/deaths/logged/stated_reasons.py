"""The reason that a line proves for a failed write or for a store wait that timed out, and the next step.

    reason = stated_reason(line)
    reason.text, reason.do      # "Not all ranks reached a barrier: {error}", "Read the ends of the logs of ..."

1. A write may fail because of a full disk, a quota, a removed folder or an error of the server. The cause is a full
   disk only if the same file says so (`join_failed_writes`).
2. All waits for a key of the store raise the same error. The key, or the call in the traceback, shows whether ranks did
   not join, did not create a group, or did not reach a barrier.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from analyzers.logs.exceptions import Relevance, text_of, waits_for_launchers, words_of
from analyzers.logs.log_events import LogLine
from analyzers.wording import ranks_text
from store.readers.logs.rules import cause_of

__all__ = ["Reason", "join_failed_writes", "stated_reason"]

_FAILED_WRITE = "write_failed"
_WAITS = ("rendezvous_timeout", "store_timeout")
_UNREACHED = ("rendezvous_unreachable", "rendezvous_failed")
_ENDPOINT = re.compile(
    r"(?:while trying to connect to|failed to connect to(?: any network address of)?)[ \[(]*"
    r"(?P<host>[\w.\-:]+?)[,\]):]+ ?(?P<port>\d+)"
)
_STORE_FAILED = re.compile(r"connection to (?:the C10d store|etcd) has failed")
_KEY = re.compile(r"(?:keys: |Wait timeout for key\(s\): |Timeout waiting for key: |for key: )(?P<key>[^\s,)]{1,120})")
_CALL = re.compile(r'File "[^"\n]*/distributed/[^"\n]*", line \d+, in (\w+)')
_BARRIER_KEY = re.compile(r"store_based_barrier_key:(\d{1,9})")
_JOINING = re.compile(r"waiting for clients|clients joined|RendezvousTimeoutError|kicked out of the rendezvous")
_JOIN_KEY = re.compile(r"torch\.rendezvous|\binit/")
_END_KEY = "torchelastic/agent/terminal_state"
_UNCONNECTED = re.compile(r"unconnected ranks: \W{0,3}\[([\d, ]{1,400})\]")
"""The ranks that did not reach the first one of a communicator, as HCCL lists them."""
_LAST_ERROR = re.compile(r"Last error:\s*(\S.{0,159})")
"""What NCCL prints below the class of an error, if it knows more."""
_COMPILED = re.compile(
    r"(?<![\w/])(?!/tmp/)/\S*(?:/\.triton/|/triton_cache|/torchinductor_|/inductor_cache|/torch_extensions/|/torch_compile)"
)
"""Folders into which every rank writes what it compiles; those in /tmp are not shared."""
_RACED = re.compile(
    r"Stale file handle|(?<!shared object file: )No such file or directory|Device or resource busy|Text file busy|"
    r"Directory not empty|File exists|file too short|invalid ELF header"
)
"""Errors of a file that another process replaced, removed or has not finished."""
_JOIN_CALLS = {"init_process_group", "next_rendezvous", "rendezvous", "_create_c10d_store", "_rendezvous"}
_GROUP_CALLS = {"new_group", "new_subgroups", "split_group", "_new_process_group_helper", "init_device_mesh"}
_BARRIER_CALLS = {"barrier", "monitored_barrier"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """`text`: template of a sentence with `{who}`, `{error}` and `{at}`. `do`: the next step. `collect`: what would
    prove it. Default: the cause's.
    """

    text: str = ""
    do: str | None = None
    collect: tuple[str, ...] = ()


_WRITE = Reason(
    text="{who} could not write a file, and the line does not say why{at}: {error}",
    do="Check the free space, inodes and quota there (`df -h`, `df -i`, `quota -s`, `lfs quota -h`), whether the "
    "folder still exists, and `dmesg -T` of that host.",
)
_GROUP = Reason(
    text="Not all ranks created a process group: {error}",
    do="Create every process group on all ranks and in the same order. If they do, read the ends of the other ranks' "
    "logs: a rank did not reach this call.",
)
_BARRIER = Reason(
    text="Not all ranks reached a barrier: {error}",
    do="Read the ends of the logs of the other ranks, and take their stacks (py-spy dump): one did not reach this "
    "barrier. If it is only busy for longer (saving, preparing data), raise the timeout of the barrier.",
)
_END = Reason(
    text="A launcher waited for the others at the end of the job, and not all of them arrived: {error}",
    do="Read the ends of the launchers' logs on the other nodes: the training had ended on this one.",
)
_LAUNCHERS = Reason(
    text="A launcher waited for the launchers of the other nodes, and not all of them joined: {error}",
    do="Check that each node was started with a --node-rank of its own and with the address and port of the first "
    "node (two nodes with rank 0 wait like this), then the launchers' logs of the other nodes and the firewall.",
)
_SETTINGS = Reason(
    text="HCCL refused a setting of the job: {error}",
    do="Correct that environment variable, or that entry of the rank table, on the hosts that report it.",
)
_TERMINATED = Reason(
    do="A process sent SIGTERM to the loader's worker, which the kernel's out-of-memory killer never does: find out "
    "who or what ended the job, or its processes, at that time."
)
_FAULT = Reason(text="{who} ran a kernel that faulted: {error}")
_PLUGIN = Reason(text="NCCL's network plugin could not open its device: {error}")
_NCCL = Reason(
    text="{who} got an error from NCCL{at}: ",
    do="Run again with NCCL_DEBUG=INFO: the lines above this error show what NCCL was doing, and on which device.",
)
_CACHE = Reason(
    do="Processes of several nodes write this cache, and replace each other's files: give every node a folder on a "
    "local disk (TRITON_CACHE_DIR, TORCHINDUCTOR_CACHE_DIR, TORCH_EXTENSIONS_DIR).",
)
_LOST_STORE = Reason(
    text="A launcher could not reach the rendezvous store, or lost its connection to it{at}: {error}",
    do="Look at the host of the store first (--rdzv-endpoint): its launcher serves the store, and ended or cannot be "
    "reached. The launcher that reports this only needs it.",
)
_FABRIC = Reason(
    do="Look at the peer first, whose host the line may name: whether its process and host still run. Then compare "
    "`fi_info` on both ends (EFA: the security group must allow all traffic to itself).",
    collect=("the log of the peer; fi_info and dmesg -T # on both ends",),
)
_OF_FABRIC = re.compile(r"NET/OFI|\befa[_:]|\blibfabric\b")
_OTHER = "A wait for a key of the store timed out: {error}"


def stated_reason(entry: LogLine) -> Reason | None:
    """The sentence and next step for a line; None if the texts of its cause apply."""
    if waits_for_launchers(entry):
        return _LAUNCHERS
    rule = cause_of(words_of(entry))
    kind = rule.kind if entry.kind == "exception" and rule is not None else entry.kind
    if kind == _FAILED_WRITE:
        return _WRITE
    if entry.kind == "exception" and _RACED.search(words_of(entry)) and _COMPILED.search(words_of(entry)):
        return _CACHE
    if kind == "hccl_rank_table":
        return _SETTINGS
    if kind == "data_worker" and "killed by signal: Terminated" in text_of(entry):
        return _TERMINATED
    if kind == "fabric_setup":
        return _PLUGIN
    if kind == "nccl_infiniband" and _OF_FABRIC.search(text_of(entry)):
        return _FABRIC
    if kind == "kernel_fault":
        return _FAULT
    if kind in _UNREACHED:
        return _of_store(text_of(entry))
    if rule is not None and rule.role == "nccl" and (named := _LAST_ERROR.search(entry.text("message"))):
        return replace(_NCCL, text=_NCCL.text + named[1].replace("{", "{{").replace("}", "}}"))
    if kind == "hccl_detect" and (listed := _UNCONNECTED.search(text_of(entry))):
        return _unconnected(tuple(int(rank) for rank in listed[1].split(",") if rank.strip()))
    return _of_wait(text_of(entry), entry.text("traceback")) if kind in _WAITS else None


def _unconnected(ranks: tuple[int, ...]) -> Reason:
    names = ranks_text(ranks)
    return Reason(
        text=f"{names[:1].upper()}{names[1:]} of a communicator did not reach its first rank in time{{at}}",
        do="Read the ends of the logs of these ranks: HCCL counts the ranks of each communicator from 0. If none of "
        "them failed, check that their hosts reach the first one (HCCL_SOCKET_IFNAME), or raise HCCL_CONNECT_TIMEOUT.",
    )


def _of_store(text: str) -> Reason | None:
    """The store that a process could not reach; the node that reports it is not the one to look at."""
    where = _ENDPOINT.search(text)
    if where is not None:
        return Reason(
            text=f"The rendezvous store at {where['host']}:{where['port']} could not be reached{{at}}: {{error}}",
            do=f"Look at {where['host']} first: whether its launcher started, what its log says, and whether it "
            "listens on that port. Then check the firewall, and what the name resolves to on the reporting host.",
        )
    return _LOST_STORE if _STORE_FAILED.search(text) else None


def _of_wait(text: str, traceback: str) -> Reason | None:
    calls = {*_CALL.findall(traceback)}
    numbered = _BARRIER_KEY.search(text)
    if _END_KEY in text or "_exit_barrier" in calls:
        return _END
    if calls & _JOIN_CALLS or _JOINING.search(text) or (numbered and int(numbered[1]) == 1):
        return None
    if numbered or calls & _GROUP_CALLS:
        return _GROUP
    if calls & _BARRIER_CALLS:
        return _BARRIER
    key = _KEY.search(text)
    if key is not None and _JOIN_KEY.search(key["key"]):
        return None
    which = f"writes {key['key']}" if key else "writes the key that the call in the stack waits for"
    return Reason(text=_OTHER, do=f"Find out which process {which}, and read the end of its log.")


def join_failed_writes(found: dict[tuple[str, str], list[tuple[LogLine, Relevance]]]) -> None:
    """Move failed writes to the cause `disk_full` if the same file reports a full disk."""
    full = found.get(("disk_full", ""))
    group = found.get(("file_system", ""))
    if not full or not group:
        return
    sources = {entry.source for entry, _ in full}
    joined = [(one, how) for one, how in group if one.source in sources and stated_reason(one) is _WRITE]
    full += joined
    found["file_system", ""] = [pair for pair in group if pair not in joined]
