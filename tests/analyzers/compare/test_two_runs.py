from __future__ import annotations

import io
import json
import math
from dataclasses import fields
from pathlib import Path
from shutil import copytree
from typing import Any

from rich.console import Console

from analyzers.compare.two_runs import Comparison, Side, _differences, _flat, _versions, compare
from analyzers.diagnose import Diagnosis, diagnose
from analyzers.report.terminal.compare_text import manifest_tables, render, tables
from probes.tape.rundir import RunDir
from store import Store
from tests.analyzers.memory_store import MemoryStore
from tests.e2e.launched import rankscope
from tests.factories import make_run


def config(**optim: float) -> dict[str, Any]:
    return {"config": {"optim": optim, "model": {"dim": 64}}, "versions": {"torch": "2.13.0"}}


_diagnoses: dict[Path, Diagnosis] = {}
"""Of runs that a test compares with several others."""


def compared(a: RunDir, b: RunDir) -> Comparison:
    with Store.open(a) as store_a, Store.open(b) as store_b:
        sides = []
        for run, store in ((a, store_a), (b, store_b)):
            if run.path not in _diagnoses:
                _diagnoses[run.path] = diagnose(store, run.manifest())
            sides.append(Side(source=store, manifest=run.manifest(), diagnosis=_diagnoses[run.path]))
        return compare(*sides)


def text_of(comparison: Comparison, width: int = 110) -> str:
    console = Console(width=width, no_color=True, file=io.StringIO())
    render(comparison, console)
    output: str = console.file.getvalue()  # type: ignore[attr-defined]
    return output


def test_a_narrow_terminal_cuts_nothing_off(tmp_path: Path) -> None:
    a = make_run(tmp_path / "a", steps=20, ranks=2)
    b = make_run(tmp_path / "b", steps=20, ranks=2, kill={1: 15}, end="")
    lines = text_of(compared(a, b), width=40).splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("RANK LOST"))
    column = lines[start].index("Rank 1 died")
    told = "".join(line[column:] for line in lines[start : start + 12])
    assert "Rank1diedofSIGKILLatstep15" in "".join(told.split())


def wobbling(step: int) -> float:
    return 2.0 + 3.0 * math.exp(-step / 40) + 0.02 * math.sin(step * 12.9898)


def test_equal_runs_differ_in_nothing(tmp_path: Path) -> None:
    a = make_run(tmp_path / "a", steps=80, **config(lr=1e-3))
    b = make_run(tmp_path / "b", steps=80, **config(lr=1e-3))
    found = compared(a, b)
    assert found.settings == found.versions == found.findings == found.only_a == found.only_b == ()
    assert found.speed is not None
    assert found.speed.low <= 1 <= found.speed.high
    assert found.loss is not None
    assert (found.loss.first_different_step, found.loss.is_real) == (None, False)
    assert "losses are bitwise identical in 80 steps" in text_of(found)


def test_a_smaller_model_is_faster_and_not_better(tmp_path: Path) -> None:
    a = make_run(tmp_path, steps=80, step_ms=60.0, **config(), num_parameters=869_504)
    for same, word in ((869_504, "is better than"), (455_520, "is faster than")):
        b = make_run(tmp_path, steps=80, step_ms=30.0, **config(), num_parameters=same)
        found = compared(a, b).sentence
        assert f"{b.run_id} {word} {a.run_id}" in found, found
    sizes = f"(parameters: 869,504 in {a.run_id}, 455,520 in {b.run_id})"
    assert f"but trains a different model {sizes}." in found
    unknown = make_run(tmp_path, steps=80, step_ms=30.0, **config(), num_parameters=0)  # as older attached runs have it
    assert "another model" not in compared(a, unknown).sentence


def test_more_ranks_are_faster_and_not_better(tmp_path: Path) -> None:
    """Twice the ranks take half the time for a token at the same price."""
    few = make_run(tmp_path, ranks=2, steps=80, step_ms=60.0, **config())
    many = make_run(tmp_path, ranks=4, steps=80, step_ms=30.0, **config())
    found = compared(few, many).sentence
    ranks = f"(2 in {few.run_id}, 4 in {many.run_id})"
    assert found.startswith(
        f"{many.run_id} is faster than {few.run_id}, but has a different number of ranks {ranks}."
    ), found


