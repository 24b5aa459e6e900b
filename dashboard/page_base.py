"""Tell Streamlit's frontend where the server's root is; by default it looks below the open page first.

    name_the_root()        # before Streamlit makes its app

Opened at `/ranks`, it requests `/ranks/_stcore/health` and `/ranks/_stcore/host-config`, gets two 404s (shown in the
browser's console), and connects only then. The root is the folder of the page's address, as for the scripts that the
document loads, so this also works behind a proxy that serves the dashboard below a path.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

__all__ = ["RootName", "name_the_root"]

Scope = dict[str, Any]
Message = dict[str, Any]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Callable[[], Awaitable[Any]], Send], Awaitable[None]]

_SCRIPT = b'<script>window.__streamlit = { BACKEND_BASE_URL: new URL(".", location.href).href };</script>'
_HEAD = b"<head>"


class RootName:
    """ASGI middleware: one more script at the beginning of the document of the pages."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Callable[[], Awaitable[Any]], send: Send) -> None:
        """Pass a request on; the answer gets the script if it is the document."""
        await self._app(scope, receive, send if scope["type"] != "http" else _with_script(send))


def _with_script(send: Send) -> Send:
    """`send` that holds the document back until it is whole, and writes the script into it."""
    start: Message = {}
    parts: list[bytes] = []

    async def send_changed(message: Message) -> None:
        nonlocal start
        if message["type"] == "http.response.start" and message["status"] == 200 and _is_document(message):
            start = message
        elif message["type"] == "http.response.body" and start:
            parts.append(message.get("body", b""))
            if not message.get("more_body"):
                whole = b"".join(parts).replace(_HEAD, _HEAD + _SCRIPT, 1)
                headers = [(name, value) for name, value in start["headers"] if name.lower() != b"content-length"]
                await send(start | {"headers": [*headers, (b"content-length", str(len(whole)).encode())]})
                await send({"type": "http.response.body", "body": whole})
        else:
            await send(message)

    return send_changed


def _is_document(start: Message) -> bool:
    headers = {name.lower(): value for name, value in start["headers"]}
    return headers.get(b"content-type", b"").startswith(b"text/html") and b"content-encoding" not in headers


def name_the_root() -> None:
    """Have each document name the root. Raises AttributeError where the middleware cannot be put."""
    from starlette.middleware import Middleware
    from streamlit.web.server.starlette import starlette_app

    own = starlette_app.create_streamlit_middleware
    starlette_app.create_streamlit_middleware = lambda: [*own(), Middleware(RootName)]
