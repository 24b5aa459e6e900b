"""Causes that the kernel states about hosts and devices: a GPU's XID, the OOM killer, a lost file system."""

from __future__ import annotations

import re
from collections.abc import Iterator

from analyzers.causes import COLLECT
from analyzers.deaths.logged.logged_schedulers import host_of, outside_causes, went_on
from analyzers.health.xids import xid_table
from analyzers.logs.candidate import Candidate, from_lines, host_in, ranks_of, who
from analyzers.logs.exceptions import relevance
from analyzers.logs.log_events import LogBook, LogLine
from analyzers.logs.policy import LogPolicy
from analyzers.logs.wording import DO_OF_LINE
from analyzers.wording import sentence

__all__ = ["ends_no_device", "host_candidates", "when_of"]

PROGRAM_XIDS = (13, 31, 43, 69)
"""Xids that the program itself causes."""
_GRAVEST_FIRST = ("replace", "reboot", "reset_gpu", "check_mechanicals", "update_driver", "check_app", "restart_app")
"""What NVIDIA advises after an Xid; of several Xids, the advice for the gravest is given."""
FOLLOWING_XIDS = (45, 66)
"""Xids that only follow another one, or the end of a process."""
_END_ROLES = ("root", "victim", "hang", "death", "nccl", "exception", "outside")
_OFF_BUS_TEXTS = ("off the bus", "NVRM: The NVIDIA GPU", "GPU is lost")
_PYTHON = re.compile(r"python[\d.]*|pt_\w+")
"""Names of a training process in the kernel's log: Python, or a thread of torch."""
_NONFATAL = re.compile(r"^\w+ Nonfatal\b")
"""Start of the text of an NVLink error from which the link recovered (Xids 144 to 150)."""
_PCI = re.compile(r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}:[0-9a-f]{2})(?:\.\d)?")
_OF_DEVICE = re.compile(r"\b(?:xid|gpu|ecc|nvlink|nvidia|nvml|dcgm|off the bus|row.?remap)", re.IGNORECASE)


def host_candidates(book: LogBook) -> list[Candidate]:
    """Candidates for every cause that lines state about hosts, devices and the job's allocation."""
    return [
        *_devices(book),
        *_switches(book),
        *_tested(book),
        *_memory(book),
        *outside_causes(book),
        *_drained(book),
        *_links(book),
        *_file_systems(book),
        *_troubles(book),
        *_crashed(book),
    ]


