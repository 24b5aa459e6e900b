"""Causes of lost ranks and hangs, one row each: what happened, what to do next, what to collect, and who is to blame.

    CAUSES["locked_memory"].do          # "Raise `ulimit -l` where the processes start (limits.conf, ...)."
    CAUSES["locked_memory"].blame       # "link": the rank that reports it is not named as the culprit
    next_step("exit", (3,))             # "Read the end of the log of rank 3: it exited by itself."

A cause has one row, whether it is found in records, a log or a dump. Derived from this table: the next step, what to
collect, the kind and rank class of a log line, the sentences of `hangs.summary` and `deaths.analyze`,
`Kind.user_causes`, and the anchors of the runbook. For a new cause add a row, a section in docs/runbook.md, and a log
rule (`store/readers/logs/rules/*.toml`) or an analyzer that names it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from analyzers.wording import processes_text, ranks_text

__all__ = ["CAUSES", "COLLECT", "SIGNALS", "WORDS", "Blame", "Cause", "anchor", "cause_names", "next_step"]

Blame = Literal["rank", "link", "job", "outside"]
"""Where the cause lies. rank: in the rank that reports it. link: between ranks. job: in the job's settings. outside: in
a file system, quota or server that the reporting ranks share. If only one rank reports such a cause, the rank is named,
because its node may be at fault.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """A cause of a lost rank or a hang."""

    name: str
    kind: Literal["rank_lost", "hang"]
    do: str
    """Next step, with `{ranks}`, the optional `{caller}`, `{stack}`, `{unseen}` and `{devices}` (`next_step`), and
    words that agree with the number of ranks (`WORDS`).
    """
    record_text: str = ""
    """Sentence for findings from a run's records; the analyzer fills in names. Empty: the analyzer writes it."""
    log_text: str = ""
    """Sentence for findings from a log line, with `{who}`, `{error}` and `{at}`. Empty: no log line names it."""
    collect: tuple[str, ...] = ()
    """Commands that confirm the cause; words in capitals are placeholders."""
    blame: Blame = "rank"
    is_proven_by_line: bool = True
    """False if the death of a peer leaves the same line, so that the cause is only suspected."""
    by_user: bool = False
    """True if the user's code, data or decision is the cause, never a machine."""
    names_call: bool = False
    """True if `record_text` names the call in which the other ranks wait."""

    @property
    def advice(self) -> str:
        """Anchor in docs/runbook.md."""
        return anchor(self.kind, self.name)


def anchor(kind: str, cause: str) -> str:
    """Anchor in docs/runbook.md of a cause of a kind of finding: `rank-lost-exit`."""
    return f"{kind.replace('_', '-')}-{cause}"


_STACKS = "py-spy dump --pid PID # of every rank, while it hangs (rankscope stacks)"
_KERNEL = "dmesg -T | grep -iE 'killed process|oom|xid|mce' # on the host of that rank"
_DUMPS = (
    "TORCH_FR_BUFFER_SIZE=2000 TORCH_NCCL_DUMP_ON_TIMEOUT=1 # in the environment of the next run; up to torch 2.8 the "
    "first is TORCH_NCCL_TRACE_BUFFER_SIZE"
)
_LOG_AND_HOST = "Check the {log} of {ranks} and {its_host} (out of memory, XID)."
_CODE_OF_CALL = "Inspect the {stacks} of {ranks}{stack} and the code around the call{caller}."

