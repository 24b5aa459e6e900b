"""Recovery ledger, kept across rollbacks: skipped batches, budgets spent, good checkpoints.

    ledger, problem = Ledger.load(run.checkpoints / "ledger.json")
    ledger.skip(40, "non-finite gradient norm at step 41")
    ledger.next_batch(40)        # 41

It is stored next to the checkpoints instead of in them, because restoring an older checkpoint must not bring back a bad
batch. The file has a digest, a sequence number and a copy next to it (`ledger-copy.json`). The digest shows an altered
file; if both files are good, the newer one counts. Every checkpoint holds a copy too, which is used if both files are
damaged.
"""

from __future__ import annotations

import errno
import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..tape.files.safe_open import read_plain

__all__ = ["LEDGER_NAME", "Ledger", "copy_of"]

LEDGER_NAME = "ledger.json"
MAX_BYTES = 16 << 20


@dataclass(slots=True, kw_only=True)
class Ledger:
    """The ledger, equal on all ranks; only rank 0 has a `path` and writes."""

    skipped: dict[int, str] = field(default_factory=dict)
    """{skipped batch: reason}, in order of skipping."""
    rollbacks: int = 0
    failures: int = 0
    """Number of failures in the current incident."""
    incident_step: int = 0
    """Last failed step of the incident."""
    rate_scale: float = 1.0
    rate_until_step: int = 0
    """Last step in which the learning rate is multiplied by `rate_scale`."""
    good_step: int | None = None
    """Newest checkpoint on disk that was followed by enough healthy steps."""
    corruptions: dict[str, int] = field(default_factory=dict)
    """Device -> number of unexplained changes of its parameters or optimizer state."""
    stopped: str = ""
    """Why the guard gave up; a restart must not try again."""
    sequence: int = 0
    """Number of times the ledger was written."""
    path: Path | None = None

    def next_batch(self, batch_index: int) -> int:
        """The first batch that is not skipped, beginning with `batch_index`."""
        while batch_index in self.skipped:
            batch_index += 1
        return batch_index

    def skip(self, batch_index: int, reason: str) -> bool:
        """Never train on a batch again; False if it was skipped already."""
        if batch_index in self.skipped:
            return False
        self.skipped[batch_index] = reason
        return True

    def trained_on_skipped(self, then: Ledger, batch_index: int) -> bool:
        """Return True if a state with ledger `then`, trained up to before `batch_index`, contains a skipped batch."""
        return any(batch < batch_index and batch not in then.skipped for batch in self.skipped)

    def rate_at(self, step: int) -> float:
        """Return the factor of the learning rate at `step`."""
        return self.rate_scale if step <= self.rate_until_step else 1.0

    def to_json(self) -> dict[str, Any]:
        """Plain values; JSON has no integer keys."""
        values = asdict(self) | {"skipped": [[batch, reason] for batch, reason in self.skipped.items()]}
        del values["path"]
        return values

    def to_file(self) -> dict[str, Any]:
        """The content of its file, with a digest."""
        values = self.to_json()
        return values | {"digest": _digest(values)}

    @classmethod
    def from_json(cls, loaded: Mapping[str, Any]) -> Ledger:
        """Inverse of `to_json`. Raises KeyError, TypeError, AttributeError, OverflowError or ValueError for malformed
        content."""
        good = loaded["good_step"]
        rate_scale = float(loaded["rate_scale"])
        if not 0.0 < rate_scale <= 1.0:  # the learning rate is multiplied by it, so a NaN would ruin the run
            raise ValueError(f"not a valid learning-rate scale: {rate_scale}")
        return cls(
            skipped={int(batch): str(reason) for batch, reason in loaded["skipped"]},
            rollbacks=int(loaded["rollbacks"]),
            failures=int(loaded["failures"]),
            incident_step=int(loaded["incident_step"]),
            rate_scale=rate_scale,
            rate_until_step=int(loaded["rate_until_step"]),
            good_step=None if good is None else int(good),
            corruptions={str(device): int(count) for device, count in loaded.get("corruptions", {}).items()},
            stopped=str(loaded["stopped"]),
            sequence=int(loaded.get("sequence", 0)),
        )

    @classmethod
    def load(cls, path: Path) -> tuple[Ledger, str]:
        """Return the newer intact ledger of the two files (an empty ledger if there is none), and what is wrong, if
        anything. Raises OSError if a file cannot be read now, because without the ledger skipped batches would be
        trained on again."""
        (own, problem), (other, problem_of_copy) = _read(path), _read(copy_of(path))
        if own is None and other is not None:
            problem = f"{problem or f'{path.name} is missing'}; its copy is used"
        elif own is not None and other is not None and other.sequence > own.sequence:
            own, problem = None, f"{path.name} is older than its copy, which is used"
        elif own is not None and other is None and own.sequence:
            problem_of_copy = problem_of_copy or f"{copy_of(path).name} is missing"
        elif own is None and not problem and not problem_of_copy and any(path.parent.glob("step-*")):
            problem = f"{path.name} and its copy are missing: batches skipped since the last checkpoint are not known"
        ledger = own or other or cls()
        ledger.path = path
        return ledger, problem or problem_of_copy

    def adopt(self, other: Ledger) -> None:
        """Add the entries of a checkpoint's copy that this ledger lacks."""
        for batch, reason in other.skipped.items():
            self.skip(batch, reason)
        self.rollbacks = max(self.rollbacks, other.rollbacks)
        for device, count in other.corruptions.items():
            self.corruptions[device] = max(count, self.corruptions.get(device, 0))


def copy_of(path: Path) -> Path:
    """The file that holds a ledger's second copy."""
    return path.with_name(f"{path.stem}-copy{path.suffix}")


_NOT_A_FILE = frozenset({errno.ENOTDIR, errno.ELOOP, errno.EINVAL, errno.EISDIR})
"""These error numbers prove that there is no regular file. Any other error only means that the file cannot be read now.
"""


def _read(path: Path) -> tuple[Ledger | None, str]:
    """Return the ledger of one file (None if it is missing or damaged), and what is wrong with the file."""
    try:
        loaded = json.loads(read_plain(path, MAX_BYTES))
        ledger = Ledger.from_json(loaded)
        # Files of former versions had neither digest nor sequence number.
        if ("digest" in loaded or "sequence" in loaded) and loaded.pop("digest", "") != _digest(loaded):
            return None, f"{path.name} is damaged: its content does not match its digest"
    except FileNotFoundError:
        return None, ""
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        if isinstance(error, OSError) and error.errno not in _NOT_A_FILE:
            raise
        return None, f"{path.name} is damaged: {type(error).__name__}"
    return ledger, ""


def _digest(values: Mapping[str, Any]) -> str:
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