def _devices(book: LogBook) -> Iterator[Candidate]:
    """Candidates for XIDs and lost GPUs. Lines about one GPU are one candidate, even from several sources."""
    by_device: dict[tuple[str | None, str], list[LogLine]] = {}
    for entry in book.of("xid", "gpu_lost"):
        if entry.kind == "gpu_lost" or not (_xid(entry) in FOLLOWING_XIDS or ends_no_device(entry)):
            by_device.setdefault((entry.host, _address(entry.text("bus"))), []).append(entry)
    named = {(entry.source, entry.line) for entry in book.of("gpu_lost") if entry.text("bus")}
    for (host, _), device_lines in by_device.items():
        bus = device_lines[0].text("bus")
        # A driver prints several lines about a lost device, and only one of them names the device: the first of
        # three with NVIDIA, a line after the cause with AMD. Nearby lines that name no device belong to it.
        if not bus:
            device_lines = [entry for entry in device_lines if not any(
                (entry.source, entry.line - apart) in named for apart in range(-4, 5))]  # fmt: skip
        lines = [entry for entry in device_lines if when_of(entry, book) != "another time"
                 and not went_on(entry, book)]  # fmt: skip
        if not lines:
            continue
        # DCGM's gauge shows the last XID, even one from an earlier job.
        is_gauge = all(entry.text("gauge") for entry in lines)
        is_sure = not is_gauge and any(when_of(entry, book) == "the job's" for entry in lines)
        codes = list(dict.fromkeys(code for entry in lines if (code := _xid(entry)) is not None))
        ranks = ranks_of(lines)
        table = xid_table()["xid"]
        known = (table[str(code)]["meaning"] for code in codes if str(code) in table)
        meaning = next(known, lines[0].text("text")[:80] or lines[0].message[:80])
        where = f"GPU {bus}" if bus else "a GPU"
        where += f" of {host}" if host else ""
        errors = [entry for entry in book.of("pcie_error") if entry.host == host]
        before = f" after {len(errors)} PCIe error{'s' * (len(errors) > 1)}" if errors else ""
        if codes:
            actions = {table[str(code)]["action"] for code in codes if str(code) in table}
            gravest = next((action for action in _GRAVEST_FIRST if action in actions), "")
            is_lost = gravest in ("replace", "reboot", "reset_gpu")
            advice = sentence(xid_table()["action"][gravest]) if gravest else None
            event = "lost its GPU" if is_lost else "met an error of its GPU"
            what = f"{who(ranks, f'the rank on {where}')} {event}: the kernel reports XID "
            if is_gauge:
                what = f"{where} may have failed: its last error, at an unknown time, is XID "
            what += f"{', '.join(map(str, codes))} ({meaning}){before}"
        else:
            state, do = "does not answer its driver", "device_unreachable"
            if any("uncorrectable" in entry.message for entry in lines):
                state, do = "reports an uncorrectable hardware error", "device_uncorrectable"
            elif any("NOT usable" in entry.message for entry in lines):
                state, do = "could not be started by its driver", "device_not_started"
                where = where.replace("GPU", "device", 1)
            elif any(text in entry.message for entry in lines for text in _OFF_BUS_TEXTS):
                state = "fell off the bus"
            what = f"{where[:1].upper()}{where[1:]} {state}{before}"
            what += f": {who(ranks)} ran on it" if ranks else ""
            advice = DO_OF_LINE[do]
        yield from_lines(
            "device_error",
            lines,
            rank_class="host",
            ranks=ranks,
            what=what,
            why=f"{where}, {lines[0].place}: {len(lines)} such line{'s' * (len(lines) > 1)}",
            is_proven=is_sure,
            evidence={
                "xids": codes,
                "device": bus or None,
                "host": host,
                "pcie_errors": len(errors) or None,
                "do": advice,
            },
            collect=()
            if is_sure
            else ("dmesg -T | grep -i xid # on that host: the time of the error",)
            if is_gauge
            else ("date; date -u # on that host: the kernel log and the job's log are an hour or more apart",),
        )


def _address(bus: str) -> str:
    """Normalised PCI address: nvidia-smi prints 00000000:4E:00.0, the kernel 0000:4e:00."""
    match = _PCI.fullmatch(bus.lower())
    return f"{int(match[1] or '0', 16):04x}:{match[2]}" if match else bus


def _switches(book: LogBook) -> Iterator[Candidate]:
    """Fatal errors of NVSwitches: every GPU behind one loses its NVLinks."""
    lines = [entry for entry in book.of("nvswitch_fatal") if when_of(entry, book) != "another time"]
    if lines:
        first = lines[0]
        host = host_in(lines)
        yield from_lines(
            "device_error", lines,
            rank_class="host",
            what=f"An NVSwitch{f' of {host}' if host else ''} reported a fatal error: SXid {first.text('sxid')}, "
            f"{first.text('text')[:80]}",
            why=first.quoted,
            evidence={"host": host, "device": first.text("bus"), "do": "Restart the fabric manager of that host and "
                      "reset its GPUs together; drain the node if the error comes back."},
        )  # fmt: skip


def _tested(book: LogBook) -> Iterator[Candidate]:
    """Candidates for failed DCGM tests of devices, and for devices that a tool reports as unhealthy."""
    lines = [entry for entry in book.of("device_check_failed") if not entry.text("what")]
    for entry in book.of("device_check_failed"):
        if what := entry.text("what"):
            yield from_lines(
                "device_error",
                [entry],
                rank_class="host",
                is_proven=False,
                what=what.replace("{of}", f" of {entry.host}" if entry.host else ""),
                why=entry.quoted,
                evidence={"devices": [entry.text("devices")], "host": entry.host, "do": entry.text("do")},
            )
    if not lines:
        return
    devices = list(dict.fromkeys(number for entry in lines for number in entry.text("devices").split(", ") if number))
    host = host_in(lines)
    where = f"GPU{'s' * (len(devices) > 1)} {', '.join(devices)}" if devices else "a GPU"
    where += f" of {host}" if host else ""
    tests = ", ".join(dict.fromkeys(entry.text("test") for entry in lines))
    yield from_lines(
        "device_error",
        lines,
        rank_class="host",
        what=f"{where[:1].upper()}{where[1:]} failed a DCGM test ({tests}): {lines[0].text('text')[:160].rstrip('. ')}",
        evidence={"devices": devices or None, "host": host, "tests": tests},
    )


