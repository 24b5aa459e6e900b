"""A drill as one HTML file that needs nothing else: no script, no font, no picture from anywhere.

    path.write_text(drill_page(tally, plan, title="examples/gpt-demo.toml"))

Whatever comes from a run (names, messages) is escaped.
"""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from trainer.drills.scenario import DrillPlan
from trainer.drills.tally import Tally

__all__ = ["drill_page"]


def drill_page(tally: Tally, plan: DrillPlan, *, title: str, interrupted: bool = False) -> str:
    """The whole page."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters["share"] = lambda value: "-" if value is None else f"{100 * value:.1f} %"
    environment.filters["seconds"] = lambda value: "-" if value is None else f"{value:.1f} s"
    template = environment.get_template("page.html.j2")
    return template.render(tally=tally, plan=plan, title=title, interrupted=interrupted)
