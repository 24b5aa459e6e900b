"""Findings that are told to a webhook and to a command, real ones both."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from analyzers.finding import Finding
from probes.tape.events import EventWriter, read_events
from probes.tape.rundir import NODE_RANK
from tests.ports import free_port
from tests.waiting import wait_for
from watch.exporting.webhook import FindingHook, finding_hook


def finding(status: str = "fired", severity: str = "warning", rank: int = 3) -> Finding:
    return Finding(analyzer="straggler", kind="straggler", severity=severity, status=status, ranks=(rank,),
                   summary="rank 3 is slow", advice="straggler-compute", cause="data", attempt=0, first_step=60)  # type: ignore[arg-type]  # fmt: skip


class Receiver:
    """A web server that keeps what is posted, and answers as slowly and badly as it is told."""

    def __init__(self, port: int = 0) -> None:
        self.heard: list[dict[str, Any]] = []
        self.holds = threading.Event()  # requests wait for `released`
        self.released = threading.Event()
        self.answered = 0
        self.code = 200
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                receiver.heard.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                if receiver.holds.is_set():
                    receiver.released.wait(60)
                receiver.answered += 1
                self.send_response(receiver.code)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                """Quiet."""

        self.server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}/hook"


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    found = Receiver()
    yield found
    found.released.set()
    found.server.shutdown()
    found.server.server_close()


@pytest.fixture
def events(tmp_path: Path) -> EventWriter:
    return EventWriter(tmp_path / "events.jsonl", attempt=0, rank=NODE_RANK)


def failures(events: EventWriter) -> list[dict[str, Any]]:
    return [event for event in read_events(events.path)[0] if event["kind"] == "hook_failed"]


def test_a_finding_and_its_end_are_posted(receiver: Receiver, events: EventWriter) -> None:
    section = {"webhook": receiver.url, "command": "", "min_severity": "warning", "at_most_per_hour": 60,
               "dashboard_url": "https://ml.example.org/", "runbook_url": ""}  # fmt: skip
    with finding_hook({"config": {"alerts": section}}, run_id="demo", events=events) as hook:
        assert hook is not None
        hook.report([finding("ok", "info", rank=1)])  # the end of a finding that was not reported
        hook.report([finding(), finding("fired", "info"), finding("insufficient_data"), finding("advice")])
        hook.report([finding("ok", "info")])
    assert [(told["run_id"], told["finding"]["status"]) for told in receiver.heard] == [
        ("demo", "fired"),
        ("demo", "ok"),
    ]
    assert receiver.heard[0]["finding"]["ranks"] == [3]
    assert receiver.heard[0]["dashboard_url"].startswith("https://ml.example.org/findings?run=demo&finding=")
    anchor = receiver.heard[0]["finding"]["advice"]
    assert receiver.heard[0]["runbook_url"] == f"https://ml.example.org/runbook?section={anchor}"
    assert anchor == "straggler-compute"
    assert receiver.heard[0]["explain"] == f"rankscope explain {anchor}"
    assert failures(events) == []


def test_without_an_address_there_is_no_hook(events: EventWriter) -> None:
    with finding_hook({"config": {}}, run_id="demo", events=events) as hook:
        assert hook is None


def test_a_finding_is_passed_to_a_command_without_a_shell(tmp_path: Path, events: EventWriter) -> None:
    out = tmp_path / "out.json"
    script = tmp_path / "note.py"
    script.write_text("import sys; open(sys.argv[1], 'a').write(sys.stdin.read() + '\\n'); print(sys.argv[2:])")
    hook = FindingHook(
        run_id="$(touch x)", events=events, command=f"{sys.executable} {script} {out} '; touch {tmp_path}/y'"
    )
    hook.report([finding()])
    hook.close()
    assert json.loads(out.read_text())["run_id"] == "$(touch x)"
    assert not (tmp_path / "y").exists()


def test_a_slow_receiver_delays_nothing(receiver: Receiver, events: EventWriter) -> None:
    receiver.holds.set()
    hook = FindingHook(run_id="demo", events=events, webhook=receiver.url)
    hook.report([finding(rank=rank) for rank in range(10)])
    hook.close(timeout_s=0.1)
    assert receiver.answered == 0, "neither waited for an answer"


def test_failed_deliveries_are_reported(receiver: Receiver, events: EventWriter) -> None:
    receiver.code = 404
    hook = FindingHook(run_id="demo", events=events, webhook=receiver.url, command="/no/such/program")
    hook.report([finding()])
    hook.close()
    assert [(event["hook"], event["reason"]) for event in failures(events)] == [
        ("webhook", "straggler was not delivered: Not Found"),
        ("command", "straggler was not delivered: No such file or directory"),
    ]
    assert len(receiver.heard) == 1, "an answer that will not change is not asked for again"


def test_a_finding_is_posted_again_until_the_receiver_takes_it(
    receiver: Receiver, events: EventWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The findings keep their order; the command does not wait for the webhook."""
    monkeypatch.setattr("watch.exporting.webhook.FIRST_RETRY_S", 0.01)
    receiver.code = 503
    out = tmp_path / "out.json"
    script = tmp_path / "note.py"
    script.write_text("import sys; open(sys.argv[1], 'a').write(sys.stdin.read() + '\\n')")
    command = f"{sys.executable} {script} {out}"
    hook = FindingHook(run_id="demo", events=events, webhook=receiver.url, command=command)
    hook.report([finding(rank=1), finding(rank=2)])
    wait_for(lambda: out.exists() and out.read_text().count("\n") == 2, "both findings at the command")
    wait_for(lambda: len(receiver.heard) >= 3, "repeated posts")
    assert {tuple(told["finding"]["ranks"]) for told in receiver.heard} == {(1,)}
    receiver.code = 200
    hook.close()
    assert [told["finding"]["ranks"] for told in receiver.heard[-2:]] == [[1], [2]]
    assert failures(events) == []


