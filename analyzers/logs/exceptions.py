"""Exceptions in logs: their type, whether a launcher raised them, and whether they only report a peer's failure."""

from __future__ import annotations

import re
from typing import Literal

from analyzers.logs.log_events import LogBook, LogLine
from analyzers.policy import SHARED
from analyzers.run.ends.endings import LOST_PEER
from analyzers.run.ends.exceptions import read_traceback
from store.readers.logs.rules import cause_of

__all__ = [
    "Relevance",
    "is_closed_by_loss",
    "is_cut_start",
    "is_launchers",
    "is_stop",
    "is_uncaught",
    "is_victims",
    "relevance",
    "text_of",
    "type_of",
    "waits_for_launchers",
    "words_of",
]

Relevance = Literal["fatal", "survived", "after", "aside", "ignored"]
"""fatal: it may have ended the process. survived: the job seems to have gone on after it, or the line is a warning.
after: the job was already being ended, or the process was already exiting. aside: it was raised in a thread or task,
which does not end the process, or the file ends in the middle of it. ignored: raised in a destructor or while logging,
which Python only prints."""

_LAUNCHER_TYPES = (
    "ChildFailedError", "CalledProcessError", "ProcessRaisedException", "ProcessExitedException", "SystemExit",
    "SignalException", "RendezvousGracefulExitError", "RendezvousConnectionError", "ActorDiedError", "RayActorError",
    "WorkerCrashedError", "ActorHandleNotFoundError",
)  # fmt: skip
_COMMAND = re.compile(r"Command '?\[?(?:PosixPath\()?['\"]?(?:[^\s'\",]*/)?([^\s'\",/]+)")
"""The program in the message of a CalledProcessError."""
_TOOLS = re.compile(
    r"(?:[\w.-]*-)?(?:gcc|g\+\+|cc|c\+\+|clang|clang\+\+|ld)(?:-\d+)?|nvcc|ptxas|hipcc|icpx|ninja|make|cmake|ldconfig|"
    r"which|whereis|nvidia-smi|rocm-smi|npu-smi|git|wget|curl|aws|gsutil|gcloud|azcopy|rclone|rsync|scp|tar|unzip|"
    r"gzip|zstd|ffmpeg|sox|cp|mv|rm|ls|df|mount"
)
"""Programs that a training calls. All others may be what a launcher started, whose failure is that of the training."""
_POINTERS = (
    "A Ray actor died",
    "See root cause above",
    "The actor died unexpectedly before finishing this task",
    "See stack trace for root cause",
    "Worker crashed during ",  # Ray Train and xgboost_ray
    "due to an exception in a background process",
    "AlgorithmError: Exit Code: ",
    "CheckpointException ranks:dict_keys(",  # torch.distributed.checkpoint, above the tracebacks of those ranks
)
"""Parts of messages that refer to another process's error."""
_BACKEND_TYPES = ("DistBackendError", "DistNetworkError", "DistStoreError", "ConnectionResetError", "BrokenPipeError")
_TIMEOUTS = (
    "Watchdog caught collective operation timeout", "timed out in blocking wait", "watchdog got stuck",
    # these codes are CANN's timeouts
    "error code is 107020", "error code is 507046", "error code is 507047", "error code is 507048",
)  # fmt: skip
_GENERIC_TYPES = (
    "RuntimeError",
    "Exception",
    "OSError",
    "UnknownError",
    "AbortedError",
    "InternalError",
    "HorovodInternalError",
)
"""Types that libraries raise for any failure. ValueError, KeyError and similar are not among them, because they concern
the caller's data."""
_WAITING_MODULES = re.compile(
    r"torch/distributed/|torch_npu/distributed|/horovod/|deepspeed/comm/|mpi4py|pynccl|/oneccl|c10d_logger"
)
"""Modules with functions that wait for other ranks."""
_WAITING_FRAMES = re.compile(rf"{_WAITING_MODULES.pattern}|/bin/(?:torchrun|accelerate|deepspeed|horovodrun|ray)\b")
"""Frames of calls that wait for other ranks, and of launchers."""
_LAUNCHER_FRAMES = re.compile(
    r"/bin/(?:torchrun|accelerate|deepspeed|horovodrun|ray)\b|/torch/distributed/(?:run|launch|launcher/api)\.py"
)
"""Frames of launchers alone."""
_AGENTS_RENDEZVOUS = re.compile(r"/elastic/agent/server/\w+\.py\", line \d+, in _rendezvous\b")
"""Frame of torchrun's agent while it waits for the agents of the other nodes."""
_WAITED = re.compile(r"time[ -]?out|timed out", re.IGNORECASE)
_COMMUNICATION_PACKAGES = (
    "torch", "torch_npu", "ray", "vllm", "sglang", "deepspeed", "megatron", "horovod", "mpi4py", "jax", "jaxlib",
    "grpc", "tensorflow", "socket", "ssl", "asyncio", "concurrent", "multiprocessing", "exceptions", "__main__",
)  # fmt: skip
"""Packages through which processes of a job communicate, as in the qualified names of their error classes."""
_OTHER_RANK = re.compile(
    r"one of the (?:other )?ranks|(?:other|another|remote) (?:rank|peer|worker|process)", re.IGNORECASE
)
"""Parts of messages about another rank's failure."""
_SHARED_PARTS = re.compile(
    r"rank|peer|worker|process|node|host|collective|barrier|rendezvous|connect|socket|store|[nrh]ccl|gloo|all_?reduce|"
    r"gather|broadcast|pipe|engine|actor|SIG[A-Z]{3}|signal",
    re.IGNORECASE,
)
"""Words for what ranks share, or through which they communicate."""
_LIBRARIES = re.compile(r"hccl|collective call|MPI_|mpi_errno|\b(?:nccl|rccl|oneccl|gloo|ucx|ucp_)", re.IGNORECASE)
"""Communication libraries. An error that they raise in a waiting call names no cause."""
_ONECCL_ERROR = re.compile(
    r"oneCCL: \S+ \S+ EXCEPTION: (?!.*(?:time[ -]?d? ?out|atl_|status|peer|connect))", re.IGNORECASE
)
"""An error of oneCCL in the process that prints it, with its cause."""
_PREFIXES = re.compile(
    r"terminate called after throwing an instance of|\w+WithTimeout\b|"
    r"(?:NCCL|[Pp]rocess group) watchdog thread terminated with exception"
)
"""Prefixes of libstdc++ and torch, and function names, which are not part of a message."""
_SPAWNED_MAIN = re.compile(r"/multiprocessing/(?:spawn|forkserver|synchronize)\.py$")
_SPAWN_TYPES = ("UnpicklingError", "EOFError", "FileNotFoundError")
"""Errors of a spawned process that cannot read its task or open its locks, because its parent has ended."""
_AT_EXIT = "driver shutting down"
"""CUDA's error for a call made while the process is already ending."""
_IS_IGNORED = re.compile(r"Exception ignored in|--- Logging error ---|Error in atexit\._run_exitfuncs")
"""What Python prints before an error in a destructor, in logging or in an exit handler, which ends no process."""
_EXIT_HANDLERS = re.compile(
    r'(?:multiprocessing/util|weakref|concurrent/futures/\w+|threading|logging/__init__)\.py", line \d+, in '
    r"(?:_run_finalizers|_exit_function|_exitfunc|_python_exit|_shutdown|shutdown)\b"
)
"""Frames of functions that Python calls when a process is already exiting."""
_TEARDOWN = ("teardown", "slurm_cancelled", "agent_signalled")
"""Kinds of lines with which a launcher or scheduler ends the processes."""
_COMMUNICATOR_READY = "Init COMPLETE"
"""What NCCL prints when a communicator is ready."""
_RAY_TASK_ERROR = re.compile(r"RayTaskError\((\w+)\)")


