"""Refuse requests of other sites: every answer, not only the WebSocket, asks for the server's own name and origin.

    check_every_request()        # before Streamlit makes its app

Streamlit compares `server.allowedHosts` with the `Host` of a WebSocket alone, and takes the origin of any port of
localhost. A page of another site whose name points here (DNS rebinding) could read files of the server; one of another
program on this machine could open the pages.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from typing import Any
from urllib.parse import urlsplit

__all__ = ["SiteCheck", "check_every_request", "is_own_request"]

Scope = dict[str, Any]
App = Callable[[Scope, Callable[[], Awaitable[Any]], Callable[[Any], Awaitable[None]]], Awaitable[None]]


def is_own_request(host: str | None, origin: str | None, allowed_hosts: Collection[str]) -> bool:
    """Return True if `Host` is one of the names of the server, and `Origin`, where there is one, the same with port."""
    try:
        own = urlsplit(f"//{host or ''}")
        own_port, name = own.port, (own.hostname or "").rstrip(".")
        if name not in allowed_hosts or "@" in own.netloc or own.path or own.query or own.fragment:
            return False
        if origin is None:
            return True
        page = urlsplit(origin)
        default = {"http": 80, "https": 443}.get(page.scheme)
        return default is not None and (page.hostname, page.port or default) == (own.hostname, own_port or default)
    except ValueError:  # no port, no address
        return False


class SiteCheck:
    """ASGI middleware: 403 for a request of another site, before anything else looks at it."""

    def __init__(self, app: App, allowed_hosts: Collection[str]) -> None:
        self._app, self._allowed_hosts = app, allowed_hosts

    async def __call__(
        self, scope: Scope, receive: Callable[[], Awaitable[Any]], send: Callable[[Any], Awaitable[None]]
    ) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] not in ("http", "websocket") or self._is_own(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await send({"type": "http.response.start", "status": 403, "headers": [(b"content-type", b"text/plain")]})
            await send({"type": "http.response.body", "body": b"Refused: this address is not the dashboard's own.\n"})
        else:
            await send({"type": "websocket.close", "code": 1008})  # before it is accepted: 403

    def _is_own(self, scope: Scope) -> bool:
        headers = [(name.lower(), value.decode("latin-1")) for name, value in scope["headers"]]
        hosts, origins = ([value for name, value in headers if name == wanted] for wanted in (b"host", b"origin"))
        if len(hosts) != 1 or len(origins) > 1:
            return False
        return is_own_request(hosts[0], origins[0] if origins else None, self._allowed_hosts)


def check_every_request() -> None:
    """Put the check before all that Streamlit does with a request. Raises AttributeError where it cannot be put."""
    from starlette.middleware import Middleware
    from streamlit import config
    from streamlit.web.server.starlette import starlette_app

    own = starlette_app.create_streamlit_middleware

    def with_check() -> list[Middleware]:
        return [Middleware(SiteCheck, allowed_hosts=config.get_option("server.allowedHosts")), *own()]

    starlette_app.create_streamlit_middleware = with_check
