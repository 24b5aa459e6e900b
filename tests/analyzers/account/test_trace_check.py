"""Exposed communication of runs recorded on a GPU against Kineto's traces of the same steps, as `watch` enters them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cache
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from analyzers.account.device.trace_check import against_traces
from analyzers.account.goodput import measure
from analyzers.communication.analyze import communication
from analyzers.diagnose import diagnose
from analyzers.finding import Finding
from analyzers.report.terminal.diagnosis_text import render
from analyzers.scope import Scope
from probes.tape.rundir import RunDir
from store import Store
from tests.support.captured_gpu import with_captures
from watch.exporting.metrics.node_metrics import NodeMetrics


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, float], RunDir]:
    """A recorded run with captures, written once for all tests that read it."""

    @cache
    def made(name: str, factor: float) -> RunDir:
        return with_captures(name, tmp_path_factory.mktemp("captured"), factor=factor)

    return made


def exposed(store: Store) -> Finding:
    (found,) = [one for one in communication(store, Scope()) if one.kind == "exposed_communication"]
    return found


@pytest.mark.parametrize("name", ["stamped_none", "stamped_fsdp2_none"])
def test_a_trace_of_the_same_steps_agrees(name: str, captured: Callable[[str, float], RunDir]) -> None:
    with Store.open(captured(name, 1.0)) as store:
        check = against_traces(store, 0)
        assert check is not None
        assert check.captures == 2
        assert check.gap_ratio < 0.07
        assert exposed(store).status in ("ok", "advice")


def test_exposed_communication_that_the_trace_contradicts_is_not_judged(
    captured: Callable[[str, float], RunDir],
) -> None:
    with Store.open(captured("stamped_fsdp2_none", 3.0)) as store:
        found = exposed(store)
    assert found.status == "insufficient_data"
    assert "by torch's profiler" in found.summary


class _CountedRows:
    """A store that counts the rows of each answer."""

    def __init__(self, store: Store) -> None:
        self.has, self.query = store.has, store.query
        self._rows = store.rows
        self.num_rows: list[int] = []

    def rows(self, sql: str, params: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        found = self._rows(sql, params)
        self.num_rows.append(len(found))
        return found


def test_only_the_captured_steps_are_read(captured: Callable[[str, float], RunDir]) -> None:
    """A run has up to hundreds of millions of rows of steps, and a capture a few."""
    with Store.open(captured("stamped_none", 1.0)) as store:
        counted = _CountedRows(store)
        assert against_traces(counted, 0) is not None
        ((num_steps,),) = store.rows("SELECT count(*) FROM steps")
    assert max(counted.num_rows) < num_steps / 2


def answers(run: RunDir) -> tuple[dict[str, Any], str, set[str]]:
    """The account as JSON, the terminal's report, and the names of the metrics."""
    terminal = Console(width=200, no_color=True, record=True, file=StringIO())
    manifest = run.manifest()
    with Store.open(run) as store:
        diagnosis = diagnose(store, manifest, stacks_dir=run.stacks)
        render(diagnosis, terminal)
        samples = NodeMetrics(manifest, node_rank=0).measure(store, time.time_ns())
        account = measure(store)
    assert account is not None
    return account.to_json(), terminal.export_text(), {one.name for one in samples}


@pytest.mark.parametrize(("factor", "is_judged"), [(1.0, True), (3.0, False)])
def test_every_surface_gives_the_answer_of_the_finding(
    factor: float, is_judged: bool, captured: Callable[[str, float], RunDir]
) -> None:
    account, report, metrics = answers(captured("stamped_fsdp2_none", factor))
    assert (account["communication_not_judged"] is None) == is_judged
    assert ("exposed communication (not judged)" in report) != is_judged
    assert ("rankscope_exposed_communication_ratio" in metrics) == is_judged