def type_of(entry: LogLine) -> str:
    """Name of the exception's class without its module; for an error of a Ray task, the class raised in the task."""
    module, _, name = entry.text("type").rpartition(".")
    name = name if name[:1].isupper() or not module else f"{module}.{name}"  # zlib.error
    inner = _RAY_TASK_ERROR.search(f"{entry.text('type')} {entry.message}")
    return inner[1] if inner else name


def text_of(entry: LogLine) -> str:
    """Type, message and line, to search in."""
    return f"{entry.text('type')}: {entry.text('message')} {entry.message}"


def words_of(entry: LogLine) -> str:
    """`text_of` without the prefixes of libstdc++ and torch."""
    return _PREFIXES.sub("", text_of(entry))


def is_launchers(entry: LogLine) -> bool:
    """Return True for an exception of a launcher, or one that only refers to another process's error."""
    if entry.number("is_cut"):  # the traceback is cut off before its error, but its frames show who raised it
        return _LAUNCHER_FRAMES.search(entry.text("traceback")) is not None
    if any(mark in f"{type_of(entry)}: {entry.text('message')}" for mark in _POINTERS):
        return True
    if type_of(entry) == "CalledProcessError" and (program := _COMMAND.search(entry.text("message"))):
        return _TOOLS.fullmatch(program[1]) is None or _LAUNCHER_FRAMES.search(entry.text("traceback")) is not None
    return type_of(entry) in _LAUNCHER_TYPES or "detected that one or more processes exited" in entry.text("message")


def is_stop(entry: LogLine) -> bool:
    """Return True if a person or launcher interrupted the process."""
    return type_of(entry) == "KeyboardInterrupt"


def is_cut_start(entry: LogLine) -> bool:
    """Return True for a spawned process that could not read its task, because its parent had ended."""
    links = read_traceback(entry.text("traceback")) if type_of(entry) in _SPAWN_TYPES else []
    return bool(links) and _SPAWNED_MAIN.search(links[-1].frames[-1].path) is not None


