"""`--format json` of the commands that write files, and outputs into folders that are not there."""

from __future__ import annotations

import json
import os
import tarfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from probes.profiling.request import RequestFile
from rankscope.cli import app
from tests.factories import make_run, still_training
from tests.rankscope.test_json_schema import checked
from tests.support.recorded_gpu import copy_gpu_run
from trainer.data.prepare import progress_view


def printed(*words: str) -> dict[str, object]:
    done = CliRunner().invoke(app, list(words), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    found: dict[str, object] = json.loads(done.stdout)
    checked(words[0], found)
    return found


def test_files_are_named_in_one_document(tmp_path: Path) -> None:
    run = copy_gpu_run("none", tmp_path)
    path = str(getattr(run, "path", run))
    report = printed("report", path, "--markdown", str(tmp_path / "ticket.md"), "--format", "json")
    assert report["files"] == [{"path": str(tmp_path / "ticket.md"), "bytes": (tmp_path / "ticket.md").stat().st_size}]
    shared = printed("share", path, "--out", str(tmp_path / "run.tar.gz"), "--format", "json")
    assert shared["bytes"] == (tmp_path / "run.tar.gz").stat().st_size
    assert shared["verdict"] == report["verdict"]
    trace = printed("export", path, "--to", "chrome-trace", "--out", str(tmp_path / "t.json"), "--format", "json")
    assert trace["bytes"] == (tmp_path / "t.json").stat().st_size


def test_evidence_of_a_node_is_one_document(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    log.write_text("step 1 loss 2.0\n")
    told = printed("collect-evidence", "--into", str(tmp_path), "--log", str(log), "--pid", str(os.getpid()),
                   "--format", "json")  # fmt: skip
    with tarfile.open(str(told["archive"])) as archive:
        assert any(name.endswith("job.log") for name in archive.getnames())
    assert all(isinstance(why, str) for why in dict(told["missing"]).values())  # type: ignore[call-overload]


def test_prepared_tokens_are_one_document_whatever_progress_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_view, "PLAIN_LINE_S", 0.0)
    (tmp_path / "notes.txt").write_text("one\ntwo\nthree\n")
    words = [str(tmp_path / "notes.txt"), "--document", "line", "--tokenizer", "bytes", "--processes", "1"]
    told = printed("prepare", *words, "--out", str(tmp_path / "out"), "--format", "json")
    assert (told["num_documents"], told["num_shards"], told["already_complete"]) == (3, 1, False)
    assert told["num_tokens"] == len("onetwothree") + 3
    assert printed("prepare", *words, "--out", str(tmp_path / "out"), "--format", "json")["already_complete"] is True


def test_a_request_for_traces_is_one_document(tmp_path: Path) -> None:
    run = still_training(make_run(tmp_path, ranks=2, steps=30, end=""))
    run.node_dir(0).mkdir(parents=True, exist_ok=True)
    asking = RequestFile(run, node_rank=0, attempt=0, rank=0)
    told = printed("profile", str(run.path), "--steps", "5", "--wait", "0", "--format", "json")
    assert (told["run"], told["steps"], told["traces"]) == (run.run_id, 5, [])
    asked = asking.poll()
    assert asked is not None
    assert told["first_step"] == asked.first_step


@pytest.mark.parametrize("option", ["--html", "--markdown", "--chrome-trace"])
def test_a_folder_that_is_not_there_is_refused_and_not_made(option: str, tmp_path: Path) -> None:
    target = tmp_path / "misspelt" / "report.html"
    done = CliRunner().invoke(app, ["report", str(tmp_path), option, str(target)])
    assert done.exit_code == 2
    assert "there is no folder" in done.output
    assert not target.parent.exists()
