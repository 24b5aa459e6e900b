"""Fetching dumps: a server that drips ends with the limit, and nothing is written through a link."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from store.readers.dumps.debug_server import DebugServerError, fetch_dumps
from store.readers.untrusted.http_deadline import HttpDeadline

DUMP = {"entries": [{"x": 1}]}
PAGE = f"<section><h2>Rank 0: host</h2><pre>{json.dumps(DUMP)}</pre><h2>Rank {'9' * 5000}: host</h2></section>".encode()


class Server:
    """Answers each request with a head, then with a body byte by byte."""

    def __init__(self, head: bytes, body: bytes, pause_s: float) -> None:
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listening.getsockname()[1]}"
        self.over = threading.Event()
        self.parts = (head, body, pause_s)
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        head, body, pause_s = self.parts
        while not self.over.is_set():
            with contextlib.suppress(OSError), self.listening.accept()[0] as connection:
                connection.recv(1 << 16)
                connection.sendall(head)
                if not pause_s:
                    connection.sendall(body)
                while pause_s and not self.over.wait(pause_s):
                    connection.sendall(b"A")


@pytest.fixture
def serve() -> Iterator[type[Server]]:
    made: list[Server] = []

    def start(head: bytes, body: bytes = b"", pause_s: float = 0.0) -> Server:
        made.append(Server(head, body, pause_s))
        return made[-1]

    yield start  # type: ignore[misc]
    for server in made:
        server.over.set()
        server.listening.close()


@pytest.mark.parametrize("head", [b"", b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.1 200 OK\r\nA"])
def test_the_limit_holds_for_the_whole_answer(serve: type[Server], tmp_path: Path, head: bytes) -> None:
    server = serve(head, b"", 0.02)
    begin = time.monotonic()
    with pytest.raises(DebugServerError, match=r"no answer|no rank"):
        fetch_dumps(server.address, tmp_path / "dumps", timeout_s=0.3)
    assert time.monotonic() - begin < 60
    assert not (tmp_path / "dumps").exists()


def test_the_limit_holds_where_connecting_outlives_it(
    serve: type[Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look_up = socket.getaddrinfo

    def slow_look_up(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.3)
        return look_up(*args, **kwargs)

    server = serve(b"HTTP/1.1 200 OK\r\n", b"", 0.02)
    monkeypatch.setattr(socket, "getaddrinfo", slow_look_up)
    give_up = threading.Timer(100, server.over.set)
    give_up.start()
    with pytest.raises(DebugServerError, match="no answer"):
        fetch_dumps(server.address, tmp_path / "dumps", timeout_s=0.1)
    assert not server.over.is_set(), "the limit ended it, not the server"
    give_up.cancel()


def test_the_limit_holds_in_a_handshake(serve: type[Server]) -> None:
    """A record of TLS is announced with 16 KB, and comes byte by byte."""
    server = serve(b"\x16\x03\x03\x40\x00", b"", 0.02)
    give_up = threading.Timer(100, server.over.set)
    give_up.start()
    with pytest.raises(TimeoutError), HttpDeadline(0.2) as opener, contextlib.suppress(OSError):
        opener.open(f"https://{server.address}/", timeout=100)
    assert not server.over.is_set(), "the limit ended it, not the server"
    give_up.cancel()


def test_a_link_in_the_folder_is_replaced(serve: type[Server], tmp_path: Path) -> None:
    victim, into = tmp_path / "victim", tmp_path / "dumps"
    victim.write_text("mine")
    into.mkdir()
    (into / "rank_0.json").symlink_to(victim)
    server = serve(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(PAGE), PAGE)
    assert fetch_dumps(server.address, into, timeout_s=30).ranks == [0]
    assert victim.read_text() == "mine"
    assert json.loads((into / "rank_0.json").read_text()) == DUMP
    assert not (into / "rank_0.json").is_symlink()