def waits_for_launchers(entry: LogLine) -> bool:
    """Return True for torchrun's error that the launchers of other nodes did not join in time: no worker has run."""
    is_agents = _AGENTS_RENDEZVOUS.search(entry.text("traceback")) is not None
    return is_agents and _WAITED.search(words_of(entry)) is not None


def is_uncaught(entry: LogLine) -> bool:
    """Return True if a traceback begins in a program's main module: its process ends."""
    first = entry.text("traceback").find('File "')
    return first >= 0 and entry.text("traceback")[first:].partition("\n")[0].rstrip().endswith(", in <module>")


def is_victims(entry: LogLine) -> bool:
    """Return True if an exception reports a peer's end or an aborted call, and no other cause."""
    text = words_of(entry)
    if entry.number("is_cut"):
        return _WAITING_FRAMES.search(entry.text("traceback")) is not None
    if is_cut_start(entry):
        return True
    if waits_for_launchers(entry):
        return False
    rule = cause_of(text)
    if rule is not None:
        return rule.role == "victim" or (rule.role == "nccl" and LOST_PEER.search(text) is not None)
    if type_of(entry) in _BACKEND_TYPES or any(mark in text for mark in _TIMEOUTS):
        return True
    if LOST_PEER.search(text) is not None and not _is_of_another_package(entry) and not _is_own_raise(entry):
        return True
    return type_of(entry) in _GENERIC_TYPES and _is_of_communication(entry, text)


def is_closed_by_loss(entry: LogLine, book: LogBook) -> bool:
    """Return True for a RendezvousClosedError of a launcher that restarts after a lost peer or a failed worker."""
    if "RendezvousClosedError" not in text_of(entry):
        return False
    lost = [one for one in book.of("exception") if is_victims(one)]
    lost += [one for one in book.of("worker_failed") if one.source == entry.source]
    return any(book.position(one) < book.position(entry) for one in lost)


def _is_of_another_package(entry: LogLine) -> bool:
    """Return True for an error class of a package that ranks do not communicate through: a tracker, a client."""
    root, dot, _ = entry.text("type").partition(".")
    return bool(dot) and root not in _COMMUNICATION_PACKAGES


def _is_own_raise(entry: LogLine) -> bool:
    """Return True if a `raise` in the user's code raised the error, and its message names nothing that ranks share."""
    links = read_traceback(entry.text("traceback"))
    code = [line.strip() for line in entry.text("traceback").splitlines() if line.strip(" ^~")]
    return (
        bool(links)
        and bool(links[-1].frames)
        and not links[-1].frames[-1].is_library
        and code[-1].startswith("raise ")
        and _SHARED_PARTS.search(entry.text("message")) is None
    )


def _is_of_communication(entry: LogLine, text: str) -> bool:
    """Return True if an error that names no cause was raised in a call that waits for other ranks."""
    if _OTHER_RANK.search(text):
        return True
    if _ONECCL_ERROR.search(text):
        return False
    links = read_traceback(entry.text("traceback"))
    return _LIBRARIES.search(text) is not None and (
        not links or _WAITING_MODULES.search(links[-1].frames[-1].path) is not None
    )


def relevance(entry: LogLine, book: LogBook) -> Relevance:
    """Classify whether an error may have ended its process, from the lines before and after it in its file."""
    if entry.number("is_cut"):
        return "aside"  # the file ends before the error's message
    if (entry.number("later_steps") or 0) >= SHARED.min_times or entry.number("is_warning"):
        return "survived"
    if any(one.source == entry.source and one.line > entry.line for one in book.of("finished")):
        return "survived"  # a later line says that the job finished
    if entry.number("later_lines") and not book.seen and not any(book.of_role("death", "victim", "outside")):
        return "survived"  # only one process prints; it printed further lines, and no line reports an end
    if entry.kind == "no_keep_alive" and any(
        one.source == entry.source and one.line < entry.line for one in book.of("finished", "process_finished")
    ):
        return "survived"  # the node that serves the agents' store ended before this one's agent
    if _AT_EXIT in text_of(entry):
        return "ignored"
    if _EXIT_HANDLERS.search(entry.text("traceback")):
        return "after"
    if "NCCL WARN" in entry.message and any(
        one.source == entry.source and one.line > entry.line and _COMMUNICATOR_READY in one.message
        for one in book.of("nccl_comm")
    ):
        return "survived"  # NCCL warned, but the communicator was created all the same
    before = [one for one in book.of("restarted", "in_thread", *_TEARDOWN) if one.source == entry.source
              and one.line < entry.line]  # fmt: skip
    last = max(before, key=lambda one: one.line, default=None)
    if last is None:
        return "fatal"
    if last.kind == "in_thread":
        is_next = entry.kind == "exception" and entry.line - last.line <= 2
        return "fatal" if not is_next else "ignored" if _IS_IGNORED.search(last.message) else "aside"
    is_over = (last.number("later_steps") or 0) < SHARED.min_times  # otherwise another job appended to the file
    return "after" if last.kind in _TEARDOWN and is_over else "fatal"
