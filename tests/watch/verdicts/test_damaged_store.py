"""A store that opens, and whose blocks are damaged: set aside by the verdict that meets it, and rebuilt."""

from __future__ import annotations

import io
import os
from pathlib import Path

import duckdb
import pytest
from rich.console import Console

from analyzers.report.html.diagnosis_page import render as html_page
from analyzers.report.json import to_json
from analyzers.report.markdown import to_markdown
from analyzers.report.terminal.diagnosis_text import render
from probes.tape.rundir import RunDir
from store import Ingester, Store, StoreCorruptError
from store.ingest.damage import find_damage, rebuild_damaged
from tests.factories import make_run
from watch.verdicts.diagnosed_run import diagnosed_run

BLOCK_BYTES = 256 << 10
HEADER_BYTES = 3 * 4096


@pytest.fixture
def damaged(tmp_path: Path) -> RunDir:
    """A run that has ended, with a damaged block of step records in its store."""
    run = make_run(tmp_path, ranks=2, steps=400)
    with Store.open(run):
        pass
    with duckdb.connect(str(run.store())) as connection:
        blocks = connection.execute(
            "SELECT DISTINCT block_id FROM pragma_storage_info('steps_done') WHERE block_id >= 0"
        ).fetchall()
    assert blocks
    with run.store().open("r+b") as file:
        for (block,) in blocks:
            file.seek(HEADER_BYTES + block * BLOCK_BYTES + 64)
            file.write(os.urandom(4096))
    return run


def test_the_verdict_is_of_the_tapes(damaged: RunDir, caplog: pytest.LogCaptureFixture) -> None:
    assert find_damage(damaged.store()) is not None
    with diagnosed_run(damaged, is_over=True) as (store, diagnosis):
        assert store.rows("SELECT count(*) FROM steps") == [(800,)]
        assert "error" not in diagnosis.run
        page = html_page(store, diagnosis, damaged.manifest()).decode()
    shown = io.StringIO()
    render(diagnosis, Console(width=1_000, file=shown))
    for text in (page, to_markdown(diagnosis, damaged.manifest()), shown.getvalue()):
        assert "set aside as telemetry.duckdb.quarantine, rebuilt from the tapes" in text
    assert [found["path"] for found in to_json(diagnosis)["run"]["file_problems"]] == ["telemetry.duckdb"]
    with diagnosed_run(damaged, is_over=True) as (_, again):
        assert again.run["file_problems"] == diagnosis.run["file_problems"], "whoever reads it next is told too"
    assert damaged.store().with_name("telemetry.duckdb.quarantine").exists()
    assert "set aside" in caplog.text
    assert find_damage(damaged.store()) is None
    assert not rebuild_damaged(damaged), "a store that can be read stays where it is"


def test_damage_that_cannot_be_set_aside_is_no_verdict(damaged: RunDir) -> None:
    with (
        Ingester(damaged),  # another process writes the store, and it is its task
        pytest.raises(StoreCorruptError, match="is damaged"),
        diagnosed_run(damaged, is_over=True),
    ):
        pass


def test_a_query_that_meets_damage_is_remembered(damaged: RunDir) -> None:
    with Store.open(damaged) as store:
        assert store.damage is None
        with pytest.raises(StoreCorruptError):
            store.rows("SELECT sum(hash(s)) FROM steps s")
        assert store.damage is not None
