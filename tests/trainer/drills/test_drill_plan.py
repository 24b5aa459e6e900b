"""What a drill lays out: which faults, on which meshes, at which steps and ranks; and what is refused."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from rankscope.cli import app
from trainer.config.config import Config
from trainer.config.load import load_config
from trainer.drills.scenario import PAIRS, DrillError, choose_faults, plan_drill
from trainer.faults.catalogue import CATALOGUE, MESHES, NOT_DRILLED
from trainer.faults.inject import ARM
from trainer.faults.options import parse_fault
from trainer.layout.resolve import resolve

CONFIG = Config()


def test_every_kind_can_be_carried_out() -> None:
    assert ARM.keys() == CATALOGUE.keys()


def test_every_fault_of_the_list_is_drilled_or_says_why_not() -> None:
    drilled = {number for kind in CATALOGUE.values() for number in kind.fault_ids}
    left = {number for numbers in NOT_DRILLED for number in numbers.split(", ")}
    assert not drilled & left
    assert drilled | left >= {f"F{number}" for number in range(1, 49)}


def test_faults_are_chosen_by_number_kind_and_all() -> None:
    assert choose_faults(["F9", "kill", "wrong_size", "nan_grad+kill"]) == [
        "wrong_size",
        "wrong_dtype",
        "kill",
        "nan_grad+kill",
    ]
    assert choose_faults(["f22"]) == ["nan_grad"]
    assert choose_faults(["all"]) == ["none", *CATALOGUE, *PAIRS]


@pytest.mark.parametrize(
    ("asked", "hint"),
    [
        ("F999", "see `rankscope drill --list`"),
        ("explode", "see `rankscope drill --list`"),
        ("kill+explode", "see `rankscope drill --list`"),
        ("nan_grd", "did you mean nan_grad?"),
    ],
)
def test_an_unknown_fault_is_one_line(asked: str, hint: str) -> None:
    with pytest.raises(DrillError) as caught:
        choose_faults([asked])
    assert str(caught.value) == f"--faults {asked}: unknown; {hint}"


@pytest.mark.parametrize("mesh", MESHES)
def test_every_scenario_can_be_parsed_and_its_mesh_resolved(mesh: str) -> None:
    plan = plan_drill(CONFIG, ["all"], meshes=[mesh], seeds=3, num_ranks=4)
    assert len(plan.scenarios) >= 3 * (len(CATALOGUE) - 2)
    for scenario in plan.scenarios:
        for fault in scenario.faults:
            assert parse_fault(fault.text) == fault
            assert fault.step + 5 < scenario.steps
            assert fault.rank < 4
        if scenario.seed == 0:
            config = load_config(None, [*scenario.settings, "model.num_layers=4", "model.num_heads=4"])
            assert resolve(config, 4).world_size == 4


def test_seeds_give_different_places_reproducibly() -> None:
    def places(name: str) -> list[tuple[int, int]]:
        plan = plan_drill(CONFIG, [name], meshes=["ddp"], seeds=12, num_ranks=4)
        return [(s.faults[0].step, s.faults[0].rank) for s in plan.scenarios]

    assert places("kill") == places("kill")
    assert len(set(places("kill"))) > 6
    assert {rank for _, rank in places("kill")} == {0, 1, 2, 3}
    assert {rank for _, rank in places("slow_logging")} == {0}


def test_what_a_mesh_has_no_place_for_is_left_out_and_said() -> None:
    plan = plan_drill(CONFIG, ["missing_send", "stop"], meshes=["ddp", "pp"], seeds=1, num_ranks=4)
    assert [(s.name, s.mesh) for s in plan.scenarios] == [("stop", "ddp"), ("missing_send", "pp"), ("stop", "pp")]
    ((name, mesh, reason),) = plan.skipped
    assert (name, mesh) == ("missing_send", "ddp")
    assert "pipeline" in reason
    alone = plan_drill(CONFIG, ["stop", "kill"], meshes=["config"], seeds=1, num_ranks=1)
    assert [s.name for s in alone.scenarios] == ["kill"]


@pytest.mark.parametrize(("mesh", "ranks", "words"), [("ring", 4, "unknown"), ("fsdp*tp", 2, "at least 4")])
def test_impossible_meshes_are_refused(mesh: str, ranks: int, words: str) -> None:
    with pytest.raises(DrillError, match=words):
        plan_drill(CONFIG, ["kill"], meshes=[mesh], seeds=1, num_ranks=ranks)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--faults", "explode"], "--faults explode: unknown"),
        (["--mesh", "ring"], "--mesh ring: unknown"),
        (["--format", "xml"], "--format xml: choose text or json"),
        (["nothing.toml"], "nothing.toml: no such file or preset"),
    ],
)
def test_mistakes_on_the_command_line_are_one_line_and_exit_code_2(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["drill", *arguments])
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


def test_the_list_names_every_kind_and_what_must_be_found() -> None:
    result = CliRunner().invoke(app, ["drill", "--list"])
    assert result.exit_code == 0
    for name, kind in CATALOGUE.items():
        (line,) = [line for line in result.stdout.splitlines() if name in line.split()[1:3]]
        assert line.startswith(kind.fault_id)
