"""An address that cannot be published to is named, without the keys that somebody wrote into it."""

from __future__ import annotations

from pathlib import Path

from probes.tape.events import EventWriter, read_events
from probes.tape.rundir import NODE_RANK
from tests.factories import empty_run
from watch.records.publishing import Publishing


def test_a_refused_address_is_an_event_without_its_keys(tmp_path: Path) -> None:
    run = empty_run(tmp_path, config={"publish": {"address": "s3://AKIAKEY:Secret@bucket/p"}})
    events = EventWriter(tmp_path / "events.jsonl", attempt=0, rank=NODE_RANK)
    assert Publishing.of(run, events, node_rank=0) is None
    events.close()
    (failed,) = read_events(events.path)[0]
    assert failed["address"] == run.manifest()["config"]["publish"]["address"], "as run.json has it"
    assert "Secret" not in events.path.read_text()
    assert "keys do not belong in an address" in failed["reason"]
