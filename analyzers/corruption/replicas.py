"""Compare state fingerprints over replicas and over time: which ranks hold wrong parameters or optimizer state.

    found = judge([Fingerprint(rank=2, group="dp_replicate:0-3", tensor="model.head.weight", hash=7), ...])
    found.ranks, found.tensors, found.certain

Both kinds of evidence are exact: a bit that differs is a bit that changed.

1. Replicas: ranks of a replica group hold the same bits. If they differ, the ranks outside the strict majority are
   the culprits. Without a majority (two replicas, or a tie) all ranks of the group are suspects.
2. The chain: nothing writes to the training state between two optimizer steps. If a tensor's fingerprint before a step
   differs from its fingerprint after the previous step, something other than the optimizer changed it. Its rank is the
   culprit, even if the other ranks differ too. This also decides the ties of rule 1.

Used by the trainer's guard at each check of a live run, and by `analyzers.corruption.analyze` afterwards.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from analyzers.wording import counted, ranks_text

__all__ = ["ALL_TENSORS", "Corruption", "Fingerprint", "judge"]

ALL_TENSORS = "(all)"
"""Name of the row that stands for all tensors of a group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """One rank's checksum of one tensor. `expected`: the checksum after the last optimizer step, None if not taken."""

    rank: int
    group: str
    tensor: str
    hash: int
    expected: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Corruption:
    """Result of one check. `certain`: True if `ranks` are the culprits, False if they are suspects."""

    kind: str
    ranks: tuple[int, ...]
    tensors: tuple[str, ...]
    certain: bool
    groups: tuple[str, ...]
    num_replicas: int
    broken_ranks: tuple[int, ...]

    @property
    def text(self) -> str:
        """Clause on the tensors, the ranks and the difference."""
        which = self.tensors[0] if self.tensors else "the state"
        more = f" and {counted(len(self.tensors) - 1, 'more tensor')}" if len(self.tensors) > 1 else ""
        where = f"{which}{more} on {ranks_text(self.ranks)}"
        verb = "differ" if more else "differs"
        if self.kind == "fingerprint_chain_broken":
            return f"{where} changed between two optimizer steps"
        if not self.certain:
            return f"{which}{more} {verb} between the replicas on {ranks_text(self.ranks)}"
        changed = "changed between two optimizer steps and " if self.broken_ranks else ""
        return f"{where} {changed}{verb} from {self.num_replicas - 1} replicas"


def judge(fingerprints: Iterable[Fingerprint]) -> Corruption | None:
    """Judge the fingerprints of all ranks at one check; None if they agree. Pure."""
    held: dict[tuple[str, str], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    broken: dict[int, set[str]] = defaultdict(set)
    for one in fingerprints:
        held[one.group, one.tensor][one.hash].append(one.rank)
        if one.expected is not None and one.expected != one.hash:
            broken[one.rank].add(one.tensor)
    culprits: set[int] = set()
    suspects: set[int] = set()
    named: set[str] = set()
    differing = {place: hashes for place, hashes in held.items() if len(hashes) > 1}
    for (_, tensor), hashes in differing.items():
        outliers, members = _minority(hashes), {rank for ranks in hashes.values() for rank in ranks}
        changed = {rank for rank in members if tensor in broken[rank]}
        named.add(tensor)
        if outliers or changed:
            culprits |= outliers | changed
        else:
            suspects |= members
    broken_ranks = {rank for rank, tensors in broken.items() if tensors}
    if not differing and not broken_ranks:
        return None
    culprits |= broken_ranks
    named.update(*(broken[rank] for rank in broken_ranks))
    # If rows of single tensors differ, the row of all tensors adds nothing.
    tensors = sorted(named - {ALL_TENSORS}) or [ALL_TENSORS]
    ranks = culprits or suspects
    return Corruption(
        kind="replica_mismatch" if differing else "fingerprint_chain_broken",
        ranks=tuple(sorted(ranks)),
        tensors=tuple(tensors),
        certain=bool(culprits),
        groups=tuple(sorted({group for group, _ in differing})),
        num_replicas=max((sum(map(len, hashes.values())) for hashes in differing.values()), default=1),
        broken_ranks=tuple(sorted(broken_ranks)),
    )


def _minority(hashes: dict[int, list[int]]) -> set[int]:
    """Ranks with another hash than the strict majority of the ranks; empty if no hash has such a majority."""
    largest = max(hashes.values(), key=len)
    total = sum(map(len, hashes.values()))
    if 2 * len(largest) <= total:
        return set()
    return {rank for ranks in hashes.values() if ranks is not largest for rank in ranks}
