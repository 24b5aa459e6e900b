"""An S3 server in this process (moto's), with one bucket, and a front of it that can fail."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import boto3
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

__all__ = ["KEYS", "S3Server", "s3_server"]

KEYS = {"AWS_ACCESS_KEY_ID": "AKIAVERYSECRETNAME", "AWS_SECRET_ACCESS_KEY": "very-secret-value"}


class S3Server:
    """`fails` is the status that every request is answered with; 0: none, they are served."""

    def __init__(self) -> None:
        self.fails = 0
        logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line a request
        self._app = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    def address(self, path: str) -> str:
        return f"s3://lake/{path}?endpoint_override={self.endpoint}&region=us-east-1"

    def keys(self) -> list[str]:
        """Names of all objects in the bucket."""
        listed = self.client().list_objects_v2(Bucket="lake")
        return [found["Key"] for found in listed.get("Contents", [])]

    def client(self) -> Any:
        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            region_name="us-east-1",
            aws_access_key_id=KEYS["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=KEYS["AWS_SECRET_ACCESS_KEY"],
        )

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(20)

    def _answer(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if self.fails:
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start_response(f"{self.fails} Refused", [("Content-Length", "0")])
            return [b""]
        answer: Iterable[bytes] = self._app(environ, start_response)
        return answer


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """A server with an empty bucket `lake`."""
    server = S3Server()
    try:
        server.client().create_bucket(Bucket="lake")
        yield server
    finally:
        server.close()
