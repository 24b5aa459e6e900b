"""`rankscope analyze` on folders of runs that Rankscope did not record."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from analyzers.evidence.diagnose_files import SourceError, diagnose_files
from tests.e2e.launched import rankscope
from tests.factories import make_run
from tests.store.readers.trace_files import trace, write
from tests.support.simulator.recorder_dumps import Job


@pytest.fixture
def hung(tmp_path: Path) -> Path:
    job = Job(4)
    job.steps(5)
    job.collective("all_reduce", ranks=[0, 1, 2])
    return job.write(tmp_path / "dumps")


def test_dumps(hung: Path) -> None:
    done = rankscope("analyze", str(hung), "--fail-on", "critical")
    assert done.returncode == 1
    assert "Rank 3 did not reach all_reduce #6 (group world:0-3)" in " ".join(done.stdout.split())


def test_traces(tmp_path: Path) -> None:
    for rank in range(4):
        made = trace(rank, world_size=4, steps=20, compute_ms=lambda rank, step: 36.0 if rank == 3 else 30.0)
        write(tmp_path / "traces", made, f"rank{rank}", packed=True)
    done = rankscope("analyze", str(tmp_path / "traces"), "--format", "json", "--fail-on", "warning")
    report = json.loads(done.stdout)
    assert (done.returncode, report["run"]["input"]) == (1, "kineto")
    assert [(f["kind"], f["ranks"]) for f in report["findings"]] == [("straggler", [3])]
    text = rankscope("analyze", str(tmp_path / "traces")).stdout
    assert "overlapped" in text


def test_one_file_is_enough(tmp_path: Path) -> None:
    write(tmp_path, trace(0, steps=5), "rank0")
    done = rankscope("analyze", str(tmp_path / "rank0.pt.trace.json"))
    assert done.returncode == 0, done.stderr
    assert "1 rank" in done.stdout


@pytest.mark.parametrize("suffix", ["gztar", "zip"])
def test_the_records_of_a_run_in_an_archive_are_named_as_not_read(tmp_path: Path, suffix: str) -> None:
    """Only its logs are judged: the report must not seem to be one of the run."""
    run = make_run(tmp_path / "sent", ranks=2, steps=5)
    packed = shutil.make_archive(str(tmp_path / "packed"), suffix, tmp_path / "sent")
    unread = f"holds the records of run {run.run_id}, which were not read: unpack it and analyze that folder"
    done = rankscope("analyze", packed)
    assert done.returncode == 2
    assert unread in done.stderr
    (run.path / "logs").mkdir()
    (run.path / "logs" / "rank-00000.err.log").write_text("RuntimeError: boom\n")
    packed = shutil.make_archive(str(tmp_path / "packed"), suffix, tmp_path / "sent")
    report = json.loads(rankscope("analyze", packed, "--format", "json").stdout)
    named = [found["path"] for found in report["run"]["file_problems"] if found["problem"] == unread]
    assert named == [Path(packed).name]


@pytest.mark.parametrize("name", ["notes.txt", "\x1b[31mred\x1b[0m.json", "data.pkl"])
def test_a_folder_without_known_files_is_refused_in_one_line(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\x80\x04K\x01.")
    (tmp_path / f"link{name}").symlink_to("/etc/hostname")
    done = rankscope("analyze", str(tmp_path))
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert "no flight-recorder dumps and no profiler traces" in done.stderr
    assert "\x1b" not in done.stderr


def test_torch_is_not_loaded(hung: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "rankscope", "analyze", str(hung)],
        capture_output=True, text=True, timeout=100, check=True,
    )  # fmt: skip
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time")}
    assert "store.readers.dumps.flight_recorder" in imported
    assert not imported & {"torch", "pickle._Unpickler", "streamlit", "pandas", "plotly"}


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("empty.log", "", "is empty"),
        ("config.json", '{"model": {"dim": 64}, "seed": 7}', "is a JSON document (model, seed) of no supported format"),
        ("table.csv", "name,width\na,1\nb,2\n", "is a CSV table (name, width) of no supported format"),
    ],
)
def test_a_file_of_no_format_says_what_it_is_and_where_to_read_on(
    tmp_path: Path, name: str, text: str, said: str
) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(SourceError) as raised:
        diagnose_files([path])
    assert said in str(raised.value)
    assert "rankscope analyze --help" in str(raised.value)


def test_such_a_file_beside_a_log_is_left_out_and_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"seed": 7}')
    (tmp_path / "rank_0.log").write_text("ValueError: no such layer\n")
    diagnosis = diagnose_files([tmp_path])
    assert [problem["path"] for problem in diagnosis.run["file_problems"]] == ["config.json"]
    assert diagnosis.run["logs"]["files"] == 1
