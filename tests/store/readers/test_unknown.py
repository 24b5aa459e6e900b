"""Files that are no log and of no supported format are described by what they hold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from store.readers import unknown
from store.readers.unknown import unknown_document


def test_a_json_document_over_the_limit_is_large_and_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unknown, "MAX_BYTES", 2 << 20)
    path = tmp_path / "tokens.json"
    path.write_text(json.dumps({"ids": [*range(400_000)]}))
    assert unknown_document(path) == "is JSON of more than 2 MiB of no supported format"


def test_a_json_document_that_ends_early_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"model": {"dim": 64}, "seed"')
    assert unknown_document(path) == "is damaged or cut JSON of no supported format"
