"""`rankscope explain`: the section of the runbook that a finding names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from rankscope.terminal import FormatOption, console, echo, fail, print_json, wants_json

if TYPE_CHECKING:
    from analyzers.report.runbook_sections import RunbookSection

__all__ = ["EPILOG", "explain"]

EPILOG = "\b\nExamples:\nrankscope explain hang-not_entered\nrankscope explain straggler\nrankscope explain"


def explain(
    anchor: Annotated[
        str, typer.Argument(help="Section, as reports name it. Default: list them.", metavar="[SECTION]")
    ] = "",
    output: FormatOption = "text",
) -> None:
    """Print a section of the runbook: what a finding means, how to confirm it, what to do.

    Each finding names its section in "Next". A kind (hang, straggler) or a part of a name lists the sections under it.
    """
    as_json = wants_json(output)
    from analyzers.report.runbook_sections import anchor_of, nearest, section, sections

    wanted = anchor_of(anchor)
    if (found := section(wanted)) is not None:
        _print_section(found, as_json)
        return
    family = wanted.lower().replace("_", "-")
    listed = [one for one in sections().values() if one.anchor.startswith(f"{family}-" if family else "")]
    if not listed:
        near = nearest(wanted)
        hint = f": did you mean {' or '.join(near[:3])}?" if near else ": `rankscope explain` lists them"
        fail(f"the runbook has no section {wanted[:100]!r}{hint}")
    if as_json:
        print_json([{"section": one.anchor, "title": one.title, "chapter": one.chapter} for one in listed])
        return
    width = max(len(one.anchor) for one in listed)
    chapter = None
    for one in listed:
        if one.chapter != chapter:
            echo(f"{'' if chapter is None else chr(10)}{one.chapter}")
            chapter = one.chapter
        if one.title != one.chapter:
            echo(f"  {one.anchor:<{width}}  {one.title}")
    echo("\nOne of them: rankscope explain SECTION")


def _print_section(found: RunbookSection, as_json: bool) -> None:
    if as_json:
        print_json({"section": found.anchor, "title": found.title, "chapter": found.chapter, "text": found.text})
        return
    screen = console()
    if screen.is_terminal:
        from rich.markdown import CodeBlock, Markdown
        from rich.syntax import Syntax

        class Code(CodeBlock):
            """Code block without the blank lines that rich adds above and below."""

            def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
                yield Syntax(str(self.text).rstrip(), self.lexer_name, theme=self.theme, word_wrap=True, padding=(0, 1))

        class Section(Markdown):
            elements: ClassVar = {**Markdown.elements, "fence": Code, "code_block": Code}

        screen.print(Section(f"## {found.title}\n\n{found.text}"))
    else:
        echo(f"{found.title}\n\n{found.text}")
