"""An S3 API in this process (moto behind werkzeug), which can fail as such services do.

with s3_server() as server:                  # sets AWS_ENDPOINT_URL and credentials of this process
    server.faults.append(Fault(method="PUT", times=3, action="500"))
    RemoteFolder(f"s3://{server.bucket}/runs")
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

__all__ = ["KEYS", "Fault", "ObjectStore", "s3_server"]

BUCKET = "checkpoints"
KEYS = {"AWS_ACCESS_KEY_ID": "AKIAVERYSECRETNAME", "AWS_SECRET_ACCESS_KEY": "very-secret-value"}
"""Credentials, in the environment; they must not appear in any file or message."""
TRICKLE_S = 0.02
LONGEST_S = 60.0
"""After this time an unreleased fault ends, so that a failed test does not hang."""
_ENVIRONMENT = {
    **KEYS,
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "MOTO_ALLOW_NONEXISTENT_REGION": "true",
}


@dataclass(kw_only=True)
class Fault:
    """What happens to the next `times` requests of a method whose path contains `part`: 500 or 503, cut (the
    connection, in the middle), short (half of the body, then the connection ends), slow (nothing until `released`),
    trickle (a byte every now and then until `released`, so that no read of a socket times out)."""

    action: str
    method: str
    part: str = ""
    times: int = 1
    released: threading.Event = field(default_factory=threading.Event)


@dataclass
class ObjectStore:
    """A running server."""

    url: str
    bucket: str = BUCKET
    faults: list[Fault] = field(default_factory=list)
    seen: list[tuple[str, str]] = field(default_factory=list)
    """(method, path) of every request."""

    def client(self) -> Any:
        """A plain client of the store."""
        import boto3

        return boto3.client("s3", endpoint_url=self.url)

    def names(self, prefix: str = "") -> list[str]:
        """Names of the objects that are there."""
        found = self.client().list_objects_v2(Bucket=self.bucket, Prefix=prefix)
        return [one["Key"] for one in found.get("Contents", [])]


class _Failing:
    """WSGI middleware that injects the store's faults into requests and answers."""

    def __init__(self, app: Any, store: ObjectStore) -> None:
        self._app = app
        self._store = store
        self._lock = threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        with self._lock:
            self._store.seen.append((method, path))
            fault = next((one for one in self._store.faults if self._matches(one, method, path)), None)
            if fault is not None:
                fault.times -= 1
        if fault is None:
            return self._app(environ, start_response)
        if fault.action in ("500", "503"):
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start_response(f"{fault.action} Error", [("Content-Length", "0")])
            return []
        if fault.action == "slow":
            fault.released.wait(LONGEST_S)
            return self._app(environ, start_response)
        if fault.action == "trickle":
            return self._bytes(environ, start_response, fault.released)
        if fault.action == "short":
            return self._half(environ, start_response)
        with contextlib.suppress(OSError):
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
        return []

    def _matches(self, fault: Fault, method: str, path: str) -> bool:
        return fault.times > 0 and fault.method == method and fault.part in path

    def _bytes(self, environ: dict[str, Any], start_response: Any, released: threading.Event) -> Iterable[bytes]:
        body = b"".join(self._app(environ, start_response))
        sent = 0
        while sent < len(body) - 1 and not released.wait(TRICKLE_S):
            yield body[sent : sent + 1]
            sent += 1
        yield body[sent:]

    def _half(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        body = b"".join(self._app(environ, start_response))
        yield body[: len(body) // 2]
        with contextlib.suppress(OSError):
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def s3_server() -> Iterator[ObjectStore]:
    """Run a server with an empty bucket; at the end fsspec's cached connections are cleared."""
    from moto.server import create_backend_app
    from s3fs import S3FileSystem
    from werkzeug.serving import make_server

    store = ObjectStore("")
    app = _Failing(create_backend_app("s3"), store)
    server = make_server("127.0.0.1", 0, app, threaded=True)
    store.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    before = dict(os.environ)
    os.environ |= {**_ENVIRONMENT, "AWS_ENDPOINT_URL": store.url}
    S3FileSystem.clear_instance_cache()
    try:
        store.client().create_bucket(Bucket=BUCKET)
        yield store
    finally:
        S3FileSystem.clear_instance_cache()
        server.shutdown()
        thread.join()
        server.server_close()
        os.environ.clear()
        os.environ |= before
