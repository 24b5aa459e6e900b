"""Sentences of causes: names, advice, and the commands that collect what is missing."""

from __future__ import annotations

from collections.abc import Mapping

from analyzers.finding import Finding
from analyzers.memory.allocator_message import holders_text, others_hold_it
from analyzers.wording import sentence

__all__ = ["ANALYZER", "COLLECT", "DO", "HANGS", "WHAT", "next_step", "why"]

ANALYZER = "logs"

WHAT: Mapping[str, str] = {
    "exception": "{who} raised {error}{at}",
    "out_of_memory": "{who} ran out of device memory{at}",
    "host_out_of_memory": "{who} could not get host memory{at}",
    "device_error": "{who} reports an error of its device: {error}",
    "device_assert": "{who} failed an assertion inside a device kernel{at}",
    "device_setup": "{who} found no usable device{at}: {error}",
    "data_worker": "{who} lost a data loader worker{at}: {error}",
    "shared_memory": "{who} ran out of shared memory (/dev/shm){at}",
    "disk_full": "{who} could not write: no space is left{at}",
    "too_many_files": "{who} ran out of file descriptors{at}",
    "too_many_processes": "{who} could not start a thread or process{at}: {error}",
    "file_system": "{who} got an error of a file system{at}: {error}",
    "download": "{who} could not download{at}: {error}",
    "checkpoint_damaged": "{who} could not read a checkpoint: the file is damaged or incomplete{at}",
    "duplicate_gpu": "Two ranks use the same GPU: {error}",
    "version_mismatch": "Versions that do not fit together: {error}",
    "unused_parameters": "{who} did not use all parameters in a step, and DDP waits for their gradients{at}",
    "model_differs": "The model's parameters differ between ranks: {error}",
    "mismatch": "Ranks called different collectives at the same place: {error}",
    "mismatch_size": "Ranks called the same collective with different sizes: {error}",
    "unreachable": "An address cannot be reached: {error}",
    "no_interface": "NCCL found no usable network interface: {error}",
    "infiniband": "A transfer over InfiniBand, RoCE or EFA failed: {error}",
    "rendezvous": "The ranks did not all meet at the rendezvous: {error}",
    "port_in_use": "A port is taken by another process: {error}",
    "locked_memory": "The limit of locked memory is too small for RDMA: {error}",
    "nccl_error": "{who} got an error from NCCL that does not name its cause: {error}",
}
"""By cause; `{who}`, `{error}`, `{at}` are filled in."""

DO: Mapping[str, str] = {
    "exception": "Fix that line. The other ranks' connection errors and timeouts follow from it.",
    "out_of_memory": "Lower the microbatch or sequence length on that rank, or shard and checkpoint activations more.",
    "host_out_of_memory": "Give the job more host memory, or use fewer loader workers and less caching per process.",
    "device_error": "Drain the node, run `nvidia-smi -q -d ECC,PAGE_RETIREMENT` and `dmesg -T | grep -i xid` there, "
    "reset or replace the GPU.",
    "device_assert": "Rerun with CUDA_LAUNCH_BLOCKING=1 to get the line. Usually an index or label is out of range.",
    "device_setup": "Compare CUDA_VISIBLE_DEVICES and the processes per node with `nvidia-smi -L` on that node.",
    "data_worker": "Check host memory and the worker's own error (num_workers=0 shows it).",
    "shared_memory": "Enlarge /dev/shm (docker run --ipc=host or --shm-size, an emptyDir with medium: Memory).",
    "disk_full": "Free space on the file system, or write somewhere else.",
    "too_many_files": "Raise `ulimit -n`, or torch.multiprocessing.set_sharing_strategy('file_system').",
    "too_many_processes": "Raise the limit of processes (`ulimit -u`, the cgroup's pids.max), or start fewer threads "
    "(OMP_NUM_THREADS).",
    "file_system": "Check that mount on that host (`mount`, `dmesg -T`) and its server, then start again from a "
    "checkpoint.",
    "download": "Give every node access to that address, or download before and set HF_HUB_OFFLINE=1.",
    "checkpoint_damaged": "Go back to the checkpoint before, and write checkpoints to a temporary name first.",
    "duplicate_gpu": "Start one process per GPU and call torch.cuda.set_device(LOCAL_RANK) before the process group.",
    "version_mismatch": "Install the same versions of driver, CUDA and NCCL on all nodes.",
    "unused_parameters": "Use find_unused_parameters=True, or make every parameter take part in the loss.",
    "model_differs": "Build the same model on every rank: same configuration, same seed, same code.",
    "mismatch": "Find the branch that depends on the rank or on its data.",
    "mismatch_size": "The ranks run different graphs or batches, so it is not the network. Compare what they do there.",
    "mismatch_operation": "The ranks run different code, so it is not the network. Find what depends on the rank.",
    "mismatch_dtype": "Compare the element types of both sides: autocast, or a part that was not converted.",
    "skipped": "Find the branch in which one rank leaves out a collective.",
    "unreachable": "Set NCCL_SOCKET_IFNAME (and GLOO_SOCKET_IFNAME) to the interface that all nodes share, and open "
    "the ports between them.",
    "no_interface": "Set NCCL_SOCKET_IFNAME to an interface of `ip -br addr` that all nodes share.",
    "infiniband": "Check `ibstat` and the switch's counters on both ends, or try NCCL_IB_DISABLE=1.",
    "rendezvous": "Check the node that did not join: its launcher's log, its firewall, MASTER_ADDR and MASTER_PORT.",
    "port_in_use": "Choose another MASTER_PORT (--rdzv-endpoint host:0), or end the process that still holds it.",
    "locked_memory": "Raise `ulimit -l` where the processes start (limits.conf, docker run --ulimit memlock=-1).",
    "launch_failed": "Start a plain command on that node in the same way (srun, ssh) and put right what it reports.",
    "nccl_error": "Run again with NCCL_DEBUG=WARN: NCCL then prints the cause.",
    "signal": "Check what ended the process on its host.",
    "exit": "Read that rank's own output.",
    "time_limit": "Ask for more time, or save checkpoints before the limit and resume.",
    "node_failed": "Start again without that node.",
    "preempted": "Resume from the last checkpoint.",
    "cancelled": "Check the scheduler's record for who or what ended the job.",
    "link_down": "Check the cable, the port and the switch, then start again.",
    "not_entered": "Find out what that rank did instead.",
    "all_entered": "Check the network and the GPUs of those ranks.",
    "device_stuck": "Check for XID and ECC errors on that rank's host.",
    "desync": "Find where one rank makes a collective more or less than the others.",
    "watchdog_stuck": "Take the stacks of those processes.",
    "connection_lost": "Find the rank that went first: its own log names the cause.",
}
HANGS = frozenset((
    "all_entered", "desync", "device_stuck", "mismatch", "mismatch_dtype", "mismatch_operation", "mismatch_size",
    "model_differs", "not_entered", "skipped", "watchdog_stuck",
))  # fmt: skip
"""Causes of which ranks hang; of all others a rank ends."""

