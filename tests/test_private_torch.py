"""torch's private names are used in one file of the probes and in one of the trainer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.private_torch import private_names

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
