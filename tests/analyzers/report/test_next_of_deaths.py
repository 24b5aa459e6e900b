from __future__ import annotations

from dataclasses import replace

import pytest

from analyzers.finding import Finding
from analyzers.report.wording.explained import next_step, why


def finding(kind: str, cause: str, ranks: tuple[int, ...] = (2,), **evidence: object) -> Finding:
    return Finding(analyzer=kind, kind=kind, severity="critical", status="fired", summary="...", ranks=ranks,
                   cause=cause, evidence=evidence, advice=f"{kind.replace('_', '-')}-{cause}")  # fmt: skip


@pytest.mark.parametrize(
    ("cause", "words"),
    [
        ("exception", "Check data/shards.py:41 in read."),
        ("out_of_memory", "the memory of rank 2"),
        ("exit", "Check data/shards.py:41 in read"),
        ("killed_all", "the scheduler's record"),
        ("ended_from_outside", "Resume the run"),
        ("store_lost", "the host of the rendezvous store"),
        ("connection_lost", "the network between the hosts"),
    ],
)
def test_what_to_do_about_a_lost_rank_follows_its_cause(cause: str, words: str) -> None:
    said = next_step(finding("rank_lost", cause, raised_at="data/shards.py:41 in read"))
    assert words in said
    assert "XID" not in said
    assert f"`rankscope explain rank-lost-{cause}`" in said
    assert "XID" in next_step(finding("rank_lost", "signal"))
    assert "traceback in the log of rank 2" in next_step(finding("rank_lost", "exception"))


@pytest.mark.parametrize(
    ("cause", "words"),
    [
        ("all_entered", "links and the backend"),
        ("mismatch_size", "Compare the shapes of both sides at train.py:9 step"),
        ("mismatch_dtype", "element types"),
        ("order_inversion", "the groups in one order"),
        ("checkpoint", "disk"),
        ("gil", "native code"),
        ("not_seen", "the folders of all nodes together"),
        ("not_entered", "the stack of rank 2"),
    ],
)
def test_what_to_do_about_a_hang_follows_its_cause(cause: str, words: str) -> None:
    assert words in next_step(finding("hang", cause, caller="train.py:9 step"))


def test_why_tells_the_line_that_raised_and_who_ended_because_of_it() -> None:
    told = {"message": "bad\nmore", "raised_at": "a.py:1 in f", "victims": [0, 1]}
    assert why(finding("rank_lost", "exception", **told)) == "Bad (a.py:1 in f), and 2 other ranks ended because of it."
    nobody = finding("rank_lost", "store_lost", (), message="Broken pipe", victims=[0, 1])
    assert why(nobody) == "Broken pipe, and 2 ranks ended because of it."


def test_why_is_the_summary_where_that_has_the_error_already() -> None:
    told = {"message": "bad", "raised_at": "a.py:1 in f", "victims": [0, 1]}
    lost = replace(finding("rank_lost", "exception", **told), summary="Rank 2 died of Bad (a.py:1 in f).")
    assert why(lost) == lost.summary, "reports leave the line out"


@pytest.mark.parametrize("cause", ["ended_from_outside", "launcher_lost"])
def test_a_run_that_was_resumed_since_is_not_to_be_resumed(cause: str) -> None:
    lost = finding("rank_lost", cause)
    assert "esume the run" in next_step(lost)
    resumed = next_step(replace(lost, severity="warning"))
    assert "esume the run" not in resumed
    assert resumed[0].isupper()
