"""Show the progress of a preparation: a bar on a terminal, else a line every few seconds.

with ProgressView(console) as view:
    prepare(request, num_processes=2, on_progress=view.show)
"""

from __future__ import annotations

import time

import rich.progress
from rich.console import Console
from rich.progress import BarColumn, TextColumn

from analyzers.report.terminal.time_left import TimeLeftColumn
from trainer.data.prepare.prepare import Progress

__all__ = ["ProgressView"]

PLAIN_LINE_S = 5.0


class ProgressView:
    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = console.is_terminal
        self._plain_at = time.monotonic()
        self._bar = rich.progress.Progress(
            BarColumn(bar_width=24),
            TextColumn("{task.percentage:>3.0f} %  {task.fields[figures]}"),
            TimeLeftColumn(),
            console=console,
            transient=True,
        )
        self._task = self._bar.add_task("", total=None, figures="starting")

    def __enter__(self) -> ProgressView:
        if self._live:
            self._bar.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._live:  # otherwise it would print an empty line
            self._bar.stop()

    def show(self, done: Progress) -> None:
        """Called after each batch of documents."""
        figures = (
            f"shard {done.shards_done}/{done.num_shards}  {done.num_documents:,} documents  "
            f"{done.num_tokens:,} tokens  {done.tokens_per_s:,.0f} tokens/s"
        )
        completed = min(done.text_bytes_done, done.text_bytes)
        if self._live:
            self._bar.update(self._task, total=done.text_bytes, completed=completed, figures=figures)
        elif time.monotonic() - self._plain_at >= PLAIN_LINE_S:
            self._plain_at = time.monotonic()
            share = 100 * completed / max(1, done.text_bytes)
            self._console.print(f"{share:3.0f} %  {figures}", highlight=False, soft_wrap=True)
