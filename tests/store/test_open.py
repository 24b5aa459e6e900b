"""What a path that a user names is, for every command."""

from __future__ import annotations

from pathlib import Path

import pytest

from store.open import classify
from tests.factories import make_run


def test_each_kind_of_path_is_recognised(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs", steps=3).path
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "job.log").write_text("x\n")
    found = classify(run)
    assert (found.kind, found.run) == ("run", run)
    found = classify(run.parent)
    assert (found.kind, found.run, found.run_ids) == ("runs", run, (run.name,))
    for path in (tmp_path / "logs", tmp_path / "logs" / "job.log"):
        found = classify(path)
        assert (found.kind, found.run) == ("files", path)
    assert classify(tmp_path / "gone").kind == "missing"


@pytest.mark.parametrize(
    ("typed", "address"),
    [("s3:/lake/runs", "s3://lake/runs"), ("s3://lake/runs/a", "s3://lake/runs/a"), ("file:///mnt/x", "file:///mnt/x")],
)
def test_an_address_is_known_before_anything_is_opened(typed: str, address: str) -> None:
    found = classify(Path(typed))
    assert (found.kind, found.address) == ("address", address)
