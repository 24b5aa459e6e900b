"""HTTP requests with a total deadline, without redirects, and without the server's text in errors.

    with HttpDeadline(10.0) as opener, opener.open(request, timeout=10.0) as answer:
        body = answer.read(limit)

A socket timeout restarts with each byte, so a server that sends single bytes could block a caller for hours.
"""

from __future__ import annotations

import http.client
import socket
import threading
import time
import urllib.error
import urllib.request
from contextlib import suppress
from typing import Any

__all__ = ["HttpDeadline", "plain_reason"]

REDIRECTS = (301, 302, 303, 307, 308)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Makes redirects raise HTTPError, like any other unsuccessful response."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


class HttpDeadline:
    """Closes the opener's connections at the deadline, and then raises TimeoutError."""

    def __init__(self, limit_s: float) -> None:
        self._ends_s = time.monotonic() + limit_s
        self._opened: list[socket.socket] = []
        self._timer = threading.Timer(limit_s, self._end)
        self._timer.daemon = True

    def __enter__(self) -> urllib.request.OpenerDirector:
        deadline = self

        class Http(urllib.request.HTTPHandler):
            def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
                return self.do_open(deadline._watched(http.client.HTTPConnection), request)

        class Https(urllib.request.HTTPSHandler):
            def https_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
                return self.do_open(deadline._watched(http.client.HTTPSConnection), request)

        self._timer.start()
        return urllib.request.build_opener(_NoRedirect, Http, Https)

    def __exit__(self, *raised: object) -> None:
        self._timer.cancel()
        for opened in self._opened:
            opened.close()
        if time.monotonic() >= self._ends_s:
            raise TimeoutError("no complete answer in time")

    def _watched(self, kind: type[http.client.HTTPConnection]) -> type[http.client.HTTPConnection]:
        deadline = self

        class Watched(kind):  # type: ignore[valid-type,misc]
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                self._create_connection = deadline._connect

        return Watched

    def _connect(self, *args: Any, **kwargs: Any) -> socket.socket:
        connection = socket.create_connection(*args, **kwargs)
        self._opened.append(connection.dup())  # a TLS handshake detaches the socket until it is over
        if time.monotonic() >= self._ends_s:  # the timer may have fired before the socket was listed
            connection.close()
            raise TimeoutError("no connection in time")
        return connection

    def _end(self) -> None:
        for opened in self._opened:
            with suppress(OSError):
                opened.shutdown(socket.SHUT_RDWR)


def plain_reason(error: Exception) -> str:
    """Reason of an error without the server's text, which may contain anything, even the address with its token."""
    if isinstance(error, urllib.error.HTTPError):
        if error.code in REDIRECTS:
            return f"it answers with a redirect ({error.code}), which is not followed"
        return http.client.responses.get(error.code, f"HTTP status {error.code}")
    if isinstance(error, http.client.HTTPException):
        return f"the answer is not HTTP ({type(error).__name__})"
    reason = getattr(error, "reason", None) or error
    return str(getattr(reason, "strerror", None) or reason)
