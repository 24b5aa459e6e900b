"""Runs with too many rows: some steps are chosen, and what lasts is among them with its begin and its end."""

from __future__ import annotations

import numpy as np
import pytest

from analyzers.account import downsampling as thinned
from analyzers.account import goodput, long_run
from analyzers.account.downsampling import changes
from analyzers.account.long_run import reduced_views
from analyzers.diagnose import diagnose
from analyzers.scope import Scope
from analyzers.stragglers.analyze import stragglers
from analyzers.verdict.run_facts import run_facts
from store import Store
from tests.factories import make_run


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """2,000 steps of 4 ranks; rank 2 is slow from step 900 to the end."""
    run = make_run(tmp_path_factory.mktemp("long"), ranks=4, steps=2000, slow={2: 1.3}, slow_from=900)
    return Store.open(run)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thinned, "MIN_STEPS", 300)
    monkeypatch.setattr(thinned, "CHOSEN_ROWS", 1200)
    monkeypatch.setattr(thinned, "NEWEST_STEPS", 60)


def test_a_short_run_is_its_own_source(store: Store) -> None:
    views = reduced_views(store)
    assert views.whole is views.compared is views.sampled is views.histories is store
    assert not views.coverage


def test_the_start_of_a_slowdown_is_found_to_the_step(store: Store, small: None) -> None:
    views = reduced_views(store, max_rows=1000)
    few = views.compared
    ((rows,),) = few.rows("SELECT count(DISTINCT step) FROM steps")
    assert rows == views.coverage["steps"] < 1000
    (whole,), (part,) = stragglers(store, Scope()), stragglers(few, Scope())
    assert part.ranks == whole.ranks == (2,)
    assert abs(part.first_step - 900) <= 2
    assert part.evidence["factor_ratio"] == pytest.approx(whole.evidence["factor_ratio"], rel=0.02)
    assert part.cost_s == pytest.approx(whole.cost_s, rel=0.1)


def test_the_report_says_how_many_steps_were_compared(
    store: Store, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reduced_views, "__defaults__", (1000,))
    told = diagnose(store, {}).run["steps_compared"]
    assert told["of"] == 2000
    assert 300 <= told["steps"] < 1000


def test_without_room_for_copies_the_whole_run_is_asked(
    store: Store, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reduced_views, "__defaults__", (1000,))
    monkeypatch.setattr(long_run, "_rows_of", lambda steps: "SELECT * FROM no_such_schema.steps")
    found = diagnose(store, {})
    assert [finding.ranks for finding in found.fired] == [(2,)]
    assert "steps_compared" not in found.run
    assert [f.evidence["error_type"] for f in found.not_judged if f.kind == "records"] == ["StoreError"]


def test_samples_include_the_first_and_last_step_of_each_attempt(store: Store, small: None) -> None:
    views = reduced_views(store, max_rows=1000)
    ends = "SELECT attempt, rank, min(start_ns), max(start_ns + duration_ns) FROM steps GROUP BY ALL ORDER BY ALL"
    assert views.sampled.rows(ends) == store.rows(ends)
    ((picked,),) = views.sampled.rows("SELECT count(*) FROM steps")
    ((compared,),) = views.compared.rows("SELECT count(*) FROM steps")
    assert picked < compared < 4000


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT count(*) FROM steps",
        "SELECT count(*) FROM main.steps",
        "SELECT count(*) FROM (SELECT max(attempt) AS newest FROM ranks) r, steps WHERE steps.attempt = r.newest",
        "WITH one AS (SELECT * FROM main.steps) SELECT count(*) FROM one JOIN steps USING (attempt, rank, step)",
        'SELECT count(*) FROM "steps"',
    ],
)
def test_a_view_limits_a_query_however_it_names_the_steps(store: Store, small: None, sql: str) -> None:
    views = reduced_views(store, max_rows=1000)
    ((whole,),) = store.rows("SELECT count(*) FROM steps")
    counts = [view.rows(sql)[0][0] for view in (views.histories, views.compared, views.sampled)]
    assert counts == [
        view.rows("SELECT count(*) FROM steps")[0][0] for view in (views.histories, views.compared, views.sampled)
    ]
    assert 0 < counts[2] < counts[1] < counts[0] == whole  # short enough to keep every rank whole
    assert store.rows(sql) == [(whole,)]


def test_some_ranks_keep_their_full_history(store: Store, small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_run, "HISTORY_ROWS", 4000)
    views = reduced_views(store, max_rows=1000)
    rows = "SELECT rank, count(*) FROM steps GROUP BY rank ORDER BY rank"
    assert views.histories.rows(rows) == [row for row in store.rows(rows) if row[0] % 2 == 0]


def test_facts_and_account_of_the_samples_equal_those_of_the_full_run(store: Store, small: None) -> None:
    views = reduced_views(store, max_rows=1000)
    whole, part = run_facts(store, {}), run_facts(store, {}, views)
    assert part["step_ms_median"] == pytest.approx(whole["step_ms_median"], rel=0.02)
    assert {**part, "step_ms_median": None} == {**whole, "step_ms_median": None}
    spent, picked = goodput.measure(store), goodput.measure(store, views=views)
    assert spent is not None
    assert picked is not None
    assert picked.wall_s == spent.wall_s
    assert picked.seconds == pytest.approx(spent.seconds, rel=0.05, abs=0.01 * spent.wall_s)


def test_changes_of_one_row_against_the_others() -> None:
    dice = np.random.default_rng(0)
    least = (100 * (1 + 0.002 * dice.standard_normal((50, 200)))).astype(np.float32)
    least *= 1 + 0.1 * (np.arange(200) % 7 == 3)  # all ranks together: nobody's change
    assert changes(least) == []
    least[7, 60:90] *= 1.08
    assert changes(least) == [60, 90]
    least[9, 120:] *= 1.05
    assert changes(least) == [60, 90, 120]
