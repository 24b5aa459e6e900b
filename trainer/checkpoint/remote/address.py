"""Files below an fsspec URL (`s3://bucket/folder`), with retries and one kind of error.

    folder = RemoteFolder("s3://bucket/runs/gpt")
    folder.put(Path("a.bin"), "objects/a.bin"); folder.sizes("objects")     # {"objects/a.bin": 123}
    folder.fetch("objects/a.bin", Path("b.bin"), size=123); folder.read("run.json", 1 << 20)

If the address needs a package (s3fs for `s3://`), only this module imports it. Credentials and endpoint are configured
as for that package: `AWS_ENDPOINT_URL`, `AWS_PROFILE`, fsspec's configuration.

    with folder.limit(3600.0, "Raise checkpoint.remote_limit_s."):
        folder.fetch(...)               # RemoteError after an hour, even if data still trickle in
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import fsspec
from fsspec.asyn import AsyncFileSystem
from fsspec.core import url_to_fs
from fsspec.utils import get_protocol

from trainer.checkpoint.disk_tier.manifest import StorageError

__all__ = ["RemoteError", "RemoteFolder"]

_T = TypeVar("_T")
TRIES = 4
FIRST_WAIT_S = 0.5
"""Seconds before the second attempt, doubled before each further attempt. s3fs itself retries five times in seconds."""
_S3_OPTIONS = {
    "use_listings_cache": False,
    "config_kwargs": {"connect_timeout": 10, "read_timeout": 60, "retries": {"max_attempts": 0}},
}
_OPTIONS: dict[str, dict[str, Any]] = {
    "s3": _S3_OPTIONS,
    "s3a": _S3_OPTIONS,
    "file": {"auto_mkdir": True},
    "local": {"auto_mkdir": True},
}
"""Defaults by protocol; fsspec's configuration takes precedence. Silent S3 connections time out, and botocore does not
retry in addition to s3fs.
"""


class RemoteError(StorageError):
    """An address cannot be read or written now. The message is one line."""


class RemoteFolder:
    """Files by name below one address. Methods raise RemoteError when all attempts have failed."""

    def __init__(self, address: str, *, tries: int = TRIES, wait: Callable[[float], None] = time.sleep) -> None:
        self.address = address.rstrip("/")
        self._tries = tries
        self._wait = wait
        self._limit_s = 0.0
        self._limit_advice = ""
        self._deadline = math.inf
        protocol = get_protocol(address)
        known = fsspec.config.conf.get(protocol, {})
        options = {key: value for key, value in _OPTIONS.get(protocol, {}).items() if key not in known}
        try:
            self._fs, root = url_to_fs(self.address, **options)
        except (ImportError, ValueError, OSError) as error:
            raise RemoteError(f"{self.address}: cannot be opened ({_line(error)})") from None
        self._root = root.rstrip("/")

    @contextlib.contextmanager
    def limit(self, seconds: float, advice: str) -> Iterator[None]:
        """Limit the total time (seconds) of requests from any thread until the block ends. With s3fs, gcsfs and adlfs,
        running requests other than moves are cancelled. With a synchronous package, a running request is completed.
        """
        self._limit_s, self._limit_advice, self._deadline = seconds, advice, time.monotonic() + seconds
        try:
            yield
        finally:
            self._deadline = math.inf

    def put(self, local: Path, name: str) -> None:
        """Upload a file, and verify its size at the address."""
        size = local.stat().st_size

        def copy() -> None:
            self._fs.put_file(str(local), self._path(name), **self._timeout())
            if (found := int(self._fs.info(self._path(name), **self._timeout())["size"])) != size:
                raise OSError(f"{found} of {size} bytes arrived")

        self._try("written", name, copy)

    def write(self, name: str, content: bytes) -> None:
        """Replace a small file."""
        self._try("written", name, lambda: self._fs.pipe_file(self._path(name), content, **self._timeout()))

    def read(self, name: str, limit_bytes: int) -> bytes | None:
        """Read a small file, at most `limit_bytes` of it; None if it does not exist."""

        def read() -> bytes | None:
            try:
                return bytes(self._fs.cat_file(self._path(name), start=0, end=limit_bytes, **self._timeout()))
            except FileNotFoundError:
                return None

        return self._try("read", name, read)

    def fetch(self, name: str, local: Path, size: int) -> None:
        """Download a file, and verify its size."""

        def copy() -> None:
            self._fs.get_file(self._path(name), str(local), **self._timeout())
            if (found := local.stat().st_size) != size:
                raise OSError(f"{found} of {size} bytes arrived")

        self._try("read", name, copy)

    def sizes(self, prefix: str) -> dict[str, int]:
        """Return {name: size} of all files below `prefix`."""

        def find() -> dict[str, int]:
            self._fs.invalidate_cache()
            try:
                found = self._fs.find(self._path(prefix), detail=True, **self._timeout())
            except FileNotFoundError:
                return {}
            return {path[len(self._root) + 1 :]: int(about["size"]) for path, about in found.items()}

        return self._try("listed", prefix, find)

    def remove(self, names: Iterable[str]) -> None:
        """Remove files; missing ones are ignored."""

        def remove(name: str) -> None:
            try:
                self._fs.rm_file(self._path(name), **self._timeout())
            except FileNotFoundError:
                return

        for name in names:
            self._try("removed", name, lambda name=name: remove(name))  # type: ignore[misc]

    def move(self, name: str, to: str) -> None:
        """Rename a file."""
        self._try("moved", name, lambda: self._fs.mv(self._path(name), self._path(to)))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _timeout(self) -> dict[str, float]:
        """Keyword argument `timeout` of a request, with the seconds left of the limit; empty without a limit."""
        if self._deadline == math.inf or not isinstance(self._fs, AsyncFileSystem):
            return {}
        return {"timeout": max(0.001, self._deadline - time.monotonic())}

    def _try(self, done: str, name: str, action: Callable[[], _T]) -> _T:
        """Call `action` and return its result. It is retried after any error, because each package has different error
        classes.
        """
        for number in range(self._tries):
            try:
                if time.monotonic() >= self._deadline:
                    raise TimeoutError
                return action()
            except Exception as error:
                if time.monotonic() >= self._deadline:
                    raise RemoteError(
                        f"{self.address}/{name} was not {done} within {self._limit_s:g} s. {self._limit_advice}"
                    ) from None
                if number == self._tries - 1 or isinstance(error, (PermissionError, FileNotFoundError)):
                    raise RemoteError(f"{self.address}/{name} cannot be {done} now ({_line(error)})") from None
            self._wait(min(FIRST_WAIT_S * 2**number, max(0.0, self._deadline - time.monotonic())))
        raise AssertionError("unreachable")


def _line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
