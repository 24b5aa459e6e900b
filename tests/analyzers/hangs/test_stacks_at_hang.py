from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console

from analyzers.diagnose import diagnose
from analyzers.finding import Finding
from analyzers.hangs.stacks import parse_stack
from analyzers.report.html.diagnosis_page import render as render_page
from analyzers.report.terminal.diagnosis_text import render
from analyzers.report.wording.stack_texts import stack_texts
from analyzers.run.policy import StallPolicy
from tests.analyzers.judged import judged_hangs
from tests.analyzers.standstill import World

POLICY = StallPolicy()


def write_stack(folder: Path, rank: int, *frames: str) -> None:
    lines = "".join(f'  File "/home/me/{frame.split(":")[0]}", line {frame.split(":")[1]} in f\n' for frame in frames)
    text = f"Current thread 0x00007f (most recent call first):\n{lines}\n"
    (folder / f"attempt-0-rank-{rank:05d}.txt").write_text(text)


def found(world: World, folder: Path) -> Finding:
    (finding,) = judged_hangs(world.store, POLICY, world.after(6.0), folder)
    return finding


def test_stacks_are_grouped_and_the_culprits_come_first(tmp_path: Path) -> None:
    world = World(ranks=6)
    for rank in range(6):
        write_stack(tmp_path, rank, *(["p/loader.py:41", "p/train.py:9"] if rank == 4 else ["p/train.py:12"]))
        if rank != 4:
            world.enter(rank)
    world.span(4, "data")
    first, second = found(world, tmp_path).evidence["stack_groups"]
    assert (first["ranks"], first["doing"], first["is_odd"]) == ([4], "in data", True)
    assert first["frames"] == ["p/loader.py:41 f", "p/train.py:9 f"]
    assert (second["ranks"], second["doing"], second["is_odd"]) == ([0, 1, 2, 3, 5], "in all_reduce", False)


def test_stages_may_differ_and_only_who_differs_from_its_own_stage_is_odd(tmp_path: Path) -> None:
    world = World(ranks=8)
    world.store.connection.execute("UPDATE ranks SET pp = rank // 4, tp = rank % 2")
    for rank in range(8):
        frames = ["p/odd.py:3"] if rank == 6 else [f"p/stage.py:{10 + rank // 4}"]
        write_stack(tmp_path, rank, *frames)
        world.enter(rank)
    groups = found(world, tmp_path).evidence["stack_groups"]
    odd = [group for group in groups if group["is_odd"]]
    assert [(group["ranks"], group["role"]) for group in odd] == [([6], "stage 1, tp rank 0")]
    assert sorted(group["role"] for group in groups if not group["is_odd"]) == [
        "stage 0, tp ranks 0 and 1",
        "stage 1, tp ranks 0 and 1",
    ]


def test_ranks_that_did_not_answer_are_a_group_and_without_any_stack_there_is_none(tmp_path: Path) -> None:
    world = World()
    for rank in (0, 1, 3):
        world.enter(rank)
    assert "stack_groups" not in found(world, tmp_path).evidence
    for rank in (0, 1, 3):
        write_stack(tmp_path, rank, "p/train.py:12")
    first, _ = found(world, tmp_path).evidence["stack_groups"]
    assert (first["ranks"], first["frames"]) == ([2], [])


def test_thousands_of_ranks_with_stacks_of_their_own_stay_small(tmp_path: Path) -> None:
    world = World(ranks=200, steps=2)
    for rank in range(200):
        write_stack(tmp_path, rank, f"p/train.py:{rank if rank < 100 else 1000}")
        if rank:
            world.enter(rank)
    evidence = found(world, tmp_path).evidence
    *told, rest = evidence["stack_groups"]
    assert len(told) == 8
    assert (told[0]["ranks"], told[1]["num_ranks"], len(told[1]["ranks"])) == ([0], 100, 64)
    assert rest == {"num_ranks": 93, "is_rest": True}
    assert len(json.dumps(evidence["stack_groups"])) < 8_000
    assert "100 ranks have the same stack: 100-163 and 36 more" in stack_texts(evidence)[1][0]
    assert stack_texts(evidence)[-1] == ("and 93 ranks with other stacks", [])


def test_every_report_shows_the_groups_and_the_line_that_raised(tmp_path: Path) -> None:
    world = World()
    for rank in (0, 1, 3):
        world.enter(rank)
        write_stack(tmp_path, rank, "p/train.py:12")
    write_stack(tmp_path, 2, "p/<b>\x1b[31mloader.py:41")
    diagnosis = diagnose(world.store, {}, now_ns=world.after(6.0), stacks_dir=tmp_path)
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    render(diagnosis, console)
    text = console.export_text()
    assert "odd one out: rank 2, in user code" in text
    assert "3 ranks have the same stack: 0, 1 and 3, in all_reduce, innermost first" in text
    assert "\x1b[31mloader" not in text
    page = render_page(world.store, diagnosis, {}).decode()
    assert "3 ranks have the same stack: 0, 1 and 3" in page
    assert "<b>\x1b" not in page

    world = World()
    trace = 'Traceback (most recent call last):\n  File "/home/me/data/<i>shards.py", line 41, in read\nKeyError: 1\n'
    world.event("exception", 0.01, rank=2, type="KeyError", message="'x'", traceback=trace)
    diagnosis = diagnose(world.store, {})
    render(diagnosis, console)
    assert "died of KeyError: 'x' (data/<i>shards.py:41 in read)" in console.export_text()
    page = render_page(world.store, diagnosis, {}).decode()
    assert "shards.py:41 in read" in page
    assert "<i>shards" not in page


def test_evidence_of_any_shape_is_shown_or_left_out() -> None:
    strange = {"stack_groups": ["x", {"ranks": "0", "frames": 3}], "traceback": {"a": 1}, "stacks": [1]}
    assert stack_texts(strange) == [("unknown ranks, no stack", [])]
    assert stack_texts({"stacks": {"1": ["a.py:1 f"]}}) == [("Python stack of rank 1, innermost first", ["a.py:1 f"])]


def test_a_stack_has_the_users_line_and_no_frames_of_ours() -> None:
    """As the recorded gather of accelerate: 14 frames of libraries lie over the line of the script."""
    packages = "/home/me/lib/python3.11/site-packages"
    frames = [f"{packages}/probes/collectives/recorded_method.py", f"{packages}/torch/distributed/distributed_c10d.py"]
    frames += [f"{packages}/accelerate/operations.py"] * 9 + ["/home/me/train.py", "/home/me/main.py"]
    lines = "".join(f'  File "{path}", line {number} in f\n' for number, path in enumerate(frames))
    found = parse_stack(f"Stack (most recent call first):\n{lines}")
    assert found == [*(f"accelerate/operations.py:{number} f" for number in range(2, 7)), "me/train.py:11 f"]
