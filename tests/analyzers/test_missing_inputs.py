"""Whatever input is missing is said: every table removed in turn, and every column that is looked at set to NULL."""

from __future__ import annotations

import copy

import pytest

from analyzers.diagnose import Diagnosis, diagnose
from probes.tape.format.schema import TABLES
from tests.analyzers.memory_store import MemoryStore
from tests.analyzers.test_diagnose import MANIFEST, clean_run
from tests.depth import later, tried

SAVING = copy.deepcopy(MANIFEST)
SAVING["config"]["checkpoint"] = {"interval": 20}

UNJUDGED = {
    "steps": {"straggler", "throughput", "exposed_communication", "data_bound", "memory_growth", "checkpoint_age",
              "slow_startup", "configuration", "goodput", "loss_spike", "non_finite", "rank_lost", "hang",
              "gradient_noise"},
    "spans": {"records"},
    "collectives": {"exposed_communication", "hang"},
    "fingerprints": {"replica_mismatch"},
    "health": {"health"},
    "ranks": {"rank_lost", "slow_startup", "hang", "gradient_noise"},
    "checkpoints": {"checkpoint_age"},
    "events": {"rank_lost", "slow_startup", "goodput"},
}  # fmt: skip
"""Without this table, these kinds are not judged."""
NOT_NEEDED = {
    "experts": "only a model with experts has them (tests/analyzers/numerics/test_expert_load.py)",
    "gradients": "taken at an interval that may be 0; the global norm is in steps",
    "scalars": "what an attached loop logs: kinds that judge it are silent without it",
    "process_groups": "calls carry the label of their group, which names its ranks",
    "findings": "what was said live; nothing is judged by it",
    "collective_totals": "only where probes.retain removes old calls; recent ones are in collectives",
    "device_stalls": "only where steps of a GPU were stamped",
    "log_events": "lines of text logs, which only `rankscope analyze` of files reads",
    **dict.fromkeys(
        ("nccl_communicators", "nccl_calls", "nccl_channels", "nccl_links", "nccl_groups"),
        "only where the NCCL plugin records; its complete calls are rows of collectives",
    ),
}
ALL_AT_ONCE = later("all that are not needed at once: test_each_table_that_an_analyzer_does_not_need_may_be_missing")
COLUMNS = {
    "steps": {
        "step": "goodput", "start_ns": "slow_startup", "duration_ns": "straggler", "data_ns": "data_bound",
        "memory_bytes": "memory_growth", "loss": "records", "grad_norm": "records", "tokens": "records",
        "forward_ns": "records", "backward_ns": "records", "optimizer_ns": "records", "collective_wait_ns": "records",
        "local_grad_norm": "gradient_noise",
    },
    "collectives": {
        "step": "exposed_communication", "seq": "records", "bytes": "exposed_communication", "phase": "records",
        "issue_ns": "exposed_communication", "end_ns": "exposed_communication", "wait_ns": "exposed_communication",
        "process_group": "exposed_communication", "op": "exposed_communication",
    },
    "ranks": {"world_size": "records", "host": "records"},
    "spans": {"kind": "records"},
    "fingerprints": {"replica_group": "records", "tensor": "records", "hash": "records"},
    "checkpoints": {"tier": "checkpoint_age", "state": "checkpoint_age", "step": "checkpoint_age",
                    "stall_ns": "checkpoint_age"},
    "events": {"kind": "records", "detail": "records", "wall_ns": "slow_startup"},
    "health": {"sample_ns": "health", "device": "health", "node": "records", "load_1m": "health", "num_cpus": "health",
               "disk_free_bytes": "health", "memory_used_bytes": "health", "memory_total_bytes": "health"},
}  # fmt: skip
"""Column -> a kind that is not judged without it."""


@pytest.fixture(scope="module")
def clean() -> MemoryStore:
    return clean_run()


def judged(store: MemoryStore) -> Diagnosis:
    found = diagnose(store, SAVING)
    assert not [finding.summary for finding in found.findings if "failed on this run" in finding.summary]
    return found


def unjudged(found: Diagnosis) -> set[str]:
    return {finding.kind for finding in found.not_judged}


def test_where_nothing_is_missing_everything_is_judged() -> None:
    assert unjudged(judged(clean_run())) == set()


def test_each_table_that_an_analyzer_does_not_need_may_be_missing(clean: MemoryStore) -> None:
    store = clean.copy()
    for table in NOT_NEEDED:
        store.drop(table)
    assert unjudged(judged(store)) == set()


@pytest.mark.parametrize(
    "table", [pytest.param(name, marks=ALL_AT_ONCE) if name in NOT_NEEDED else name for name in sorted(TABLES)]
)
@pytest.mark.parametrize("how", ["removed", "empty"])
def test_a_missing_table_is_reported(table: str, how: str, clean: MemoryStore) -> None:
    store = clean.copy()
    if how == "removed":
        store.drop(table)
    else:
        store.connection.execute(f"DELETE FROM {table}")
    found = judged(store)
    if table in NOT_NEEDED:
        assert unjudged(found) == set()
        return
    expected = UNJUDGED[table]
    if how == "empty" and table in ("events", "steps"):
        expected = expected - {"rank_lost"}  # nothing was written yet: a run that is young, or died before a step
    assert expected <= unjudged(found)
    told = {finding.kind for finding in found.findings if finding.status == "ok"}
    assert not told & expected, "what is not judged is not ok as well"
    lacking = [finding for finding in found.not_judged if finding.kind in expected]
    names = [name for finding in lacking for name in finding.evidence.get("missing_records", ())]
    assert any(name.partition(".")[0] == table for name in names) or any(table in one.summary for one in lacking), (
        "one of them names the table"
    )
    assert len({finding.summary for finding in found.not_judged}) == len(found.not_judged), "each in its own words"


ALL = [(table, column) for table, of in COLUMNS.items() for column in of]


@pytest.mark.parametrize(("table", "column"), ALL[:: tried(3, nightly=1)])
def test_a_column_of_nulls_is_reported(table: str, column: str, clean: MemoryStore) -> None:
    store = clean.copy()
    ((there,),) = store.rows(f"SELECT count({column}) FROM {table}")
    assert there, "the clean run has it, so that taking it away is a change"
    store.connection.execute(f"UPDATE {table} SET {column} = NULL")
    found = judged(store)
    kind = COLUMNS[table][column]
    assert kind in unjudged(found)
    assert kind not in {finding.kind for finding in found.findings if finding.status == "ok"}
