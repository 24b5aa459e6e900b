"""Every setting of the configuration is read somewhere: none is accepted and ignored."""

from __future__ import annotations

import ast
from pathlib import Path

from pydantic import BaseModel

from trainer.config.config import Config

ROOT = Path(__file__).parents[3]
PACKAGES = ("rankscope", "probes", "store", "analyzers", "watch", "trainer", "dashboard")


def names_read() -> set[str]:
    """Attributes that any module of the product reads, parameters (settings are passed by name) and short texts."""
    found: set[str] = set()
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                    found.add(node.attr)
                elif isinstance(node, ast.arg):
                    found.add(node.arg)
                elif isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 60:
                    found.add(node.value.rpartition(".")[2])
    return found


def test_every_setting_is_read_somewhere() -> None:
    read = names_read()
    unread = []
    for section, info in Config.model_fields.items():
        assert isinstance(info.annotation, type)
        assert issubclass(info.annotation, BaseModel)
        unread += [
            f"{section}.{name}" for name in info.annotation.model_fields if name.removeprefix("wandb_") not in read
        ]
    assert unread == []
