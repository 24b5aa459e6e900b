"""Warnings in a host's kernel log that no death explains: XIDs, links, heat, blocked tasks.

    found += kernel_warnings(book, is_finished=outcome.ended == "finished")

These lines are reported only if no line names a cause, and never as the end of a rank. If the job continued or finished
after such a line, the finding is only advice.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from analyzers.deaths.logged.logged_hosts import ends_no_device, when_of
from analyzers.deaths.logged.logged_schedulers import went_on
from analyzers.finding import Finding
from analyzers.health.counters import health_warning
from analyzers.health.xids import xid_table
from analyzers.logs.log_events import LogBook, LogLine, quotes
from analyzers.wording import counted

__all__ = ["kernel_warnings"]

_CAUSE_OF_SLOWDOWN = {"thermal": "thermal", "power": "power"}
"""{word in the reason that the driver gives for a slowdown: cause}. Any other reason means `hardware`."""


def kernel_warnings(book: LogBook, *, is_finished: bool) -> list[Finding]:
    """Findings of the same kinds as device and host readings give, one per device or host."""
    found = [*_xids(book), *_links(book), *_slowed_gpus(book), *_heat(book), *_blocked(book)]
    return [_as_remark(one) if is_finished or one.evidence.get("is_over") else one for one in found]


def _as_remark(one: Finding) -> Finding:
    return replace(one, status="advice", severity="info")


def _lines(book: LogBook, *kinds: str) -> dict[str | None, list[LogLine]]:
    """Kernel events of each host during the job."""
    found: dict[str | None, list[LogLine]] = defaultdict(list)
    for entry in book.of(*kinds):
        if when_of(entry, book) != "another time":
            # In "ib0: link down", a device is named in the place of the host.
            is_device = entry.host in (entry.text("interface"), f"CPU{entry.text('cpu')}")
            found[None if is_device else entry.host].append(replace(entry, host=None) if is_device else entry)
    return found


def _finding(kind: str, cause: str, lines: Sequence[LogLine], summary: str, book: LogBook, **evidence: Any) -> Finding:
    of = f" of {lines[0].host}" if lines[0].host else ""
    return health_warning(
        kind,
        cause,
        summary.format(of=of),
        {
            "node": lines[0].host or "",
            "basis": lines[0].quoted,
            "lines": quotes(lines),
            **{name: value for name, value in evidence.items() if value is not None},
            **({"is_over": True} if all(went_on(entry, book) for entry in lines) else {}),
        },
    )


def _xids(book: LogBook) -> Iterator[Finding]:
    """XIDs that a program causes, or that the device has dealt with. If a rank died from one, its own log shows it."""
    table = xid_table()
    for lines in _lines(book, "xid").values():
        by_code: dict[tuple[int, str], list[LogLine]] = defaultdict(list)
        for entry in lines:
            if (code := entry.number("xid")) is not None and ends_no_device(entry):
                by_code[code, entry.text("bus")].append(entry)
        for (code, bus), of_code in by_code.items():
            about = table["xid"][str(code)]
            first = of_code[0]
            name = first.text("name")
            process = f", process {name or 'without a name'} ({first.pid})" if first.pid is not None else ""
            times = f", {len(of_code)} times" if len(of_code) > 1 else ""
            meaning = about["meaning"].replace(";", ",").rstrip(".")
            what = f"XID {code} on GPU {bus}{{of}}{process}{times}: {meaning}."
            if first.text("gauge"):
                what = f"The last XID of GPU {bus}{{of}}, at an unknown time, is {code}: {meaning}."
            yield _finding(
                "xid", about["class"], of_code, what, book,
                xid=code, device=bus, count=len(of_code), message=first.message[:2000],
                action=table["action"][about["action"]],
            )  # fmt: skip


def _links(book: LogBook) -> Iterator[Finding]:
    for lines in _lines(book, "link_down", "link_up", "port_fault").values():
        by_port: dict[str, list[LogLine]] = defaultdict(list)
        for entry in lines:
            by_port[entry.text("interface")].append(entry)
        for port, of_port in by_port.items():
            downs = [entry for entry in of_port if entry.kind != "link_up"]
            if not downs:
                continue
            times = f" {len(downs)} times" if len(downs) > 1 else ""
            is_back = of_port[-1].kind == "link_up"
            after = " and came back" if is_back else ""
            where = f"{port or 'a port'}{{of}}"
            text = next((entry.text("text") for entry in downs if entry.kind == "port_fault"), "")
            what = f"The link {where} went down{times}{after}."
            if text:
                what = f"Port {where} reports a fault{times}: {text.removeprefix('[error]').lstrip(': ')}."
            found = _finding("link_errors", "infiniband_down", downs, what.replace("..", "."), book, device=port)
            yield _as_remark(found) if is_back else found  # every host writes such lines when it boots


def _slowed_gpus(book: LogBook) -> Iterator[Finding]:
    for lines in _lines(book, "gpu_slowed").values():
        by_device: dict[str, list[LogLine]] = defaultdict(list)
        for entry in lines:
            by_device[entry.text("gpu")].append(entry)
        for device, of_device in by_device.items():
            reasons = list(dict.fromkeys(entry.text("reason") for entry in of_device))
            words = " ".join(reasons).lower()
            cause = next((cause for word, cause in _CAUSE_OF_SLOWDOWN.items() if word in words), "hardware")
            lines_text = counted(len(of_device), "line")
            what = f"{device or 'A GPU'}{{of}} was slowed down: {', '.join(reasons)}, in {lines_text}."
            yield _finding("gpu_throttled", cause, of_device, what[:1].upper() + what[1:], book, device=device or None)


def _heat(book: LogBook) -> Iterator[Finding]:
    for lines in _lines(book, "cpu_throttled").values():
        cpus = len({entry.text("cpu") for entry in lines})
        events = max((entry.number("events") or 0 for entry in lines), default=0)
        so_far = f", up to {events:,} times each since boot" if events else ""
        what = f"The kernel{{of}} throttled {cpus} CPU{'s' * (cpus != 1)} because of heat{so_far}."
        yield _finding("host_pressure", "heat", lines, what, book, device="host", events=events or None)


def _blocked(book: LogBook) -> Iterator[Finding]:
    for lines in _lines(book, "task_blocked").values():
        tasks = list(dict.fromkeys(f"{entry.text('name')} ({entry.number('pid')})" for entry in lines))
        longest = max(entry.number("seconds") or 0 for entry in lines)
        more = f" and {len(tasks) - 3} more" if len(tasks) > 3 else ""
        what = (
            f"The kernel{{of}} reports {', '.join(tasks[:3])}{more} blocked for more than {longest} s: in "
            "uninterruptible sleep, usually waiting for a disk, a network file system or a driver."
        )
        yield _finding("host_pressure", "blocked", lines, what, book, device="host", processes=tasks[:8])
