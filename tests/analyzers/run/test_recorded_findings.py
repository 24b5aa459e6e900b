"""What a plug-in recorded while the run lived stays, where it is not installed."""

from __future__ import annotations

from typing import Any

from analyzers.diagnose import conclude, diagnose, reaching
from analyzers.finding import Finding
from analyzers.plugin_calls.named import first_of, of_plugin
from analyzers.report.wording.explained import next_step
from store.readers.memory_store import MemoryStore
from watch.live import _event_columns


def recorded(*reports: Finding) -> MemoryStore:
    store = MemoryStore()
    rows = [{"rank": -1, "kind": "finding", "wall_ns": number, "detail": _event_columns(one)} for number, one in
            enumerate(reports)]  # fmt: skip
    store.add("events", rows)
    return store


def plateau(**more: Any) -> Finding:
    values: dict[str, Any] = {
        "severity": "critical",
        "status": "fired",
        "summary": "The loss is flat.",
        "attempt": 0,
        "first_step": 40,
    }
    return of_plugin(Finding(analyzer="p", kind="loss_plateau", **{**values, **more}), "plateau")


def test_a_recorded_plug_in_finding_is_shown() -> None:
    with recorded(plateau()) as store:
        diagnosis = diagnose(store, {})
    (found,) = diagnosis.fired
    said = "The loss is flat (recorded live by plug-in plateau, which is not installed here)."
    assert (found.summary, found.severity, found.status) == (said, "critical", "fired")
    assert diagnosis.verdict.startswith(said)
    assert reaching(diagnosis.findings, "critical") == [found]
    assert next_step(found) == "Install plug-in plateau here to see what it advises."


def test_a_recorded_finding_that_was_over_stays_over() -> None:
    with recorded(plateau(), plateau(status="ok", severity="info", summary="Over: The loss is flat.")) as store:
        diagnosis = diagnose(store, {})
    (found,) = diagnosis.fired
    assert found.severity == "critical"
    assert diagnosis.closed == {found.id: "over"}


def test_the_newest_report_counts_once() -> None:
    with recorded(plateau(), plateau(summary="The loss rises.")) as store:
        (found,) = diagnose(store, {}).fired
    assert found.summary.startswith("The loss rises (recorded live")


def test_a_finding_of_a_known_kind_is_judged_anew() -> None:
    straggler = Finding(analyzer="straggler", kind="straggler", severity="warning", status="fired", summary="Slow.",
                        ranks=(1,), attempt=0)  # fmt: skip
    with recorded(straggler) as store:
        assert diagnose(store, {}).fired == ()


def test_many_findings_of_one_kind_have_three_cards_and_one_verdict_line() -> None:
    many = [plateau(first_step=step, summary=f"Flat at {step}. Go on.") for step in range(20)]
    with recorded(*many) as store:
        diagnosis = diagnose(store, {})
    assert len(diagnosis.fired) == 20
    assert len(diagnosis.cards) == 3
    by = "(recorded live by plug-in plateau, which is not installed here"
    assert diagnosis.cards[1].summary == f"Flat at 1. Go on {by})."
    assert diagnosis.cards[2].summary == f"Flat at 2. Go on {by}, 17 more)."
    assert diagnosis.verdict.splitlines()[0].startswith(f"Flat at 0 {by}, 19 more).")


def test_a_critical_one_stands_before_our_warning_and_ours_before_an_equal_one() -> None:
    ours = {one: Finding(analyzer="s", kind="straggler", severity=one, status="fired", summary=f"Ours, {one}.",
                         first_step=80) for one in ("critical", "warning")}  # fmt: skip
    order = [one.summary for one in conclude([plateau(), *ours.values()], {}).findings]
    assert order == ["Ours, critical.", "The loss is flat (plug-in plateau).", "Ours, warning."]


def test_a_plug_in_that_failed_is_no_check_that_needs_data() -> None:
    told = {"analyzer": "plug-in team"}
    failed = [Finding.insufficient("team", "records", "Plug-in team: it hung.", evidence={"plugin": "team"}),
              Finding.insufficient("coverage", "records", "While ...", evidence=told)]  # fmt: skip
    verdict = conclude(failed, {"steps": 60, "num_ranks": 4}).verdict
    assert "more data" not in verdict
    assert verdict.endswith("Plug-in team has problems: see Not judged.")


def test_plug_ins_never_fill_a_short_list() -> None:
    theirs = [plateau(first_step=step) for step in range(9)]
    ours = Finding(analyzer="s", kind="straggler", severity="warning", status="fired", summary="Slow.")
    assert first_of([*theirs, ours], 4) == [*theirs[:3], ours]
    assert first_of([ours, *theirs], 4) == [ours, *theirs[:3]]
    assert first_of(theirs, 4) == theirs[:4]


def test_findings_with_an_undeclared_identity_are_merged_by_their_id() -> None:
    """A kind with an identity that the plug-in declares; and a run whose findings do not name the plug-in yet."""
    told = {"id": "loss_plateau", "analyzer": "loss_plateau"}
    events = [_event_columns(plateau(first_step=step)) | told | {"summary": text} for step, text in
              ((40, "Flat."), (90, "Still."))]  # fmt: skip
    with MemoryStore() as store:
        store.add("events", [{"rank": -1, "kind": "finding", "wall_ns": number, "detail": one} for number, one in
                             enumerate(events)])  # fmt: skip
        (found,) = diagnose(store, {}).fired
    said = "Still (recorded live by a plug-in or version of Rankscope that is not installed here)."
    assert (found.summary, found.first_step) == (said, 90)
    assert next_step(found) == "Install what found it here to see what it advises."
