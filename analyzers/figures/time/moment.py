"""Timeline around a finding: what the ranks did in its steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from analyzers.figures.drawing.titled_figure import Drawing
from analyzers.figures.time import activity, timeline
from analyzers.finding import Finding
from analyzers.kinds import KINDS
from analyzers.source import Source

__all__ = ["MAX_RANKS", "moment"]

MAX_RANKS = 16


def moment(source: Source, finding: Finding | None = None) -> Iterator[Drawing]:
    """The timeline around a finding's first step, or at the end of its attempt."""
    if not source.has("steps"):
        return
    attempt = finding.attempt if finding is not None else None
    if attempt is None:
        ((attempt,),) = source.rows("SELECT max(attempt) FROM steps")
    if attempt is None:
        return
    ((newest,),) = source.rows("SELECT max(step) FROM steps WHERE attempt = ? AND rank >= 0", [attempt])
    at_end = finding is None or finding.first_step is None or _is_at_end(finding)
    last = newest if at_end or finding is None or finding.first_step is None else finding.first_step + 1
    if last is None:
        return
    first = max(0, last - (1 if at_end else 2))
    shown = _shown_ranks(source, attempt, finding.ranks if finding is not None else ())
    pieces = activity.timeline(source, attempt=attempt, first_step=first, last_step=last, ranks=shown)
    if pieces:
        title = (
            f"What {'the ranks' if len(shown) < MAX_RANKS else f'{len(shown)} ranks'} did in steps {first} to {last}"
        )
        yield Drawing(title=title, figure=timeline.draw(pieces, ranks=shown))


def _is_at_end(finding: Finding) -> bool:
    kind = KINDS.get(finding.kind)
    return kind is not None and kind.at_end


def _shown_ranks(source: Source, attempt: int, named: Sequence[int]) -> list[int]:
    """Ranks to show: the named ones first, then others, up to `MAX_RANKS` in all."""
    rows = source.rows("SELECT DISTINCT rank FROM steps WHERE attempt = ? AND rank >= 0 ORDER BY rank", [attempt])
    everybody = [int(rank) for (rank,) in rows]
    chosen = [rank for rank in named if rank in set(everybody)][:MAX_RANKS]
    chosen += [rank for rank in everybody if rank not in set(chosen)][: MAX_RANKS - len(chosen)]
    return sorted(chosen)
