"""Page on findings: all of them, or one with its evidence, the run's response and the runbook."""

from __future__ import annotations

from typing import Any

import streamlit as st

from analyzers.deaths.recovery_response import done_about
from analyzers.diagnose import Diagnosis
from analyzers.finding import SEVERITIES, Finding
from analyzers.kinds import KINDS
from analyzers.plugin_calls.named import MAX_OF_A_KIND, folded
from analyzers.report.evidence import drawings
from analyzers.report.runbook_sections import advice_text
from analyzers.report.terminal.diagnosis_text import evidence_rows, title
from analyzers.report.wording.explained import next_step, why
from analyzers.report.wording.stack_texts import stack_texts
from analyzers.run.findings.open_findings import reported_findings
from analyzers.run.live.state import RunState
from analyzers.source import Source
from analyzers.verdict.verdict import LISTED_BELOW, outcome
from dashboard.data.current_findings import CurrentFindings, current_findings, pick
from dashboard.drawing.elements import (
    SEVERITY_COLOURS,
    chart,
    empty_state,
    location,
    markdown_text,
    table,
    with_runbook_links,
)
from dashboard.frame import View, framed, runs_folder
from dashboard.page_link import page_link
from probes.tape.redaction.printable import visible

__all__ = ["as_of", "card", "findings", "verdict_without_findings"]

MAX_LISTED = 60
_UNWELL = ("stalled", "recovering", "died", "failed", "given up", "fenced")


def card(
    view: View, finding: Finding, number: int, *, closed: str = "", has_link: bool = False, is_numbered: bool = False
) -> None:
    """Draw one finding in three lines. `has_link`: with a link to its evidence; `closed`: why it is not open.

    `is_numbered`: show the number that marks its steps in the loss chart.
    """
    with st.container(border=True, key=f"card-{number}"):
        with st.container(horizontal=True, vertical_alignment="center", gap="small"):
            word = "advice" if finding.status == "advice" else finding.severity
            st.badge(word, color="gray" if closed else SEVERITY_COLOURS[finding.severity])
            if finding.status == "suspect":
                st.badge("suspected", color="gray")
            heading = f"{number}. {title(finding).capitalize()}" if is_numbered else title(finding).capitalize()
            st.markdown(f"**{markdown_text(heading, 80)}**", width="content")
            passed = f" · {closed}" if closed else as_of(finding, view.state)
            st.markdown(f":gray[{markdown_text(location(finding) + passed, 200)}]", width="stretch")
            if has_link:
                address = {"run": view.run_id, "finding": finding.id}
                page_link("Findings", "Evidence", "arrow_forward", address, key=f"evidence-{number}")
            elif st.query_params.get("finding") is None and st.button(
                "Evidence", key=f"evidence-{number}", icon=":material/arrow_forward:", type="tertiary"
            ):
                st.query_params["finding"] = finding.id
                st.rerun()
        st.markdown(markdown_text(finding.summary))


def as_of(finding: Finding, state: RunState) -> str:
    """Note on the last judged step of an open finding, if the figures of a live run's page are newer."""
    lasts = finding.kind in KINDS and KINDS[finding.kind].may_last
    if not (state.is_live and lasts and finding.last_step and state.step and finding.last_step < state.step):
        return ""
    return f" · as of step {finding.last_step} of {state.step}"


@framed("Findings")
def findings(view: View) -> None:
    """Draw the list, or the finding in the page's address."""
    reports = view.ask(reported_findings, often=True)
    if reports is None:
        return
    diagnosis = view.diagnosis()
    known = current_findings(diagnosis, reports, newest_attempt=view.state.attempt, has_ended=not view.state.is_live)
    advised = list(diagnosis.advised) if diagnosis is not None else []
    asked = st.query_params.get("finding")
    if asked:
        _one(view, known, advised, asked[:300], diagnosis)
        return
    note, listed = st.empty(), st.container()
    if diagnosis is None:
        note.caption("The analyzers are reading the whole run. Until then, findings reported by watch are shown.")
    with listed:
        _all(view, known, diagnosis)


def verdict_without_findings(view: View, diagnosis: Diagnosis, listed: str = "see Findings") -> str:
    """The verdict for `st.markdown`, with its mark. `listed`: heading of the list of checks that were not made."""
    text = "  \n".join(map(markdown_text, diagnosis.verdict.replace(LISTED_BELOW, listed).splitlines()))
    return f":{_mark(view, diagnosis)} {text}]"


def _mark(view: View, diagnosis: Diagnosis) -> str:
    """Colour and icon of a verdict without findings: green only if every check that matters was made and the run is
    healthy."""
    found = outcome(diagnosis.verdict, diagnosis.run)
    if found == "failed" or view.state.word in _UNWELL:
        return "orange[:material/warning:"
    if view.state.word in ("starting", "empty") or not diagnosis.run.get("steps"):
        return "gray[:material/hourglass_top:"
    if found == "unjudged":
        return "blue[:material/info:"
    return "green[:material/check_circle:"


def _all(view: View, known: CurrentFindings, diagnosis: Diagnosis | None) -> None:
    if not known.findings:
        if diagnosis is not None:
            st.markdown(verdict_without_findings(view, diagnosis, LISTED_BELOW))
    else:
        _list(view, known)
    if diagnosis is not None and diagnosis.advised:
        st.subheader("Advice", anchor=False)
        for number, finding in enumerate(diagnosis.advised):
            card(view, finding, 1_000 + number)
    if diagnosis is not None and diagnosis.not_judged:
        st.subheader("Not judged", anchor=False)
        for finding in diagnosis.not_judged:
            st.caption(markdown_text(finding.summary))


