"""Python stacks that `watch` had a rank write when the run hung: the innermost frames worth reading.

    read_stack(run.stacks, attempt=0, rank=3)     # ["trainer/rank/loop.py:120 train_step", ...]

The text is faulthandler's and comes from a stranger's process: sizes are bounded, links are not followed, and
whoever shows it escapes it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from probes.tape.safe_open import folder_problem, open_plain

__all__ = ["parse_stack", "read_stack"]

MAX_BYTES = 256 << 10
MAX_FRAMES = 6
_FRAME = re.compile(r'^\s*File "([^"]{1,500})", line (\d{1,9}) in (.{1,200})$')
_BLOCK = re.compile(r"^(Current thread|Thread) ", re.MULTILINE)
_LIBRARY = re.compile(r"/(site|dist)-packages/torch/|/threading\.py$|/selectors\.py$")


def read_stack(stacks_dir: Path, attempt: int, rank: int) -> list[str]:
    """The newest stack of a rank's main thread, innermost first; empty if there is none."""
    path = stacks_dir / f"attempt-{attempt}-rank-{rank:05d}.txt"
    try:
        if folder_problem(stacks_dir):
            return []
        with open(open_plain(path), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - MAX_BYTES))
            text = file.read(MAX_BYTES).decode("utf-8", "replace")
    except OSError:
        return []
    return parse_stack(text)


def parse_stack(text: str) -> list[str]:
    """Frames of the last `Current thread` block, torch's own left out unless nothing else is there."""
    starts = [match for match in _BLOCK.finditer(text) if match[1] == "Current thread"]
    if not starts:
        return []
    block = text[starts[-1].start() :]
    following = _BLOCK.search(block, 1)
    block = block[: following.start()] if following else block
    frames = [match for line in block.splitlines() if (match := _FRAME.match(line))]
    own = [frame for frame in frames if not _LIBRARY.search(frame[1])] or frames
    return [f"{'/'.join(frame[1].split('/')[-2:])}:{frame[2]} {frame[3]}" for frame in own[:MAX_FRAMES]]
