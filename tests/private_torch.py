"""Private names of torch in a source file: attributes behind an underscore, imports of them, and module paths in texts.

private_names(source)        # ["torch._C._distributed_c10d (line 18)"]
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

__all__ = ["private_names"]

_IN_TEXT = re.compile(r"torch(\.\w+)*\._[a-zA-Z]\w*(\.\w+)*")


def private_names(source: str) -> list[str]:
    tree = ast.parse(source)
    aliases = _aliases(tree)
    found = {(line, name) for line, name in _used(tree, aliases) if _is_private(name)}
    # The longest of a chain stands for its parts.
    longest = [
        (line, name)
        for line, name in sorted(found)
        if not any(other != name and other.startswith(f"{name}.") and at == line for at, other in found)
    ]
    return [f"{name} (line {line})" for line, name in longest]


def _aliases(tree: ast.AST) -> dict[str, str]:
    """Local names of torch's modules -> their paths, like dist -> torch.distributed."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    names[alias.asname or "torch"] = alias.name if alias.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch" and not node.level:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return names


def _used(tree: ast.AST, aliases: dict[str, str]) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name.split(".")[0] == "torch")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch" and not node.level:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Attribute):
            path = _path(node, aliases)
            if path is not None:
                yield node.lineno, path
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _IN_TEXT.fullmatch(node.value):
            yield node.lineno, node.value


def _path(node: ast.Attribute, aliases: dict[str, str]) -> str | None:
    names: list[str] = []
    value: ast.expr = node
    while isinstance(value, ast.Attribute):
        names.insert(0, value.attr)
        value = value.value
    if not isinstance(value, ast.Name) or value.id not in aliases:
        return None
    return ".".join([aliases[value.id], *names])


def _is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.endswith("__") for part in name.split("."))