def _list(view: View, known: CurrentFindings) -> None:
    found = known.findings
    with st.container(horizontal=True, gap="medium", vertical_alignment="bottom"):
        present = [severity for severity in SEVERITIES if any(f.severity == severity for f in found)]
        severities = st.pills("Severity", present, selection_mode="multi", key="severity", bind="query-params")
        # Offer the kind in an alert's link (`?kind=hang&rank=3`) even before such a finding is known.
        linked = {kind for kind in st.query_params.get_all("kind") if kind in KINDS}
        chosen = st.multiselect(
            "Kind", sorted({finding.kind for finding in found} | linked), key="kind", placeholder="all kinds",
            format_func=visible, bind="query-params",
        )  # fmt: skip
        rank = st.text_input("Rank", key="rank", placeholder="any", width=120, max_chars=9, bind="query-params")
    shown = [
        finding
        for finding in found
        if (not severities or finding.severity in severities)
        and (not chosen or finding.kind in chosen)
        and (not (rank or "").strip().isdigit() or int(rank) in finding.ranks)
    ]
    if not shown:
        empty_state("No finding matches the filter.")
    shown = shown if chosen else folded(shown, MAX_OF_A_KIND)
    for number, finding in enumerate(shown[:MAX_LISTED], 1):
        card(view, finding, number, closed=known.closed.get(finding.id, ""))
    if len(shown) > MAX_LISTED:
        st.caption(f"{len(shown) - MAX_LISTED} more findings are not shown: filter by kind or rank.")


def _one(view: View, known: CurrentFindings, advised: list[Finding], asked: str, diagnosis: Diagnosis | None) -> None:
    if st.button("All findings", icon=":material/arrow_back:", type="tertiary", key="all-findings"):
        del st.query_params["finding"]
        st.rerun()
    finding = pick(known.findings + advised, asked)
    if finding is None:
        if diagnosis is not None:  # any diagnosis will do: on a live run, waiting for a newer one would never end
            empty_state("This run has no such finding now.", "It may be over, or the link is for another run.")
        if diagnosis is None or view.is_pending:
            st.caption("The analyzers are reading the run…")
        return
    card(view, finding, 0, closed=known.closed.get(finding.id, ""))
    reason = _why(finding)
    if reason != finding.summary:
        st.markdown(f"**Why** &nbsp; {markdown_text(reason)}")
    following = next_step(finding, runs_folder().path / view.run_id)
    st.markdown(f"**Next** &nbsp; {with_runbook_links(markdown_text(following))}")
    evidence = _evidence_of(view, finding)
    for number, (heading, figure) in enumerate(evidence["drawings"] if evidence else ()):
        import plotly.graph_objects as go

        st.subheader(markdown_text(heading, 160), anchor=False)
        chart(go.Figure, figure, skip_invalid=True, key=f"evidence-{finding.id}-{number}", what=heading)
    left, right = st.columns([1, 1], gap="large")
    with left:
        st.subheader("Numbers", anchor=False)
        _numbers(finding)
        st.subheader("Response", anchor=False)
        done = evidence["done"] if evidence else []
        for sentence in done:
            st.text(visible(sentence)[:400])
        if not done:
            st.caption("No automatic action was taken.")
    with right:
        st.subheader("Runbook", anchor=False)
        text = advice_text(finding.advice)
        if text:
            st.markdown(text)
        else:
            st.caption("The runbook has no section for this finding.")
    _texts(finding)


def _why(finding: Finding) -> str:
    """The evidence in one line, or the summary if the evidence has an unexpected form."""
    try:
        return why(finding)
    except (AttributeError, KeyError, TypeError, ValueError):
        return finding.summary


def _evidence_of(view: View, finding: Finding) -> dict[str, Any] | None:
    found: dict[str, Any] | None = view.ask(load_evidence, _ById(finding))
    return found


class _ById:
    """A finding as a query parameter. It equals later versions of the same finding, even if their numbers differ."""

    def __init__(self, finding: Finding) -> None:
        self.finding = finding

    def __hash__(self) -> int:
        return hash(self.finding.id)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ById) and other.finding.id == self.finding.id


def load_evidence(source: Source, asked: _ById) -> dict[str, Any]:
    """Load the figures of a finding, and the run's response to it."""
    found = drawings(source, asked.finding)
    return {
        "drawings": [(drawing.title, drawing.figure.to_dict()) for drawing in found],
        "done": done_about(source, asked.finding),
    }


def _numbers(finding: Finding) -> None:
    if rows := evidence_rows(finding):
        table({"number": [name for name, _ in rows], "value": [value for _, value in rows]}, key="numbers")
    else:
        st.caption("This finding has no numbers.")


def _texts(finding: Finding) -> None:
    for heading, frames in stack_texts(finding.evidence):
        with st.expander(markdown_text(heading, 200)):
            st.code("\n".join(map(visible, frames)) or "-", language=None)
    message = finding.evidence.get("message")
    if isinstance(message, str) and message.strip():
        with st.expander("Message"):
            st.code(visible(message[:20_000]), language=None)