_LOST_RANKS = (
    Cause(name="exception", kind="rank_lost", by_user=True,
          do="Fix this error first: connection errors and timeouts of other ranks usually follow from it.",
          record_text="died of {error}{at}", log_text="{who} raised {error}{at}"),
    Cause(name="signal", kind="rank_lost", do=_LOG_AND_HOST, record_text="died of {signal}",
          collect=(_KERNEL, "python -X faulthandler")),
    Cause(name="out_of_memory", kind="rank_lost", by_user=True,
          do="Lower the microbatch or sequence length on {ranks}, or shard and checkpoint activations more.",
          record_text="ran out of memory{asked}{at}", log_text="{who} ran out of device memory{at}"),
    Cause(name="exit", kind="rank_lost", by_user=True,
          do="Read the {end} of the {log} of {ranks}: {it} exited by {itself}.",
          record_text="ended with exit code {exit_code}{output}{at}",
          collect=("torchrun --log-dir logs --tee 3 # keeps every rank's own output",
                   "wrap main() in torch.distributed.elastic.multiprocessing.errors.record # writes error_file")),
    Cause(name="vanished", kind="rank_lost", do=_LOG_AND_HOST, record_text="exited without an error message"),
    Cause(name="no_dump", kind="rank_lost", do=_LOG_AND_HOST),
    Cause(name="killed_all", kind="rank_lost",
          do="Check the scheduler's record of the job, and who or what stopped it."),
    Cause(name="ended_from_outside", kind="rank_lost", by_user=True,
          do="Resume the run. If it was not meant to stop, check the scheduler's record of the job."),
    Cause(name="launcher_lost", kind="rank_lost",
          do="Check `dmesg -T` of the launcher's host for the out-of-memory killer, then resume the run."),
    Cause(name="store_lost", kind="rank_lost",
          do="Check the host of the rendezvous store, and the launcher or process that served it."),
    Cause(name="node_failed", kind="rank_lost",
          do="Check the power, kernel log and network of that node, and start again without it."),
    Cause(name="connection_lost", kind="rank_lost",
          do="Check the network between the hosts at that time, and the end of every rank's log: the log of the rank "
          "that ended first is the likeliest to name the cause.",
          collect=("the logs of all ranks", _KERNEL)),
    Cause(name="host_out_of_memory", kind="rank_lost",
          do="Give the job more host memory, or use fewer loader workers and less caching per process.",
          log_text="{who} could not allocate host memory{at}"),
    Cause(name="device_error", kind="rank_lost",
          do="Drain the node, run `nvidia-smi -q -d ECC,ROW_REMAPPER` and `dmesg -T | grep -i xid` on it, "
          "and reset or replace the GPU.",
          log_text="{who} reported a device error: {error}"),
    Cause(name="device_assert", kind="rank_lost", by_user=True,
          do="Rerun with CUDA_LAUNCH_BLOCKING=1 to get the line. Usually an index or label is out of range.",
          log_text="{who} failed an assertion inside a device kernel{at}"),
    Cause(name="device_setup", kind="rank_lost",
          do="Compare CUDA_VISIBLE_DEVICES and the processes per node with `nvidia-smi -L` on that node.",
          log_text="{who} found no usable device{at}: {error}"),
    Cause(name="data_worker", kind="rank_lost", by_user=True,
          do="Check host memory and the worker's own error (num_workers=0 shows it).",
          log_text="{who} lost a worker process{at}: {error}"),
    Cause(name="shared_memory", kind="rank_lost",
          do="Enlarge /dev/shm (docker run --ipc=host or --shm-size, an emptyDir with medium: Memory).",
          log_text="{who} ran out of shared memory (/dev/shm){at}"),
    Cause(name="disk_full", kind="rank_lost", blame="outside",
          do="Free space on the file system, or write somewhere else.",
          log_text="{who} could not write: the disk or its quota is full{at}"),
    Cause(name="too_many_files", kind="rank_lost",
          do="Raise `ulimit -n`, or torch.multiprocessing.set_sharing_strategy('file_system').",
          log_text="{who} ran out of file descriptors{at}"),
    Cause(name="too_many_processes", kind="rank_lost",
          do="Raise the process limit (`ulimit -u`, the cgroup's pids.max), or start fewer threads "
          "(OMP_NUM_THREADS).",
          log_text="{who} could not start a thread or process{at}: {error}"),
    Cause(name="file_system", kind="rank_lost", blame="outside",
          do="Check that mount on that host (`mount`, `dmesg -T`) and its server, then start again from a checkpoint.",
          log_text="{who} got a file system error{at}: {error}"),
    Cause(name="download", kind="rank_lost", blame="outside",
          do="Give every node access to that address, or download beforehand and set HF_HUB_OFFLINE=1.",
          log_text="{who} could not load from or save to a remote address{at}: {error}"),
    Cause(name="checkpoint_damaged", kind="rank_lost",
          do="Resume from the previous checkpoint, and write checkpoints to a temporary name first.",
          log_text="{who} could not read a checkpoint: the file is damaged or incomplete{at}"),
    Cause(name="checkpoint_differs", kind="rank_lost", blame="job", by_user=True,
          do="Build the model as it was when the checkpoint was written: the same configuration, vocabulary and "
          "parallel layout, or resize or convert the checkpoint first.",
          log_text="The checkpoint does not fit the model{at}: {error}"),
    Cause(name="duplicate_gpu", kind="rank_lost", blame="job", by_user=True,
          do="Start one process per GPU and call torch.cuda.set_device(LOCAL_RANK) before the process group.",
          log_text="Two ranks use the same GPU: {error}"),
    Cause(name="version_mismatch", kind="rank_lost", blame="job",
          do="Install the same versions of driver, CUDA and NCCL on all nodes.",
          log_text="Incompatible versions: {error}"),
    Cause(name="unused_parameters", kind="rank_lost", by_user=True,
          do="Use find_unused_parameters=True, or make the loss depend on every parameter.",
          log_text="{who} did not use all parameters in a step, and DDP raised an error{at}"),
    Cause(name="unreachable", kind="rank_lost", blame="link",
          do="Set NCCL_SOCKET_IFNAME (and GLOO_SOCKET_IFNAME) to the interface that all nodes share, and open "
          "the ports between them.",
          log_text="An address cannot be reached: {error}",
          collect=("ip -br addr # on both hosts", "nc -vz ADDRESS PORT # from the other host")),
    Cause(name="no_interface", kind="rank_lost", blame="link",
          do="Set NCCL_SOCKET_IFNAME to an interface of `ip -br addr` that all nodes share.",
          log_text="No usable network interface was found: {error}"),
    Cause(name="infiniband", kind="rank_lost", blame="link", is_proven_by_line=False,
          do="Check `ibstat` and the switch's counters on both ends, or try NCCL_IB_DISABLE=1.",
          log_text="InfiniBand, RoCE or EFA reported an error: {error}",
          collect=("ibstat; ibqueryerrors # on both ends", _KERNEL)),
    Cause(name="rendezvous", kind="rank_lost", blame="link", is_proven_by_line=False,
          do="Check the node that did not join: its launcher's log, its firewall, MASTER_ADDR and MASTER_PORT.",
          log_text="Not all ranks joined the rendezvous: {error}",
          collect=("the launcher's log of every node", "nc -vz MASTER_ADDR MASTER_PORT # from every node")),
    Cause(name="port_in_use", kind="rank_lost", blame="link",
          do="Choose another MASTER_PORT (torchrun --standalone does so on a single node), or end the process that "
          "still holds it.",
          log_text="A port is taken by another process: {error}"),
    Cause(name="port_denied", kind="rank_lost", blame="link",
          do="Choose a MASTER_PORT of 1024 or more: only root may listen on a lower one.",
          log_text="A process is not allowed to listen on its port: {error}"),
    Cause(name="locked_memory", kind="rank_lost", blame="link",
          do="Raise `ulimit -l` where the processes start (limits.conf, docker run --ulimit memlock=-1).",
          log_text="The locked-memory limit is too low for RDMA: {error}"),
    Cause(name="nccl_error", kind="rank_lost", blame="link", is_proven_by_line=False,
          do="Run again with NCCL_DEBUG=WARN: NCCL then usually prints the cause.",
          log_text="{who} got an error from NCCL that does not name its cause: {error}",
          collect=("NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET # in the environment of the next run",)),
    Cause(name="unnamed_error", kind="rank_lost",
          do="Read this line, the lines around it, and the end of every rank's log: no rule matches this error."),
    Cause(name="launch_failed", kind="rank_lost",
          do="Start a simple command on that node with the same launcher (srun, ssh), and fix the error that it "
             "reports.",
          collect=("srun --nodelist NODE hostname    |    ssh NODE hostname", "scontrol show node NODE")),
    Cause(name="time_limit", kind="rank_lost",
          do="Ask for more time, or save checkpoints before the limit and resume."),
    Cause(name="preempted", kind="rank_lost", do="Resume from the last checkpoint."),
    Cause(name="cancelled", kind="rank_lost", do="Check the scheduler's record for who or what ended the job."),
    Cause(name="link_down", kind="rank_lost", do="Check the cable, the port and the switch, then start again."),
)  # fmt: skip
_HANGS = (
    Cause(name="stopped", kind="hang", do="Continue or restart the {process} of {ranks}.",
          record_text="{who} {are} stopped{at} (process state {os_state}), {doing}"),
    Cause(name="not_entered", kind="hang", names_call=True, by_user=True, do=_CODE_OF_CALL,
          record_text="{who} did not reach {call}{stuck}"),
    Cause(name="gil", kind="hang", by_user=True,
          do="Check the native code called by the innermost line of the {stacks} of {ranks}: this code must release "
             "the GIL.",
          record_text="{who} {do} not respond{at}: asleep in native code that holds Python's lock (GIL), "
          "{doing}{where}"),
    Cause(name="data", kind="hang", by_user=True,
          do="Inspect the data loader of {ranks}{stack}, and the data being read.",
          record_text="{who} {hang} in the data loader{at}{inside}"),
    Cause(name="checkpoint", kind="hang", do="Check the disk that {ranks} {writes} to.",
          record_text="{who} {hang} writing a checkpoint{at}{inside}"),
    Cause(name="evaluate", kind="hang", by_user=True, do=_CODE_OF_CALL,
          record_text="{who} {hang} in evaluation{at}{inside}"),
    Cause(name="compile", kind="hang",
          do="Check whether the compiler of {ranks} is busy ({its} child processes), or disable `torch.compile`.",
          record_text="{who} {have} not finished compiling{at}{inside}"),
    Cause(name="mismatch", kind="hang", blame="job", is_proven_by_line=False, by_user=True,
          do="Find the branch that depends on the rank or on its data.",
          log_text="Ranks called different collectives at the same place: {error}"),
    Cause(name="mismatch_operation", kind="hang", by_user=True, do=_CODE_OF_CALL,
          record_text="different collectives at the same place{at}: {sides}"),
    Cause(name="mismatch_dtype", kind="hang", names_call=True, by_user=True,
          do="Compare the element types of both sides{caller}: usual causes are autocast and an unconverted tensor.",
          record_text="different element types in {call}{at}: {sides}"),
    Cause(name="mismatch_size", kind="hang", names_call=True, by_user=True,
          do="Compare the shapes of both sides{caller}: usual causes are an uneven batch and a branch on the rank.",
          record_text="different sizes in {call}{at}: {sides}",
          log_text="Ranks called the same collective with different sizes: {error}"),
    Cause(name="model_differs", kind="hang", by_user=True,
          do="Build the same model on every rank: same configuration, same seed, same code.",
          log_text="The model's parameters differ between ranks: {error}"),
    Cause(name="skipped", kind="hang", names_call=True, by_user=True, do=_CODE_OF_CALL,
          record_text="{who} skipped {call}{at} and {are} ahead of the others{sides_if_any}"),
    Cause(name="desync", kind="hang", do="Find the collective that {ranks} called more or less often than the others."),
    Cause(name="not_seen", kind="hang", names_call=True,
          do="Analyze the folders of all nodes together (`rankscope collect`), or the published address: {unseen} left "
          "no records in this folder."),
    Cause(name="finished", kind="hang", names_call=True, by_user=True,
          do="Find out why {ranks} ended the training loop before the others (fewer batches or steps).",
          record_text="{who} finished and closed{at} while other ranks still wait in {call}"),
    Cause(name="p2p_unmatched", kind="hang", names_call=True, do=_CODE_OF_CALL, record_text="{who} {unmatched}"),
    Cause(name="order_inversion", kind="hang", by_user=True,
          do="Make all ranks enter the groups in one order, or wait for each call before the next.",
          record_text="ranks entered process groups in opposite order{at}: {cycle}"),
    Cause(name="all_entered", kind="hang", names_call=True,
          do="{devices}Check the links and the backend (NCCL_DEBUG=INFO, firewall, interface): no rank is missing.",
          record_text="{entered}"),
    Cause(name="device_stuck", kind="hang", names_call=True,
          do="Look for an XID and ECC errors on the {hosts} of {ranks} (`dmesg -T`, `nvidia-smi -q`).",
          record_text="{devices} {are} stuck{at}: {stuck_call}"),
    Cause(name="watchdog_stuck", kind="hang",
          do="If those processes still run, take their stacks (py-spy dump). If not, set "
          "TORCH_NCCL_ENABLE_MONITORING=0 for the next run, which keeps them alive, and take the stacks then."),
    Cause(name="busy", kind="hang", do=_CODE_OF_CALL,
          record_text="{who} {make} no progress{at} outside of any collective: {doing}{where}"),
)  # fmt: skip
CAUSES: Mapping[str, Cause] = {cause.name: cause for cause in (*_LOST_RANKS, *_HANGS)}
"""By name."""

