"""What commands print with `--format json` is what docs/commands.schema.json says."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import typer.main
from typer.testing import CliRunner

from rankscope.cli import app
from rankscope.schemas.commands import commands, schema
from tests.factories import make_run
from trainer.drills.script.drill import to_json
from trainer.drills.script.score import ScriptRow

PAGE = Path(__file__).parents[2] / "docs" / "commands.schema.json"


def checked(command: str, told: Any) -> None:
    """Raises jsonschema.ValidationError if the command would not print this."""
    validator_of(command).validate(told)


@functools.cache
def validator_of(command: str) -> jsonschema.Draft202012Validator:
    """Made and checked once: that takes half a second."""
    return jsonschema.Draft202012Validator({**whole_schema(), "$ref": f"#/$defs/{command}"})


@functools.cache
def whole_schema() -> Mapping[str, Any]:
    made: Mapping[str, Any] = schema()
    jsonschema.Draft202012Validator.check_schema(made)
    return made


def printed(*words: str) -> Any:
    done = CliRunner().invoke(app, [*words, "--format", "json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_the_page_is_what_the_module_prints() -> None:
    assert PAGE.read_text() == json.dumps(whole_schema(), indent=2) + "\n", (
        "python -m rankscope.schemas.commands > docs/commands.schema.json"
    )


def test_every_command_with_json_has_a_schema() -> None:
    group = typer.main.get_command(app)
    found = {
        name
        for name, command in group.commands.items()  # type: ignore[attr-defined]
        if any("--format" in option.opts for option in command.params)
    }
    assert found - {"analyze"} == commands().keys()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for name, ranks in (("a", 2), ("b", 2), ("c", 4)):
        run = make_run(folder, name=name, ranks=ranks, steps=60)
        (folder / name).symlink_to(run.path)
    return folder


@pytest.mark.parametrize("names", ["ab", "ac", "abc"])
def test_comparisons_are_valid(names: str, runs: Path) -> None:
    told = printed("compare", *(str(runs / name) for name in names))
    checked("compare", told)
    assert ("sentence" in told, "scaling" in told) == (len(names) == 2, "c" in names)


@pytest.mark.parametrize(
    "words",
    [
        ["doctor"], ["explain"], ["explain", "hang-not_entered"], ["fleet", "runs"], ["note", "a", "b"],
        ["collect", "a", "--into", "one"], ["top", "a"],
        ["rebuild", "a"], ["sql", "a", "FROM steps LIMIT 2"], ["version"], ["plan", "gpt2-124m", "--gpus", "2"],
        ["plan", "gpt2-124m", "--gpus", "2", "--no-ladder"], ["export", "a", "--to", "parquet"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_what_commands_print_is_valid(words: list[str], runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(runs)
    checked(words[0], printed(*words))


def test_the_ranks_of_a_run_come_in_order_of_trouble(tmp_path: Path) -> None:
    told = printed("top", str(make_run(tmp_path, ranks=4, steps=60, slow={2: 2.0}).path))
    checked("top", told)
    assert (told["ranks"][0]["rank"], told["ranks"][0]["finding"]) == (2, "straggler")
    assert [one["kind"] for one in told["findings"]] == ["straggler"]


def test_what_was_collected_is_told(runs: Path, tmp_path: Path) -> None:
    told = printed("collect", str(runs / "a"), "--into", str(tmp_path / "one"))
    assert (told["run"], told["ranks"], told["skipped"]) == (str(tmp_path / "one"), [0, 1], [])
    assert told["files"] > 0


def test_a_drill_of_a_script_is_valid() -> None:
    clean = ScriptRow(fault="none", what="nothing", rank=-1)
    killed = ScriptRow(fault="kill", what="SIGKILL", rank=1, seen="live", finding_s=0.5, summary="Rank 1 ended.")
    checked("drill", json.loads(json.dumps(to_json([clean, killed]))))


@pytest.mark.parametrize(
    ("command", "broken"),
    [("compare", {"sentence": None}), ("note", [{"run": "a"}]), ("doctor", {"checks": []}), ("version", {})],
)
def test_a_schema_refuses_what_it_should(command: str, broken: Any) -> None:
    with pytest.raises(jsonschema.ValidationError):
        checked(command, broken)
