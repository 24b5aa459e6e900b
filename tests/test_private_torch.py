"""torch's private names are used in one file of the probes and in one of the trainer."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

_IN_TEXT = re.compile(r"torch(\.\w+)*\._[a-zA-Z]\w*(\.\w+)*")


ROOT = Path(__file__).parent.parent
ALLOWED = {Path("probes/torch_compat.py"), Path("trainer/torch_compat.py")}


@pytest.mark.parametrize("package", ["probes", "store", "analyzers", "watch", "trainer", "dashboard", "rankscope"])
def test_private_names_of_torch_are_in_torch_compat(package: str) -> None:
    found = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        if path.relative_to(ROOT) not in ALLOWED and (names := private_names(path.read_text(encoding="utf-8"))):
            found[str(path.relative_to(ROOT))] = names
    assert not found, f"move them to torch_compat.py: {found}"


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("import torch\ntorch._foreach_norm(x)", ["torch._foreach_norm (line 2)"]),
        ("from torch._C._distributed_c10d import Store", ["torch._C._distributed_c10d.Store (line 1)"]),
        ("import torch.distributed as dist\ndist._shut", ["torch.distributed._shut (line 2)"]),
        ("from torch.utils import _pytree as tree\ntree.tree_map(f, x)",
         ["torch.utils._pytree (line 1)", "torch.utils._pytree.tree_map (line 2)"]),
        ("def f():\n  from torch.utils._pytree import tree_map", ["torch.utils._pytree.tree_map (line 2)"]),
        ("import torch\nclass A:\n  b = torch.ops._c10d_functional.wait_tensor.default",
         ["torch.ops._c10d_functional.wait_tensor.default (line 3)"]),
        ("find('torch._dynamo.callback')", ["torch._dynamo.callback (line 1)"]),
        ("import torch\ntorch.__version__\nself._torch.mine\ntorch.cuda.memory.snapshot()", []),
        ('"""`torch._dynamo.reset` has done so."""', []),
        ("from .torch import _mine\nfrom torchvision import _x", []),
    ],
)  # fmt: skip
def test_what_is_a_private_name(source: str, names: list[str]) -> None:
    assert private_names(source) == names


def private_names(source: str) -> list[str]:
    """Private names of torch in a source file: attributes and imports with an underscore, and module paths in texts."""
    if "torch" not in source:
        return []
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
