"""A read-only Model Context Protocol server over the runs of a folder, for agents on call.

make_server(Path("runs")).run("stdio")
"""

from __future__ import annotations

from rankscope.mcp_server.server import make_server

__all__ = ["make_server"]