def _drained(book: LogBook) -> Iterator[Candidate]:
    """Candidate for drained Slurm nodes, with the reason. It may have to do with the end of this job, or be older."""
    lines = [entry for entry in book.of("node_drained") if entry.text("reason")]
    if lines:
        first = lines[0]
        reason, is_device = first.text("reason"), bool(_OF_DEVICE.search(first.text("reason")))
        host = host_of(first)
        yield from_lines(
            "device_error" if is_device else "node_failed",
            lines,
            rank_class="weak",
            what=f"Slurm took {host or 'a node'} out of service: {reason.rstrip('. ')}",
            why=first.quoted,
            is_proven=False,
            severity="warning",
            evidence={
                "host": host or None,
                "reason": reason,
                "do": "Check whether the job used that node at that time (sacct), and exclude the node until the "
                "cause is fixed.",
            },
            collect=("sacct -j JOB --format=JobID,State%20,ExitCode,NodeList%40,End", "dmesg -T # on that node"),
        )


def _xid(entry: LogLine) -> int | None:
    """The Xid code, or the code that the line names as its cause."""
    return entry.number("previous") or entry.number("xid")


def ends_no_device(entry: LogLine) -> bool:
    """Return True for an Xid that the program caused, the device has dealt with, or that is nonfatal by its text."""
    about = xid_table()["xid"].get(str(_xid(entry)), {})
    is_handled = about.get("action") == "watch" or _NONFATAL.search(entry.text("text")) is not None
    return _xid(entry) in PROGRAM_XIDS or is_handled


def when_of(entry: LogLine, book: LogBook, policy: LogPolicy | None = None) -> str:
    """Whether a line of a kernel log is from the time of the job: "the job's", "another time", or "unsure", if the
    clocks may be of different time zones. A line that names a process of the job is the job's.
    """
    policy = policy or LogPolicy()
    if entry.pid is not None and any(one.pid == entry.pid and one.rank is not None for one in book.of("nccl_comm")):
        return "the job's"
    times = [one.wall_ns for one, rule in book.of_role("exception", "death", "hang", "victim", "root", "context")
             if one.wall_ns is not None]  # fmt: skip
    if entry.wall_ns is None or not times:
        return "the job's"
    apart_s = max(min(times) - entry.wall_ns, entry.wall_ns - max(times)) / 1e9
    if apart_s <= policy.kernel_slack_s:
        return "the job's"
    return "another time" if apart_s > policy.kernel_other_s else "unsure"


def _memory(book: LogBook) -> Iterator[Candidate]:
    lines = [
        entry
        for entry in book.of("oom_kill", "slurm_oom", "kubernetes_oom", "ray_memory")
        if (entry.kind != "oom_kill" or when_of(entry, book) != "another time") and not went_on(entry, book)
    ]
    if not lines:
        return
    ranks = ranks_of(lines)
    ranks = ranks or tuple(sorted(_killed_ranks(book)))
    host = host_in(lines)
    rss_kb = max((entry.number("rss_kb") or 0 for entry in lines), default=0)
    names = [f"{entry.text('name')} ({entry.number('pid')})" for entry in lines if entry.text("name")]
    in_pod = bool(host) and any(f"pod/{host}" in entry.message for entry in lines)
    in_cgroup = any(entry.text("cgroup") or "emory cgroup" in entry.message or "CONSTRAINT_MEMCG" in entry.message
                    for entry in lines)  # fmt: skip
    held = f" at {rss_kb / 1048576:.1f} GiB of resident memory" if rss_kb else ""
    # A kernel log reaches back for days. A process that no other line mentions may belong to another job.
    is_jobs = bool(ranks) or any(entry.kind != "oom_kill" for entry in lines) or _was_killed(book)
    yield from_lines(
        "host_out_of_memory",
        lines,
        rank_class="host" if is_jobs else "victim",
        is_proven=is_jobs,
        ranks=ranks,
        what=f"{who(ranks, f'process {names[0]}' if names else 'a process')} was killed because "
        + (
            f"its cgroup{f' on {host}' if host else ''} reached its memory limit"
            if in_cgroup
            else f"the {'pod' if in_pod else 'host'}{f' {host}' if host else ''} or its cgroup ran out of memory"
        )
        + held,
        evidence={
            "host": host,
            "resident_bytes": rss_kb * 1024 or None,
            "processes": names[:8] or None,
            "cgroup": next((entry.text("cgroup") for entry in lines if entry.text("cgroup")), None),
        },
    )


