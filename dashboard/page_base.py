"""Tell Streamlit's frontend the server's root URL; by default it first tries addresses below the open page.

    set_server_root()        # before Streamlit creates its app

When opened at `/ranks`, the frontend requests `/ranks/_stcore/health` and `/ranks/_stcore/host-config`, gets two 404s
(shown in the browser's console), and only then connects. The root is the folder of the page's address, as for the
scripts of the document, so this also works behind a proxy that serves the dashboard below a path.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

__all__ = ["RootUrlMiddleware", "set_server_root"]

Scope = dict[str, Any]
Message = dict[str, Any]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Callable[[], Awaitable[Any]], Send], Awaitable[None]]

_SCRIPT = b'<script>window.__streamlit = { BACKEND_BASE_URL: new URL(".", location.href).href };</script>'
_HEAD = b"<head>"


class RootUrlMiddleware:
    """ASGI middleware that inserts a script at the start of the pages' HTML document."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Callable[[], Awaitable[Any]], send: Send) -> None:
        """Forward a request, and insert the script into the response if it is the document."""
        await self._app(scope, receive, send if scope["type"] != "http" else _with_script(send))


def _with_script(send: Send) -> Send:
    """Wrap `send`: buffer the document until it is complete, and insert the script."""
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


def set_server_root() -> None:
    """Install the middleware. Raises AttributeError if Streamlit has no place for it."""
    from starlette.middleware import Middleware
    from streamlit.web.server.starlette import starlette_app

    default = starlette_app.create_streamlit_middleware
    starlette_app.create_streamlit_middleware = lambda: [*default(), Middleware(RootUrlMiddleware)]
