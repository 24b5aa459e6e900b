"""Send each finding to a webhook, a command, and plug-ins. For teams without Prometheus.

    with finding_hook(run.manifest(), run_id="demo", events=events) as hook:
        hook.report(findings)                   # returns at once; another thread delivers

Each receives one JSON object per finding: the finding as in `analyze --format json`, the run, and the addresses of its
page and its runbook section (from `alerts.dashboard_url` and `alerts.runbook_url`; empty if not set). A command reads
it from standard input. None of them can delay watch. A finding that the webhook cannot take now (no connection, no
answer, status 5xx) is posted again, in the order of the findings, until `RETRIES_S` after it was queued. An event
reports each lost delivery, each finding beyond `at_most_per_hour` or the queue's size, and each delivery that the end
of watch cuts off. Redirects are not followed, so that findings go only to the configured address.

A plug-in is a module named by an entry point of the group `rankscope.hooks`, with a function `on_finding(report)` that
gets the same object. A call that does not return in time is ended and reported.
"""

from __future__ import annotations

import collections
import json
import math
import shlex
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from analyzers.finding import Finding
from analyzers.report.runbook_sections import explain_command
from analyzers.report.wording.links import AlertLinks, alert_links
from probes.settings.section import read
from probes.settings.sections import AlertsSettings
from probes.tape import event_kinds
from probes.tape.events import EventWriter
from probes.tape.redaction.printable import visible
from probes.tape.redaction.secrets import MIN_LITERAL_CHARS, Redactor
from store.plugins import PluginProcess, plugins
from store.readers.untrusted.http_deadline import HttpDeadline, plain_reason

__all__ = ["FindingHook", "finding_hook"]

DELIVERY_S = 10.0
"""Time limit of one delivery, in seconds."""
RETRIES_S = 300.0
"""Time in which a finding is posted again: a restart of the receiver or of a proxy takes less."""
FIRST_RETRY_S = 1.0
"""Delay of the first retry, doubled for each further one."""
GROUP = "rankscope.hooks"
_MAX_WAITING = 1000
_Deliver = Callable[[Mapping[str, Any]], None]
_SEVERITIES = ("info", "warning", "critical")


class _TryLaterError(Exception):
    """The receiver may accept the same finding later."""


@dataclass(slots=True, eq=False)
class _Delivery:
    receiver: str
    lost: str
    """Text to report if it fails or if watch ends before."""
    deliver: Callable[[], None]
    until_s: float
    """When to stop repeating it (monotonic)."""
    tries: int = 0


