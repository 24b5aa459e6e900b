"""Allow several ranks on one GPU, which NCCL refuses ("Duplicate GPU") unless each process claims another host.

A forked rank gets its launcher's environment after the fork, so the host name is set again at each change.
"""

from __future__ import annotations

import os
from typing import Any

_NAME = "NCCL_HOSTID"
_set_item = os._Environ.__setitem__


def _named(environment: Any, key: Any, value: Any) -> None:
    _set_item(environment, key, f"process{os.getpid()}" if key == _NAME else value)


os._Environ.__setitem__ = _named  # type: ignore[method-assign]
os.environ[_NAME] = ""
os.register_at_fork(after_in_child=lambda: os.environ.__setitem__(_NAME, ""))
