"""Lines of logs find their rank and step: by what they say, by their time, by the file's last write, or not at all."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path

import pytest

from dashboard.data.run_logs import MAX_FILE_BYTES, RunLogs, run_logs
from dashboard.data.sql.step_range import contains, numbers, sql_of
from probes.tape.rundir import RunDir
from store import Store
from tests.factories import make_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """Two ranks of twenty steps; rank 1 dies within step 12."""
    return make_run(tmp_path_factory.mktemp("logs"), ranks=2, steps=20, kill={1: 12})


def logs_of(run: RunDir, content: dict[str, str], *, written_ns: int = 0) -> RunLogs:
    for name, text in content.items():
        path = run.path / "logs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        if written_ns:
            os.utime(path, ns=(written_ns, written_ns))
    try:
        with Store.open(run) as store:
            return run_logs(store, str(run.path))
    finally:
        for name in content:
            (run.path / "logs" / name).unlink()


def start_ns(run: RunDir, rank: int, step: int) -> int:
    with Store.open(run) as store:
        ((found,),) = store.rows("SELECT start_ns FROM steps WHERE rank = ? AND step = ?", [rank, step])
    return int(found)


def stamp(wall_ns: int) -> str:
    return datetime.fromtimestamp(wall_ns / 1e9, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")


def test_a_step_on_the_line_and_the_lines_below_it(run: RunDir) -> None:
    text = "loading\nstep 7 | loss 2.5\n  a detail\niteration 8/20 loss 2.4\n"
    found = logs_of(run, {"attempt-0/rank-00000.out.log": text}, written_ns=1)
    assert [(line.step, line.step_from) for line in found.lines] == [(None, ""), (7, "line"), (7, "above"), (8, "line")]
    assert {(line.rank, line.attempt) for line in found.lines} == {(0, 0)}
    assert [line.line for line in found.lines] == [1, 2, 3, 4]


def test_a_time_on_the_line_within_a_step_of_its_rank(run: RunDir) -> None:
    inside, before = start_ns(run, 0, 9) + 1_000_000, start_ns(run, 0, 1) - 10**9
    text = (
        f"{stamp(before)} starting\n{stamp(inside)} WARNING slow read\n{stamp(inside + 3600 * 10**9)} an hour later\n"
    )
    found = logs_of(run, {"attempt-0/rank-00000.err.log": text}, written_ns=1)
    assert [(line.step, line.step_from) for line in found.lines] == [(None, ""), (9, "time"), (None, "")]


def test_a_traceback_belongs_to_the_step_of_the_last_write_to_its_file(run: RunDir) -> None:
    text = "UserWarning: at the start\nTraceback (most recent call last):\n  File x\nRuntimeError: boom\n"
    at = start_ns(run, 1, 12) + 2_000_000
    found = logs_of(run, {"attempt-0/rank-00001.err.log": text}, written_ns=at)
    assert [(line.step, line.step_from) for line in found.lines] == [
        (None, ""), (12, "last write"), (12, "last write"), (12, "last write"),
    ]  # fmt: skip
    copied = logs_of(run, {"attempt-0/rank-00001.err.log": text}, written_ns=at + 3600 * 10**9)
    assert {line.step for line in copied.lines} == {None}, "the time of a copy says nothing"


def test_only_the_end_of_a_long_file_and_no_link_is_read(run: RunDir, tmp_path: Path) -> None:
    (tmp_path / "secret.log").write_text("secret")
    (run.path / "logs").mkdir(exist_ok=True)
    link = run.path / "logs" / "linked.log"
    link.symlink_to(tmp_path / "secret.log")
    try:
        found = logs_of(run, {"rank_0.log": "x" * 100 + "\n" + "filler\n" * (MAX_FILE_BYTES // 7 + 1) + "step 3 end\n"})
    finally:
        link.unlink()
    assert found.num_cut == 1
    assert found.lines[-1].text == "step 3 end"
    assert not any("secret" in line.text or line.text.startswith("x") for line in found.lines)


def test_control_signs_are_taken_out_and_empty_logs_are_counted(run: RunDir) -> None:
    found = logs_of(run, {"launcher.log": "\x1b[31mred\x1b[0m \u202eback\n", "attempt-0/rank-00000.out.log": ""})
    assert [line.text for line in found.lines] == ["red back"]
    assert (found.num_files, found.lines[0].rank) == (2, None)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("", ()), ("3", ((3, 3),)), ("0-7", ((0, 7),)), ("3, 12 to 15", ((3, 3), (12, 15))), ("-1", ((-1, -1),)),
     ("x", None), ("3;4", None), ("1" * 40, None), (",".join("1" * 60), None)],
)  # fmt: skip
def test_ranges_as_a_reader_types_them(text: str, expected: tuple[tuple[int, int], ...] | None) -> None:
    assert numbers(text) == expected


def test_an_unknown_value_passes_only_without_a_filter() -> None:
    assert contains((), None)
    assert not contains(((0, 9),), None)
    assert contains(((0, 2), (7, 9)), 8)
    assert sql_of("step", ((0, 2), (7, 9))) == "step BETWEEN 0 AND 2 OR step BETWEEN 7 AND 9"
