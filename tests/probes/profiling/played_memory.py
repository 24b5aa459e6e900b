"""Snapshots in the shape of `torch.cuda.memory._snapshot`, of an allocator that a test plays.

cuda = PlayedMemory()
block = cuda.alloc(2 << 20, "model.py", 88)
cuda.fail(4 << 30, "model.py", 90)
cuda.free(block)
cuda.snapshot()
"""

from __future__ import annotations

from typing import Any

__all__ = ["SEGMENT_BYTES", "PlayedMemory", "stack"]

SEGMENT_BYTES = 20 << 20
_TORCH = "/opt/venv/lib/python3.11/site-packages/torch/nn/modules/module.py"
_FIRST = 0x7F0000000000


def stack(file: str, line: int) -> list[dict[str, Any]]:
    """Innermost first: torch, the user's line, and the script."""
    return [
        {"filename": _TORCH, "line": 1776, "name": "_call_impl"},
        {"filename": f"/home/me/gpt/{file}", "line": line, "name": "forward"},
        {"filename": "/home/me/gpt/train.py", "line": 20, "name": "main"},
    ]


class PlayedMemory:
    """Device 1 of two. `history`: whether stacks and traces are recorded."""

    def __init__(self, num_segments: int = 2, *, history: bool = True) -> None:
        self.history = history
        self._blocks: list[list[dict[str, Any]]] = [[] for _ in range(num_segments)]
        self._trace: list[dict[str, Any]] = []

    def alloc(self, size: int, file: str, line: int, *, segment: int = 0) -> dict[str, Any]:
        """A block in use."""
        used = sum(block["size"] for block in self._blocks[segment])
        frames = stack(file, line) if self.history else []
        block = {"address": _FIRST + segment * SEGMENT_BYTES + used, "size": size, "requested_size": size - 12,
                 "state": "active_allocated", "frames": frames}  # fmt: skip
        self._blocks[segment].append(block)
        self._enter("alloc", block["address"], size, frames)
        return block

    def free(self, block: dict[str, Any]) -> None:
        """Give a block back to the cache, where it has no stack."""
        block |= {"state": "inactive", "frames": []}
        for action in ("free_requested", "free_completed"):
            self._enter(action, block["address"], block["size"], [])

    def fail(self, size: int, file: str, line: int) -> None:
        """An allocation that is refused."""
        if self.history:
            about = {"action": "oom", "device_free": 3 << 20, "size": size, "stream": 0}
            self._trace.append(about | {"time_us": len(self._trace), "frames": stack(file, line)})

    def snapshot(self) -> dict[str, Any]:
        """As torch makes it."""
        return {
            "segments": [self._segment(number) for number in range(len(self._blocks))],
            "device_traces": [[], list(self._trace)],
            "allocator_settings": {"expandable_segments": False, "max_split_size": -1, "PYTORCH_CUDA_ALLOC_CONF": ""},
            "external_annotations": [],
        }

    def _segment(self, number: int) -> dict[str, Any]:
        blocks = [dict(block) for block in self._blocks[number]]
        active = sum(block["size"] for block in blocks if block["state"] == "active_allocated")
        if rest := SEGMENT_BYTES - sum(block["size"] for block in blocks):
            address = _FIRST + (number + 1) * SEGMENT_BYTES - rest
            blocks.append({"address": address, "size": rest, "requested_size": 0, "state": "inactive", "frames": []})
        return {
            "device": 1, "address": _FIRST + number * SEGMENT_BYTES, "total_size": SEGMENT_BYTES,
            "allocated_size": active, "active_size": active, "requested_size": active, "stream": 0,
            "segment_type": "large", "segment_pool_id": (0, 0), "is_expandable": False, "frames": [], "blocks": blocks,
        }  # fmt: skip

    def _enter(self, action: str, address: int, size: int, frames: list[Any]) -> None:
        if self.history:
            about = {"action": action, "addr": address, "size": size, "stream": 0, "time_us": len(self._trace)}
            self._trace.append(about | {"frames": frames, "compile_context": "N/A", "user_metadata": ""})
