"""An exception's traceback without the frames that `rankscope` has put between the user's.

    trace = without_our_frames(error)      # of the exception and of those that it was raised from

Python lets frames be taken out of a traceback that is complete: at the process's end, and not where the script itself
prints one.
"""

from __future__ import annotations

import os
from types import TracebackType

__all__ = ["without_our_frames"]

_PROBES = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_RUNS_SCRIPTS = os.path.join("rankscope", "attached_script.py")
_RUNPY = "<frozen runpy>"


def without_our_frames(error: BaseException) -> TracebackType | None:
    """Take our frames out of `error` and of the exceptions behind it; returns its traceback. All of them stay if no
    other is there."""
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        one.__traceback__ = _stripped(one.__traceback__) or one.__traceback__
        one = one.__cause__ or one.__context__
    return error.__traceback__


def _stripped(trace: TracebackType | None) -> TracebackType | None:
    links: list[TracebackType] = []
    is_start = True
    while trace is not None:
        path = trace.tb_frame.f_code.co_filename
        is_script = path.endswith(_RUNS_SCRIPTS)
        is_start = is_script or (is_start and path == _RUNPY)
        if not (is_start or os.path.abspath(path).startswith(_PROBES)):
            links.append(trace)
        trace = trace.tb_next
    if not links:  # a script that does not compile has no frame
        return None
    for link, following in zip(links, [*links[1:], None], strict=True):
        link.tb_next = following
    return links[0]
