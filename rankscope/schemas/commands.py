"""JSON Schemas of all commands with `--format json`, for programs that read their output.

    python -m rankscope.schemas.commands > docs/commands.schema.json

The output is `docs/commands.schema.json`, in which `$defs` has an entry per command; for `rankscope analyze` see
`docs/report.schema.json`. Keys may be added; none is renamed or removed within a minor version.
"""

from __future__ import annotations

import json
import sys
from typing import Any, get_args

from analyzers.account.goodput import CATEGORIES
from analyzers.compare.loss_change import LossChange
from analyzers.compare.scaling import Point
from analyzers.compare.step_parts import PLACES
from analyzers.fleet.fleet import Fleet
from analyzers.report.json_schema import schema as report_schema
from analyzers.report.rank_rows import RankRow
from analyzers.stragglers.throughput import Change
from rankscope.schemas.types import INTEGER, NUMBER, STRING, any_of, array, by_name, obj, of_type, or_null

__all__ = ["schema"]

_COUNT = {"type": "integer", "minimum": 0}
_TEXTS = array(STRING)
_FINDINGS = array({"$ref": "#/$defs/finding"})


def schema() -> dict[str, Any]:
    """JSON Schema, draft 2020-12: `$defs` by command, and the shared `finding`."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "rankscope COMMAND --format json: see $defs/COMMAND; for analyze, see report.schema.json",
        "$defs": {"finding": _finding(), **commands()},
    }


def commands() -> dict[str, dict[str, Any]]:
    """The schema of each command."""
    return {
        "collect": obj(
            run=STRING, nodes=array(INTEGER), ranks=array(INTEGER), files=_COUNT, bytes=_COUNT, skipped=_TEXTS
        ),
        "collect-evidence": obj(archive=STRING, missing=by_name(STRING, "why a source of evidence is missing")),
        "compare": _compare(),
        "doctor": _doctor(),
        "drill": any_of(_drill(), _script_drill()),
        "dumps": obj(folder=STRING, ranks=array(INTEGER), silent=by_name(STRING, "ranks that did not answer, and why")),
        "explain": any_of(
            array(obj(section=STRING, title=STRING, chapter=STRING)),
            obj(section=STRING, title=STRING, chapter=STRING, text=STRING),
        ),
        "export": _export(),
        "fleet": _fleet(),
        "note": array(obj(run=STRING, tags=_TEXTS, text=STRING)),
        "plan": _plan(),
        "preflight": _preflight(),
        "prepare": obj(
            folder=STRING,
            num_tokens=_COUNT,
            dtype=STRING,
            num_documents=_COUNT,
            num_shards=_COUNT,
            num_skipped=_COUNT,
            num_empty=_COUNT,
            num_unknown=_COUNT,
            already_complete={"type": "boolean"},
            shards_reused=_COUNT,
            vocab_size=_COUNT,
        ),
        "profile": obj(
            run=STRING,
            first_step=INTEGER,
            steps=INTEGER,
            traces=array(obj(rank=INTEGER, path=or_null(STRING, "null: larger than profiler.budget_mb"))),
        ),
        "rebuild": obj(store=STRING, rows=by_name(_COUNT, "rows of each table"), kept=_TEXTS, problems=_TEXTS),
        "replay": _replay(),
        "report": obj(run=STRING, verdict=STRING, files=array(obj(path=STRING, bytes=_COUNT))),
        "share": obj(run=STRING, file=STRING, bytes=_COUNT, texts=_COUNT, verdict=STRING, skipped=_TEXTS),
        "sql": array({"type": "object", "description": "one row: columns by name; null where NULL"}),
        "stacks": obj(
            verdict=STRING,
            processes=array(
                obj(
                    name=STRING,
                    pid=INTEGER,
                    rank=or_null(INTEGER),
                    stopped={"type": "boolean"},
                    is_outlier={"type": "boolean"},
                    problem=STRING,
                    frames=_TEXTS,
                )
            ),
        ),
        "top": obj(
            state=STRING,
            reason=STRING,
            is_live={"type": "boolean"},
            attempt=or_null(INTEGER),
            step=or_null(INTEGER),
            planned_steps=or_null(INTEGER),
            step_ms=or_null(NUMBER),
            findings=array({"allOf": [{"$ref": "#/$defs/finding"}, obj(closed=_closed())]}),
            ranks=array(of_type(RankRow)) | {"description": "worst first"},
        ),
        "version": obj(rankscope=STRING),
    }


def _closed() -> dict[str, Any]:
    return dict(report_schema()["$defs"]["finding"]["properties"]["closed"])


def _finding() -> dict[str, Any]:
    found = report_schema()["$defs"]["finding"]
    properties = {name: each for name, each in found["properties"].items() if name not in ("link", "closed")}
    return {"type": "object", "required": list(properties), "properties": properties}


def _compare() -> dict[str, Any]:
    difference = array(obj(name=STRING, a=or_null(STRING), b=or_null(STRING)))
    both = obj(a=or_null(NUMBER), b=or_null(NUMBER))
    two_runs = obj(
        run_a=STRING, run_b=STRING,
        sentence=STRING | {"description": "which run is better, and B's speed and loss relative to A"},
        main_difference=STRING | {"description": "ranks and parts that explain the difference; empty: none do"},
        load_caveat=STRING | {"description": "host load, if it may explain the speed; empty otherwise"},
        shortcomings={"type": "array", "items": STRING, "minItems": 2, "maxItems": 2,
                      "description": "reasons against calling A, and B, the better run; empty: none"},
        nonfinite_since={"type": "array", "items": or_null(INTEGER), "minItems": 2, "maxItems": 2,
                         "description": "step from which A's, and B's, loss is NaN or Inf; null: the last is finite"},
        speed=or_null(of_type(Change), "B's time over A's, with its 95 % interval; null: too few steps"),
        loss=or_null(of_type(LossChange), "B's loss minus A's; null: fewer than 20 common steps"),
        settings=difference, versions=difference, conditions=difference, advice=difference,
        phases=obj(**dict.fromkeys(PLACES, both)) | {"description": "milliseconds of a step, mean over the ranks"},
        validation=by_name(both, "last and lowest validation loss"),
        goodput=obj(**dict.fromkeys(CATEGORIES, both)) | {"description": "shares of the wall time"},
        only_a=_FINDINGS, only_b=_FINDINGS, both=_FINDINGS,
        findings=_FINDINGS | {"description": "a slowdown, if its whole interval is above 1"},
    )  # fmt: skip
    point = of_type(Point)
    point["properties"]["lost_to"] = STRING | {"description": "largest part of a step besides training"}
    point["required"].append("lost_to")
    scaling = obj(kind={"enum": ["strong", "weak", "mixed"]}, points=array(point))
    two_runs["properties"]["scaling"] = scaling  # present if the runs have different numbers of ranks
    return any_of(two_runs, obj(scaling=scaling))


def _doctor() -> dict[str, Any]:
    from trainer.doctor.check import SCHEMA_VERSION, STATUSES, Check

    return obj(schema_version={"const": SCHEMA_VERSION}, worst={"enum": [*STATUSES]}, checks=array(of_type(Check)))


def _drill() -> dict[str, Any]:
    answer = obj(
        fault=STRING, rank=INTEGER, seen=STRING, right_rank=_or_unknown(), right_cause=_or_unknown(),
        finding_s=or_null(NUMBER), kind=or_null(STRING), cause=or_null(STRING), ranks=array(INTEGER), summary=STRING,
    )  # fmt: skip
    run = obj(
        fault=STRING, fault_ids=_TEXTS, mesh=STRING, seed=INTEGER, injected=_TEXTS, was_injected={"type": "boolean"},
        passed={"type": "boolean"}, answers=array(answer),
        false_alarms=array(obj(kind=STRING, cause=STRING, ranks=array(INTEGER), summary=STRING)),
        recovered={"type": "boolean"}, ended=or_null(STRING), training_s=or_null(NUMBER), steps_lost=or_null(INTEGER),
        goodput=or_null(NUMBER), wall_s=NUMBER, run=or_null(STRING), problems=_TEXTS,
    )  # fmt: skip
    from trainer.drills.tally import SCHEMA_VERSION

    share = or_null(NUMBER, "share of the faults or runs, 0 to 1; null: of none")
    return obj(
        schema_version={"const": SCHEMA_VERSION}, recall=share, precision=share, right_rank=share, right_cause=share,
        unrecovered=_COUNT, goodput=share, median_finding_s=or_null(NUMBER), median_training_s=or_null(NUMBER),
        num_runs=_COUNT, wall_s=NUMBER, runs=array(run),
    )  # fmt: skip


def _script_drill() -> dict[str, Any]:
    from trainer.drills.script.score import ScriptRow

    row = of_type(ScriptRow)
    row["properties"]["is_right"] = {"type": "boolean"}
    row["required"].append("is_right")
    return obj(schema_version={"const": 1}, is_right={"type": "boolean"}, runs=array(row))


def _or_unknown() -> dict[str, Any]:
    return or_null({"type": "boolean"}, "null: not seen, or not asked for")


def _export() -> dict[str, Any]:
    return any_of(
        obj(path=STRING, step=INTEGER, num_parameters=_COUNT, num_tensors=_COUNT, bytes=_COUNT,
            newest_confirmed_step=or_null(INTEGER, "newest checkpoint followed by healthy steps, if an older one")),
        obj(path=STRING, events=_COUNT, bytes=_COUNT),
        obj(path=STRING, rows=_COUNT, files=_COUNT, bytes=_COUNT),
        obj(path=STRING, steps=_COUNT, findings=_COUNT),
    )  # fmt: skip


def _fleet() -> dict[str, Any]:
    found = of_type(Fleet)
    found["properties"]["mtbf_h"] = or_null(NUMBER, "hours between failures; null: there was none")
    found["required"].append("mtbf_h")
    return found


def _plan() -> dict[str, Any]:
    expected = obj(
        world_size=_COUNT, mesh=by_name(INTEGER, "size by dimension"), num_parameters=_COUNT, flops_per_token=NUMBER,
        fits=or_null({"type": "boolean"}), memory_bytes=by_name(NUMBER, "bytes on the fullest device by category, "
                                                                        "and their `peak`"),
        fullest_pp_rank=INTEGER, float8=or_null({"type": "object"}), step_s=or_null(NUMBER), compute_s=or_null(NUMBER),
        tokens_per_s=or_null(NUMBER), mfu_ratio=or_null(NUMBER), communication_ratio=or_null(NUMBER),
        bubble_ratio=or_null(NUMBER), tape_bytes_per_step=NUMBER, store_bytes_per_step=NUMBER,
        record_bytes_per_hour=or_null(NUMBER), flops_per_memory_byte=or_null(NUMBER),
        ridge_flops_per_byte=or_null(NUMBER),
        collectives=array(
            obj(dimension=STRING, op=STRING, what=STRING, members=_COUNT, calls_per_step=NUMBER, bytes_per_step=NUMBER,
                bus_bytes_per_step=NUMBER,
                seconds=or_null(NUMBER), exposed_s=or_null(NUMBER), crosses_nodes={"type": "boolean"})
        ),
    )["properties"]  # fmt: skip
    found = obj(hardware={"type": "object"}, **expected, warnings=_TEXTS)
    found["properties"] |= {  # absent with --no-ladder
        "layouts": array(obj(name=STRING, set=_TEXTS, **expected)),
        "impossible": array(obj(name=STRING, why=STRING)),
        "would_fit": _TEXTS,
        "simplest": or_null(STRING),
        "fastest": or_null(STRING),
    }
    return found


def _preflight() -> dict[str, Any]:
    from trainer.preflight.verdict.readings import Readings
    from trainer.preflight.verdict.report import SCHEMA_VERSION, Line, Status

    return obj(
        schema_version={"const": SCHEMA_VERSION},
        worst={"enum": list(get_args(Status))},
        lines=array(of_type(Line)),
        readings=of_type(Readings),
    )


def _replay() -> dict[str, Any]:
    return obj(
        step=INTEGER, attempt=INTEGER, batch_index=or_null(INTEGER), step_kind=STRING, loss_recorded=or_null(NUMBER),
        grad_norm_recorded=or_null(NUMBER), loss=or_null(NUMBER), grad_norm=or_null(NUMBER), state_step=INTEGER,
        steps_recomputed=_COUNT, max_loss_deviation_ratio=or_null(NUMBER), data_differs={"type": ["boolean", "null"]},
        num_processes=_COUNT, duration_s=NUMBER, samples=array({"type": "object"}),
    )  # fmt: skip


if __name__ == "__main__":
    json.dump(schema(), sys.stdout, indent=2)
    sys.stdout.write("\n")
