"""Folders of several nodes become one; what is not of one run, or no plain file, is refused."""

from __future__ import annotations

import os
import resource
import shutil
import signal
from pathlib import Path

import pytest
from typer.testing import CliRunner

from analyzers.diagnose import diagnose
from probes.tape.rundir import RunDir, RunError
from rankscope.cli import app
from store import Store
from store.collect import collect
from tests.factories import make_run


@pytest.fixture
def nodes(tmp_path: Path) -> list[Path]:
    """Two folders with two ranks each of one run in which rank 2 is slow."""
    where = {rank: {"node_rank": rank // 2} for rank in range(4)}
    whole = make_run(tmp_path, steps=60, slow={2: 1.5}, identities=where)
    folders = []
    for node in (0, 1):
        copy = RunDir(Path(shutil.copytree(whole.path, tmp_path / f"node-{node}" / whole.run_id)))
        for rank in (2, 3) if node == 0 else (0, 1):
            shutil.rmtree(copy.rank_dir(0, rank))
        if node == 1:
            shutil.rmtree(copy.node_dir(0))
            (copy.path / "run.json").unlink()
        folders.append(copy.path)
    return folders


def test_the_whole_run_is_found_and_judged(nodes: list[Path], tmp_path: Path) -> None:
    for node in nodes:
        Store.open(RunDir.open(node)).close()  # as a watch leaves it
    done = collect(nodes, tmp_path / "into")
    assert (done.ranks, done.left_out) == ((0, 1, 2, 3), ())
    with Store.open(done.run) as store:
        fired = [finding for finding in diagnose(store, done.run.manifest()).findings if finding.status == "fired"]
    assert [(finding.kind, finding.ranks) for finding in fired] == [("straggler", (2,))]
    again = collect(nodes, tmp_path / "into")
    assert (again.num_files, again.num_bytes) == (done.num_files, done.num_bytes), "done again, it is the same"


def test_the_ranks_of_a_node_that_is_missing_are_counted(nodes: list[Path], tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["collect", str(nodes[0]), "--into", str(tmp_path / "one")])
    assert "2 of 4 ranks of 1 node" in done.stdout, done.output
    done = CliRunner().invoke(app, ["collect", *map(str, nodes), "--into", str(tmp_path / "both")])
    assert ": 4 ranks of " in done.stdout, done.output


@pytest.mark.parametrize("is_there", [False, True])
def test_the_collected_folder_is_its_users_own(is_there: bool, nodes: list[Path], tmp_path: Path) -> None:
    into = tmp_path / "into"
    if is_there:
        into.mkdir(mode=0o755)
    collect(nodes, into)
    assert into.stat().st_mode & 0o777 == 0o700
    into.chmod(0o750)
    collect(nodes, into)
    assert into.stat().st_mode & 0o777 == 0o750, "opened to others since, it stays so"


def test_the_manifest_of_another_node_replaces_a_missing_one(nodes: list[Path], tmp_path: Path) -> None:
    manifest = RunDir(nodes[0]).manifest()
    (nodes[0] / "run.json").rename(nodes[1] / "run.json")
    collected = collect(nodes, tmp_path / "into", force=True)
    assert manifest
    assert collected.run.manifest() == manifest | {"run_id": "into"}


def test_files_that_grew_are_copied_again(nodes: list[Path], tmp_path: Path) -> None:
    collect(nodes, tmp_path / "into")
    events = RunDir(nodes[0]).node_dir(0) / "events.jsonl"
    events.write_text(events.read_text() + "{}\n")
    done = collect(nodes, tmp_path / "into")
    assert (done.run.node_dir(0) / "events.jsonl").read_text() == events.read_text()


def test_a_full_disk_leaves_no_part_of_a_file(nodes: list[Path], tmp_path: Path) -> None:
    (nodes[0] / "logs").mkdir(exist_ok=True)
    (nodes[0] / "logs" / "large.log").write_bytes(b"x" * (64 << 20))
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # writing then fails, as on a full disk
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (32 << 20, before[1]))
    try:
        with pytest.raises(RunError, match="is incomplete: collect again once this is fixed"):
            collect(nodes, tmp_path / "into")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert not [path for path in (tmp_path / "into").rglob("*") if ".collect-" in path.name]


def test_what_is_not_one_run_is_refused(nodes: list[Path], tmp_path: Path) -> None:
    other = make_run(tmp_path / "other", ranks=2, steps=2, name="another").path
    with pytest.raises(RunError, match="add --force"):
        collect([nodes[0], other], tmp_path / "into")
    with pytest.raises(RunError, match="with different content"):
        collect([nodes[0], other], tmp_path / "into", force=True)
    with pytest.raises(RunError, match="not created by collect"):
        collect(nodes, tmp_path / "node-0")
    assert not (tmp_path / "into").exists()


def test_links_lead_nowhere(nodes: list[Path], tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "key").write_text("secret")
    os.symlink(secret, nodes[1] / "tapes" / "more")
    os.symlink(secret / "key", nodes[1] / "tapes" / "key")
    done = collect(nodes, tmp_path / "into")
    assert len(done.left_out) == 2
    assert not [path for path in (tmp_path / "into").rglob("*") if path.name in ("more", "key")]


@pytest.mark.parametrize("name", ["tapes", "stacks", "logs", "checkpoints", "run.json", "telemetry-node7.duckdb"])
def test_a_link_in_place_of_a_part_of_the_run_leads_nowhere(name: str, tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", ranks=1, steps=2)
    outside = tmp_path / "outside"
    (outside / "attempt-0").mkdir(parents=True)
    (outside / "attempt-0" / "key").write_text("secret")
    part = run.path / name
    if part.exists():
        part.rename(run.path / "aside")
    part.symlink_to(outside / "attempt-0" / "key" if part.suffix else outside)
    done = collect([run.path], tmp_path / "into", checkpoints=True)
    assert done.left_out == (f"{part} is a link: not followed",)
    assert not any("secret" in path.read_text("latin-1") for path in done.run.path.rglob("*") if path.is_file())


def test_holes_stay_holes_and_odd_names_stay_behind(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", steps=3)
    logs = run.path / "logs"
    logs.mkdir(exist_ok=True)
    with (logs / "sparse.log").open("wb") as file:
        file.write(b"begin")
        file.seek(1 << 40)
        file.write(b"end")
    (logs / "\x1b[2J.log").write_text("x")
    (logs / "empty.log").touch()
    collected = collect([run.path], into=tmp_path / "all")
    copy = collected.run.path / "logs" / "sparse.log"
    assert copy.stat().st_size == (1 << 40) + 3
    assert copy.stat().st_blocks * 512 < 1 << 20
    with copy.open("rb") as file:
        assert file.read(5) == b"begin"
        file.seek(1 << 40)
        assert file.read() == b"end"
    assert (collected.run.path / "logs" / "empty.log").read_bytes() == b""
    assert ["control characters" in name for name in collected.left_out] == [True]
    copy.unlink()
    (logs / "sparse.log").unlink()
