"""HTTP server of a node's `/metrics`: the newest snapshot in Prometheus' text format, served from a thread of `watch`.

    snapshot = Snapshot({"run_id": "demo", "node": "0"})
    with serve(snapshot, Listen("127.0.0.1", 0)) as endpoint:
        snapshot.replace(samples)           # at each tick; a scrape never mixes two ticks
        endpoint.url

A scrape reads the snapshot of the last tick and touches neither the store nor the ranks, so it does not cost training
time and works while the ranks hang. On loopback it is open. Other addresses need TLS and a bearer token.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from watch.exporting.metrics.catalogue import METRICS, Sample

__all__ = ["Endpoint", "Listen", "ListenError", "Snapshot", "serve"]

REQUEST_TIMEOUT_S = 10.0
"""Seconds of silence after which a client is disconnected."""
LAST_ANSWERS_S = 2.0
"""Seconds that closing waits for answers in progress: `watch` exits next, and without this wait an answer with the last
state might be cut off.
"""
_POLL_S = 0.05
"""Seconds that closing waits for the thread that accepts connections."""


class ListenError(ValueError):
    """The endpoint cannot be opened; the message is one line with the cause and the remedy."""


@dataclass(frozen=True, slots=True)
class Listen:
    """Address to listen on. `port` 0 takes a free port. Beyond loopback, certificate, key and token are required."""

    host: str = "127.0.0.1"
    port: int = 0
    certificate: Path | None = None
    key: Path | None = None
    token: str = ""

    @classmethod
    def parse(cls, address: str, **secrets: Any) -> Listen:
        """`HOST:PORT`, `[V6]:PORT` or `:PORT` (loopback). Raises ListenError."""
        host, colon, port = address.rpartition(":")
        if not colon or not port.isdecimal() or int(port) > 65535:
            raise ListenError(f"--listen {address}: must look like HOST:PORT, for example 127.0.0.1:9400")
        return cls(host.strip("[]") or "127.0.0.1", int(port), **secrets)

    @property
    def is_loopback(self) -> bool:
        """True if only this machine can reach it."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def check(self) -> None:
        """Raise ListenError if other machines can reach the address without TLS and a token, or if TLS cannot work."""
        where = f"{self.host}:{self.port}"
        if not self.is_loopback and not (self.certificate and self.key and self.token):
            raise ListenError(
                f"{where} can be reached from other machines: needs a TLS certificate, its key and a token file, or "
                "listen on 127.0.0.1"
            )
        if bool(self.certificate) != bool(self.key):
            raise ListenError(f"{where}: TLS needs a certificate and its key, but only one of them was given")
        self.tls()

    def tls(self) -> ssl.SSLContext | None:
        """TLS context of the server; None without a certificate. Raises ListenError."""
        if not self.certificate or not self.key:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.certificate, self.key)
        except OSError as error:  # includes ssl.SSLError
            raise ListenError(
                f"{self.host}:{self.port}: {self.certificate} and {self.key} are not a certificate and its key "
                f"({error.strerror or error})"
            ) from None
        return context

    def refuse_taken_port(self) -> None:
        """Raise ListenError if the port cannot be bound. (An error in `serve` does not stop a watch, which continues to
        record.)
        """
        try:
            family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
            socket.create_server((self.host, self.port), family=family).close()
        except OSError as error:
            raise ListenError(f"--listen {self.host}:{self.port}: {error.strerror}; choose another port") from None


