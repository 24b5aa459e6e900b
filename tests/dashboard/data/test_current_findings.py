"""What the pages list: the diagnosis and the newest words of `watch`, open ones first, and nothing of another run."""

from __future__ import annotations

from typing import Any

from analyzers.diagnose import Diagnosis, conclude
from analyzers.finding import Finding
from dashboard.data.current_findings import current_findings


def finding(kind: str, severity: Any = "warning", status: Any = "fired", **more: Any) -> Finding:
    return Finding(
        analyzer="test", kind=kind, severity=severity, status=status, summary=f"{kind} {more}", **{"attempt": 0} | more
    )


def diagnosis(*found: Finding) -> Diagnosis:
    return conclude(found, {})


def test_newer_findings_of_watch_are_sorted_into_the_diagnosis() -> None:
    slow, lost = finding("straggler", ranks=(3,), first_step=60), finding("rank_lost", "critical", ranks=(1,))
    known = current_findings(diagnosis(slow), [lost], newest_attempt=0)
    assert known.findings == [lost, slow]
    assert known.closed == {}


def test_a_second_fault_on_the_same_rank_is_another_one() -> None:
    first, second = (finding("non_finite", ranks=(2,), first_step=step, last_step=step) for step in (40, 90))
    assert current_findings(diagnosis(first), [second, first]).findings == [first, second]


def test_the_same_fault_is_listed_once_however_it_was_reported() -> None:
    told = [
        finding("straggler", ranks=(3,), first_step=60, cause="compute"),
        finding("hang", "critical", ranks=(1, 2), first_step=70),
        finding("loss_spike", ranks=(), first_step=80, attempt=None),
        finding("divergence", ranks=(), first_step=100, last_step=900),
        finding("non_finite", ranks=(2,), first_step=200, last_step=800),
    ]
    words = [
        finding("straggler", ranks=(3,), first_step=64, cause="gpu_clock"),
        finding("straggler", ranks=(3,), first_step=62, cause="compute"),
        finding("hang", "critical", ranks=(1,), first_step=69),
        finding("loss_spike", ranks=(), first_step=80, attempt=7),
        finding("divergence", ranks=(), first_step=600),
        finding("non_finite", ranks=(2,), first_step=500, last_step=500),
    ]
    assert current_findings(diagnosis(*told), words).findings == current_findings(diagnosis(*told), []).findings
    assert len(current_findings(None, words).findings) == 5  # two words on one straggler


def test_open_ones_come_first_and_closed_ones_say_why() -> None:
    lost = finding("rank_lost", "critical", ranks=(1,), first_step=20)
    bad = finding("non_finite", "critical", ranks=(2,), first_step=40, attempt=1, evidence={"restored_step": 30})
    refused = finding("non_finite", "critical", ranks=(2,), first_step=50, attempt=1, evidence={"update_skipped": True})
    passed = finding("straggler", ranks=(0,), first_step=10, attempt=1, evidence={"ongoing": False})
    slow = finding("straggler", ranks=(3,), first_step=60, attempt=1, evidence={"ongoing": True})
    suspect = finding("hang", "warning", "suspect", ranks=(3,), first_step=60, attempt=1)
    known = current_findings(diagnosis(lost, bad, refused, passed, slow, suspect), [], newest_attempt=1)
    assert known.findings[:2] == [slow, suspect]
    assert known.findings[-1] == passed
    assert known.closed == {
        lost.id: "the run continued as attempt 1", bad.id: "recovered",
        refused.id: "the step was refused", passed.id: "over",
    }  # fmt: skip


def test_the_page_lists_them_in_the_order_of_the_verdict() -> None:
    slow, bad = finding("straggler", "warning", ranks=(3,)), finding("non_finite", "warning", ranks=(2,), first_step=40)
    suspect = finding("rank_lost", "critical", "suspect", ranks=(1,))
    whole = conclude([slow, suspect, bad], {})
    assert whole.verdict.startswith(bad.summary)
    assert current_findings(whole, []).findings == list(whole.fired) == [bad, slow, suspect]
    assert current_findings(conclude([slow], {}), [bad]).findings == [bad, slow], "what watch reports has its place"


def test_page_and_report_have_one_order_of_findings_that_are_over() -> None:
    lost = finding("rank_lost", "critical", ranks=(1,), first_step=20)
    slow = finding("straggler", ranks=(3,), first_step=60, attempt=1)
    advice = finding("exposed_communication", "info", "advice", attempt=1)
    known = conclude([advice, slow, lost], {}, closed={lost.id: "the run continued as attempt 1"})
    assert known.findings == (slow, lost, advice)
    assert current_findings(known, [], newest_attempt=1).findings == list(known.fired)
    first, second = known.verdict.splitlines()
    assert first == slow.summary, "what is still wrong comes first, although the other was worse"
    assert second == f"Already over: {lost.summary}"


def test_a_finding_that_watch_closed_stays_closed_until_it_is_reported_again() -> None:
    slow = finding("straggler", ranks=(3,), first_step=60, cause="compute")
    over = finding("straggler", "info", "ok", ranks=(3,), first_step=60, cause="compute")
    assert current_findings(diagnosis(slow), [over, slow]).closed == {slow.id: "over"}
    again = finding("straggler", ranks=(3,), first_step=120, cause="compute")
    assert current_findings(diagnosis(slow), [again, over, slow]).closed == {}
    assert current_findings(None, [over, slow]).findings == []


def test_evidence_of_any_type_is_accepted() -> None:
    odd = finding("xid", ranks=(1,), evidence={"node": ["a"], "device": {}, "xid": [1]})
    odd = Finding(**{name: getattr(odd, name) for name in odd.__dataclass_fields__} | {"analyzer": "health"})
    assert current_findings(diagnosis(odd), [odd]).findings == [odd]
