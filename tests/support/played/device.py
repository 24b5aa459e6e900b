"""A played CUDA device: tensors of FakeTensorMode on "cuda", streams and events that only count.

    load(folder)                       # compiles `device.cpp`; before torch is imported
    with played_device() as counts:    # patches torch.cuda and enters the modes
        model = nn.Linear(4, 4, device="cuda:0")
        model(torch.empty(2, 4, device="cuda:0")).sum().backward()
    counts.kernels, counts.copies, counts.events, counts.syncs

No memory is allocated and nothing is computed, so any size of model and world fits. A dispatch mode
counts what torch would launch, also in autograd's device thread. `item` returns 1.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

__all__ = ["Counts", "load", "played_device"]

_SOURCE = Path(__file__).with_name("device.cpp")
_FLAGS = ("-std=c++20", "-O1", "-fPIC", "-shared")
_PROPERTIES = SimpleNamespace(name="played", uuid="0", total_memory=80 << 30, major=9, minor=0)
_library: ctypes.CDLL | None = None


def load(folder: Path) -> None:
    """Compile and load the device. Raises RuntimeError if torch is already imported, or without a compiler."""
    global _library
    if "torch" in sys.modules:
        raise RuntimeError("the played device must be loaded before torch is imported")
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    torch = Path(spec.origin).parent
    target = folder / "played-device.so"
    words = [os.environ.get("CXX", "c++"), *_FLAGS, f"-I{torch / 'include'}", str(_SOURCE), "-o", str(target)]
    try:
        done = subprocess.run([*words, f"-L{torch / 'lib'}", "-lc10"], capture_output=True, text=True, check=False)
    except OSError as error:
        raise RuntimeError(f"no compiler: {error}") from error
    if done.returncode:
        raise RuntimeError(done.stderr)
    mode = os.RTLD_GLOBAL | os.RTLD_LAZY
    ctypes.CDLL(str(torch / "lib" / "libc10.so"), mode=mode)
    _library = ctypes.CDLL(str(target), mode=mode)


@dataclass(slots=True)
class Counts:
    """Work given to the device since `clear`."""

    operators: Counter[str] = field(default_factory=Counter)
    """Kernels by operator: everything that computes on the device, so no views."""
    copies: int = 0
    """From the device to the host, or back."""
    events: int = 0
    """Recorded on a stream."""
    stamps: int = 0
    """Events with timing enabled."""
    collectives: int = 0
    syncs: int = 0
    """Waits of the host for the device: synchronisations, and copies that block."""

    @property
    def kernels(self) -> int:
        return self.operators.total()

    def clear(self) -> None:
        self.operators.clear()
        self.copies = self.events = self.stamps = self.collectives = self.syncs = 0


@contextmanager
def played_device() -> Iterator[Counts]:
    """Let torch train on the played device inside the block."""
    import torch

    from tests.support.played.device_modes import CountingMode, PlayedMode, played_streams

    assert _library is not None, "call load() before torch is imported"
    _library.register_played_device()
    counts = Counts()
    event, stream = played_streams(counts)
    current = stream()
    answers: dict[str, Any] = {
        "Event": event, "Stream": stream,
        "current_stream": lambda *_, **__: current,
        "stream": lambda *_: nullcontext(),
        "is_available": lambda: True, "is_initialized": lambda: True, "is_current_stream_capturing": lambda: False,
        "device_count": lambda: 8, "current_device": lambda: 0, "set_device": lambda *_: None,
        "get_device_capability": lambda *_: (9, 0), "get_device_properties": lambda *_: _PROPERTIES,
        "memory_stats": lambda *_: {}, "_lazy_init": lambda: None,
        "get_rng_state": lambda *_: None, "set_rng_state": lambda *_: None,
        "synchronize": lambda *_: stream().synchronize(),
    }  # fmt: skip
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, answer))
        stack.enter_context(PlayedMode(allow_non_fake_inputs=True))
        stack.enter_context(CountingMode(counts))
        yield counts