def test_a_finding_reaches_a_receiver_that_starts_later(events: EventWriter) -> None:
    port = free_port()
    hook = FindingHook(run_id="demo", events=events, webhook=f"http://127.0.0.1:{port}/hook")
    hook.report([finding()])
    wait_for(lambda: hook._paused, "a refused connection")
    receiver = Receiver(port)
    hook.close(timeout_s=100)  # tried again at once
    receiver.server.shutdown()
    receiver.server.server_close()
    assert [told["finding"]["ranks"] for told in receiver.heard] == [[3]]
    assert failures(events) == []


def test_the_reason_of_a_loss_is_in_words(events: EventWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("watch.exporting.webhook.RETRIES_S", 0)
    hook = FindingHook(run_id="demo", events=events, webhook=f"http://127.0.0.1:{free_port()}/hook")
    hook.report([finding()])
    hook.close()
    assert [event["reason"] for event in failures(events)] == ["straggler was not delivered: Connection refused"]


def test_a_finding_that_no_retry_delivers_is_reported_as_lost(
    receiver: Receiver, events: EventWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("watch.exporting.webhook.FIRST_RETRY_S", 0.001)
    monkeypatch.setattr("watch.exporting.webhook.RETRIES_S", 0.5)
    receiver.code = 500
    hook = FindingHook(run_id="demo", events=events, webhook=receiver.url)
    hook.report([finding()])
    wait_for(lambda: failures(events), "the event")
    hook.close()
    (lost,) = failures(events)
    tries = len(receiver.heard)
    assert lost["reason"] == f"straggler was not delivered in {tries} tries: Internal Server Error"
    assert tries > 1


def test_a_flood_is_counted(receiver: Receiver, events: EventWriter) -> None:
    hook = FindingHook(run_id="demo", events=events, webhook=receiver.url, at_most_per_hour=3)
    hook.report([finding(rank=rank) for rank in range(10)])
    hook._delivered.clear()  # an hour later
    hook.report([finding(rank=11)])
    hook.close()
    assert [told["left_out"] for told in receiver.heard] == [0, 0, 0, 7]


def test_an_invalid_command_line_is_an_event(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    events = EventWriter(path, attempt=0, rank=NODE_RANK)
    manifest = {"config": {"alerts": {"command": "mail 'ops"}}}
    with finding_hook(manifest, run_id="demo", events=events) as hook:
        assert hook is None
    assert [event["kind"] for event in read_events(path)[0]] == ["hook_failed"]


OK = b"HTTP/1.1 200 OK\r\n"
HOSTILE_ANSWERS = {
    "nothing": b"",
    "garbage": b"garbage\r\n\r\n",
    "a byte": b"\xff",
    "zeros": bytes(5_000),
    "ssh": b"SSH-2.0-x\r\n",
    "ftp": b"220 ready\r\n",
    "tls": b"\x16\x03\x01\x02\x00\x01",
    "ends early": b"HTTP/1.1 20",
    "html": b"<html></html>",
    "no reason": b"HTTP/1.1 500\r\n\r\n",
    "code 999": b"HTTP/1.1 999 \xff\r\n\r\n",
    "code 0": b"HTTP/1.1 000 x\r\n\r\n",
    "code of five digits": b"HTTP/1.1 20000 OK\r\n\r\n",
    "negative code": b"HTTP/1.1 -200 OK\r\n\r\n",
    "version 9": b"HTTP/9.9 200 OK\r\n\r\n",
    "version 0.9": b"HTTP/0.9 200 OK\r\n\r\n",
    "echo": b"POST / HTTP/1.1\r\n\r\n",
    "long status line": b"HTTP/1.1 200 " + b"x" * 200_000 + b"\r\n\r\n",
    "only line ends": b"\r\n" * 2_000,
    "terminal title": b"HTTP/1.1 500 \x1b]0;owned\x07\r\n\r\n",
    "right to left": "HTTP/1.1 500 \u202e\r\n\r\n".encode(),
    "many headers": OK + b"A: b\r\n" * 5_000 + b"\r\n",
    "long header": OK + b"A: " + b"b" * 200_000 + b"\r\n\r\n",
    "header without a colon": OK + b"nothing\r\n\r\n",
    "folded header": OK + b"A: b\r\n \tc\r\n\r\n",
    "zero in a header": OK + b"A\0: b\r\n\r\n",
    "length -5": OK + b"Content-Length: -5\r\n\r\n",
    "length of text": OK + b"Content-Length: x\r\n\r\n",
    "length of a terabyte": OK + b"Content-Length: 1099511627776\r\n\r\n",
    "two lengths": OK + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nab",
    "chunk of -1": OK + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n",
    "chunk of exabytes": OK + b"Transfer-Encoding: chunked\r\n\r\nfffffffffffffff\r\n",
    "gzip bomb": OK + b"Content-Encoding: gzip\r\n\r\n" + b"\x1f\x8b" * 5_000,
    "continue": b"HTTP/1.1 100 Continue\r\n\r\n" * 200,
    "upgrade": b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n\r\n",
    "login": b"HTTP/1.1 401 x\r\nWWW-Authenticate: Basic\r\n\r\n",
    "proxy login": b"HTTP/1.1 407 x\r\nProxy-Authenticate: Basic\r\n\r\n",
    "cookie": OK + b"Set-Cookie: a=b\r\n\r\n",
    **{f"redirect {code}": b"HTTP/1.1 %d x\r\nLocation: {url}\r\n\r\n" % code for code in (301, 302, 303, 307, 308)},
    "redirect to a file": b"HTTP/1.1 302 x\r\nLocation: file:///etc/passwd\r\n\r\n",
    "drip": b"drip",
    "drip of headers": OK,
}


@pytest.mark.parametrize("name", HOSTILE_ANSWERS)
def test_no_response_ends_or_redirects_the_deliveries(
    name: str, receiver: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = HOSTILE_ANSWERS[name].replace(b"{url}", receiver.url.encode())
    path, served, over = tmp_path / "events.jsonl", threading.Event(), threading.Event()
    drips = name.startswith("drip")
    monkeypatch.setattr("watch.exporting.webhook.RETRIES_S", 0)
    if drips:
        monkeypatch.setattr("watch.exporting.webhook.DELIVERY_S", 0.3)
    hostile = socket.create_server(("127.0.0.1", 0))

    def drip(connection: socket.socket) -> None:
        while not over.wait(0.02):  # each byte well within the timeout
            connection.sendall(b"A")

    def answers() -> None:
        for _ in range(2):
            connection, _ = hostile.accept()
            with contextlib.suppress(OSError), connection:
                connection.recv(1 << 16)
                connection.sendall(answer)
                if drips:
                    drip(connection)
        served.set()

    threading.Thread(target=answers, daemon=True).start()
    events = EventWriter(path, attempt=0, rank=NODE_RANK)
    hook = FindingHook(run_id="demo", events=events, webhook=f"http://127.0.0.1:{hostile.getsockname()[1]}/")
    hook.report([finding(rank=1), finding(rank=2)])
    assert served.wait(100), "the second finding is delivered too"
    hook.close()
    over.set()
    hostile.close()
    assert receiver.heard == [], "no redirect is followed"
    lost = [event for event in read_events(path)[0] if event["kind"] == "hook_failed"] if path.exists() else []
    assert len(lost) in (0, 2)
    if not answer.startswith(OK) or drips:
        assert len(lost) == 2 or name in ("version 9", "version 0.9", "code of five digits"), lost
    assert all(event["reason"].isprintable() and len(event["reason"]) <= 300 for event in lost)


@pytest.mark.parametrize("reason", ["/services/T0/topsecret", "{url}", "gone: {path}?token=topsecret"])
def test_a_failure_does_not_repeat_the_address(reason: str, tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    echo = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{echo.getsockname()[1]}/services/T0/topsecret?token=topsecret"

    def answer() -> None:
        connection, _ = echo.accept()
        with connection:
            connection.recv(1 << 16)
            text = reason.format(url=url, path="/services/T0/topsecret")
            connection.sendall(f"HTTP/1.1 404 {text}\r\n\r\n".encode())

    threading.Thread(target=answer, daemon=True).start()
    hook = FindingHook(run_id="demo", events=EventWriter(path, attempt=0, rank=NODE_RANK), webhook=url)
    hook.report([finding()])
    hook.close()
    echo.close()
    (failure,) = read_events(path)[0]
    assert "topsecret" not in json.dumps(failure)


def test_each_finding_that_is_not_sent_is_an_event(receiver: Receiver, tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    events = EventWriter(path, attempt=0, rank=NODE_RANK)
    hook = FindingHook(run_id="demo", events=events, webhook=receiver.url, at_most_per_hour=1)
    hook.report([finding(rank=1), finding(rank=2), finding(rank=3)])
    hook.close()
    lost = [event for event in read_events(path)[0] if event["kind"] == "hook_failed"]
    assert [event["reason"] for event in lost] == ["straggler was not sent: more than 1 findings in an hour"] * 2


def test_each_delivery_that_the_close_cuts_off_is_one_event(receiver: Receiver, events: EventWriter) -> None:
    receiver.holds.set()
    receiver.code = 500
    hook = FindingHook(run_id="demo", events=events, webhook=receiver.url, command="/no/such/program")
    hook.report([finding(rank=rank) for rank in range(5)])
    wait_for(lambda: receiver.heard, "the first delivery")
    hook.close(timeout_s=0.1)
    lost = Counter((event["hook"], event["reason"]) for event in failures(events))
    why = "straggler was not delivered before watch ended"
    assert lost == {("webhook", why): 5, ("command", why): 5}
    receiver.released.set()  # the one under way fails after it was reported
    hook._thread.join(100)
    assert not hook._thread.is_alive()
    assert len(receiver.heard) == 1, "nothing is sent that was reported as lost"
    assert len(failures(events)) == 10


def test_undelivered_findings_are_reported_at_close(
    receiver: Receiver, events: EventWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("watch.exporting.webhook._MAX_WAITING", 2)
    receiver.holds.set()
    hook = FindingHook(run_id="demo", events=events, webhook=receiver.url)
    hook.report([finding(rank=0)])
    wait_for(lambda: receiver.heard, "the first delivery")
    hook.report([finding(rank=rank) for rank in range(1, 5)])
    hook.close(timeout_s=0.1)
    lost = Counter(event["reason"] for event in failures(events))
    assert lost == {
        "straggler was not sent: too many findings wait to be sent": 3,
        "straggler was not delivered before watch ended": 2,
    }


def test_a_finding_that_is_not_json_does_not_end_the_deliveries(receiver: Receiver, events: EventWriter) -> None:
    hook = FindingHook(run_id="demo", events=events, webhook=receiver.url)
    hook.report([dataclasses.replace(finding(rank=1), evidence={"set_ms": {1, 2}}), finding(rank=2)])
    hook.close()
    assert [told["finding"]["ranks"] for told in receiver.heard] == [[2]]
    assert [event["reason"] for event in failures(events)] == [
        "straggler was not delivered: Object of type set is not JSON serializable"
    ]


def test_a_full_disk_does_not_end_the_deliveries(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKSCOPE_FAIL_LOUD", "1")  # the writer raises what it would only count
    receiver.code = 404
    hook = FindingHook(run_id="demo", events=EventWriter(Path("/dev/full"), attempt=0, rank=NODE_RANK),
                       webhook=receiver.url)  # fmt: skip
    hook.report([finding(rank=1), finding(rank=2)])
    hook.close()
    assert [told["finding"]["ranks"] for told in receiver.heard] == [[1], [2]]
