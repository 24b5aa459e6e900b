"""Signatures of the training state in a checkpoint's manifest, to verify that a resumed run continues exactly.

    signature(tensors, rng)                       # {"parameters": ..., "optimizer": ..., "rng": ...} of this rank
    order_signature(training.stream, position)    # signature of the next global batch; the same on all ranks
    data_differs(loaded.extra, training.stream, loaded.values.position)     # True if the saved run had other data
    differing(saved, found)                       # ["rng"]: parts that differ from the saved state

The manifest's hashes prove that the files are unchanged. Signatures prove that the resumed training has the saved
state: nothing was left out, restored twice or altered on the way, and the same data follow.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from probes.guard.fingerprints import FingerprintReader
from trainer.checkpoint.state import Position
from trainer.data.batches import BatchStream

__all__ = ["PARTS", "data_differs", "differing", "order_signature", "signature"]

PARTS: dict[str, tuple[str, ...]] = {"parameters": ("model.",), "optimizer": ("optimizer.", "compression."), "rng": ()}
"""Part of the state -> prefixes of the names of its tensors."""


def signature(tensors: Mapping[str, Tensor], rng: Mapping[str, Tensor]) -> dict[str, int]:
    """64-bit checksums of a rank's local parameters, optimizer state and random generators. `tensors` are plain
    tensors.
    """
    reader = FingerprintReader()
    found = {"rng": _combined(reader.read(rng).values())}
    values = reader.read(tensors).values()
    for part, prefix in PARTS.items():
        if prefix:
            found[part] = _combined({name: value for name, value in values.items() if name.startswith(prefix)})
    return {part: found[part] for part in PARTS}


def order_signature(stream: BatchStream, position: Position) -> str:
    """Signature of the next global batch: its sequences, and the tokens of the first one."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(repr(stream.sample_ids(position.batch_index)).encode())
    first = stream.batch(position.batch_index, 0, stream.global_batch_size)
    digest.update(first.inputs.numpy().tobytes())
    return digest.hexdigest()


def data_differs(extra: Mapping[str, Any], stream: BatchStream, position: Position) -> bool:
    """Return True if the checkpoint was saved with a different corpus, or a different next batch. Both are compared,
    because most edits of a corpus do not change the next batch, and checkpoints of older versions have no `corpus`."""
    saved = {"corpus": extra.get("corpus"), "order": extra.get("order")}
    return bool(differing(saved, {"corpus": stream.corpus.digest, "order": order_signature(stream, position)}))


def differing(saved: Mapping[str, object], found: Mapping[str, object]) -> list[str]:
    """Names of the signatures that both have and that differ, in the order of `found`."""
    return [part for part, value in found.items() if saved.get(part) not in (None, value)]


def _combined(values: Mapping[str, int]) -> int:
    """Combine checksums into one number, each weighted by a factor that depends on the tensor's name."""
    total = 0
    for name, value in values.items():
        weight = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") | 1
        total += weight * value
    return total % 2**64
