"""Each TOML snippet of docs/parallelism.md loads, and resolves on the ranks that its first line names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from trainer.config.load import load_config
from trainer.layout.resolve import resolve

PAGE = Path(__file__).parent.parent / "docs" / "parallelism.md"
SNIPPETS = re.findall(r"^```toml\n(.*?)^```", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("snippet", SNIPPETS, ids=range(len(SNIPPETS)))
def test_snippet_resolves(snippet: str, tmp_path: Path) -> None:
    named = re.match(r"# ranks: (\d+)\n", snippet)
    assert named, "the first line says on how many ranks: `# ranks: 4`"
    ranks = int(named.group(1))
    path = tmp_path / "snippet.toml"
    path.write_text(snippet, encoding="utf-8")
    plan = resolve(load_config(path), ranks)
    assert plan.world_size == ranks


def test_each_kind_has_a_snippet() -> None:
    together = "\n".join(SNIPPETS)
    keys = "dp_replicate dp_shard tp cp ep pp schedule stage_costs precision zero1 cpu_offload gradient_compression"
    for key in (*keys.split(), "num_experts", "compile"):
        assert re.search(rf"^{key} = ", together, flags=re.MULTILINE), key


def test_each_schedule_is_described() -> None:
    for schedule in ("gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv_zero_bubble"):
        assert f"| `{schedule}` |" in PAGE.read_text(encoding="utf-8")
