"""The JSON Schema of `rankscope analyze --format json`, for programs that read it.

    python -m analyzers.report.json_schema > docs/report.schema.json

`docs/report.schema.json` is this module's output; tests check this, and validate real reports with it. Keys may be
added under the same `schema_version`; it only changes if readers of the previous version would misread a report.
"""

from __future__ import annotations

import json
import sys
from typing import Any, get_args

from analyzers.account.goodput import CATEGORIES
from analyzers.diagnose import SCHEMA_VERSION
from analyzers.finding import SEVERITIES, Status

__all__ = ["schema"]


def schema() -> dict[str, Any]:
    """JSON Schema, draft 2020-12."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "rankscope analyze --format json",
        "type": "object",
        "required": ["schema_version", "run", "verdict", "findings", "goodput"],
        "properties": {
            "schema_version": {"const": SCHEMA_VERSION},
            "run": {
                "description": "Facts of the run; null where not recorded. More keys may be present.",
                "type": "object",
                "properties": {
                    "run_id": _or_null("string", "name of the run's folder"),
                    "ended": _or_null("string", "finished, interrupted, failed; null: no end was recorded"),
                    "attempts": _or_null("integer", "number of launches of the worker group"),
                    "num_ranks": _or_null("integer", "ranks with records in the newest attempt"),
                    "world_size": _or_null("integer", "ranks of the newest attempt, also those without records"),
                    "num_ranks_before": {
                        "description": "different numbers of ranks in earlier attempts of an elastic job",
                        "type": "array",
                        "items": {"type": "integer"},
                    },
                    "num_nodes": _or_null("integer", "hosts"),
                    "steps": _or_null("integer", "newest finished step"),
                    "wall_s": _or_null(
                        "number",
                        "seconds from the start to the end of the run; without `goodput`, from its first step on",
                    ),
                    "step_ms_median": _or_null("number", "milliseconds"),
                    "tokens_per_s": _or_null("number", "over the ranks with records, while steps ran"),
                    "first_loss": _or_null("number", "nat"),
                    "last_loss": _or_null("number", "the last finite loss, nat"),
                    "loss_lost_at_step": _or_null("integer", "step from which the loss was never finite again"),
                    "validation": {
                        "type": ["object", "null"],
                        "description": "last and lowest validation loss in nat, with their steps; null: no evaluation",
                    },
                },
            },
            "verdict": {
                "type": "string",
                "description": "the first finding's sentences, and a line for each further one",
            },
            "findings": {
                "description": "The most severe first; those that could not be judged last.",
                "type": "array",
                "items": {"$ref": "#/$defs/finding"},
            },
            "goodput": {"oneOf": [{"type": "null"}, {"$ref": "#/$defs/goodput"}]},
            "why_spike": {
                "type": "object",
                "description": "only with --why-spike: `ranks`, `samples` and `layers` of a loss spike, largest "
                "contribution first, and what is `unknown`",
            },
            "what_if": {"oneOf": [{"type": "null"}, {"$ref": "#/$defs/what_if"}]},
        },
        "$defs": {"finding": _finding(), "goodput": _goodput(), "what_if": _what_if()},
    }


def _finding() -> dict[str, Any]:
    properties: dict[str, Any] = {
        "id": {
            "type": "string",
            "description": "name within the run: its kind and identity, such as attempt and ranks",
        },
        "link": {"type": "string", "description": "path and query of its page on `rankscope dashboard`"},
        "closed": {
            "type": "string",
            "description": "why it is over; empty if it is open, or was open when the run ended",
        },
        "analyzer": {"type": "string", "description": "analysis that made it"},
        "kind": {"type": "string", "description": "what happened"},
        "severity": {"enum": list(SEVERITIES)},
        "status": {
            "enum": list(get_args(Status)),
            "description": "insufficient_data: not judged, which is not healthy",
        },
        "ranks": {
            "type": "array",
            "items": {"type": "integer"},
            "description": "ranks to blame; victims are not named",
        },
        "first_step": _or_null("integer", "first step concerned"),
        "last_step": _or_null("integer", "last step concerned"),
        "cause": {"type": "string", "description": "cause within the kind; empty if the kind has only one"},
        "summary": {"type": "string", "description": "at most three sentences"},
        "evidence": {"type": "object", "description": "named values; names end in their unit: _s, _ms, _ratio, _bytes"},
        "advice": {"type": "string", "description": "section of the runbook: `rankscope explain ANCHOR`"},
        "attempt": _or_null("integer", "launch of the worker group; null: the whole run"),
        "cost_s": _or_null("number", "estimated wall time lost, seconds"),
    }
    return {"type": "object", "required": list(properties), "properties": properties}


def _goodput() -> dict[str, Any]:
    seconds: dict[str, Any] = {
        "type": "object",
        "required": list(CATEGORIES),
        "additionalProperties": False,
        "properties": {
            name: {"type": ["number", "null"], "minimum": 0, "description": text} for name, text in CATEGORIES.items()
        },
    }
    properties: dict[str, Any] = {
        "wall_s": {"type": "number", "description": "seconds from the run's start to its end"},
        "goodput_ratio": _or_null("number", "share of time spent training, 0 to 1; null if no phase was recorded"),
        "seconds": seconds | {"description": "mean over the ranks, adds up to wall_s; null: not measured"},
        "by_rank": {"type": "object", "additionalProperties": seconds, "description": "each adds up to wall_s"},
        "steps_kept": {"type": "integer"},
        "steps_discarded": {"type": "integer", "description": "executions that were refused or rolled back"},
        "steps_not_known": {
            "type": "integer",
            "description": "steps in steps_kept that a later restart may have discarded",
        },
        "waits_split_by": {"enum": ["collectives", "steps", "durations of calls", None]},
        "communication_not_judged": _or_null(
            "string", "why seconds of communication are not judged: the profiler's traces contradict them"
        ),
    }
    return {"type": "object", "required": list(properties), "properties": properties}


def _what_if() -> dict[str, Any]:
    ratio = {"type": "number", "minimum": 0}
    properties: dict[str, Any] = {
        "attempt": {"type": "integer"},
        "first_step": {"type": "integer", "description": "first of the newest steps that were replayed"},
        "last_step": {"type": "integer"},
        "basis": {"enum": ["calls", "steps"], "description": "records that give the dependencies"},
        "replay_error_ratio": ratio
        | {"description": "relative error of predicted steps, or of the replay of the measured ones"},
        "step_ms": {"type": "number", "description": "measured, mean over the steps replayed"},
        "step_without_stragglers_ms": {
            "type": "number",
            "description": "with balanced work and transfers",
        },
        "slowdown_ratio": ratio | {"description": "S: step time as it ran / with all ranks balanced"},
        "lasting_slowdown_ratio": _or_null("number", "S counting only lasting differences between ranks, beyond noise"),
        "launch_delay_ratio": ratio | {"description": "share of time in which no recorded work ran"},
        "withheld": _or_null("string", "why no gain is claimed; null if one is"),
        "slowdown_by_rank_ratio": {
            "type": "object",
            "additionalProperties": ratio,
            "description": "S_w of the slowest ranks: with all other ranks balanced",
        },
        "worst_ranks": {"type": "array", "items": {"type": "integer"}, "description": "the worst 3 %, at least one"},
        "removed_by_worst_ranks_ratio": _share("M_W: share of the slowdown; null if almost none, or within the error"),
        "removed_by_last_stage_ratio": _share("M_S; also null without a pipeline"),
    }
    return {"type": "object", "required": list(properties), "properties": properties}


def _share(description: str) -> dict[str, Any]:
    return _or_null("number", description) | {"minimum": 0, "maximum": 1}


def _or_null(kind: str, description: str) -> dict[str, Any]:
    return {"type": [kind, "null"], "description": description}


if __name__ == "__main__":
    json.dump(schema(), sys.stdout, indent=2)
    sys.stdout.write("\n")
