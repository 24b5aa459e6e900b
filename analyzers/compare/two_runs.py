"""Compare two runs: the better one, speed, loss, settings, conditions, phases, goodput, findings, advice.

    comparison = compare(Side(source=a, manifest=..., diagnosis=...), Side(source=b, manifest=..., diagnosis=...))
    comparison.sentence             # "B is better than A. B takes 12.0 % less time per token (...). The losses are ..."
    comparison.speed.ratio          # B's time per token over A's
    comparison.findings             # a regression, if its interval excludes 1

The comparison states differences and their certainty, but no causes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from analyzers.account.goodput import CATEGORIES
from analyzers.compare.answer import answer, shortcoming
from analyzers.compare.conditions import Run, conditions, load_caveat, tokens_of_step
from analyzers.compare.step_parts import PLACES, StepParts, main_difference, step_parts
from analyzers.policy import SHARED
from analyzers.run.records.evaluations import evaluations
from analyzers.source import Source
from probes.tape.redaction.printable import escaped

# Relative: see analyzers/diagnose.py.
from ..diagnose import Diagnosis
from ..finding import Finding
from ..stragglers.throughput import Change, StepTimes, between, regression, step_times
from .conditions import Difference
from .loss_change import LossChange, loss_change, nonfinite_since

__all__ = ["Comparison", "Side", "arguments", "compare"]

_PER_RUN = ("run_id", "created_wall_ns", "launcher_pid", "command", "digest")
"""Keys of a manifest that differ between any two runs."""
MAX_SETTINGS = 500
SHOWN_SETTINGS = 20
_NAMED = ("settings", "versions", "conditions", "advice")
_BY_NAME = ("phases", "validation", "goodput")
_OF_FINDINGS = ("only_a", "only_b", "both", "findings")
MAX_ARGUMENTS = 200
MAX_VALUE_CHARS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of the two runs."""

    source: Source
    manifest: Mapping[str, Any]
    diagnosis: Diagnosis


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Comparison:
    """Run B compared with run A. A difference is (name, value in A, value in B); None if the run has no such value."""

    run_a: str
    run_b: str
    settings: tuple[Difference, ...]
    versions: tuple[Difference, ...]
    conditions: tuple[Difference, ...] = ()
    """Ranks, devices, hosts and their load, tokens per step, memory."""
    advice: tuple[Difference, ...] = ()
    """Advice for either run: (kind, sentence in A, sentence in B); None: not advised there."""
    speed: Change | None
    """B's time per token or step over A's, with its 95 % interval; None with too few steps."""
    phases: Mapping[str, tuple[float | None, float | None]]
    """{part of a step: (A's, B's) milliseconds, mean over the ranks}; `waiting`: for other ranks and for transfers."""
    main_difference: str = ""
    """Ranks and parts that explain most of the difference per step; empty if none do."""
    load_caveat: str = ""
    """A sentence if the load of the hosts may explain the difference in speed; empty otherwise."""
    loss: LossChange | None
    """None with fewer than 20 common steps."""
    nonfinite_since: tuple[int | None, int | None] = (None, None)
    """(A's, B's) step from which the loss is NaN or Inf to the end; None: the last loss is finite."""
    only_a: tuple[Finding, ...]
    """Findings of A for which B has none of the same kind, cause and ranks."""
    only_b: tuple[Finding, ...]
    both: tuple[Finding, ...]
    """Findings of both runs, in B's version."""
    validation: Mapping[str, tuple[float | None, float | None]] = field(default_factory=dict)
    """{"last" and "lowest": (A's, B's) validation loss}; empty if neither run was evaluated."""
    goodput: Mapping[str, tuple[float | None, float | None]]
    """{category: (A's, B's) share of the wall time}. The share of `communication` includes waiting for others in a run
    whose `straggler` or `bubble` is None."""
    shortcomings: tuple[str, str] = ("", "")
    """(reason not to call A better, reason not to call B better); a text is empty if there is no reason. A reason is
    that the run did not finish, or that it has a critical finding that the other run lacks."""
    findings: tuple[Finding, ...]
    """Findings of the comparison itself: a regression of B's speed, if its interval excludes 1."""

    @property
    def sentence(self) -> str:
        """Summary for all outputs: which run is better, speed and loss of B against A, ranks and phases that differ."""
        against_a, against_b = self.shortcomings
        sizes = [(a, b) for name, a, b in self.versions if name == "num_parameters" and a and b and "0" not in (a, b)]
        against_either = ""
        if any(name == "attached" for name, _, _ in self.versions):
            against_either = "may train a different model (only one of the two is a run of `rankscope train`)"
        if sizes:
            in_a, in_b = (f"{int(size):,}" if size.isdigit() else size for size in sizes[0])
            against_either = f"trains a different model (parameters: {in_a} in {self.run_a}, {in_b} in {self.run_b})"
        for name, a, b in self.conditions:
            if name == "ranks" and a and b:
                ranks = f"has a different number of ranks ({a} in {self.run_a}, {b} in {self.run_b})"
                against_either = " and ".join(filter(None, (against_either, ranks)))
        found = answer(
            self.run_a, self.run_b, self.speed, self.loss, against_a=against_a, against_b=against_b,
            against_either=against_either, load=self.load_caveat, nonfinite_since=self.nonfinite_since,
        )  # fmt: skip
        return " ".join(part for part in (found, self.main_difference) if part)

    def __repr__(self) -> str:
        return f"Comparison({self.sentence})"

    def _repr_markdown_(self) -> str:
        """The sentence, the differing settings, and the findings of only one of the runs, for a notebook."""
        lines = [f"**{escaped(self.sentence)}**", ""]
        lines += [f"- {escaped(f'{name}: {a} in A, {b} in B')}" for name, a, b in self.settings[:SHOWN_SETTINGS]]
        lines += [f"- only in {escaped(self.run_a)}: {escaped(finding.summary)}" for finding in self.only_a]
        lines += [f"- only in {escaped(self.run_b)}: {escaped(finding.summary)}" for finding in self.only_b]
        return "\n".join(lines)

    def to_json(self) -> dict[str, object]:
        """The fields by name as plain values, such as `settings` as [{name, a, b}] and `phases` as {name: {a, b}}."""
        return {
            "run_a": self.run_a,
            "run_b": self.run_b,
            "sentence": self.sentence,
            "main_difference": self.main_difference,
            "load_caveat": self.load_caveat,
            "shortcomings": [*self.shortcomings],
            "nonfinite_since": [*self.nonfinite_since],
            "speed": None if self.speed is None else asdict(self.speed),
            "loss": None if self.loss is None else asdict(self.loss),
            **{name: [{"name": n, "a": a, "b": b} for n, a, b in getattr(self, name)] for name in _NAMED},
            **{name: {n: {"a": a, "b": b} for n, (a, b) in getattr(self, name).items()} for name in _BY_NAME},
            **{name: [finding.to_json() for finding in getattr(self, name)] for name in _OF_FINDINGS},
        }


