"""A run's folder that somebody made to harm (F48): manifest, stores, stacks. Nothing runs, leaks or waits."""

from __future__ import annotations

import io
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from analyzers.diagnose import diagnose
from analyzers.hangs.stacks import parse_stack, read_stack
from analyzers.report.json import to_json
from analyzers.report.terminal.diagnosis_text import render
from analyzers.run.policy import stall_policy
from analyzers.verdict.run_facts import run_facts
from probes.tape.rundir import ALTERED, RunDir, RunError
from store import Store, StoreError
from tests.factories import make_run

SECRET = "what-only-the-reader-may-see"
TERABYTE = 1 << 40


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    run = make_run(tmp_path_factory.mktemp("pristine"), ranks=2, steps=8)
    with Store.open(run):
        pass
    return run


@pytest.fixture
def run(pristine: RunDir, tmp_path: Path) -> RunDir:
    return RunDir(Path(shutil.copytree(pristine.path, tmp_path / "runs" / "demo", symlinks=True)))


def report(run: RunDir, *, may_fail: bool = False) -> str:
    """Everything that `analyze` would say; an error's line where it refuses. `may_fail`: single analyzers may."""
    try:
        opened = RunDir.open(run.path)
        with Store.open(opened, wait_s=1.0) as store:
            diagnosis = diagnose(store, opened.manifest(), stacks_dir=opened.stacks)
    except (RunError, StoreError) as error:
        return str(error)
    assert may_fail or not [finding for finding in diagnosis.findings if finding.advice == "analyzer-failed"]
    screen = io.StringIO()
    render(diagnosis, Console(file=screen, width=200, no_color=True, legacy_windows=False))
    assert "\x1b" not in screen.getvalue()
    return screen.getvalue() + json.dumps(to_json(diagnosis), allow_nan=False)


# ---- run.json ----

MANIFESTS: dict[str, bytes] = {
    "empty": b"",
    "cut off": b'{"run_id": "demo", "conf',
    "deep": b"[" * 500_000,
    "deep objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "a list": b"[1, 2, 3]",
    "a number": b"7",
    "invalid UTF-8": b'{"run_id": "\xff\xfe"}',
    "NUL bytes": b"\0" * 4096,
    "a pickle": b"\x80\x04cos\nsystem\n(X\x02\0\0\0idtR.",
    "gzip": b"\x1f\x8b\x08\0" + b"\0" * 100,
    "odd values": b'{"run_id": [1], "config": {"run": 7, "recovery": {"hang_floor_s": "NaN"}, "parallel": []}}',
    "keys twice": b'{"run_id": "a", "run_id": {"b": 1}, "config": 1, "config": []}',
    "not finite": b'{"config": {"recovery": {"hang_floor_s": NaN}, "checkpoint": {"interval": Infinity}}}',
    "negative and huge": b'{"world_size": -5, "config": {"recovery": {"hang_floor_s": -1}}, "x": ' + b"9" * 30 + b"}",
    "10^18 ranks": b'{"world_size": 1000000000000000000, "mesh": {"tp": 1000000000000000000, "pp": -1}}',
    "a number of 20,000 digits": b'{"world_size": ' + b"9" * 20_000 + b"}",
    "ANSI and HTML": rb'{"run_id": "\u001b[2J<script>alert(1)</script>", "config": {"run": {"name": "\u001b]0;x"}}}',
    "a schema that is text": b'{"schema_version": "99"}',
}  # fmt: skip


@pytest.fixture(scope="module")
def store(pristine: RunDir) -> Any:
    with Store.open(pristine) as opened:
        yield opened


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_of_any_content(pristine: RunDir, store: Store, tmp_path: Path, name: str) -> None:
    (tmp_path / "run.json").write_bytes(MANIFESTS[name])
    (tmp_path / "tapes").mkdir()
    manifest = RunDir.open(tmp_path).manifest()
    facts = run_facts(store, manifest)
    json.dumps(facts, default=str)
    assert 0 < stall_policy(manifest).floor_s < 86400
    if not manifest:
        assert RunDir(tmp_path).problems()["run.json"].startswith("is damaged")


