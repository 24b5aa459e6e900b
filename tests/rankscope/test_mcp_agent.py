"""A slow rank, a NaN, a hang and a dead log, diagnosed by an agent through the real client, by tools alone."""

from __future__ import annotations

import json
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp import Client, StdioServerParameters

from tests.factories import make_run
from tests.support.recorded_gpu import copy_gpu_run

MOST_CHARS = 24_000
"""What one diagnosis may cost an agent: six thousand tokens."""
LOG = """\
[rank1]: Traceback (most recent call last):
[rank1]:   File "train.py", line 88, in <module>
[rank1]:     loss.backward()
[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 79.10 GiB
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("agent")
    make_run(where, ranks=4, steps=60, slow={2: 2.0})
    copy_gpu_run("nan", where / "runs")
    hung = copy_gpu_run("hang", where / "runs")
    with (hung / "stacks" / "attempt-0-rank-00001.txt").open("a") as stacks:
        stacks.write('  File "loader.py", line 12 in wait_for_file\n' * 2000)
    (where / "runs" / "job.log").write_text(LOG)
    return where / "runs"


Call = Callable[[str, dict[str, Any]], Awaitable[str]]


def with_server(runs: Path, work: Callable[[Call], Awaitable[None]]) -> str:
    """Run `work` against a server over the folder; returns what the server wrote to stderr."""
    errors = runs.parent / "stderr.txt"

    async def go() -> None:
        command = f'exec "{sys.executable}" -m rankscope mcp "{runs}" 2>"{errors}"'
        server = StdioServerParameters(command="bash", args=["-c", command], cwd=Path(__file__).parents[2])
        async with Client(server) as client:

            async def call(name: str, arguments: dict[str, Any]) -> str:
                result = await client.call_tool(name, arguments)
                text = "".join(getattr(part, "text", "") for part in result.content)
                if result.is_error:
                    raise ValueError(text)
                return text

            await work(call)

    anyio.run(go)
    return errors.read_text()


def test_an_agent_diagnoses_by_tools_alone(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow = next(one.name for one in folder.iterdir() if one.is_dir() and one.name not in ("nan", "hang", "latest"))
    expected = {
        slow: ("straggler", [2], "compute"), "nan": ("non_finite", [1], "forward"),
        "hang": ("hang", [1], None), "job.log": ("rank_lost", [1], "out_of_memory"),
    }  # fmt: skip
    costs: dict[str, tuple[int, int]] = {}

    async def work(call: Call) -> None:
        for name, (kind, ranks, cause) in expected.items():
            agent = Agent(call)
            told = await agent.diagnose(name)
            assert (told["kind"], told["ranks"]) == (kind, ranks), told
            assert cause in (None, told["cause"]), told
            assert len(told["runbook"]) > 100
            if kind == "straggler":
                assert told["slowest"] == 2
            if kind == "hang":
                assert "wait_for_file" in told["stacks"]["attempt-0-rank-00001.txt"]
                assert "cut" in told["stacks"]
            assert agent.num_chars < MOST_CHARS, (name, agent.num_chars)
            costs[kind] = (len(agent.calls), agent.num_chars)

    with_server(folder, work)
    with capsys.disabled():
        print(f"\ncalls and characters by diagnosis: {json.dumps(costs)}")


def test_every_mistake_has_its_reason_and_no_answer_is_cut_silently(folder: Path) -> None:
    async def work(call: Call) -> None:
        async def refused(name: str, **arguments: Any) -> str:
            with pytest.raises(ValueError) as raised:  # noqa: PT011 (the text is what is tested)
                await call(name, arguments)
            return str(raised.value)

        assert "COPY is not allowed" in await refused("sql", statement="COPY steps TO 'out.csv'")
        assert "nothing" in await refused("sql", statement="SELECT nothing FROM steps")
        assert "no run 'other'" in await refused("verdict", run="other")
        assert "not a recorded run but files" in await refused("sql", run="job.log", statement="SELECT 1")
        assert "it has " in await refused("finding", finding_id="hang-9")
        assert "name different runs" in await refused("compare", run_a="latest", run_b="latest")
        assert "similar: straggler-" in await refused("runbook", anchor="stragler-compute")
        of_sql = "arguments of sql: statement, run (optional)"
        told = await refused("sql", statement="SELECT 1", max_rows=9)
        assert told == f"there is no argument max_rows; {of_sql}"
        assert await refused("sql", run="latest") == f"statement is missing; {of_sql}"
        told = await refused("sql", statement=3)
        assert told == f"statement: must be a text; {of_sql}"
        rows = json.loads(await call("sql", {"statement": "SELECT * FROM collectives"}))
        assert len(json.dumps(rows, separators=(",", ":"))) <= 16_500
        assert any("200 rows" in text for text in rows["cut"])
        assert any(text.startswith("rows: ") for text in rows["cut"])
        few = json.loads(await call("sql", {"statement": "SELECT 1 / 3.0 AS third"}))
        assert few == {"columns": ["third"], "rows": [[0.333333]]}
        for printed in ("docs/runbook.md#hang-data", "See `rankscope explain hang-data`.", "#hang-data", "hang-data"):
            assert (await call("runbook", {"anchor": printed})).startswith("**")

    assert with_server(folder, work) == ""


@dataclass(slots=True)
class Agent:
    """Counts what it asks and reads.

    The policy is what a prompt would say: list, verdict, the worst finding with its runbook section, and where that
    names a hang the stacks, a straggler the account and a query for its steps.
    """

    call: Callable[[str, dict[str, Any]], Awaitable[str]]
    calls: list[str] = field(default_factory=list)
    num_chars: int = 0

    async def ask(self, name: str, **arguments: Any) -> Any:
        """One call; the answer as JSON, or as the text that it is."""
        text = await self.call(name, arguments)
        self.calls.append(name)
        self.num_chars += len(text)
        return json.loads(text) if text[:1] in "[{" else text

    async def diagnose(self, name: str) -> dict[str, Any]:
        """What the tools let it conclude."""
        listed = await self.ask("list_runs")
        assert name in [*(one["run"] for one in listed["runs"]), *listed["files"]]
        verdict = await self.ask("verdict", run=name)
        if not verdict["findings"]:
            return {"kind": "", "verdict": verdict["verdict"]}
        worst = verdict["findings"][0]
        whole = await self.ask("finding", run=name, finding_id=worst["id"])
        told = {
            **{key: worst[key] for key in ("kind", "ranks", "first_step", "cause", "next")},
            "runbook": whole["runbook"],
        }
        if worst["kind"] == "hang":
            told["stacks"] = await self.ask("stacks", run=name)
        if worst["kind"] == "straggler":
            told["account"] = await self.ask("account", run=name)
            own = "forward_ns - coalesce(forward_wait_ns, 0) + backward_ns - coalesce(backward_wait_ns, 0)"
            statement = f"SELECT rank, median({own}) / 1e6 AS ms FROM steps GROUP BY rank ORDER BY 2 DESC"
            told["slowest"] = (await self.ask("sql", run=name, statement=statement))["rows"][0][0]
        return told
