"""Refuse cross-site requests: check `Host` and `Origin` of every request, not only of the WebSocket.

    check_every_request()        # before Streamlit creates its app

Streamlit checks `Host` against `server.allowedHosts` only for the WebSocket, and accepts an origin on any port of
localhost. Through DNS rebinding another site could read the server's files, and a page of another program on this
machine could open the WebSocket.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from typing import Any
from urllib.parse import urlsplit

__all__ = ["SiteCheck", "check_every_request", "is_own_request"]

Scope = dict[str, Any]
App = Callable[[Scope, Callable[[], Awaitable[Any]], Callable[[Any], Awaitable[None]]], Awaitable[None]]


def is_own_request(host: str | None, origin: str | None, allowed_hosts: Collection[str]) -> bool:
    """Return True if `Host` is a name of the server and `Origin`, if present, has the same host and port."""
    try:
        site = urlsplit(f"//{host or ''}")
        port, name = site.port, (site.hostname or "").rstrip(".")
        if name not in allowed_hosts or "@" in site.netloc or site.path or site.query or site.fragment:
            return False
        if origin is None:
            return True
        page = urlsplit(origin)
        default = {"http": 80, "https": 443}.get(page.scheme)
        return default is not None and (page.hostname, page.port or default) == (site.hostname, port or default)
    except ValueError:  # the header has a malformed port or address
        return False


class SiteCheck:
    """ASGI middleware: answer 403 to a cross-site request before any other code sees it."""

    def __init__(self, app: App, allowed_hosts: Collection[str]) -> None:
        self._app, self._allowed_hosts = app, allowed_hosts

    async def __call__(
        self, scope: Scope, receive: Callable[[], Awaitable[Any]], send: Callable[[Any], Awaitable[None]]
    ) -> None:
        """Forward or refuse a request."""
        if scope["type"] not in ("http", "websocket") or self._is_own(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await send({"type": "http.response.start", "status": 403, "headers": [(b"content-type", b"text/plain")]})
            await send({"type": "http.response.body", "body": b"Refused: this address is not the dashboard's own.\n"})
        else:
            # If a WebSocket is closed before it was accepted, the server answers with status 403.
            await send({"type": "websocket.close", "code": 1008})

    def _is_own(self, scope: Scope) -> bool:
        headers = [(name.lower(), value.decode("latin-1")) for name, value in scope["headers"]]
        hosts, origins = ([value for name, value in headers if name == wanted] for wanted in (b"host", b"origin"))
        if len(hosts) != 1 or len(origins) > 1:
            return False
        return is_own_request(hosts[0], origins[0] if origins else None, self._allowed_hosts)


def check_every_request() -> None:
    """Install the check before Streamlit's own middleware. Raises AttributeError if Streamlit has no such hook."""
    from starlette.middleware import Middleware
    from streamlit import config
    from streamlit.web.server.starlette import starlette_app

    default = starlette_app.create_streamlit_middleware

    def with_check() -> list[Middleware]:
        return [Middleware(SiteCheck, allowed_hosts=config.get_option("server.allowedHosts")), *default()]

    starlette_app.create_streamlit_middleware = with_check
