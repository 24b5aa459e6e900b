"""Digests carry what the analyzers need to the leader, and a malformed one cannot harm it."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analyzers.deaths import analyze as rank_lost
from analyzers.finding import Finding
from analyzers.hangs import analyze as hang
from analyzers.run.calls.recorded_calls import Call
from analyzers.run.calls.snapshot import SNAPSHOT_EVENTS, AttemptView, RankView, take_snapshot
from analyzers.run.live.digest import (
    MAX_BYTES,
    VERSION,
    Digest,
    DigestError,
    decode,
    encode,
    joined,
    joined_log,
    of_ranks,
)
from analyzers.run.policy import StallPolicy
from analyzers.run.records.event_log import EventLog
from tests.analyzers.standstill import SECOND, World

POLICY = StallPolicy()
NODES = {0: (0, 1), 1: (2, 3)}


def sent(world: World, node: int = 1, ahead_ns: int = 0) -> Digest:
    """What node `node` sends of its ranks; its clock may be ahead."""
    log = EventLog.load(world.store, SNAPSHOT_EVENTS)
    view = of_ranks(take_snapshot(world.store, 0, log), NODES[node])
    events = tuple(event for kind in SNAPSHOT_EVENTS for event in log.of(kind))
    return decode(encode(Digest(node=node, sent_ns=world.now_ns + ahead_ns, view=view, events=events)))


def leaders_view(world: World, digests: list[Digest], offsets_ns: Mapping[int, int]) -> AttemptView:
    """Node 0 knows its own ranks and what it was sent."""
    own = of_ranks(take_snapshot(world.store, 0, EventLog([])), NODES[0])
    return joined(own, digests, offsets_ns)


def hang_of(world: World, digests: list[Digest], offsets_ns: Mapping[int, int]) -> Finding | None:
    view = leaders_view(world, digests, offsets_ns)
    log = joined_log(EventLog([]), digests, offsets_ns)
    return hang.hang_of_attempt(view, log, POLICY, is_last=True, now_ns=world.after(6.0))


def hung() -> World:
    """Ranks 0, 1 and 2 wait; rank 3, on node 1, computes for ever."""
    world = World()
    for rank in (0, 1, 2):
        world.enter(rank)
    world.span(3, "forward")
    return world


def test_a_hang_on_another_node_is_named_from_its_digest() -> None:
    world = hung()
    found = hang_of(world, [sent(world)], {})
    assert found is not None
    assert (found.cause, found.ranks, found.evidence["waiting_ranks"]) == ("not_entered", (3,), [0, 1, 2])
    assert "in forward" in found.summary
    assert hang_of(world, [], {}) is None, "alone the leader knows half of the ranks, which is no proof"


def test_a_digest_survives_sending_unchanged() -> None:
    world = hung()
    world.event("silent_work", 4.0, ranks=[3], idle_ranks=[], cores=1.0)
    digest = sent(world)
    assert decode(encode(digest)) == digest
    assert digest.view.ranks[3].is_at_work


@pytest.mark.parametrize("ahead_s", [-600, 600])
def test_a_clock_that_is_wrong_is_put_right(ahead_s: int) -> None:
    ahead_ns = ahead_s * SECOND
    world = World(clock_offset_ns={2: ahead_ns, 3: ahead_ns})
    for rank in (0, 1, 2):
        world.enter(rank)
    world.span(3, "forward")
    digest = sent(world, ahead_ns=ahead_ns)
    found = hang_of(world, [digest], {1: ahead_ns})
    assert found is not None
    assert found.ranks == (3,)
    assert 5 < found.evidence["silent_s"] < 7
    if ahead_s > 0:
        assert hang_of(world, [digest], {}) is None, "without the offset the rank would seem to live in the future"


def test_a_rank_that_died_on_another_node_is_told() -> None:
    world = World()
    world.event("rank_exit", 0.5, exit_rank=2, signal="SIGKILL", exit_code=-9)
    digests = [sent(world)]
    log = joined_log(EventLog([]), digests, {})
    (lost,) = rank_lost.deaths_of_attempt(
        leaders_view(world, digests, {}), log, POLICY, is_last=True, now_ns=world.after(3.0)
    )
    assert (lost.ranks, lost.evidence["signal"]) == ((2,), "SIGKILL")


def test_a_digest_is_small_and_stays_below_its_bound() -> None:
    assert len(encode(sent(hung()))) < 1_000
    calls = tuple(Call(rank=0, group=f"group {i}", seq=i, op="all_reduce", caller=f"x{i * 7919}") for i in range(4000))
    ranks = {rank: RankView(rank=rank, calls=calls, num_in_flight=4000) for rank in range(8)}
    huge = Digest(node=1, sent_ns=1, view=AttemptView(attempt=0, ranks=ranks))
    data = encode(huge)
    assert len(data) <= MAX_BYTES
    assert decode(data).view.ranks.keys() == ranks.keys(), "that they live is what is left"


def test_a_digest_without_ranks_stays_below_its_bound_whatever_was_queued() -> None:
    queued = {(f"group {i * 7919}", i): i * 104_729 for i in range(20_000)}
    peers = {(i, "send", i * 7919): i * 104_729 for i in range(20_000)}
    view = AttemptView(attempt=0, ranks={}, queued=queued, queued_p2p=peers)
    assert len(encode(Digest(node=1, sent_ns=1, view=view))) <= MAX_BYTES


def test_another_version_and_a_bomb_are_refused() -> None:
    plain = json.loads(zlib.decompress(encode(sent(hung()))))
    with pytest.raises(DigestError, match=f"version {VERSION + 1}"):
        decode(zlib.compress(json.dumps(plain | {"v": VERSION + 1}).encode()))
    with pytest.raises(DigestError):
        decode(zlib.compress(b"[" * (64 << 20)))
    with pytest.raises(DigestError, match="more than"):
        decode(b"x" * (MAX_BYTES + 1))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
PLAIN = json.loads(zlib.decompress(encode(sent(hung()))))


@given(st.sampled_from(sorted(PLAIN)), JSON)
def test_a_malformed_digest_raises_no_other_error(key: str, value: object) -> None:
    data = zlib.compress(json.dumps(PLAIN | {key: value}).encode())
    try:
        digest = decode(data)
    except DigestError:
        return
    joined(AttemptView(attempt=digest.view.attempt, ranks={}), [digest], {digest.node: 5})


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(DigestError):
        decode(data)
