"""Which GPUs there are for ranks: those that CUDA_VISIBLE_DEVICES shows, not those of the machine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from trainer.config.config import Config
from trainer.config.load import ConfigError
from trainer.launcher.nodes.devices import visible_devices
from trainer.training.build import pick_device


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (None, ["0", "1", "2", "3"]),
        ("", []),
        ("-1", []),
        ("2, 3", ["2", "3"]),
        ("1,-1,2", ["1"]),
        ("0,7", ["0"]),
        ("GPU-1b7d8f2c,MIG-aa", ["GPU-1b7d8f2c", "MIG-aa"]),
    ],
)
def test_visible_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str | None, found: list[str]) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidia3", "nvidiactl"):
        (tmp_path / name).touch()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if value is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert visible_devices(tmp_path) == found


def test_two_ranks_do_not_share_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert pick_device(Config(), 3) == torch.device("cuda", 3)
    with pytest.raises(ConfigError, match="only 4 GPUs"):
        pick_device(Config(), 4)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # a launcher that shows each rank its own
    assert pick_device(Config(), 4) == torch.device("cuda", 0)
