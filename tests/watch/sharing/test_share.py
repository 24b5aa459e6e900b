"""`rankscope share`: one file, the same verdict elsewhere, no secret in it."""

from __future__ import annotations

import json
import shutil
import tarfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from probes.tape.events import EventWriter
from probes.tape.rundir import RunDir
from rankscope.cli import app
from store.open import is_shared
from tests.factories import make_run
from watch.records.tape_sync import TapeSync
from watch.sharing.pack import pack
from watch.sharing.shared_run import shared_run
from watch.verdicts.diagnosed_run import diagnosed_run

SECRET = "hunter22hunter22"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A run with a straggler, and secrets in its settings, events, logs and stacks."""
    made = make_run(tmp_path_factory.mktemp("runs"), ranks=4, steps=60, slow={3: 1.6}, phase="forward")
    manifest = made.manifest()
    manifest["config"] = {"alerts": {"webhook": f"https://example.org/{SECRET}"}}
    made.write_manifest(manifest)
    events = EventWriter(made.rank_dir(0, 3) / "events.jsonl", attempt=0, rank=3)
    events.write(
        "note_of_the_user", wall_ns=1, mono_ns=1, message=f"401 for https://example.org/{SECRET} with TOKEN={SECRET}"
    )
    (made.path / "logs").mkdir()
    (made.path / "logs" / "launcher.log").write_text(f"export API_KEY={SECRET}\nstep 12 done\n")
    (made.path / "logs" / "outside.log").symlink_to("/etc/hostname")
    (made.stacks / "attempt-0-rank-00003.txt").write_text(
        f"File train.py, line 3, in f\n  log_in(password='{SECRET}')\n"
    )
    return made


@pytest.fixture(scope="module")
def packed(run: RunDir, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("out") / "any-name.bin"
    done = CliRunner().invoke(app, ["share", str(run.path), "--out", str(target)])
    assert done.exit_code == 0, done.output
    assert "outside.log" in done.output
    return target


def test_the_verdict_is_the_same_elsewhere(run: RunDir, packed: Path, tmp_path: Path) -> None:
    there = tmp_path / "renamed.tar.gz"
    shutil.copy(packed, there)
    here, shared = (CliRunner().invoke(app, ["analyze", str(path), "--format", "json"]) for path in (run.path, there))
    assert shared.exit_code == here.exit_code == 0, shared.output
    assert shared.stdout == here.stdout
    assert "Rank 3 was slow" in json.loads(shared.stdout)["verdict"]


def test_what_the_run_lacks_is_named_elsewhere(tmp_path: Path) -> None:
    """The folder of one rank was not copied, nor was `run.json`; the shared file has no tapes to check."""
    run = make_run(tmp_path / "runs", ranks=3, steps=20)
    TapeSync(run).sync(last=True)
    shutil.rmtree(run.rank_dir(0, 1))
    (run.path / "run.json").unlink()
    file = tmp_path / "file.tar.gz"
    pack(run, file, version="1")
    with diagnosed_run(run) as (_, here), shared_run(file) as (_, there, _):
        assert there.verdict == here.verdict
        assert there.run == here.run
        assert any("rank-00001/steps.00000.tape" in found["path"] for found in there.damaged_records)


def test_no_secret_is_in_it(packed: Path) -> None:
    assert packed.stat().st_mode & 0o077 == 0
    with tarfile.open(packed) as archive:
        texts = {member.name.partition("/")[2]: archive.extractfile(member) for member in archive}
        contents = {name: file.read() for name, file in texts.items() if file is not None}
    assert {"shared.json", "run.json", "telemetry.duckdb", "logs/launcher.log", "reports/report.html"} <= set(contents)
    assert "logs/outside.log" not in contents
    assert [name for name, content in contents.items() if SECRET.encode() in content] == []
    assert b"step 12 done" in contents["logs/launcher.log"]


def test_a_link_in_place_of_a_folder_leads_nowhere(tmp_path: Path) -> None:
    made = make_run(tmp_path / "runs", ranks=1, steps=3)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "id_rsa").write_text("a key")
    links = [made.path / "logs", made.path / "stacks"]
    for link in links:
        shutil.rmtree(link, ignore_errors=True)
        link.symlink_to(outside)
    done = pack(made, tmp_path / "x.tar.gz", version="1")
    assert sorted(done.left_out) == [f"{link} is a link: not followed" for link in links]
    with tarfile.open(done.path) as archive:
        assert [member for member in archive.getnames() if "id_rsa" in member] == []


def test_unpacked_it_is_a_run_for_other_commands(packed: Path, tmp_path: Path) -> None:
    with tarfile.open(packed) as archive:
        archive.extractall(tmp_path, filter="data")
    (folder,) = tmp_path.iterdir()
    assert [path for path in folder.rglob("*") if path.is_file() and path.stat().st_mode & 0o077] == []
    done = CliRunner().invoke(app, ["sql", str(folder), "SELECT count(*) AS n FROM steps", "--format", "csv"])
    assert done.exit_code == 0, done.output
    assert "240" in done.output


def test_only_the_newest_steps(run: RunDir, tmp_path: Path) -> None:
    target = tmp_path / "tail.tar.gz"
    done = pack(run, target, version="1", last_steps=20)
    with shared_run(target) as (store, _, note):
        assert store.rows("SELECT min(step), max(step) FROM steps") == [(41, 60)]
    assert "step 41" in note
    assert done.diagnosis.run["steps"] == 60


def test_a_run_that_was_alive_is_judged_as_of_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from watch.sharing import pack as packing
    from watch.verdicts.run_phase import RunPhase

    alive = make_run(tmp_path, ranks=4, steps=30, hang={2: 20})
    monkeypatch.setattr(packing, "settled_phase", lambda run: RunPhase(word="running"))
    target = tmp_path / "live.tar.gz"
    done = pack(alive, target, version="1")
    with shared_run(target) as (_, diagnosis, note):
        assert diagnosis.verdict == done.diagnosis.verdict
    assert "alive" in note


def test_other_files_are_no_shared_runs(tmp_path: Path) -> None:
    (tmp_path / "text.gz").write_bytes(b"\x1f\x8bnot an archive")
    assert not is_shared(tmp_path / "text.gz")
    assert not is_shared(tmp_path)
    assert not is_shared(tmp_path / "nothing")


def test_an_archive_without_a_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "shared.json").write_text(json.dumps({"first_step": "x"}))
    with tarfile.open(tmp_path / "x.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "shared.json", "x/shared.json")
    done = CliRunner().invoke(app, ["analyze", str(tmp_path / "x.tar.gz")])
    assert done.exit_code == 2
    assert len(done.output.splitlines()) == 1, done.output
