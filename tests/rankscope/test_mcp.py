"""`rankscope mcp` as an agent uses it: a real client of the SDK, over standard input and output."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.factories import make_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mcp")
    make_run(folder, ranks=4, steps=30, kill={1: 30})
    make_run(folder, ranks=4, steps=40)
    (folder / "secret.txt").write_text("hunter2")
    return folder / "runs"


Answers = list[tuple[bool, str]]
Arguments = dict[str, Any] | Callable[[Answers], dict[str, Any]]


def ask(runs: Path, *calls: tuple[str, Arguments]) -> Answers:
    """(is an error, text) of each call, over one connection; arguments may be made of the answers before."""

    from mcp import Client, StdioServerParameters

    async def go() -> Answers:
        server = StdioServerParameters(
            command=sys.executable, args=["-m", "rankscope", "mcp", str(runs)], cwd=Path(__file__).parents[2]
        )
        async with Client(server) as client:
            answers: Answers = []
            for name, arguments in calls:
                result = await client.call_tool(name, arguments(answers) if callable(arguments) else arguments)
                answers.append((bool(result.is_error), "".join(getattr(part, "text", "") for part in result.content)))
            return answers

    return anyio.run(go)


def test_an_agent_gets_the_facts_and_nothing_else(runs: Path) -> None:
    dead, healthy = sorted(path.name for path in runs.iterdir() if not path.is_symlink() and path.is_dir())
    (_, verdict), (_, stacks), (_, account), (_, rows), (_, compared), (_, runbook), evidence, listed = answers = ask(
        runs,
        ("verdict", {"run": dead}),
        ("stacks", {"run": dead}),
        ("account", {"run": dead}),
        ("sql", {"run": dead, "statement": "SELECT rank, count(*) AS n FROM steps GROUP BY rank ORDER BY rank"}),
        ("compare", {"run_a": dead, "run_b": healthy}),
        ("runbook", {"anchor": "rank-lost-signal"}),
        ("finding", lambda so_far: {"run": dead, "finding_id": json.loads(so_far[0][1])["findings"][0]["id"]}),
        ("list_runs", {}),
    )
    assert not any(is_error for is_error, _ in answers), answers
    told = json.loads(verdict)
    assert told["findings"][0]["kind"] == "rank_lost"
    assert told["findings"][0]["ranks"] == [1]
    assert json.loads(stacks) == {}
    assert json.loads(account)["wall_s"] > 0
    assert json.loads(rows)["columns"] == ["rank", "n"]
    assert len(json.loads(rows)["rows"]) == 4
    assert json.loads(compared)["run_b"] == healthy
    assert len(runbook) > 100
    assert "rank_lost" in evidence[1]
    assert healthy in listed[1]


def test_nothing_can_be_written_and_nothing_outside_reached(runs: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in runs.parent.rglob("*") if path.suffix == ".txt"}
    refused = ask(
        runs,
        ("verdict", {"run": "../secret.txt"}),
        ("verdict", {"run": "/etc"}),
        ("stacks", {"run": ".."}),
        ("sql", {"statement": "COPY steps TO 'out.csv'"}),
        ("sql", {"statement": "FROM read_text('../secret.txt')"}),
        ("sql", {"statement": "DROP TABLE steps"}),
        ("sql", {"statement": "INSTALL httpfs"}),
        ("runbook", {"anchor": "../../etc/passwd"}),
    )
    assert all(is_error for is_error, _ in refused), refused
    assert not any("hunter2" in text for _, text in refused)
    assert {path.name: path.stat().st_mtime_ns for path in runs.parent.rglob("*") if path.suffix == ".txt"} == before