class Snapshot(Collector):
    """The samples of the last tick. `replace` is atomic: a scrape never mixes two ticks."""

    def __init__(self, common: Mapping[str, str]) -> None:
        self._common = dict(common)
        self._samples: tuple[Sample, ...] = ()
        self.num_scrapes = 0

    def replace(self, samples: Iterable[Sample]) -> None:
        """Replace the samples. Raises KeyError for a metric that the catalogue lacks."""
        fresh = tuple(samples)
        for sample in fresh:
            METRICS[sample.name]
        self._samples = fresh

    def collect(self) -> Iterator[Metric]:
        """Yield one family per metric, in order of first appearance."""
        samples = self._samples
        self.num_scrapes += 1
        families: dict[str, Metric] = {}
        for sample in samples:
            metric = METRICS[sample.name]
            labels = (*self._common, *metric.labels)
            family = families.get(sample.name)
            if family is None:
                kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
                family = families[sample.name] = kind(sample.name, metric.help, labels=labels)
            values = [*self._common.values(), *(sample.labels.get(label, "") for label in metric.labels)]
            family.add_metric(values, sample.value)  # type: ignore[attr-defined]
        yield from families.values()


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An open endpoint."""

    host: str
    port: int
    is_tls: bool

    @property
    def address(self) -> str:
        """`host:port` for Prometheus' targets, with the machine's name if it listens on all interfaces."""
        host = os.uname().nodename if self.host in ("0.0.0.0", "::") else self.host
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"

    @property
    def url(self) -> str:
        """URL for a browser or curl."""
        return f"{'https' if self.is_tls else 'http'}://{self.address}/metrics"


@contextmanager
def serve(snapshot: Snapshot, listen: Listen) -> Iterator[Endpoint]:
    """Answer scrapes in a daemon thread until the block ends. Raises ListenError."""
    listen.check()
    registry = CollectorRegistry(auto_describe=False)
    registry.register(snapshot)
    try:
        server = make_server(
            listen.host, listen.port, _guarded(make_wsgi_app(registry), listen.token), _server_class(listen), _Quiet
        )
        if context := listen.tls():
            # The TLS handshake is done in the connection's thread: a silent client must not delay the others.
            server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    except (OSError, ssl.SSLError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ListenError(
            f"cannot serve metrics on {listen.host}:{listen.port}: {reason}; choose another port"
        ) from None
    thread = threading.Thread(target=server.serve_forever, args=(_POLL_S,), name="metrics", daemon=True)
    thread.start()
    try:
        yield Endpoint(listen.host, server.server_port, listen.certificate is not None)
    finally:
        server.shutdown()
        server.server_close()
        server.finish_answers()


class _Server(ThreadingMixIn, WSGIServer):
    def __init__(self, *args: Any, **options: Any) -> None:
        self._answering: list[threading.Thread] = []
        super().__init__(*args, **options)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer one request in a separate thread, which is kept in a list until it ends."""
        thread = threading.Thread(target=self.process_request_thread, args=(request, client_address), daemon=True)
        self._answering = [*(other for other in self._answering if other.is_alive()), thread]
        thread.start()

    def finish_answers(self) -> None:
        """Wait for answers in progress, for `LAST_ANSWERS_S` at most."""
        deadline = time.monotonic() + LAST_ANSWERS_S
        for thread in self._answering:
            thread.join(max(0.0, deadline - time.monotonic()))

    def server_bind(self) -> None:
        """Bind like HTTPServer, but without its reverse lookup of the host name, which may take seconds."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnect or do not use TLS."""


class _ServerV6(_Server):
    address_family = socket.AF_INET6


def _server_class(listen: Listen) -> type[_Server]:
    return _ServerV6 if ":" in listen.host else _Server


class _Quiet(WSGIRequestHandler):
    timeout = REQUEST_TIMEOUT_S

    def log_message(self, format: str, *args: Any) -> None:
        """Do not log scrapes."""


def _guarded(app: Callable[..., Any], token: str) -> Callable[..., Any]:
    """Allow only GET of `/metrics` and `/`, and only with the token if one is set."""
    expected = f"Bearer {token}".encode()

    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Sequence[bytes]:
        given = str(environ.get("HTTP_AUTHORIZATION", "")).encode("latin-1", "replace")
        if token and not hmac.compare_digest(given, expected):
            start_response("401 Unauthorized", [("WWW-Authenticate", "Bearer"), ("Content-Type", "text/plain")])
            return [b"A bearer token is needed.\n"]
        if environ.get("REQUEST_METHOD") != "GET":
            start_response("405 Method Not Allowed", [("Allow", "GET"), ("Content-Type", "text/plain")])
            return [b"Only GET is allowed.\n"]
        if environ.get("PATH_INFO") not in ("/metrics", "/"):
            start_response("404 Not Found", [("Content-Type", "text/plain")])
            return [b"The metrics are at /metrics.\n"]
        body: Sequence[bytes] = app(environ, start_response)
        return body

    return answer
