"""`/metrics`: what a scrape reads, and who may read it."""

from __future__ import annotations

import json
import os
import shutil
import socket
import ssl
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.programs import needs, program
from tests.waiting import wait_for
from watch.exporting.metrics.catalogue import METRICS, Sample
from watch.exporting.prometheus import server
from watch.exporting.prometheus.endpoint import TARGETS_FILE, announced
from watch.exporting.prometheus.server import Endpoint, Listen, ListenError, Snapshot, serve

COMMON = {"run_id": "demo", "node": "0"}


def get(url: str, *, token: str = "", method: str = "GET", context: ssl.SSLContext | None = None) -> tuple[int, str]:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(url, headers=headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=100, context=context) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_a_scrape_reads_the_newest_snapshot_whole() -> None:
    snapshot = Snapshot(COMMON)
    with serve(snapshot, Listen()) as endpoint:
        assert endpoint.host == "127.0.0.1"
        assert get(endpoint.url) == (200, "")
        snapshot.replace([Sample("rankscope_step", 40), Sample("rankscope_rank_up", 0, {"rank": "3"})])
        snapshot.replace([Sample("rankscope_step", 41), Sample("rankscope_rollbacks_total", 2)])
        status, text = get(endpoint.url)
    found = {
        (s.name, s.labels.get("rank")): s for family in text_string_to_metric_families(text) for s in family.samples
    }
    assert status == 200
    assert set(found) == {("rankscope_step", None), ("rankscope_rollbacks_total", None)}
    assert found["rankscope_step", None].value == 41
    assert found["rankscope_step", None].labels == COMMON
    assert snapshot.num_scrapes == 2


def test_hostile_label_values_stay_inside_their_quotes() -> None:
    snapshot = Snapshot({"run_id": 'a"} 1\nrankscope_step 7', "node": "0"})
    snapshot.replace(
        [Sample("rankscope_run_info", 1, {"name": "\\", "mesh": "\x1b[31m", "device": "", "version": "é"})]
    )
    with serve(snapshot, Listen()) as endpoint:
        _, text = get(endpoint.url)
    (family,) = text_string_to_metric_families(text)
    (sample,) = family.samples
    assert sample.labels["run_id"] == 'a"} 1\nrankscope_step 7'


@needs("promtool")
def test_promtool_finds_nothing_wrong_with_any_metric() -> None:
    """Names, units, kinds and help of the whole catalogue, as a scrape shows them."""
    snapshot = Snapshot(COMMON)
    snapshot.replace([Sample(metric.name, 1.0, dict.fromkeys(metric.labels, "x")) for metric in METRICS.values()])
    with serve(snapshot, Listen()) as endpoint:
        _, text = get(endpoint.url)
    assert text.count("# TYPE") == len(METRICS)
    command = [program("promtool"), "check", "metrics"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_metric_that_the_catalogue_lacks_is_a_mistake() -> None:
    with pytest.raises(KeyError):
        Snapshot(COMMON).replace([Sample("rankscope_stepp", 1)])


def test_other_methods_and_paths_are_refused() -> None:
    with serve(Snapshot(COMMON), Listen()) as endpoint:
        assert get(endpoint.url, method="POST")[0] == 405
        assert get(endpoint.url.replace("/metrics", "/etc/passwd"))[0] == 404


def test_a_silent_client_does_not_hold_up_the_others() -> None:
    with serve(Snapshot(COMMON), Listen()) as endpoint, socket.create_connection((endpoint.host, endpoint.port)):
        assert get(endpoint.url)[0] == 200


def test_the_end_waits_for_an_answer_that_is_being_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """`watch` exits once its last state was scraped: what is not sent by then is lost."""
    monkeypatch.setattr(server, "LAST_ANSWERS_S", 60.0)
    release = threading.Event()

    class Slow(Snapshot):
        def collect(self) -> Iterator[Metric]:
            yield from super().collect()
            release.wait(60)

    snapshot = Slow(COMMON)
    with ThreadPoolExecutor() as clients:
        with serve(snapshot, Listen()) as endpoint:
            answer = clients.submit(get, endpoint.url)
            wait_for(lambda: snapshot.num_scrapes == 1, "the scrape")
            threading.Timer(0.3, release.set).start()
        assert release.is_set()
        assert answer.result()[0] == 200


@pytest.mark.parametrize("address", ["9400", "host:", "host:http", "0.0.0.0:70000", ""])
def test_an_address_is_host_and_port(address: str) -> None:
    with pytest.raises(ListenError, match="HOST:PORT"):
        Listen.parse(address)


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "example.org:0"])
def test_beyond_loopback_certificate_and_token_are_needed(address: str) -> None:
    with pytest.raises(ListenError, match="needs a TLS certificate"), serve(Snapshot(COMMON), Listen.parse(address)):
        pass


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("127.0.0.1", "127.0.0.1:9400"),
        ("::1", "[::1]:9400"),
        ("0.0.0.0", f"{os.uname().nodename}:9400"),  # would be Prometheus' own machine
        ("::", f"{os.uname().nodename}:9400"),
    ],
)
def test_the_announced_address_follows_from_the_host_it_listens_on(host: str, address: str) -> None:
    assert Endpoint(host, 9400, True).address == address


