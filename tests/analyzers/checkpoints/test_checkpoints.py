from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from analyzers.checkpoints.analyze import saved_checkpoints
from analyzers.checkpoints.explain import NEXT, WHY
from analyzers.finding import Finding
from analyzers.scope import Scope
from analyzers.source import Source
from probes.tape_recorder import TapeRecorder
from store import Store
from tests.analyzers.judged import checked
from tests.analyzers.plain_run import MS, plain_run, save
from tests.factories import empty_run

MANIFEST: dict[str, Any] = {"config": {"checkpoint": {"interval": 20}}}


def analyze(source: Source, manifest: dict[str, Any]) -> list[Finding]:
    return checked(saved_checkpoints(source, Scope(manifest=manifest)))


def test_good_saves_are_silent() -> None:
    assert analyze(plain_run(), MANIFEST) == []


def test_a_save_that_failed_and_one_that_was_good_after_it() -> None:
    store = plain_run(steps=60)
    save(store, 80, "failed", reason="No space left on device: checkpoints/step-80.tmp")
    failed, *_ = analyze(store, MANIFEST)
    assert (failed.kind, failed.severity, failed.last_step) == ("checkpoint_failed", "critical", 80)
    assert "No space left on device" in failed.summary
    save(store, 100, "good")
    (healed,) = analyze(store, MANIFEST)
    assert healed.severity == "warning"


def test_a_copy_at_an_address_that_failed_is_a_warning_and_no_lost_save() -> None:
    store = plain_run(steps=60)
    save(store, 60, "failed", tier="remote", reason="s3://bucket/run cannot be written now (Timeout)")
    (failed,) = analyze(store, MANIFEST)
    assert (failed.kind, failed.severity, failed.evidence["tier"]) == ("checkpoint_failed", "warning", "remote")
    assert failed.summary == (
        "A checkpoint copy to the address failed at step 60: s3://bucket/run cannot be written now (Timeout). "
        "No copy to the address has been good since."
    )
    assert "credentials" in NEXT["checkpoint_failed"](failed)
    assert "nothing has been copied since" in WHY["checkpoint_failed"](failed)
    for step in (80, 100):
        save(store, step, "good", tier="remote")
    (healed,) = analyze(store, MANIFEST)
    assert "and 2 later copies succeeded" in WHY["checkpoint_failed"](healed)


def test_the_age_of_the_last_good_one() -> None:
    store = plain_run(steps=100, saves_every=20)
    store.connection.execute("DELETE FROM checkpoints WHERE step > 20")
    (finding,) = analyze(store, MANIFEST)
    assert (finding.kind, finding.evidence["age_steps"], finding.first_step) == ("checkpoint_age", 80, 20)
    assert finding.evidence["lost_s"] == pytest.approx(8.0, rel=0.01)
    save(store, 80, "verified")
    assert analyze(store, MANIFEST) == []
    save(store, 80, "condemned", reason="a loss spike")
    assert [f.kind for f in analyze(store, MANIFEST)] == ["checkpoint_age"]
    store.connection.execute("UPDATE checkpoints SET tier = 'memory'")
    (never,) = analyze(store, MANIFEST)
    assert never.summary.startswith("No good checkpoint in 100 steps")


def test_saves_that_cost_too_much_or_come_late() -> None:
    store = plain_run()
    store.connection.execute(f"UPDATE steps SET checkpoint_ns = {10 * MS} WHERE step > 10")
    (cost,) = analyze(store, MANIFEST)
    assert (cost.kind, cost.status, cost.cause) == ("checkpoint_cost", "advice", "stall")
    assert cost.evidence["stall_ratio"] == pytest.approx(0.09, rel=0.05)
    late = plain_run()
    for step in (41, 61):
        save(late, step, "delayed", reason="the previous save is still being written")
    (slow,) = analyze(late, MANIFEST)
    assert (slow.kind, slow.cause, slow.evidence["num_delayed"]) == ("checkpoint_cost", "slow", 2)


def test_missing_saves_are_reported_unless_none_was_due() -> None:
    for damage in ("DELETE FROM steps", "DELETE FROM checkpoints", "UPDATE checkpoints SET state = NULL",
                   "UPDATE checkpoints SET stall_ns = NULL"):  # fmt: skip
        store = plain_run()
        store.connection.execute(damage)
        assert [finding.status for finding in analyze(store, MANIFEST)] == ["insufficient_data"], damage
    store = plain_run(steps=15)
    assert analyze(store, MANIFEST) == [], "none was due"
    assert analyze(store, {"config": {"checkpoint": {"interval": 0}}}) == [], "none was wanted"
    assert [finding.status for finding in analyze(store, {})] == ["insufficient_data"]


def test_a_save_after_the_last_step_of_an_attached_loop_was_seen(tmp_path: Path) -> None:
    """As in a script that saves once, when it has trained and evaluated."""
    run = empty_run(tmp_path)
    recorder = TapeRecorder(run.rank_dir(0, 0), rank=0, attempt=0, world_size=1, local_rank=0, node_rank=0)
    for number in range(1, 6):
        recorder.begin_step(number)
        with recorder.span("forward"):
            pass
        recorder.end_step()
    recorder.begin_step(6)
    with recorder.span("checkpoint"):
        pass
    recorder.discard_step()
    recorder.close()
    with Store.open(run) as store:
        (found,) = analyze(store, {"attached": True})
    assert "a save after the last step was seen" in found.summary
