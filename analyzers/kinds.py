"""The kinds of findings, with all properties that do not depend on a single finding.

    KINDS["straggler"].title            # "Straggler"
    KINDS["straggler"].identity         # ("attempt", "ranks"): two findings that agree in these are the same one

The kinds are in the order of the verdict: among equally severe findings, those that explain others come first. All else
that must know about kinds is derived from this table: the order, the identity of a finding, what may last, and which
package judges, explains and draws it:

* `analyzers.<package>.analyze.ANALYSES` judges (`analyzers.analysis.Analysis`),
* `analyzers.<package>.explain.WHY` and `.NEXT` give the evidence and the next step in one sentence each,
* `analyzers.<package>.figures.FIGURES` draws it, where there is something to draw.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from analyzers.causes import cause_names
from analyzers.plugins import installed

__all__ = ["KINDS", "OUR_KINDS", "Kind", "heading", "packages", "title_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of finding."""

    name: str
    title: str
    """Title for headings, in sentence case."""
    package: str = ""
    """Folder of `analyzers` that judges, explains and draws it; empty for a kind of a plug-in."""
    identity: tuple[str, ...] = ("attempt", "first_step", "ranks")
    """Fields in which two reports of one finding agree; `evidence.<name>` is a value of its evidence."""
    may_last: bool = False
    """True if it stays open until `watch` reports it as over; otherwise it is a single incident."""
    at_end: bool = False
    """True if it is about the end of an attempt, whatever step the finding names."""
    drawn: bool = True
    """True if it has figures."""
    may_be_hardware: bool = False
    """True if broken hardware can cause it; `rankscope fleet` counts only such findings."""
    user_causes: frozenset[str] = frozenset()
    """Causes in the user's code, data or request, for kinds that hardware can also cause."""