def test_a_script_is_not_better_than_a_run_of_the_trainer(tmp_path: Path) -> None:
    """A script's run need not record the size of its model."""
    a = make_run(tmp_path, steps=80, step_ms=60.0, **config())
    b = make_run(tmp_path, steps=80, step_ms=30.0, **config(), attached=True)
    found = compared(a, b).sentence
    assert f"{b.run_id} is faster than {a.run_id}, but may train a different model (only one" in found, found


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    """Two folders of runs, and launches in one second."""
    before = make_run(tmp_path / "a", ranks=2, steps=60, loss=wobbling)
    after = make_run(tmp_path / "b", ranks=2, steps=60, loss=wobbling, step_ms=75.0)
    found = compared(before, RunDir.open(after.path.rename(after.path.parent / before.run_id)))
    assert (found.run_a, found.run_b) == (f"{before.run_id} (A)", f"{before.run_id} (B)")
    assert found.sentence.startswith(f"{before.run_id} (A) is better than {before.run_id} (B). ")


def test_a_copied_run_is_called_by_its_folder(tmp_path: Path) -> None:
    """The page heads its columns with the folders' names, and the sentence names the same."""
    run = make_run(tmp_path, ranks=2, steps=60, loss=wobbling)
    found = compared(run, RunDir.open(Path(copytree(run.path, tmp_path / "kept"))))
    assert (found.run_a, found.run_b) == (run.run_id, "kept")
    assert "kept shows no difference in speed" in found.sentence


def test_a_loss_that_ends_as_nan_is_told(tmp_path: Path) -> None:
    """A script that goes on after a NaN: its finite losses are the same as those of the other."""
    lost = make_run(tmp_path, ranks=2, steps=60, loss=lambda step: math.nan if step > 30 else wobbling(step))
    found = compared(make_run(tmp_path, ranks=2, steps=60, loss=wobbling), lost)
    assert found.nonfinite_since == (None, 31)
    assert found.loss is not None
    assert found.loss.common_steps == 30
    assert f"in 30 steps. The loss of {lost.run_id} is NaN or Inf from step 31 on." in found.sentence
    assert "NON-FINITE" in text_of(found)


def test_what_changed_is_listed(tmp_path: Path) -> None:
    a = make_run(tmp_path / "a", steps=100, loss=wobbling, **config(lr=1e-3, decay=0.1))
    b = make_run(
        tmp_path / "b",
        steps=100,
        step_ms=65.0,
        slow={2: 1.6},
        seed=1,
        loss=lambda step: wobbling(step) + (0.3 if step > 50 else 0.0),
        **config(lr=3e-3) | {"versions": {"torch": "2.11.0"}},
    )
    found = compared(a, b)
    assert found.settings == (("optim.lr", "0.001", "0.003"), ("optim.decay", "0.1", None))
    assert found.versions == (("versions.torch", "2.13.0", "2.11.0"),)
    (slower,) = found.findings
    assert (slower.kind, slower.cause) == ("throughput", "between_runs")
    assert [finding.kind for finding in found.only_b] == ["straggler"]
    assert found.loss is not None
    assert found.loss.first_different_step == 51
    assert found.loss.is_real
    assert abs(found.loss.difference - 0.3) < 0.01
    before, after = found.phases["forward"]
    assert before
    assert after
    assert 1.2 < after / before < 1.5
    assert found.goodput["straggler"] > found.goodput["bubble"]
    text = text_of(found)
    for words in ("optim.lr", "0.003", "torch", "straggler", "0.3 higher", "step 51"):
        assert words in text, words
    json.dumps(found.to_json(), allow_nan=False)