def compare(a: Side, b: Side) -> Comparison:
    """Compare two runs; values that a run did not record are None."""
    times_a, times_b = step_times(a.source), step_times(b.source)
    speed = between(times_a, times_b) if times_a is not None and times_b is not None else None
    slower = regression(speed) if speed is not None else None
    keys_a, keys_b = ({_key(f): f for f in side.diagnosis.fired} for side in (a, b))
    goodput_a, goodput_b = (_shares(side.diagnosis) for side in (a, b))
    parts_a, parts_b = step_parts(a.source), step_parts(b.source)
    phases_a, phases_b = _of_places(parts_a), _of_places(parts_b)
    equal_tokens = _equal_tokens(times_a, times_b)
    run_a, run_b = _names(a.diagnosis, b.diagnosis)
    machine_a, machine_b = (
        Run(source=s.source, facts=s.diagnosis.run, times=t) for s, t in ((a, times_a), (b, times_b))
    )
    return Comparison(
        run_a=run_a,
        run_b=run_b,
        settings=_differences(
            *(_flat(side.manifest.get("config")) | arguments(side.manifest) for side in (a, b)),
        ),
        shortcomings=(shortcoming(a.diagnosis, b.diagnosis), shortcoming(b.diagnosis, a.diagnosis)),
        versions=_differences(_flat(_versions(a.manifest)), _flat(_versions(b.manifest))),
        conditions=conditions(machine_a, machine_b),
        load_caveat=load_caveat(speed, machine_a, machine_b),
        advice=_advice(a.diagnosis, b.diagnosis),
        speed=speed,
        main_difference=main_difference(speed, parts_a, parts_b) if equal_tokens else "",
        phases={name: (phases_a[name], phases_b[name]) for name in PLACES},
        loss=loss_change(a.source, b.source, equal_tokens=equal_tokens),
        nonfinite_since=(nonfinite_since(a.source), nonfinite_since(b.source)),
        validation=_validation(a.source, b.source),
        only_a=tuple(finding for key, finding in keys_a.items() if key not in keys_b),
        only_b=tuple(finding for key, finding in keys_b.items() if key not in keys_a),
        both=tuple(finding for key, finding in keys_b.items() if key in keys_a),
        goodput={name: (goodput_a.get(name), goodput_b.get(name)) for name in CATEGORIES},
        findings=(slower,) if slower is not None else (),
    )