def test_a_port_that_is_taken_is_one_line() -> None:
    with serve(Snapshot(COMMON), Listen()) as endpoint:
        taken = Listen("127.0.0.1", endpoint.port)
        with pytest.raises(ListenError, match="choose another port"), serve(Snapshot(COMMON), taken):
            pass


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")
def test_with_a_certificate_only_who_has_the_token_gets_an_answer(tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "1",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", cert],
        check=True, capture_output=True,
    )  # fmt: skip
    trusting = ssl.create_default_context(cafile=cert)
    with serve(Snapshot(COMMON), Listen("0.0.0.0", 0, cert, key, "secret")) as endpoint:
        url = f"https://127.0.0.1:{endpoint.port}/metrics"
        with socket.create_connection(("127.0.0.1", endpoint.port)):  # says nothing, not even a TLS hello
            assert get(url, context=trusting)[0] == 401
            assert get(url, token="secre", context=trusting)[0] == 401
            assert get(url, token="secret", context=trusting)[0] == 200


def test_targets_are_there_while_a_node_serves(tmp_path: Path) -> None:
    path = tmp_path / TARGETS_FILE
    gone = {"targets": ["127.0.0.1:1"], "labels": {"__meta_rankscope_host": os.uname().nodename,
                                                  "__meta_rankscope_pid": str(2**22 + 1)}}  # fmt: skip
    other = {"targets": ["10.0.0.9:9400"], "labels": {"team": "blue"}}
    path.write_text(json.dumps([gone, other]))
    with announced(tmp_path, "a", 0, "127.0.0.1:5"), announced(tmp_path, "b", 0, "127.0.0.1:6"):
        shown = [entry["targets"][0] for entry in json.loads(path.read_text())]
        assert shown == ["10.0.0.9:9400", "127.0.0.1:5", "127.0.0.1:6"]
        labels = json.loads(path.read_text())[1]["labels"]
        assert (labels["__meta_rankscope_run"], labels["__meta_rankscope_node"]) == ("a", "0")
    assert json.loads(path.read_text()) == [other]


@pytest.mark.parametrize("text", ["", "{", '{"a": 1}', "[1, null]", "\x00"])
def test_a_damaged_file_of_targets_is_rewritten(tmp_path: Path, text: str) -> None:
    (tmp_path / TARGETS_FILE).write_text(text)
    with announced(tmp_path, "a", 0, "127.0.0.1:5"):
        (entry,) = json.loads((tmp_path / TARGETS_FILE).read_text())
    assert entry["targets"] == ["127.0.0.1:5"]
