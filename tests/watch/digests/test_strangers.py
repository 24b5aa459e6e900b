"""A stranger who can read and write the store of the rendezvous: nothing it sends has an effect; all is reported.

The stranger is a client of a real store on loopback, with all that has ever been written there.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from analyzers.run.calls.snapshot import AttemptView, RankView
from analyzers.run.live.digest import Digest, encode
from probes.tape.events import EventWriter, read_events
from probes.tape.rundir import NODE_RANK, RunDir
from tests.analyzers.memory_store import MemoryStore
from tests.waiting import wait_for
from watch.digests.clock_offsets import ClockClient
from watch.digests.exchange import JobWatch
from watch.digests.job_secret import FILE, create_job_secret, job_secret
from watch.digests.link import LEADER_KEY, DigestLink, Verdict, digest_key, verdict_key
from watch.digests.signed_messages import NO_SESSION, Inbox, MessageRefused, Signer

SECRET = b"of this job"
KILL = Verdict(attempt=0, ranks=(1,), summary="rank 1 hangs")
OVER = Verdict(attempt=-1, ranks=(), summary="over")


@pytest.fixture(autouse=True)
def _quick_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("watch.digests.link.PERIOD_S", 0.02)


@pytest.fixture
def stranger() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))


@pytest.fixture
def links(stranger: TCPStore) -> Iterator[tuple[DigestLink, DigestLink]]:
    """Leader and node 1, after their first digest."""
    with contextlib.ExitStack() as stack:
        leader, node = (stack.enter_context(link(stranger, number)) for number in (0, 1))
        node.publish(digest(step=1))
        wait_for(lambda: leader.received(), "first digest")
        yield leader, node


def link(store: TCPStore, node: int, secret: bytes = SECRET) -> DigestLink:
    return DigestLink(f"127.0.0.1:{store.port}", node=node, num_nodes=2, secret=secret)


def digest(step: int) -> Digest:
    rank = RankView(rank=1, step=step, last_ns=time.time_ns())
    return Digest(node=1, sent_ns=time.time_ns(), view=AttemptView(attempt=0, ranks={1: rank}))


def refused(link: DigestLink, purpose: str, word: str = "") -> str:
    """Wait for a refusal whose reason has the word; returns the reason. What lies there is refused at each look."""
    reasons: list[str] = []

    def found() -> bool:
        new = [refusal.reason for refusal in link.take_refusals() if refusal.purpose == purpose]
        reasons.extend(reason for reason in new if word in reason)
        return bool(reasons)

    wait_for(found, f"refusal of a {purpose}")
    return reasons[0]


def forged_digests(store: TCPStore, leader: bytes) -> dict[str, bytes]:
    body = encode(digest(step=99))
    return {
        "wrong secret": Signer(b"a guess", node=1).seal("digest", body, to=0, echo=leader),
        "no secret": Signer(b"", node=1).seal("digest", body, to=0, echo=leader),
        "no signature": body,
        "nothing": b"",
        "noise": os.urandom(2_000),
        "of another purpose": Signer(SECRET, node=1).seal("clock", body, to=0, echo=leader),
        "of another node": Signer(SECRET, node=2).seal("digest", body, to=0, echo=leader),
        "for another node": Signer(SECRET, node=1).seal("digest", body, to=2, echo=leader),
        "without a session": Signer(SECRET, node=1).seal("digest", body, to=0, echo=NO_SESSION),
        "of another session": Signer(SECRET, node=1).seal("digest", body, to=0, echo=os.urandom(16)),
    }


def test_forged_and_replayed_digests_change_nothing(stranger: TCPStore, links: tuple[DigestLink, DigestLink]) -> None:
    leader, node = links
    recorded = bytes(stranger.get(digest_key(1)))
    for name, forged in forged_digests(stranger, leader._signer.session).items():
        stranger.set(digest_key(1), forged)
        assert refused(leader, "digest"), name
        assert [found.view.step for found in leader.received()] == [1], name
    changed = bytearray(recorded)
    changed[70] ^= 1
    stranger.set(digest_key(1), bytes(changed))
    assert refused(leader, "digest", "signature")

    node.publish(digest(step=2))
    wait_for(lambda: leader.received()[0].view.step == 2, "second digest")
    stranger.set(digest_key(1), recorded)
    assert refused(leader, "digest", "replayed")
    assert leader.received()[0].view.step == 2
    node.publish(digest(step=3))
    wait_for(lambda: leader.received()[0].view.step == 3, "the node's own digest is taken afterwards")


def test_forged_and_replayed_verdicts_reach_no_node(stranger: TCPStore, links: tuple[DigestLink, DigestLink]) -> None:
    leader, node = links
    body = json.dumps(asdict(KILL)).encode()
    session = node._signer.session
    for forged in (
        body,
        Signer(b"a guess", node=0).seal("verdict", body, to=1, echo=session),
        Signer(b"", node=0).seal("verdict", body, to=1, echo=session),
        Signer(SECRET, node=0).seal("digest", body, to=1, echo=session),
        Signer(SECRET, node=2).seal("verdict", body, to=1, echo=session),
    ):
        stranger.set(verdict_key(1), forged)
        assert "replayed" not in refused(node, "verdict")
        assert node.verdict is None

    leader.publish_verdict(KILL)
    wait_for(lambda: node.verdict == KILL, "the leader's verdict")
    recorded = bytes(stranger.get(verdict_key(1)))
    leader.publish_verdict(OVER)
    wait_for(lambda: node.verdict == OVER, "its withdrawal")
    node.take_refusals()  # a forged one stayed in the store until the leader's came, and may have been read again
    stranger.set(verdict_key(1), recorded)
    assert "replayed" in refused(node, "verdict")
    assert node.verdict == OVER


def test_a_watch_that_starts_again_takes_no_old_message(stranger: TCPStore) -> None:
    with link(stranger, 0) as leader:
        with link(stranger, 1) as node:
            node.publish(digest(step=1))
            wait_for(lambda: leader.received(), "first digest")
            leader.publish_verdict(KILL)
            wait_for(lambda: node.verdict, "verdict")
            old_digest, old_verdict = bytes(stranger.get(digest_key(1))), bytes(stranger.get(verdict_key(1)))
            old_leader = bytes(stranger.get(LEADER_KEY))
            leader.publish_verdict(OVER)
            wait_for(lambda: node.verdict == OVER, "withdrawal")
        with link(stranger, 1) as again:
            stranger.set(verdict_key(1), old_verdict)
            again.publish(digest(step=2))
            wait_for(lambda: leader.received()[0].view.step == 2, "digest of the new process")
            wait_for(lambda: again.verdict == OVER, "what stands is sent to the new process")
            stranger.set(digest_key(1), old_digest)
            assert "replayed" in refused(leader, "digest")
    with link(stranger, 0) as new_leader, link(stranger, 1) as node:
        for _ in range(3):
            stranger.set(LEADER_KEY, old_leader)  # the new leader writes its own again
        stranger.set(digest_key(1), old_digest)
        node.publish(digest(step=7))
        wait_for(lambda: [d.view.step for d in new_leader.received()] == [7], "digest for the new leader")


def test_forged_and_replayed_clock_answers_move_no_clock(stranger: TCPStore) -> None:
    """A node's answer counts for the request that it was made for; any other time of a stranger's does not."""
    signer, stale = Signer(SECRET, node=0), Signer(SECRET, node=1)
    reasons: list[str] = []

    class Answering:
        """The store, with a stranger who answers each request at once."""

        def __init__(self, answer: Any) -> None:
            self.answer = answer

        def __getattr__(self, name: str) -> Any:
            return getattr(stranger, name)

        def set(self, key: str, value: Any) -> None:
            stranger.set(key, value)
            if key.endswith("/asked"):
                stranger.set(key.replace("asked", "answer"), self.answer(bytes(value)))

    wrong = str(time.time_ns() + 10**12).encode()
    for answer in (
        lambda nonce: wrong,
        lambda nonce: Signer(b"a guess", node=1).seal("clock", wrong, to=0, echo=nonce),
        lambda nonce: stale.seal("clock", wrong, to=0, echo=os.urandom(16)),
    ):
        before = len(reasons)
        clocks = ClockClient(Answering(answer), [1], signer, refuse=lambda node, what, why: reasons.append(why))
        clocks.poll_some()
        assert len(reasons) == before + 1
        assert clocks.offsets() == {}
    honest = ClockClient(
        Answering(lambda nonce: stale.seal("clock", str(time.time_ns()).encode(), to=0, echo=nonce)), [1], signer
    )
    honest.poll_some()
    assert abs(honest.offsets()[1].offset_ns) < 10**10


def test_what_is_refused_is_an_event_once_a_minute(stranger: TCPStore, tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"

    def said(kind: str) -> list[dict[str, Any]]:
        return [event for event in read_events(path)[0] if event["kind"] == kind] if path.exists() else []

    with link(stranger, 0) as leader, link(stranger, 1) as node:
        job = JobWatch(leader, node_rank=0, events=EventWriter(path, attempt=0, rank=NODE_RANK))
        node.publish(digest(step=1))
        wait_for(lambda: leader.received(), "first digest")
        for _ in range(3):
            stranger.set(digest_key(1), os.urandom(100))
            wait_for(lambda: leader._refusals, "refusal")
            job.exchange(MemoryStore(), 0, set())
        (event,) = said("message_refused")
        assert (event["node_rank"], event["purpose"], event["num_messages"] >= 1) == (1, "digest", True)
        assert not said("digests_unsigned")
    unsigned = link(stranger, 0, secret=b"")
    JobWatch(unsigned, node_rank=0, events=EventWriter(path, attempt=0, rank=NODE_RANK))
    assert said("digests_unsigned")


def test_a_message_is_taken_once_and_in_order() -> None:
    sender, receiver = Signer(SECRET, node=1), Signer(SECRET, node=0)
    inbox = Inbox(receiver, "digest", sender=1)
    first, second, third = (sender.seal("digest", b"%d" % n, to=0, echo=receiver.session) for n in range(3))
    opened = inbox.open(second)
    assert opened is not None
    assert opened.body == b"1"
    assert inbox.open(second) is None
    with pytest.raises(MessageRefused, match="replayed"):
        inbox.open(first)
    assert inbox.open(third) is not None


def test_the_secret_is_readable_only_by_the_user_and_new_with_each_launch(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, name="x", manifest={})
    assert job_secret(run, {}) == b""
    create_job_secret(run)
    first = job_secret(run, {})
    assert len(first) == 64
    assert (run.path / FILE).stat().st_mode & 0o777 == 0o600
    create_job_secret(run)
    assert job_secret(run, {}) not in (b"", first)
    assert job_secret(run, {"RANKSCOPE_JOB_SECRET": " given "}) == b"given"
    (run.path / FILE).unlink()
    (run.path / FILE).symlink_to(tmp_path / "elsewhere")
    assert job_secret(run, {}) == b""