class FindingHook:
    """Delivers findings of at least `min_severity` that are firing, suspected, or over."""

    def __init__(
        self,
        *,
        run_id: str,
        events: EventWriter,
        webhook: str = "",
        command: str = "",
        min_severity: str = AlertsSettings().min_severity,
        at_most_per_hour: int = AlertsSettings().at_most_per_hour,
        links: AlertLinks | None = None,
        modules: Sequence[PluginProcess] = (),
    ) -> None:
        self._run_id, self._events = run_id, events
        self._webhook, self._command = webhook, shlex.split(command)
        targets: tuple[tuple[str, object, _Deliver], ...] = (
            ("webhook", self._webhook, self._post),
            ("command", self._command, self._run),
        )
        self._receivers = [(name, deliver) for name, target, deliver in targets if target]
        self._receivers += [(plugin.name, partial(_call, plugin)) for plugin in modules]
        parts = urlsplit(webhook)
        path = f"{parts.path}?{parts.query}" if parts.query else parts.path
        secrets = {webhook, path, parts.query, command, *self._command[1:]}
        self._redact = Redactor(
            tuple(sorted((v for v in secrets if len(v) >= MIN_LITERAL_CHARS), key=len, reverse=True))
        )
        self._min_severity = _SEVERITIES.index(min_severity)
        self._at_most = at_most_per_hour
        self._links = links or AlertLinks()
        self._delivered: collections.deque[float] = collections.deque()
        self._left_out = 0
        self._reported: set[tuple[object, ...]] = set()
        self._queue: list[_Delivery] = [
            _Delivery(plugin.name, "it was not imported", partial(plugin.call, "load_only"), 0) for plugin in modules
        ]
        """An entry remains while it is being delivered; the thread that removes it reports a failure."""
        self._paused: dict[str, float] = {}
        """When each receiver that failed is tried again (monotonic); others get their findings meanwhile."""
        self._ends_s = math.inf
        self._is_closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._deliver_all, daemon=True)
        self._thread.start()

    def report(self, findings: Sequence[Finding]) -> None:
        """Queue findings for delivery; never waits."""
        for finding in findings:
            key = (finding.kind, finding.attempt, finding.ranks)
            is_over = finding.status == "ok" and key in self._reported
            severity = _SEVERITIES.index(finding.severity)
            is_open = finding.status in ("fired", "suspect") and severity >= self._min_severity
            if not is_over and not is_open:
                continue
            if not self._may_deliver():
                self._drop(finding, f"more than {self._at_most} findings in an hour")
                continue
            self._reported.add(key)
            redacted = self._redact.within(finding.to_json())
            body = {"run_id": self._run_id, "finding": redacted, "left_out": self._left_out,
                    "dashboard_url": self._links.finding(self._run_id, finding),
                    "runbook_url": self._links.runbook(finding.advice),
                    "explain": explain_command(finding.advice) if finding.advice else ""}  # fmt: skip
            with self._changed:
                if len(self._queue) >= _MAX_WAITING:
                    self._drop(finding, "too many findings wait to be sent")
                    continue
                lost, until_s = f"{finding.kind} was not delivered", time.monotonic() + RETRIES_S
                self._queue += [_Delivery(to, lost, partial(deliver, body), until_s) for to, deliver in self._receivers]
                self._changed.notify()
            self._left_out = 0

    def close(self, timeout_s: float = DELIVERY_S) -> None:
        """Deliver what is queued, for at most `timeout_s`, and report the rest as lost, including a delivery in
        progress.
        """
        with self._changed:
            self._is_closing = True
            self._ends_s = time.monotonic() + timeout_s
            self._paused.clear()
            self._changed.notify()
        self._thread.join(timeout_s)
        with self._changed:
            for one in self._queue:
                self._report(one.receiver, f"{one.lost} before watch ended")
            self._queue.clear()

    def _drop(self, finding: Finding, reason: str) -> None:
        self._left_out += 1
        name = "webhook" if self._webhook else "command" if self._command else "plug-ins"
        self._report(name, f"{finding.kind} was not sent: {reason}")

    def _report(self, name: str, reason: str) -> None:
        with suppress(Exception):  # the event writer counts its errors; they must not end the deliveries
            self._events.write(event_kinds.HOOK_FAILED, hook=name, reason=reason)

    def _may_deliver(self) -> bool:
        now = time.monotonic()
        while self._delivered and now - self._delivered[0] > 3600:
            self._delivered.popleft()
        if len(self._delivered) >= self._at_most:
            return False
        self._delivered.append(now)
        return True

    def _deliver_all(self) -> None:
        while (one := self._next()) is not None:
            problem, may_succeed = "", False
            try:
                one.deliver()
            except Exception as error:  # no response of a receiver may stop further deliveries
                problem, may_succeed = type(error).__name__, isinstance(error, _TryLaterError)
                with suppress(Exception):  # str() of a foreign exception may raise, too
                    problem = self._redact(_one_line(error)) or problem
            with self._changed:
                if one not in self._queue:  # `close` has emptied the queue and reported what was not delivered
                    return
                again_s = time.monotonic() + FIRST_RETRY_S * 2**one.tries
                one.tries += 1
                if may_succeed and again_s < min(one.until_s, self._ends_s):
                    self._paused[one.receiver] = again_s
                    continue
                self._queue.remove(one)
                if problem:
                    tries = f" in {one.tries} tries" if one.tries > 1 else ""
                    self._report(one.receiver, f"{one.lost}{tries}: {problem}"[:300])

    def _next(self) -> _Delivery | None:
        """Wait for the first delivery to a receiver that is not paused; None after the last one."""
        with self._changed:
            while self._queue or not self._is_closing:
                now = time.monotonic()
                due = {one: self._paused.get(one.receiver, now) for one in self._queue}
                if ready := next((one for one, due_s in due.items() if due_s <= now), None):
                    return ready
                self._changed.wait(min(due.values()) - now if due else None)
            return None

    def _post(self, report: Mapping[str, Any]) -> None:
        body = json.dumps(report).encode()
        request = urllib.request.Request(self._webhook, data=body, headers={"Content-Type": "application/json"})
        try:
            with HttpDeadline(DELIVERY_S) as opener, opener.open(request, timeout=DELIVERY_S):
                pass  # only the status matters: the body is not read
        except OSError as error:
            if isinstance(error, urllib.error.HTTPError) and error.code < 500 and error.code not in (408, 429):
                raise
            raise _TryLaterError(plain_reason(error)) from error

    def _run(self, report: Mapping[str, Any]) -> None:
        done = subprocess.run(
            self._command,
            input=json.dumps(report).encode(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=DELIVERY_S,
            check=False,
        )
        if done.returncode:
            last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2][:200]
            raise ValueError(f"{self._command[0]}: exit code {done.returncode}: {last}")


@contextmanager
def finding_hook(manifest: Mapping[str, Any], *, run_id: str, events: EventWriter) -> Iterator[FindingHook | None]:
    """The hook for the run's configuration (section `alerts`) and installed plug-ins; None without either."""
    settings = read(AlertsSettings, manifest)
    modules = plugins(GROUP, "watch.exporting.hook_child")
    if not settings.webhook and not settings.command and not modules:
        yield None
        return
    try:
        hook = FindingHook(
            run_id=run_id,
            events=events,
            webhook=settings.webhook,
            command=settings.command,
            min_severity=settings.min_severity,
            at_most_per_hour=settings.at_most_per_hour,
            links=alert_links(manifest),
            modules=modules,
        )
    except ValueError as error:  # run.json is of an older version or was edited: the trainer accepts no such values
        events.write(event_kinds.HOOK_FAILED, hook="alerts", reason=_one_line(error))
        yield None
        return
    try:
        yield hook
    finally:
        hook.close()


def _call(plugin: PluginProcess, report: Mapping[str, Any]) -> None:
    """Call `on_finding` in the plug-in's process. Raises PluginError."""
    plugin.call("on_finding", dict(report), limit=DELIVERY_S)


def _one_line(error: Exception) -> str:
    return visible(" ".join(plain_reason(error).split()))[:2000]
