"""A store whose writer was killed is read without a loss."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import duckdb
import pytest

from store import Store, StoreCorruptError
from tests.factories import make_run

WRITES_AND_DIES = """
import os, sys, duckdb
connection = duckdb.connect(sys.argv[1])
connection.execute("INSERT INTO ingest_problems VALUES ('a file', 'a problem')")
os._exit(0)
"""


def test_a_log_that_a_checkpoint_has_made_useless_costs_no_record(tmp_path: Path) -> None:
    """As a writer leaves it that is killed after the checkpoint; the rows of tapes that are gone are in the store."""
    run = make_run(tmp_path, ranks=2, steps=5)
    with Store.open(run) as store:
        assert store.rows("SELECT count(*) FROM steps") == [(10,)]
    shutil.rmtree(run.tapes)
    subprocess.run([sys.executable, "-c", WRITES_AND_DIES, run.store()], check=True)
    log = run.store().with_name(run.store().name + ".wal")
    useless = log.read_bytes()
    duckdb.connect(str(run.store())).close()  # which takes the log into the file
    assert not log.exists()
    log.write_bytes(useless)
    with pytest.raises(StoreCorruptError):
        Store.open(run, catch_up=False)
    with Store.open(run) as store:
        assert store.rows("SELECT count(*) FROM steps") == [(10,)]
        assert store.rows("SELECT count(*) FROM ingest_problems") == [(1,)]
    assert not list(run.path.glob("*.quarantine*"))