@pytest.mark.parametrize("change", [("world_size", "worldsize"), ('"digest"', '"dihest"')])
def test_an_altered_manifest_is_a_problem(tmp_path: Path, change: tuple[str, str]) -> None:
    run = RunDir(tmp_path)
    run.write_manifest({"world_size": 4})
    assert run.problems() == {}
    path = tmp_path / "run.json"
    path.write_text(path.read_text().replace(*change))
    assert run.problems() == {"run.json": ALTERED}


def test_the_whole_report_with_an_odd_manifest(run: RunDir) -> None:
    (run.path / "run.json").write_bytes(MANIFESTS["not finite"])
    assert report(run).startswith("Verdict")
    (run.path / "run.json").write_bytes(MANIFESTS["cut off"])
    assert "what was configured is not known" in report(run)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
_SECTION = JSON | st.dictionaries(
    st.sampled_from(["name", "hang_floor_s", "schedule", "interval", "memory_interval", "mtbf_s", "dir"]),
    JSON,
    max_size=4,
)
_MANIFEST = st.dictionaries(
    st.sampled_from(["run_id", "world_size", "mesh", "created_wall_ns", "faults", "device"]), JSON, max_size=4
) | st.fixed_dictionaries({
    "config": JSON | st.dictionaries(
        st.sampled_from(["run", "recovery", "parallel", "checkpoint", "train", "model"]), _SECTION, max_size=5
    )
})  # fmt: skip


@given(manifest=_MANIFEST)
def test_any_manifest_gives_facts_and_a_policy(store: Store, manifest: dict[str, Any]) -> None:
    run_facts(store, manifest)
    assert 0 < stall_policy(manifest).floor_s < 86400


# ---- what is not a file, or not in the run ----


def _outside(run: RunDir) -> Path:
    path = run.path.parents[1] / "outside"
    path.mkdir(exist_ok=True)
    return path


def _replace(run: RunDir, name: str, make: Callable[[Path], object]) -> None:
    path = run.path / name
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    make(path)


def manifest_links_out(run: RunDir) -> None:
    secret = _outside(run) / "secret.json"
    secret.write_text(json.dumps({"run_id": SECRET, "config": {"run": {"name": SECRET}}}))
    _replace(run, "run.json", lambda path: path.symlink_to(secret))


def tapes_link_out(run: RunDir) -> None:
    shutil.move(run.tapes, _outside(run) / "tapes")
    run.tapes.symlink_to(_outside(run) / "tapes")


def attempt_links_out(run: RunDir) -> None:
    shutil.move(run.tapes / "attempt-0", _outside(run) / "attempt-0")
    (run.tapes / "attempt-0").symlink_to(_outside(run) / "attempt-0")


def stacks_link_out(run: RunDir) -> None:
    (_outside(run) / "attempt-0-rank-00000.txt").write_text(
        f'Current thread 0x1 (most recent call first):\n  File "{SECRET}", line 1 in {SECRET}\n'
    )
    _replace(run, "stacks", lambda path: path.symlink_to(_outside(run)))
    assert read_stack(run.stacks, 0, 0) == []


def store_links_out(run: RunDir) -> None:
    other = _outside(run) / "other.duckdb"
    shutil.move(run.store(), other)
    with duckdb.connect(str(other)) as connection:
        connection.execute(f"UPDATE ingest_problems SET problem = '{SECRET}'")
    run.store().symlink_to(other)


def lock_links_out(run: RunDir) -> None:
    precious = _outside(run) / "precious"
    precious.write_text("precious")
    _replace(run, "telemetry.duckdb.lock", lambda path: path.symlink_to(precious))


