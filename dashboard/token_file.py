"""The file with the access token of the dashboard.

read_token(Path("token"))        # ValueError if other users can read it, or if the token is too short
"""

from __future__ import annotations

import stat
from pathlib import Path

from probes.tape.files.safe_open import read_plain

__all__ = ["VARIABLE", "read_token"]

VARIABLE = "RANKSCOPE_DASHBOARD_TOKEN_FILE"
"""Environment variable with the path of the file; without it there is no login."""
MIN_CHARS = 16
MAX_BYTES = 4096


def read_token(path: Path) -> str:
    """Read the token. Raises ValueError if other users can read the file, or if the token is too short to be safe."""
    try:
        token = read_plain(path, MAX_BYTES).decode("utf-8", "replace").strip()
        mode = path.stat().st_mode
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ValueError(f"{path}: other users can read it; chmod 600 {path}")
    if len(token) < MIN_CHARS:
        raise ValueError(f"{path}: holds {len(token)} characters; a token needs {MIN_CHARS}, e.g. openssl rand -hex 16")
    return token
