"""Read a progress bar over training steps: tqdm's, and Lightning's on a terminal.

read_bar(" 39%|###  | 391/1000 [33:50<1:25:15,  8.40s/it]")        # transformers, Lightning, NeMo
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import lru_cache

__all__ = ["BAR_LITERALS", "Bar", "float_of", "read_bar"]

BAR_LITERALS = (b"it/s", b"s/it")
_BAR = re.compile(
    r"(?P<step>\d{1,12})/(?P<total>\d{1,12}) \[(?P<elapsed>[\d:]{1,16}|"
    r"\d+ days?, [\d:]{1,12})<(?P<left>[^,\]\n]{0,24}), *"
    r"(?P<rate>[\d.]+|\?) ?(?P<unit>s/it|it/s)"
)
_RICH_BAR = re.compile(
    r"[━╸╺ ]+(?P<step>\d{1,12})/(?P<total>\d{1,12}) (?P<elapsed>[\d:]{1,16}) • (?P<left>[\d:-]{1,16}) "
    r"(?P<rate>[\d.]+)(?P<unit>it/s)"
)
"""Lightning's RichProgressBar on a terminal."""
_PART = re.compile(
    r"(?<![a-z])(fold|split|trial|seed|stage|phase|task|experiment|run|repeat|cv)[ _=:#-]{0,2}(\d{1,6})", re.IGNORECASE
)
_TURN = re.compile(r"\b[Ee]p(?:och)?[ _=:#\[-]{0,3}(\d{1,7})|(?<![\d./])(\d{1,7}) ?(?:/|of) ?\d{1,7}(?![\d./])")
_NO_TRAINING = re.compile(
    r"load|shard|download|\bmap\b|token|filter|generat|valid|\beval|\btest|sanity|predict|prepar|process|\bsav|fetch|upload|"
    r"extract|resolv|\bcast|concat|group|check|warm|captur|compil|convert|read|build|quantiz|merg|infer|decod|sampl|rollout",
    re.IGNORECASE,
)
"""Descriptions of progress bars that do not count training steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A progress bar over steps. `name`: the description of the bar without numbers; it identifies the bar."""

    name: str
    epoch: int | None
    step: int
    total: int
    duration_ns: int | None
    """Nanoseconds per step by the printed rate, which tqdm smooths."""
    elapsed_s: int | None = None
    part: str = ""
    """Fold, trial, stage etc. in the description."""
    turn: int | None = None
    """The epoch, or the first number with a total in the description (`[fold_1] 001/200`)."""


def read_bar(text: str) -> Bar | None:
    """Newest state of a progress bar over training steps; None if the line has none."""
    states = list((_RICH_BAR if "•" in text else _BAR).finditer(text))
    if not states:
        return None
    found = states[-1]
    described = _name_and_epoch(text[: found.start()].rsplit("]", 1)[-1].split("%|")[0].rstrip("0123456789 "))
    if described is None:
        return None
    name, epoch = described
    before = text[states[-2].end() if len(states) > 1 else 0 : found.start()].split("%|")[0]
    part, turn = _PART.search(before), _TURN.search(before)
    value = float_of(found["rate"]) if found["rate"] != "?" else 0.0
    seconds = value if found["unit"] == "s/it" else 1 / value if value > 0 else 0.0
    return Bar(
        name=name,
        epoch=epoch,
        step=int(found["step"]),
        total=int(found["total"]),
        duration_ns=int(seconds * 1e9) if 0 < seconds < 1e6 else None,
        elapsed_s=_elapsed_s(found["elapsed"]),
        part=" ".join(part.groups()).lower() if part else "",
        turn=int(turn[1] or turn[2]) if turn else None,
    )


def _elapsed_s(text: str) -> int | None:
    days, _, clock = text.rpartition(", ")
    parts = clock.split(":")
    if not all(part.isdecimal() for part in parts):
        return None
    seconds = 0
    for part in parts:
        seconds = 60 * seconds + int(part)
    return seconds + (86_400 * int(days.split()[0]) if days else 0)


@lru_cache(maxsize=256)
def _name_and_epoch(description: str) -> tuple[str, int | None] | None:
    """Name and epoch of a bar, from the text before its percentage; None if it does not count training steps."""
    if _NO_TRAINING.search(description):
        return None
    epoch = re.search(r"[Ee]poch:? *(\d{1,7})|^\s*(\d{1,7})\|", description)
    # Numbers become "#", and runs of spaces one space, because the padding of columns varies.
    name = " ".join(re.sub(r"[\d.]+|\b(?:nan|inf)\b", "#", description).split())
    return name[:40], int(epoch[1] or epoch[2]) if epoch else None


def float_of(text: str) -> float:
    """A printed number, NaN for any other text."""
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return math.nan
