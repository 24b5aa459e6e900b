"""The commit of a checkout is read from git's files, whatever form they have."""

from __future__ import annotations

from pathlib import Path

import pytest

from probes.tape.run_facts import source_commit

HASH = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    "files",
    [
        {".git/HEAD": HASH},
        {".git/HEAD": "ref: refs/heads/main\n", ".git/refs/heads/main": f"{HASH}\n"},
        {".git/HEAD": "ref: refs/heads/main", ".git/packed-refs": f"# pack-refs\n{HASH} refs/heads/main\n^{HASH}\n"},
        {".git": "gitdir: ../main/.git/worktrees/a\n", "../main/.git/worktrees/a/HEAD": "ref: refs/heads/a",
         "../main/.git/worktrees/a/commondir": "../..\n", "../main/.git/refs/heads/a": HASH},
    ],
    ids=["detached", "branch", "packed", "linked"],
)  # fmt: skip
def test_the_commit_of_a_checkout(tmp_path: Path, files: dict[str, str]) -> None:
    checkout = tmp_path / "checkout"
    for name, text in files.items():
        path = checkout / name
        path.parent.resolve().mkdir(parents=True, exist_ok=True)
        path.resolve().write_text(text)
    inner = checkout / "a" / "b"
    inner.mkdir(parents=True)
    assert source_commit(inner) == HASH


@pytest.mark.parametrize("head", ["", "ref: refs/heads/unborn", "ref: ../../secret", "no hash"])
def test_without_a_commit_there_is_none(tmp_path: Path, head: str) -> None:
    (tmp_path / "secret").write_text("password")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git/HEAD").write_text(head)
    assert source_commit(tmp_path) == ""