SIGNALS: Mapping[str, Cause] = {
    "SIGKILL": Cause(name="signal", kind="rank_lost", record_text="died of {signal}",
        do="Check `dmesg -T` of the {hosts} of {ranks} for the out-of-memory killer, and find out who else could have "
           "killed {them}.",
        collect=(_KERNEL, "cat /sys/fs/cgroup/memory.events # oom_kill of the job's cgroup",
                 "sacct -j JOB --format=JobID,State%20,ExitCode,MaxRSS    |    kubectl describe pod POD")),
    "SIGSEGV": Cause(name="signal", kind="rank_lost", record_text="died of {signal}",
        do="Find the native {stacks} of {ranks}: a core dump, or {its} {log} with `PYTHONFAULTHANDLER=1`.",
        collect=(_KERNEL, "coredumpctl gdb # or: python -X faulthandler")),
    "SIGBUS": Cause(name="signal", kind="rank_lost", record_text="died of {signal}",
        do="Check whether /dev/shm or a mapped file's disk was full on the {hosts} of {ranks} (`df -h`), and enlarge "
           "the full one (docker run --ipc=host or --shm-size).",
        collect=("df -h /dev/shm # on the host of that rank", _KERNEL)),
    "SIGABRT": Cause(name="signal", kind="rank_lost", record_text="died of {signal}",
        do="Read the lines before the abort in the {log} of {ranks}: the library that aborted usually states why.",
        collect=("python -X faulthandler", _KERNEL)),
}  # fmt: skip
"""Rows of the cause `signal` for signals with a more specific next step."""
COLLECT: Mapping[str, tuple[str, ...]] = {
    **{row.name: row.collect for row in CAUSES.values() if row.collect},
    **{signal: row.collect for signal, row in SIGNALS.items()},
    "contested": ("the logs with a time on each line: torchrun --log-dir logs --tee 3", _KERNEL),
    "ray": ("ls -t /tmp/ray/session_latest/logs/worker-*.err # on the node of that worker", _KERNEL),
    "hang": (_STACKS, _DUMPS, _KERNEL),
    "timeout": (_DUMPS, _STACKS, _KERNEL),
}
"""What to collect, by cause or signal. Other keys: `contested` for errors that contradict each other, `ray`, `hang` for
hangs without a known cause, and `timeout` for hangs that a timeout has ended, so that no stack can be taken now."""