def test_settings_that_only_one_run_has_are_one_row(tmp_path: Path) -> None:
    """A run of the trainer and one of a script share no setting."""
    many = {f"key{number}": float(number) for number in range(30)}
    a = make_run(tmp_path / "a", ranks=2, steps=40, **config(lr=1e-3, **many))
    b = make_run(tmp_path / "b", ranks=2, steps=40, **config(lr=3e-3))
    found = compared(a, b)
    short = dict(tables(found))["Setting"]
    named = "optim.key0, optim.key1, optim.key2 and 27 more"
    assert short == [("optim.lr", "0.001", "0.003"), ("only in this run", named, "-")]
    assert len(text_of(found).splitlines()) < 40
    facts = {f"planned{number}": number for number in range(9)}
    c = make_run(tmp_path / "c", ranks=2, steps=40, **facts, **config(lr=1e-3))
    assert len(dict(tables(compared(b, c)))["Launch"]) == 1


def test_settings_that_some_of_several_runs_lack_are_one_row(tmp_path: Path) -> None:
    many = {f"key{number}": float(number) for number in range(9)}
    base, other, script = (
        make_run(tmp_path / name, ranks=2, steps=40, **config(lr=lr, **more))
        for name, lr, more in (("a", 1e-3, many), ("b", 2e-3, many), ("c", 1e-3, {}))
    )
    rows = dict(manifest_tables([compared(base, other), compared(base, script)]))["Setting"]
    named = "optim.key0, optim.key1, optim.key2 and 6 more"
    assert rows == [("optim.lr", "0.001", "0.002", "0.001"), ("not in all runs", named, named, "-")]


def test_a_run_without_records_is_compared_as_far_as_it_goes(tmp_path: Path) -> None:
    empty = MemoryStore()
    a = Side(source=empty, manifest={}, diagnosis=diagnose(empty, {}))
    run = make_run(tmp_path, steps=40)
    with Store.open(run) as store:
        b = Side(source=store, manifest=run.manifest(), diagnosis=diagnose(store, run.manifest()))
        found = compare(a, b)
    assert (found.speed, found.loss) == (None, None)
    assert found.phases["forward"][0] is None
    assert "too few steps" in text_of(found)


def test_the_command(tmp_path: Path) -> None:
    a = make_run(tmp_path / "a", steps=80, **config(lr=1e-3))
    b = make_run(tmp_path / "b", steps=80, step_ms=80.0, **config(lr=1e-3))
    done = rankscope("compare", str(a.path), str(b.path), "--format", "json", "--fail-on", "warning")
    assert done.returncode == 1, done.stderr
    assert "is slower: it is 1." in done.stderr
    assert "the limit is 5 %" in done.stderr
    report = json.loads(done.stdout)
    assert report.keys() == {one.name for one in fields(Comparison)} | {"sentence"}
    assert 1.4 < report["speed"]["ratio"] < 1.8
    assert rankscope("compare", str(b.path), str(a.path), "--fail-on", "slower").returncode == 0
    gone = rankscope("compare", str(a.path), str(tmp_path / "gone"))
    assert (gone.returncode, len(gone.stderr.strip().splitlines())) == (2, 1)


def test_versions_are_apart_from_facts_of_the_launch(tmp_path: Path) -> None:
    a = make_run(tmp_path / "a", ranks=2, steps=20, cwd="/a", digest="1", **config(lr=1e-3))
    b = make_run(tmp_path / "b", ranks=4, steps=20, cwd="/b", digest="2", versions={"torch": "2.12.0"})
    tables_of = dict(tables(compared(a, b)))
    assert tables_of["Version"] == [("torch", "2.13.0", "2.12.0")]
    assert {name for name, _, _ in tables_of["Launch"]} >= {"cwd", "world_size"}
    assert "digest" not in {name for name, _, _ in tables_of["Launch"]}


def test_the_version_of_a_trained_and_an_attached_run_is_one_fact() -> None:
    """A launcher records it apart from the versions of a rank: as rankscope_version, "0.1.0" differed from "-"."""
    trained = _versions({"rankscope_version": "0.1.0", "versions": {"torch": "2.13.0"}})
    for version, differing in (("0.1.0", ()), ("0.2.0", (("versions.rankscope", "0.1.0", "0.2.0"),))):
        script = _versions({"versions": {"torch": "2.13.0", "rankscope": version}})
        assert _differences(_flat(trained), _flat(script)) == differing
