"""The ledger: batches are skipped once, in order, and it survives the disk."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from probes.guard import ledger as ledger_module
from probes.guard.ledger import Ledger, copy_of
from probes.recorder import NullRecorder
from trainer.checkpoint.disk_tier.manifest import StorageError
from trainer.guard.ledger_file import LedgerFile, save_ledger


@given(st.lists(st.integers(0, 60), unique=True))
def test_every_batch_is_either_skipped_or_met_once(skipped: list[int]) -> None:
    ledger = Ledger()
    for batch in skipped:
        assert ledger.skip(batch, "bad")
        assert not ledger.skip(batch, "again")
    met, batch = [], ledger.next_batch(0)
    while batch < 80:
        met.append(batch)
        batch = ledger.next_batch(batch + 1)
    assert sorted(met + skipped) == list(range(80))


def test_a_ledger_survives_the_disk_unchanged(tmp_path: Path) -> None:
    ledger = Ledger(path=tmp_path / "ledger.json", rollbacks=2, failures=1, good_step=50, rate_scale=0.5)
    for batch in (40, 7):
        ledger.skip(batch, f"reason {batch}")
    save_ledger(ledger)
    again, problem = Ledger.load(tmp_path / "ledger.json")
    assert (again, problem) == (ledger, "")
    assert list(again.skipped) == [40, 7], "in the order of the decisions"


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"skipped": 3}', '{"skipped": [["x", "y"]]}', "[" * 100_000])
def test_a_damaged_file_is_reported_and_loses_only_its_contents(text: str, tmp_path: Path) -> None:
    path = tmp_path / "ledger.json"
    path.write_text(text)
    ledger, problem = Ledger.load(path)
    assert "damaged" in problem
    assert ledger == Ledger(path=path)


def test_a_missing_file_is_an_empty_ledger(tmp_path: Path) -> None:
    assert Ledger.load(tmp_path / "ledger.json") == (Ledger(path=tmp_path / "ledger.json"), "")


def test_an_altered_file_is_noticed_and_its_copy_counts(tmp_path: Path) -> None:
    path = tmp_path / "ledger.json"
    save_ledger(Ledger(path=path, rate_scale=0.5, rate_until_step=90))
    path.write_text(path.read_text().replace('"rate_scale": 0.5', '"rate_scale": 0.9'))
    ledger, problem = Ledger.load(path)
    assert ledger.rate_scale == 0.5
    assert problem == "ledger.json is damaged: its content does not match its digest; its copy is used"
    copy_of(path).write_text("{")
    ledger, problem = Ledger.load(path)
    assert (ledger, "damaged" in problem) == (Ledger(path=path), True)


def test_the_newer_of_both_files_counts(tmp_path: Path) -> None:
    path = tmp_path / "ledger.json"
    ledger = Ledger(path=path)
    save_ledger(ledger)
    older = path.read_text()
    ledger.skip(40, "bad")
    save_ledger(ledger)
    path.write_text(older)
    again, problem = Ledger.load(path)
    assert list(again.skipped) == [40]
    assert "older than its copy" in problem
    path.unlink()
    again, problem = Ledger.load(path)
    assert list(again.skipped) == [40]
    assert "missing" in problem


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ENOTCONN, errno.EREMOTEIO])
def test_an_unreadable_file_is_not_an_empty_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    path = tmp_path / "ledger.json"
    save_ledger(Ledger(path=path, stopped="the budget is spent"))
    before = path.read_bytes()

    def fails(*arguments: object) -> bytes:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(ledger_module, "read_plain", fails)
        with pytest.raises(OSError, match=os.strerror(number)):
            Ledger.load(path)
        with pytest.raises(StorageError, match=os.strerror(number)):
            LedgerFile(tmp_path, NullRecorder(), is_chief=True)
    assert path.read_bytes() == before


def test_a_link_or_a_folder_in_its_place_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "ledger.json"
    path.symlink_to("elsewhere")
    copy_of(path).mkdir()
    ledger, problem = Ledger.load(path)
    assert (ledger, problem) == (Ledger(path=path), "ledger.json is damaged: OSError")
