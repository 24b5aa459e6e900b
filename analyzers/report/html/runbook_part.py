"""The runbook's sections inside an HTML report: each "Next" links to the section on the same page.

part = RunbookPart(finding.advice for finding in diagnosis.fired)
part.sections                 # [("straggler-compute", "Slow in compute", <HTML>), ...]
part.linked(next_step(f))     # escaped, with the command that explains the finding as a link
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from markdown_it import MarkdownIt
from markupsafe import Markup, escape

from analyzers.report.runbook_sections import explain_command, section

__all__ = ["RunbookPart"]

_COMMAND = re.compile("`" + explain_command("([a-z0-9_-]+)") + "`")


class RunbookPart:
    """Sections by anchor, in the order in which the findings name them."""

    def __init__(self, anchors: Iterable[str]) -> None:
        renderer = MarkdownIt("commonmark", {"html": False}).enable("table")
        found = [one for anchor in dict.fromkeys(anchors) if (one := section(anchor)) is not None]
        self.sections = [(one.anchor, one.title, Markup(renderer.render(one.text))) for one in found]
        self._anchors = {one.anchor for one in found}

    def linked(self, text: str) -> Markup:
        """The escaped text; a command that explains a section of this page is a link to it."""
        return Markup(_COMMAND.sub(self._link, str(escape(text))))

    def _link(self, command: re.Match[str]) -> str:
        code = f"<code>{command[0].strip('`')}</code>"
        return f'<a href="#runbook-{command[1]}">{code}</a>' if command[1] in self._anchors else code
