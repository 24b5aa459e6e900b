"""The command and its server: the address that it prints answers, and neither outlives the other."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from dashboard import launch
from dashboard.launch import LOOPBACK, DashboardError, DashboardServer, usable_port
from probes.attach.launch.own_process import own_process
from tests.waiting import wait_for


def test_a_command_that_is_killed_hard_leaves_no_server_behind(tmp_path: Path) -> None:
    command, environment = own_process("rankscope", "dashboard", str(tmp_path), "--port", "0")
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            lines: list[str] = []
            wait_for(lambda: lines.append(process.stdout.readline()) or "http" in lines[-1], "the address")
            url = re.findall(r"http://127\.0\.0\.1:\d+", lines[-1])[0]
            assert process.stdout.readline().startswith(f"There is no run in {tmp_path} yet")
            with urllib.request.urlopen(f"{url}/_stcore/health", timeout=100) as answer:
                assert answer.status == 200
            port = int(url.rpartition(":")[2])
            assert handshake(port, f"127.0.0.1:{port}", url) == 101
            assert handshake(port, f"evil.example:{port}", f"http://evil.example:{port}") == 403, "DNS rebinding"
            assert handshake(port, f"127.0.0.1:{port}", "http://evil.example") == 403
            assert handshake(port, f"127.0.0.1:{port}", f"http://127.0.0.1:{port - 1}") == 403, "another program's page"
            for path in ("/", "/_stcore/health", "/_stcore/host-config"):
                assert status(port, path, f"127.0.0.1:{port}") == 200
                assert status(port, path, f"evil.example:{port}") == 403, "DNS rebinding"
            (server,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            maps = Path(f"/proc/{server}/maps")
            wait_for(lambda: "/pandas/" in maps.read_text(), "the pages' libraries, before the first visitor")
            process.send_signal(signal.SIGKILL)
            process.wait(60)
            wait_for(lambda: is_gone(int(server)), "the end of the server")
        finally:
            process.kill()


def test_the_port_of_the_links_is_taken_where_it_is_free() -> None:
    with socket.socket() as taken:
        taken.bind((LOOPBACK, 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert usable_port(port) not in (0, port)
    assert usable_port(port) == port


def test_a_port_that_was_lost_before_the_server_took_it_is_chosen_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server((LOOPBACK, 0)) as other:
        lost = other.getsockname()[1]
        real, chosen = launch._free_port, [lost]
        monkeypatch.setattr(launch, "_free_port", lambda *where: chosen.pop() if chosen else real(*where))
        with DashboardServer(tmp_path, port=0) as server:
            assert not chosen
            assert server.url != f"http://{LOOPBACK}:{lost}"
            with urllib.request.urlopen(f"{server.url}/_stcore/health", timeout=100) as answer:
                assert answer.status == 200


def test_a_port_that_the_user_named_is_not_chosen_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server((LOOPBACK, 0)) as other:
        named = other.getsockname()[1]
        free = [named]  # when it was looked at
        monkeypatch.setattr(launch, "_free_port", lambda *_: free.pop())
        with pytest.raises(DashboardError, match="Streamlit ended with exit code 1"):
            DashboardServer(tmp_path, port=named)


def handshake(port: int, host: str, origin: str) -> int:
    """Status of the answer to a WebSocket that a page of `origin` opens at `host`."""
    request = (
        f"GET /_stcore/stream HTTP/1.1\r\nHost: {host}\r\nOrigin: {origin}\r\nUpgrade: websocket\r\n"
        "Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", port), 20) as connection:
        connection.sendall(request.encode())
        return int(connection.recv(4096).split()[1])


def status(port: int, path: str, host: str) -> int:
    """Status of the answer to a request for a path under a name."""
    with socket.create_connection(("127.0.0.1", port), 20) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        return int(connection.recv(4096).split()[1])


def is_gone(pid: int) -> bool:
    """Whether it has ended; one that nobody has waited for yet counts."""
    try:
        os.kill(pid, 0)
        return " Z " in Path(f"/proc/{pid}/stat").read_text()
    except (ProcessLookupError, FileNotFoundError):
        return True


def test_a_server_that_is_stopped_waits_for_no_query() -> None:
    program = (
        "import os, runpy, threading\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "from streamlit.web import cli\n"
        "def main():\n"
        "    ThreadPoolExecutor(1).submit(threading.Event().wait)\n"
        "    raise SystemExit(0)\n"
        "cli.main = main\n"
        "os.environ['RANKSCOPE_DASHBOARD_PARENT'] = str(os.getppid())\n"
        "runpy.run_module('dashboard.serve', run_name='__main__')\n"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=120, check=False).returncode == 0
