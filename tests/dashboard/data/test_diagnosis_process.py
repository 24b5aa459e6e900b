"""A diagnosis made in a child process is the one that the server would make."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from analyzers.diagnose import Diagnosis, diagnose
from analyzers.report.json import to_json
from dashboard.data import run_access as access
from dashboard.data.background_answers import Answers
from dashboard.data.processes.diagnosis_process import diagnose_in_process
from dashboard.data.run_access import RunAccess
from probes.tape.rundir import RunDir
from store import Store, StoreError
from tests.factories import make_run
from tests.waiting import wait_for


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return make_run(tmp_path_factory.mktemp("beside"), steps=40)


class CountingLock:
    """A lock that says how many have asked for it."""

    def __init__(self) -> None:
        self._lock, self.num_asked = threading.Lock(), 0

    def __enter__(self) -> None:
        self.num_asked += 1
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_the_child_process_gives_the_same_diagnosis(run: RunDir) -> None:
    with Store.open(run) as store:
        here = diagnose(store, run.manifest(), stacks_dir=run.stacks)
    assert to_json(diagnose_in_process(run, now_ns=None)) == to_json(here)


def test_a_large_run_is_diagnosed_there_once_for_a_version(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[RunDir] = []
    monkeypatch.setattr(access, "SEPARATE_PROCESS_BYTES", 1)
    monkeypatch.setattr(
        access, "diagnose_in_process", lambda of, **_: asked.append(of) or diagnose_in_process(of, now_ns=None)
    )
    one = RunAccess(run, Answers())
    assert one.state(first_s=60.0).value.word == "finished", "from here on nothing new can come"
    assert one.diagnosis(first_s=60.0).value is None, "a page does not wait for what takes a minute"
    answer = wait_for(lambda: (found := one.diagnosis()).value is not None and found, "diagnosis of the large run")
    assert answer.error is None
    assert one.diagnosis().value is answer.value
    assert one._diagnosed((one.version(), one.is_watched)) is answer.value, "Compare uses it too"
    assert asked == [run]


def test_a_request_during_a_diagnosis_gets_its_result(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    one, found, second = RunAccess(run, Answers()), [], []
    lock = one._diagnosing = CountingLock()  # type: ignore[assignment]
    also = threading.Thread(target=lambda: second.append(one._diagnosed("version")))

    def diagnosed(*_: object, **__: object) -> Diagnosis:
        with Store.open(run) as store:
            found.append(diagnose(store, run.manifest()))
        if len(found) == 1:
            also.start()
            wait_for(lambda: lock.num_asked == 2, "the second thread at the lock")
        return found[-1]

    monkeypatch.setattr(access, "SEPARATE_PROCESS_BYTES", 1)
    monkeypatch.setattr(access, "diagnose_in_process", diagnosed)
    first = one._diagnosed("version")
    also.join()
    assert len(found) == 1
    assert second == [first]


def test_the_child_reports_why_a_run_cannot_be_read(tmp_path: Path) -> None:
    run = make_run(tmp_path, steps=2)
    run.store().write_bytes(b"no database" * 400)
    with pytest.raises(StoreError, match=r"telemetry\.duckdb"):
        diagnose_in_process(run, now_ns=None)