def _was_killed(book: LogBook) -> bool:
    """Return True if a launcher reports SIGKILL, or only the kernel wrote lines."""
    deaths = [entry for entry, _ in book.of_role("death")]
    killed = any(entry.number("exitcode") in (-9, 137) or entry.text("signal") == "SIGKILL" for entry in deaths)
    return killed or not any(book.of_role("exception", "death", "hang", "root", "outside"))


def _killed_ranks(book: LogBook) -> set[int]:
    killed = {
        entry.rank
        for entry in book.of("root_failure", "worker_failed", "process_terminated")
        if entry.number("exitcode") in (-9, 137) or entry.text("signal") == "SIGKILL"
    }
    return {rank for rank in killed if rank is not None}


def _links(book: LogBook) -> Iterator[Candidate]:
    lines = [entry for entry in book.of("link_down") if not went_on(entry, book)]
    # Such a line alone does not explain a rank's end, because every host logs some when it boots (`kernel_warnings`).
    if lines and any(relevance(entry, book) != "survived" for entry, _ in book.of_role(*_END_ROLES)):
        host, interface = lines[0].host, lines[0].text("interface")
        yield from_lines(
            "link_down",
            lines,
            rank_class="network",
            what=f"The network link {interface} of {host or 'a host'} went down",
            evidence={"host": host, "interface": interface},
        )


def _file_systems(book: LogBook) -> Iterator[Candidate]:
    """Candidate for a file server or disk that the kernel reports as failing: processes wait for it and log nothing."""
    lines = [entry for entry in book.of("file_system") if when_of(entry, book) != "another time"]
    back = {entry.text("server"): book.position(entry) for entry in lines if entry.text("state") == "OK"}
    failing = [entry for entry in lines if entry.text("state") != "OK"
               and book.position(entry) > back.get(entry.text("server"), -1)]  # fmt: skip
    if failing:
        server, host = failing[0].text("server"), failing[0].host
        where = f" on {host}" if host else ""
        yield from_lines(
            "file_system",
            failing[:20],
            rank_class="weak",
            what=f"The NFS server {server} does not answer{where}"
            if server
            else f"The kernel reports an error of a file system{where}: {failing[0].text('text')[:120].rstrip('. ')}",
            is_proven=False,
            evidence={"host": host, "server": server or None},
            collect=("mount | grep nfs; nfsstat -m # on that host", "dmesg -T | grep -iE 'nfs|blocked for more'"),
        )


def _troubles(book: LogBook) -> Iterator[Candidate]:
    """Candidates for a kernel lockup or uncorrected memory error, which may be why a process died or hung."""
    lines = [entry for entry in book.of("kernel_trouble") if when_of(entry, book) != "another time"]
    if lines:
        host = host_in(lines)
        yield from_lines(
            "node_failed",
            lines[:20],
            rank_class="weak",
            what=f"The kernel{f' of {host}' if host else ''} reports: {lines[0].text('text')[:120].rstrip('. ')}",
            is_proven=False,
            evidence={"host": host},
            collect=("ipmitool sel list # of that host", "ras-mc-ctl --errors # of that host"),
        )


def _crashed(book: LogBook) -> Iterator[Candidate]:
    """Candidate for a Python process that crashed, if only the kernel has recorded the crash."""
    lines = [entry for entry in book.of("segfault") if _PYTHON.fullmatch(entry.text("name"))
             and when_of(entry, book) != "another time"]  # fmt: skip
    if lines and not any(book.of("finished", "process_finished")):  # a kernel log also has processes of other jobs
        first, ranks, host = lines[0], ranks_of(lines), host_in(lines)
        process = f"process {first.text('name')} ({first.pid}){f' on {host}' if host else ''}"
        yield from_lines(
            "signal",
            lines[:20],
            rank_class="weak",
            ranks=ranks,
            what=f"{who(ranks, process)} died of SIGSEGV in {first.text('library')}, as the kernel reports",
            is_proven=bool(ranks),
            evidence={"host": host, "signal": "SIGSEGV", "library": first.text("library")},
            collect=COLLECT["signal"],
        )
