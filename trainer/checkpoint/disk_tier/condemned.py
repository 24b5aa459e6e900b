"""A note with the reason in a condemned checkpoint's folder, for the next attempt and for users.

    note_reason(folder, "__0_0.distcp has 7 bytes, not 9", is_damaged=True)
    condemned_as_damaged(checkpoints)           # ["step-00000050.condemned"]

If the guard condemns a checkpoint for a bad update, the run continues from an earlier one. But if damaged files leave
no other checkpoint, only the user may decide to start over.
"""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path

from probes.tape.files.safe_open import read_plain
from trainer.checkpoint.disk_tier.listing import subfolders
from trainer.checkpoint.disk_tier.manifest import CONCLUSIVE_ERRORS

__all__ = ["condemned_as_damaged", "note_reason"]

NOTE_NAME = "condemned.json"


def note_reason(folder: Path, reason: str, *, is_damaged: bool) -> None:
    """Write the note to a condemned folder. Disk errors are ignored."""
    with contextlib.suppress(OSError):
        (folder / NOTE_NAME).write_text(json.dumps({"reason": reason, "damaged": is_damaged}) + "\n")


def condemned_as_damaged(checkpoints: Path) -> list[str]:
    """Names of condemned folders that may be damaged, oldest first.

    Raises OSError if the folders cannot be read now.
    """
    condemned = [name for name in subfolders(checkpoints) if re.fullmatch(r"step-.*\.condemned", name)]
    return [name for name in condemned if not _is_whole(checkpoints / name)]


def _is_whole(folder: Path) -> bool:
    try:
        return json.loads(read_plain(folder / NOTE_NAME, 1 << 16))["damaged"] is False
    except OSError as error:
        if error.errno not in CONCLUSIVE_ERRORS:
            raise
        return False
    except (ValueError, KeyError, TypeError, RecursionError):
        return False