def wal_links_out(run: RunDir) -> None:
    precious = _outside(run) / "precious"
    precious.write_text("precious")
    _replace(run, "telemetry.duckdb.wal", lambda path: path.symlink_to(precious))


FOLDERS: dict[str, tuple[Callable[[RunDir], object], str]] = {
    "a manifest that leads out": (manifest_links_out, "is a link"),
    "a manifest that is a FIFO": (lambda run: _replace(run, "run.json", os.mkfifo), "is not a regular file"),
    "a manifest that is a folder": (lambda run: _replace(run, "run.json", Path.mkdir), "is not a regular file"),
    "a manifest that is /dev/zero": (
        lambda run: _replace(run, "run.json", lambda path: path.symlink_to("/dev/zero")), "is a link"),
    "a manifest of a terabyte": (lambda run: os.truncate(run.path / "run.json", TERABYTE), "is damaged"),
    "a manifest that was removed": (lambda run: (run.path / "run.json").unlink(), "is missing"),
    "tapes that lead out": (tapes_link_out, "is a link"),
    "tapes that are a file": (lambda run: _replace(run, "tapes", lambda path: path.write_text("x")), "is not a folder"),
    "an attempt that leads out": (attempt_links_out, "is a link"),
    "stacks that lead out": (stacks_link_out, "Verdict"),
    "stacks that are a FIFO": (lambda run: _replace(run, "stacks", os.mkfifo), "Verdict"),
    "a store that leads out": (store_links_out, "Verdict"),
    "a store that is a FIFO": (lambda run: _replace(run, "telemetry.duckdb", os.mkfifo), "Verdict"),
    "a store that is a folder": (lambda run: _replace(run, "telemetry.duckdb", Path.mkdir), "Verdict"),
    "a store that is text": (
        lambda run: _replace(run, "telemetry.duckdb", lambda path: path.write_text("x" * 20_000)), "Verdict"),
    "a store of a terabyte": (lambda run: os.truncate(run.store(), TERABYTE), "Verdict"),
    "a store cut in half": (lambda run: os.truncate(run.store(), run.store().stat().st_size // 2), "Verdict"),
    "a lock that leads out": (lock_links_out, "Verdict"),
    "a lock that is a FIFO": (lambda run: _replace(run, "telemetry.duckdb.lock", os.mkfifo), "Verdict"),
    "a log that leads out": (wal_links_out, "Verdict"),
    "a log that is text": (
        lambda run: _replace(run, "telemetry.duckdb.wal", lambda path: path.write_text("x" * 999)), "Verdict"),
}  # fmt: skip


TOGETHER = (
    ("a manifest that leads out", "stacks that lead out", "a store that leads out"),
    ("a manifest that is a FIFO", "stacks that are a FIFO", "a store that is a FIFO"),
    ("a manifest that is a folder", "an attempt that leads out", "a store that is a folder"),
    ("a manifest that is /dev/zero", "a store that is text", "a log that is text"),
    ("a manifest of a terabyte", "tapes that lead out", "a store of a terabyte"),
    ("tapes that are a file", "a store cut in half"),
    ("a lock that leads out", "a manifest that was removed"),
    ("a lock that is a FIFO", "a log that leads out"),
)
"""Cases that do not hide one another, in one run each."""


def test_every_case_is_in_a_run() -> None:
    assert sorted(name for names in TOGETHER for name in names) == sorted(FOLDERS)


@pytest.mark.parametrize("names", TOGETHER, ids=lambda names: names[0])
def test_what_is_no_file_of_the_run_is_not_opened(run: RunDir, names: tuple[str, ...]) -> None:
    for name in names:
        FOLDERS[name][0](run)
    began = time.monotonic()
    said = report(run)
    assert said.startswith("Verdict")
    assert all(FOLDERS[name][1] in said for name in names)
    assert SECRET not in said
    assert time.monotonic() - began < 100.0
    precious = _outside(run) / "precious"
    assert not precious.exists() or precious.read_text() == "precious"


# ---- stores that somebody else made ----

ENDLESS = f"SELECT 0 AS attempt, 0 AS rank, range AS step, range AS wall_ns FROM range({10**12})"
ATTACKS = {
    "a view that reads": "CREATE OR REPLACE VIEW steps AS SELECT content AS step FROM read_text('/etc/hostname')",
    "a view without an end": f"CREATE OR REPLACE VIEW steps AS {ENDLESS}",
    "a view in place of a table": f"DROP TABLE events; CREATE VIEW events AS {ENDLESS}",
    "a view in place of a part": f"DROP VIEW steps; DROP TABLE steps_done; CREATE VIEW steps_done AS {ENDLESS}",
    "a macro of a name that we use": "CREATE MACRO median(x) AS (SELECT content FROM read_text('/etc/hostname'))",
    "tables without columns of ours": "DROP TABLE events; CREATE TABLE events (x INTEGER)",
    "columns of other types": "DROP TABLE events; CREATE TABLE events (wall_ns VARCHAR, kind BLOB, detail INTEGER[])",
    "no table at all": "DROP TABLE ingest_meta; DROP VIEW steps; DROP TABLE steps_done",
    "a description of lies": "UPDATE ingest_meta SET schema_version = -5, fingerprint = NULL, store_id = NULL",
    "positions beyond all tapes": "UPDATE ingest_positions SET next_place = 9000000000000000000, "
    "pending = [-1, 9000000000000000000]",
    "positions of other files": "UPDATE ingest_positions SET path = '/etc/passwd'",
    "clocks of another age": "UPDATE ingest_anchors SET wall_minus_mono_ns = 9223372036854775807",
}  # fmt: skip
NONSENSE = """
    INSERT INTO steps_done (attempt, rank, step, start_ns, duration_ns, loss) VALUES
        (-7, -9, -1, -1, -1, 'nan'), (0, 0, NULL, NULL, NULL, NULL),
        (2147483647, 2147483647, 9223372036854775807, 9223372036854775807, 9223372036854775807, 'inf');
    INSERT INTO events (attempt, rank, wall_ns, step, kind, detail) VALUES
        (NULL, NULL, NULL, NULL, NULL, NULL), (-1, -1, -1, -1, 'run_ended', '[]'),
        (0, 0, 9223372036854775807, 0, 'rollback', '{"from_step": {}}')
"""


@pytest.mark.parametrize("name", ATTACKS)
def test_a_store_with_traps(run: RunDir, name: str) -> None:
    with duckdb.connect(str(run.store())) as connection:
        connection.execute(ATTACKS[name])
    began = time.monotonic()
    secret = Path("/etc/hostname").read_text().strip() if Path("/etc/hostname").exists() else ""
    for catch_up in (False, True):
        said = ""
        try:
            with Store.open(run, catch_up=catch_up, wait_s=1.0) as store:
                for table in ("steps", "events"):
                    said += repr(store.rows(f"SELECT * FROM {table} LIMIT 3"))
                    ((rows,),) = store.rows(f"SELECT count(*) FROM {table}")
                    assert rows < 1000
        except StoreError as error:
            said += str(error)
        assert len(secret) < 4 or secret not in said
    assert time.monotonic() - began < 100.0


def test_rows_of_nonsense_give_a_report(run: RunDir) -> None:
    with duckdb.connect(str(run.store())) as connection:
        connection.execute(NONSENSE)
    assert report(run, may_fail=True).startswith("Verdict")


# ---- stacks ----


@given(text=st.text(max_size=300) | st.binary(max_size=300).map(lambda blob: blob.decode("utf-8", "replace")))
def test_any_text_is_a_stack_or_none(text: str) -> None:
    for whole in (text, f'Current thread 0x1:\n  File "{text}", line 3 in f\n', "Current thread \n" * 50 + text):
        assert len(parse_stack(whole)) <= 6
