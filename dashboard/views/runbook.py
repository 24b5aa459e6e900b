"""Page with the runbook: what each finding means, how to confirm it, what to do. The address names the section."""

from __future__ import annotations

import streamlit as st

from analyzers.report.runbook_sections import anchor_of, explain_command, section, sections
from dashboard.drawing.elements import empty_state, markdown_text

__all__ = ["runbook"]


def runbook() -> None:
    """Draw the choice of the section, and its text."""
    st.title("Runbook", anchor=False)
    known = list(sections())
    asked = st.query_params.get("section", "")
    wanted = anchor_of(asked)
    if asked and wanted not in known:
        empty_state("The runbook has no such section.", "Choose one below.")
    chosen = st.selectbox(
        "Section", known, index=known.index(wanted) if wanted in known else None, key=f"section-{wanted}",
        format_func=_name, placeholder="name of a finding",
    )  # fmt: skip
    if chosen is None:
        _list_of_sections()
        return
    if chosen != wanted:
        st.query_params["section"] = chosen
        st.rerun()
    found = section(chosen)
    if found is not None:
        st.subheader(markdown_text(found.title), anchor=False)
        st.markdown(found.text)
        st.caption(f"In a terminal: `{explain_command(chosen)}`")


def _list_of_sections() -> None:
    """Draw all sections by chapter, shown if no section is chosen."""
    by_chapter: dict[str, list[str]] = {}
    for found in sections().values():
        if found.title != found.chapter:
            by_chapter.setdefault(found.chapter, []).append(f"- {markdown_text(found.title)} (`{found.anchor}`)")
    for chapter, lines in by_chapter.items():
        st.markdown(f"**{markdown_text(chapter)}**\n\n" + "\n".join(lines))


def _name(anchor: str) -> str:
    found = section(anchor)
    if found is None or found.title == found.chapter:
        return anchor if found is None else found.title
    return f"{found.chapter}: {found.title}"
