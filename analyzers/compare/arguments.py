"""Arguments of a script's recorded command as settings, to compare runs.

arguments({"attached": True, "command": ["train.py", "--lr", "3e-3", "--fault=spike", "--bf16"]})
# {"--lr": "3e-3", "--fault": "spike", "--bf16": "set", "arguments": "train.py"}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["arguments"]

MAX_ARGUMENTS = 200
MAX_VALUE_CHARS = 200


def arguments(manifest: Mapping[str, Any]) -> dict[str, str]:
    """Options by name and the positional arguments in order. Empty for the trainer, whose settings are recorded."""
    command = manifest.get("command")
    if not manifest.get("attached") or not isinstance(command, list):
        return {}
    words = [str(word) for word in command[:MAX_ARGUMENTS]]
    found: dict[str, str] = {}
    rest = []
    while words:
        word = words.pop(0)
        if not _is_option(word):
            rest.append(word)
            continue
        name, sign, value = word.partition("=")
        if not sign:
            values = []
            while words and not _is_option(words[0]):
                values.append(words.pop(0))
            value = " ".join(values) or "set"
        value = f"{found[name]}, {value}" if name in found else value
        found[name[:MAX_VALUE_CHARS]] = value[:MAX_VALUE_CHARS]
    return {**found, "arguments": " ".join(rest)[:MAX_VALUE_CHARS]} if rest else found


def _is_option(word: str) -> bool:
    """Return True for `-x` and `--name`; a negative number is a value."""
    return len(word) > 1 and word[0] == "-" and not (word[1].isdigit() or word[1] == ".")