_DEVICE = ("cause", "evidence.node", "evidence.device")
_KINDS = (
    # Before the deaths that follow from it.
    Kind(name="desync", title="Ranks out of sync", package="hangs"),
    Kind(name="rank_lost", title="Rank lost", package="deaths", identity=("attempt", "ranks"), at_end=True,
         may_be_hardware=True, user_causes=cause_names("rank_lost", by_user=True)),
    Kind(name="hang", title="Hang", package="hangs", identity=("attempt",), may_last=True, at_end=True,
         may_be_hardware=True, user_causes=cause_names("hang", by_user=True)),
    Kind(name="standstill", title="Temporary stall", package="hangs", may_be_hardware=True, drawn=False),
    Kind(name="xid", title="GPU error (XID)", package="health", identity=(*_DEVICE, "evidence.xid"),
         may_be_hardware=True),
    Kind(name="gpu_memory_errors", title="GPU memory errors", package="health", identity=_DEVICE, may_be_hardware=True),
    Kind(name="replica_mismatch", title="Replica mismatch", package="corruption", may_be_hardware=True),
    Kind(name="fingerprint_chain_broken", title="State changed", package="corruption", may_be_hardware=True),
    Kind(name="gradient_corrupted", title="Gradient corrupted", package="corruption", may_be_hardware=True),
    Kind(name="excluded", title="Device or node excluded", package="deaths", at_end=True, may_be_hardware=True),
    Kind(name="node_silent", title="Node silent", package="hangs", identity=("evidence.node_rank",), may_last=True,
         may_be_hardware=True),
    Kind(name="resume_differs", title="Resume differs", package="deaths"),
    Kind(name="non_finite", title="Non-finite", package="numerics", may_be_hardware=True),
    Kind(name="loss_spike", title="Loss spike", package="numerics"),
    Kind(name="divergence", title="Divergence", package="numerics", identity=("attempt",), may_last=True),
    Kind(name="overfitting", title="Overfitting", package="numerics", identity=("attempt",), may_last=True),
    Kind(name="loss_scale_collapse", title="Loss scale collapse", package="numerics", identity=("attempt",),
         may_last=True),
    Kind(name="expert_imbalance", title="Expert imbalance", package="numerics"),
    Kind(name="exploding_gradients", title="Exploding gradients", package="numerics"),
    Kind(name="vanishing_gradients", title="Vanishing gradients", package="numerics"),
    Kind(name="logged_value", title="Logged value", package="numerics", identity=("attempt", "cause"), drawn=False),
    Kind(name="gpu_throttled", title="GPU throttled", package="health", identity=_DEVICE, may_be_hardware=True),
    Kind(name="link_errors", title="Link errors", package="health", identity=_DEVICE, may_be_hardware=True),
    Kind(name="straggler", title="Straggler", package="stragglers", identity=("attempt", "ranks"), may_last=True,
         may_be_hardware=True),
    Kind(name="checkpoint_failed", title="Checkpoint failed", package="checkpoints", identity=("attempt",)),
    Kind(name="memory_growth", title="Memory growth", package="memory", identity=("attempt",), may_last=True),
    Kind(name="memory_limit", title="Memory limit", package="memory", identity=("attempt",)),
    Kind(name="host_pressure", title="Host pressure", package="health", identity=_DEVICE, may_last=True,
         may_be_hardware=True),
    Kind(name="data_bound", title="Data bound", package="data", identity=("attempt",), may_last=True),
    Kind(name="padding", title="Padding", package="data", identity=("attempt",), may_last=True, drawn=False),
    Kind(name="stage_imbalance", title="Stage imbalance", package="pipeline"),
    Kind(name="throughput", title="Throughput drop", package="stragglers"),
    Kind(name="checkpoint_age", title="Checkpoint too old", package="checkpoints", identity=("attempt",),
         may_last=True),
    Kind(name="memory_imbalance", title="Memory imbalance", package="memory"),
    Kind(name="slow_startup", title="Slow start", package="settings"),
    # Advice: nothing is broken, but something could be improved.
    Kind(name="bubble", title="Pipeline bubble", package="pipeline"),
    Kind(name="exposed_communication", title="Exposed communication", package="communication"),
    Kind(name="low_bandwidth", title="Low bandwidth", package="communication"),
    Kind(name="small_buckets", title="Small buckets", package="communication"),
    Kind(name="gradient_noise", title="Gradient noise", package="numerics"),
    Kind(name="checkpoint_cost", title="Checkpoint cost", package="checkpoints"),
    Kind(name="configuration", title="Configuration", package="settings", identity=("attempt", "cause")),
    # Kinds that only report checks that were not made.
    Kind(name="health", title="Health", package="health", drawn=False),
    Kind(name="records", title="Records", package="run", drawn=False),
    Kind(name="goodput", title="Goodput", package="account", drawn=False),
)  # fmt: skip


class _Kinds(Mapping[str, Kind]):
    """The kinds by name: Rankscope's kinds in the order of the verdict, then the kinds of plug-ins. Plug-ins are loaded
    when first needed.
    """

    def __init__(self) -> None:
        self._ours = {kind.name: kind for kind in _KINDS}

    def __getitem__(self, name: str) -> Kind:
        return self._ours[name] if name in self._ours else _plugin_kinds()[name]

    def __iter__(self) -> Iterator[str]:
        yield from self._ours
        yield from (name for name in _plugin_kinds() if name not in self._ours)

    def __len__(self) -> int:
        return sum(1 for _ in self)


@cache
def _plugin_kinds() -> dict[str, Kind]:
    declared = (kind for plugin in installed() for kind in plugin.kinds)
    return {
        kind["name"]: Kind(
            **{**kind, "identity": tuple(kind["identity"]), "user_causes": frozenset(kind["user_causes"])}
        )
        for kind in declared
    }


OUR_KINDS = frozenset(kind.name for kind in _KINDS)
"""Names reserved for Rankscope's own kinds."""
KINDS: Mapping[str, Kind] = _Kinds()
"""Kinds by name, in the order of the verdict."""


def title_of(name: str) -> str:
    """The title of a kind. For a kind that is unknown here, it is the kind's name with spaces."""
    return KINDS[name].title if name in KINDS else name.replace("_", " ")


def heading(name: str) -> str:
    """The title of a kind in capitals, as it heads a finding."""
    return title_of(name).upper()


def packages() -> tuple[str, ...]:
    """Packages with analyses, in the order of their first kind."""
    return tuple(dict.fromkeys(kind.package for kind in _KINDS))