WORDS: Mapping[bool, Mapping[str, str]] = {
    True: {
        "it": "it", "them": "it", "itself": "itself", "its": "its", "its_host": "its host", "log": "log", "end": "end",
        "process": "process", "hosts": "host", "stacks": "stack",
        "writes": "writes its checkpoint",
    },
    False: {
        "it": "they", "them": "them", "itself": "themselves", "its": "their", "its_host": "their hosts",
        "log": "logs", "end": "ends", "process": "processes", "hosts": "hosts", "stacks": "stacks",
        "writes": "write their checkpoints",
    },
}  # fmt: skip
"""Words in a next step that depend on the number of ranks: for one rank (True), and for several or unknown ones."""


def cause_names(kind: str, *, by_user: bool = False) -> frozenset[str]:
    """Names of the causes of a kind of finding. `by_user`: only causes that are never a machine's fault."""
    return frozenset(row.name for row in CAUSES.values() if row.kind == kind and (row.by_user or not by_user))


def next_step(
    cause: str,
    ranks: Sequence[int],
    *,
    signal: str = "",
    caller: str = "",
    stack: str = "",
    unseen: Sequence[int] = (),
    devices_first: bool = False,
    processes: Sequence[int] = (),
) -> str:
    """The next step of a cause; empty for one without a row.

    `caller`: " at train.py:77". `stack`: " (in train.py:77 wait)". `unseen`: ranks without records here.
    `devices_first`: only the hosts are known to have entered the call, so a device may be stuck. `processes`: process
    ids, if the ranks are not known.
    """
    row = SIGNALS.get(signal) if cause == "signal" else None
    row = row or CAUSES.get(cause)
    if row is None:
        return ""
    return row.do.format(
        **WORDS[len(ranks or processes) == 1],
        ranks=processes_text(processes) if processes and not ranks else ranks_text(ranks),
        caller=caller,
        stack=stack,
        unseen=ranks_text(unseen) if unseen else "the awaited ranks",
        devices="Look at the devices of these ranks first (`dmesg -T`, `nvidia-smi -q`). " if devices_first else "",
    )
