"""The frame of a self-contained HTML page around the sections of a report or a comparison.

    sheet = FigurePage()
    section = Section(title="Loss", figures=[sheet.figure(figure, alt="Loss over the steps")])
    page = sheet.render(run_id="demo", verdict="no finding", sections=[section], ...)     # bytes, UTF-8

Everything that comes from the run (names, log lines, tracebacks) is treated as text: it is escaped, control characters
are made visible, and very long texts are cut. The page's Content-Security-Policy forbids it to load anything.

`RunbookPart` holds the runbook's sections inside a report: each "Next" links to the section on the same page.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template, pass_context
from jinja2.runtime import Context
from markdown_it import MarkdownIt
from markupsafe import Markup, escape
from plotly.offline import get_plotlyjs

from analyzers.figures.drawing import theme
from analyzers.report.runbook_sections import explain_command, section
from probes.tape.redaction.printable import visible

__all__ = ["FigurePage", "PlacedFigure", "RunbookPart", "Section"]

PAGE = Path(__file__).parent / "page"
MAX_TEXT = 2_000
"""Maximum number of characters of one text from the run."""
_SCRIPT = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


_COMMAND = re.compile("`" + explain_command("([a-z0-9_-]+)") + "`")
_CODE = re.compile("`([^`\n]+)`")


@dataclass(slots=True, kw_only=True)
class PlacedFigure:
    """A figure with its place on the page; `alt` is its alternative text."""

    id: str
    title: str
    alt: str
    height: int
    json: Markup
    hidden: bool = False


@dataclass(slots=True, kw_only=True)
class Section:
    """A heading, a note, figures (side by side as tabs, or one below the other) and a table."""

    title: str
    note: str = ""
    figures: list[PlacedFigure] = field(default_factory=list)
    tabs: bool = False
    columns: Sequence[str] = ()
    numeric: Sequence[int] = ()
    rows: Sequence[Sequence[str]] = ()


class FigurePage:
    """Collects figures under unique names, and puts everything into the page."""

    def __init__(self) -> None:
        self.figures: list[PlacedFigure] = []

    def figure(self, figure: go.Figure, heading: str = "", *, hidden: bool = False, alt: str = "") -> PlacedFigure:
        """Place a figure of any height on the page. `alt`: alternative text, by default the heading."""
        made = PlacedFigure(
            id=f"figure-{len(self.figures) + 1}", title=heading, alt=alt or heading, hidden=hidden,
            height=int(figure.layout.height or 320), json=_for_script(figure.to_json()),
        )  # fmt: skip
        self.figures.append(made)
        return made

    def render(self, *, explains: Iterable[str] = (), **values: Any) -> bytes:
        """The page, UTF-8. `values`: the variables of the template `page/page.html.j2`. `explains`: anchors of the
        runbook sections that the page contains."""
        runbook = RunbookPart(explains)
        text = _template().render(
            **values,
            links=runbook,
            runbook=runbook.sections,
            css=Markup((PAGE / "page.css").read_text(encoding="utf-8")),
            js=Markup((PAGE / "page.js").read_text(encoding="utf-8")),
            plotly=Markup(get_plotlyjs()),
            templates=_for_script(json.dumps({"light": theme.template(dark=False), "dark": theme.template(dark=True)})),
            all_figures=self.figures,
        )
        return text.encode("utf-8", "replace")


@functools.cache
def _template() -> Template:
    """The page's template, compiled once in a process: that takes a tenth of the time of a page."""
    environment = Environment(
        loader=FileSystemLoader(PAGE), autoescape=True, undefined=StrictUndefined, finalize=_shown, trim_blocks=True
    )
    environment.filters["linked"] = _linked
    return environment.get_template("page.html.j2")


@pass_context
def _linked(context: Context, value: Any) -> Markup:
    links: RunbookPart = context["links"]
    return links.linked(_shown(value))


def _shown(value: Any) -> Any:
    """Texts of the run for the template: without control characters and of bounded length."""
    if isinstance(value, str) and not isinstance(value, Markup):
        cut = value if len(value) <= MAX_TEXT else f"{value[:MAX_TEXT]} … ({len(value):,} characters)"
        return visible(cut)
    return value


def _for_script(text: str) -> Markup:
    """JSON that cannot close its script element."""
    for sign, escaped in _SCRIPT.items():
        text = text.replace(sign, escaped)
    return Markup(text)


class RunbookPart:
    """Sections by anchor, in the order in which the findings name them."""

    def __init__(self, anchors: Iterable[str]) -> None:
        renderer = MarkdownIt("commonmark", {"html": False}).enable("table")
        found = [one for anchor in dict.fromkeys(anchors) if (one := section(anchor)) is not None]
        self.sections = [(one.anchor, one.title, Markup(renderer.render(one.text))) for one in found]
        self._anchors = {one.anchor for one in found}

    def linked(self, text: str) -> Markup:
        """The escaped text with code between backticks; a command that explains a section of this page links to it."""
        return Markup(_CODE.sub(r"<code>\1</code>", _COMMAND.sub(self._link, str(escape(text)))))

    def _link(self, command: re.Match[str]) -> str:
        code = f"<code>{command[0].strip('`')}</code>"
        return f'<a href="#runbook-{command[1]}">{code}</a>' if command[1] in self._anchors else code