def _names(a: Diagnosis, b: Diagnosis) -> tuple[str, str]:
    """Names of the runs; equal names (two folders, started in the same second) get the suffixes ` (A)` and ` (B)`."""
    name_a, name_b = (str(one.run.get("run_id") or letter) for one, letter in ((a, "A"), (b, "B")))
    return (f"{name_a} (A)", f"{name_b} (B)") if name_a == name_b else (name_a, name_b)


def _key(finding: Finding) -> tuple[object, ...]:
    return finding.kind, finding.cause, finding.ranks


def _equal_tokens(a: StepTimes | None, b: StepTimes | None) -> bool:
    """Return False only if both runs recorded their tokens per step and the numbers differ."""
    before, after = (tokens_of_step(times) for times in (a, b))
    return before is None or after is None or abs(after - before) <= SHARED.min_change_ratio * before


def _advice(a: Diagnosis, b: Diagnosis) -> tuple[Difference, ...]:
    advised_a, advised_b = ({(f.kind, f.cause): f.summary for f in one.advised} for one in (a, b))
    keys = [*advised_a, *(key for key in advised_b if key not in advised_a)]
    return tuple((key[0], advised_a.get(key), advised_b.get(key)) for key in keys)


def _versions(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest without the configuration, and without fields that differ between any two runs."""
    found = {key: value for key, value in manifest.items() if key != "config" and key not in _PER_RUN}
    # The launcher records the version of rankscope at the top, a rank among the versions of its packages.
    if (version := found.pop("rankscope_version", None)) is not None:
        by_rank = found.get("versions")
        found["versions"] = {"rankscope": version} | (by_rank if isinstance(by_rank, dict) else {})
    return found


def _flat(value: Any) -> dict[str, str]:
    """Flatten nested settings to {dotted name: value as text}."""
    flat: dict[str, str] = {}

    def walk(prefix: str, item: Any, depth: int) -> None:
        if len(flat) >= MAX_SETTINGS:
            return
        if isinstance(item, Mapping) and depth < 8:
            for key, inner in item.items():
                walk(f"{prefix}.{key}" if prefix else str(key), inner, depth + 1)
        else:
            text = item if isinstance(item, str) else json.dumps(item, default=str)
            flat[prefix[:MAX_VALUE_CHARS]] = text[:MAX_VALUE_CHARS]

    walk("", value if isinstance(value, Mapping) else {}, 0)
    return flat


def _differences(a: Mapping[str, str], b: Mapping[str, str]) -> tuple[Difference, ...]:
    names = [*a, *(name for name in b if name not in a)]
    return tuple((name, a.get(name), b.get(name)) for name in names if a.get(name) != b.get(name))


def _shares(diagnosis: Diagnosis) -> dict[str, float]:
    account = diagnosis.goodput
    if account is None or not account.wall_s:
        return {}
    return {name: seconds / account.wall_s for name, seconds in account.known_seconds.items()}


def _of_places(parts: StepParts | None) -> dict[str, float | None]:
    return {name: None if parts is None else parts.of_place(name) for name in PLACES}


def _validation(a: Source, b: Source) -> dict[str, tuple[float | None, float | None]]:
    found_a, found_b = ([each.loss for each in evaluations(source)] for source in (a, b))
    if not found_a and not found_b:
        return {}
    last = (found_a[-1] if found_a else None, found_b[-1] if found_b else None)
    return {"last": last, "lowest": (min(found_a, default=None), min(found_b, default=None))}


def arguments(manifest: Mapping[str, Any]) -> dict[str, str]:
    """Parse a script's command line into settings: options by name, positional arguments joined in order.

    Empty for the trainer, which records its settings.
    """
    command = manifest.get("command")
    if not manifest.get("attached") or not isinstance(command, list):
        return {}
    words = [str(word) for word in command[:MAX_ARGUMENTS]]
    found: dict[str, str] = {}
    rest = []
    while words:
        word = words.pop(0)
        if not _is_option(word):
            rest.append(word)
            continue
        name, sign, value = word.partition("=")
        if not sign:
            values = []
            while words and not _is_option(words[0]):
                values.append(words.pop(0))
            value = " ".join(values) or "set"
        value = f"{found[name]}, {value}" if name in found else value
        found[name[:MAX_VALUE_CHARS]] = value[:MAX_VALUE_CHARS]
    return {**found, "arguments": " ".join(rest)[:MAX_VALUE_CHARS]} if rest else found


def _is_option(word: str) -> bool:
    """Return True for `-x` and `--name`, False for a negative number, which is a value."""
    return len(word) > 1 and word[0] == "-" and not (word[1].isdigit() or word[1] == ".")
