"""Facts of a rank's node, on processors whose kernel describes them in another way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from trainer.preflight.facts import device_model


@pytest.mark.parametrize(
    ("cpuinfo", "expected"),
    [
        ("processor\t: 0\nmodel name\t: Xeon Platinum 8480C\nprocessor\t: 1\n", "Xeon Platinum 8480C"),
        ("processor\t: 0\nBogoMIPS\t: 2000.00\nCPU implementer\t: 0x41\n", "cpu"),  # ARM
        ("", "cpu"),
    ],
)
def test_the_processor_is_named_or_called_cpu(monkeypatch: pytest.MonkeyPatch, cpuinfo: str, expected: str) -> None:
    real = Path.read_text

    def read_text(path: Path, *arguments: Any, **options: Any) -> str:
        return cpuinfo if str(path) == "/proc/cpuinfo" else real(path, *arguments, **options)

    monkeypatch.setattr(Path, "read_text", read_text)
    assert device_model(torch.device("cpu")) == expected