_STACKS = "py-spy dump --pid PID # of every rank, while it hangs (rankscope stacks)"
_KERNEL = "dmesg -T | grep -iE 'killed process|oom|xid|mce' # on the host of that rank"
_DUMPS = "TORCH_FR_BUFFER_SIZE=2000 TORCH_NCCL_DUMP_ON_TIMEOUT=1 # in the environment of the next run"

COLLECT: Mapping[str, tuple[str, ...]] = {
    "SIGKILL": (_KERNEL, "cat /sys/fs/cgroup/memory.events # oom_kill of the job's cgroup",
                "sacct -j JOB --format=JobID,State,ExitCode,MaxRSS    |    kubectl describe pod POD"),
    "SIGSEGV": (_KERNEL, "coredumpctl gdb # or: python -X faulthandler"),
    "SIGBUS": ("df -h /dev/shm # on the host of that rank", _KERNEL),
    "signal": (_KERNEL, "python -X faulthandler"),
    "launch_failed": ("srun --nodelist NODE hostname    |    ssh NODE hostname", "scontrol show node NODE"),
    "contested": ("the logs with a time on each line: torchrun --log-dir logs --tee 3", _KERNEL),
    "exit": ("torchrun --log-dir logs --tee 3 # keeps every rank's own output",
             "wrap main() in torch.distributed.elastic.multiprocessing.errors.record # writes error_file"),
    "ray": ("ls -t /tmp/ray/session_latest/logs/worker-*.err # on the node of that worker", _KERNEL),
    "nccl_error": ("NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET # in the environment of the next run",),
    "infiniband": ("ibstat; ibqueryerrors # on both ends", _KERNEL),
    "rendezvous": ("the launcher's log of every node", "nc -vz MASTER_ADDR MASTER_PORT # from every node"),
    "unreachable": ("ip -br addr # on both hosts", "nc -vz ADDRESS PORT # from the other host"),
    "hang": (_STACKS, _DUMPS, _KERNEL),
    "connection_lost": ("the logs of all ranks", _KERNEL),
}  # fmt: skip
"""By cause or signal: exact commands, with capitals where something has to be filled in."""


def why(finding: Finding) -> str:
    """The line that proves or suggests it."""
    return f"{str(finding.evidence.get('basis', '')).rstrip('.')}."


def next_step(finding: Finding) -> str:
    """Advice; where the logs prove nothing, the first command that would settle it."""
    collect = list(finding.evidence.get("collect") or ())
    settle = f"To settle it: {collect[0]}." if collect and finding.status == "suspect" else ""
    do = DO.get(finding.cause, "")
    if finding.cause == "out_of_memory" and others_hold_it(finding.evidence):
        do = sentence(f"end or move the other processes on that device: {holders_text(finding.evidence)}")
    return " ".join(part for part in (do, settle) if part)
