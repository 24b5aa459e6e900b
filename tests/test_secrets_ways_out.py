"""Secrets in fifteen places of a run and in 255 forms, and thirteen ways out of it: none of them leaks one."""

from __future__ import annotations

import json
import tarfile
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from typer.testing import CliRunner

from analyzers.diagnose import diagnose
from probes.tape import event_kinds
from probes.tape.events import EventWriter
from probes.tape.format.names import NameWriter
from probes.tape.rundir import NODE_RANK, RunDir
from rankscope.cli import app
from rankscope.mcp_server.tools import Tools
from store import Store
from store.runs_folder import RunsFolder
from tests.factories import make_run
from tests.probes.tape.secret_forms import BODIES, BODY, FORMS
from tests.watch.exporting.otel.collector import collector
from watch.exporting.exports import otel_export
from watch.exporting.metrics.node_metrics import NodeMetrics
from watch.exporting.webhook import finding_hook

SECRETS = {place: f"Zq{number:02d}swordfish{number:02d}" for number, place in enumerate((
    "exception", "traceback", "url", "signed_url", "bearer", "quoted", "user_event", "user_field", "key", "name",
    "setting", "command", "webhook", "log", "stack",
))}  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    made = make_run(tmp_path_factory.mktemp("runs"), ranks=2, steps=30, kill={1: 20})
    secret = SECRETS
    manifest = made.manifest()
    manifest["config"] = {
        "alerts": {"webhook": f"https://example.org/{secret['webhook']}"},
        "tracking": {"api_key": secret["setting"]},
    }
    manifest["command"] = ["train.py", "--api-key", secret["command"]]
    made.write_manifest(manifest)
    events = EventWriter(made.rank_dir(0, 1) / "events.jsonl", attempt=0, rank=1)
    key = f"-----BEGIN PRIVATE KEY-----\n{secret['key']}\n-----END PRIVATE KEY-----"
    message = (
        f"login(user='me', password='{secret['exception']}') at postgresql://me:{secret['url']}@db/x failed with "
        f"Authorization: Bearer {secret['bearer']}, https://store/x?X-Amz-Signature={secret['signed_url']}&a=b, "
        f'db_password="{secret["quoted"]} and more", https://example.org/{secret["webhook"]}, {key}'
    )
    traceback = f"Traceback (most recent call last):\n  File \"train.py\", line 3\n    token='{secret['traceback']}'\n"
    traceback += f"ValueError: {message}\n"
    events.write(event_kinds.EXCEPTION, step=20, type="ValueError", message=message, traceback=traceback)
    events.write_any("downloaded", step=3, text=f"WANDB_API_KEY={secret['user_event']}")
    events.write_any("downloaded", step=4, token=secret["user_field"])
    names = NameWriter(made.rank_dir(0, 1) / "names.jsonl")
    names.close()
    path = made.rank_dir(0, 1) / "names.jsonl"
    path.write_text(path.read_text().replace("forward", f"forward token={secret['name']}"))
    (made.path / "logs").mkdir()
    (made.path / "logs" / "rank-00001.log").write_text(f"export HF_TOKEN={secret['log']}\n")
    forms = [form.replace("{}", BODY) for form in FORMS]
    for number, form in enumerate(forms):
        events.write_any("printed", step=5, text=form, number=number)
    with (made.path / "logs" / "rank-00001.log").open("a") as log:
        log.write("\n".join((*forms, *traceback.splitlines())) + "\n")
    (made.stacks / "attempt-0-rank-00001.txt").write_text(f"  log_in(password='{secret['stack']}')\n")
    return made


def told(*arguments: str) -> str:
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code in (0, 1), done.output
    return done.output


def parquet(run: RunDir, out: Path) -> str:
    told("export", str(run.path), "--to", "parquet", "--out", str(out))
    tables = [pyarrow.parquet.read_table(path).to_pylist() for path in out.rglob("*.parquet")]
    assert any("swordfish" in text or "(redacted)" in text for text in map(str, tables))
    return str(tables)


def shared(run: RunDir, out: Path) -> str:
    told("share", str(run.path), "--out", str(out / "x.tar.gz"))
    with tarfile.open(out / "x.tar.gz") as archive:
        archive.extractall(out, filter="data")
    return "".join(path.read_bytes().decode("latin-1") for path in out.rglob("*") if path.is_file())


def posted(run: RunDir, out: Path) -> str:
    bodies: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Quiet."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server, Store.open(run) as store:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        config = {"config": {"alerts": {"webhook": f"http://127.0.0.1:{server.server_port}/"}}}
        events = EventWriter(out / "events.jsonl", attempt=0, rank=NODE_RANK)
        with finding_hook(config, run_id="x", events=events) as hook:
            hook.report(diagnose(store, run.manifest()).fired)
        server.shutdown()
    assert bodies
    return b"".join(bodies).decode()


def tracked(run: RunDir, out: Path) -> str:
    told("export", str(run.path), "--to", "tensorboard", "--out", str(out))
    return "".join(path.read_bytes().decode("latin-1") for path in out.rglob("*") if path.is_file())


def asked(run: RunDir, out: Path) -> str:
    tools = Tools(RunsFolder(run.path.parent))
    name = run.path.name
    answers = [tools.verdict(name), tools.sql("SELECT detail FROM events", name), tools.stacks(name)]
    return json.dumps([*answers, tools.sql("SELECT DISTINCT kind FROM spans", name)])


def measured(run: RunDir, out: Path) -> str:
    with Store.open(run) as store:
        return str(NodeMetrics(run.manifest(), node_rank=0).measure(store, 10**18))


def sent(run: RunDir, out: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    with collector() as received, Store.open(run) as store:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", received.url)
        events = EventWriter(out / "events.jsonl", attempt=0, rank=NODE_RANK)
        with otel_export(run, node_rank=0, events=events) as otel:
            assert otel is not None
            otel.tick(store, 10**18, NodeMetrics(run.manifest(), node_rank=0).measure(store, 10**18))
            otel.report(diagnose(store, run.manifest()).fired)
    assert received.spans
    assert received.logs
    return f"{received.spans}{received.metrics}{received.logs}{received.resource}"


def traced(run: RunDir, out: Path) -> str:
    told("export", str(run.path), "--to", "chrome-trace", "--out", str(out / "trace.json"))
    return (out / "trace.json").read_text()


def report(run: RunDir, out: Path, kind: str) -> str:
    told("report", str(run.path), f"--{kind}", str(out / "report"))
    return (out / "report").read_text()


WAYS: dict[str, Callable[[RunDir, Path], str]] = {
    "text": lambda run, out: told("analyze", str(run.path)),
    "json": lambda run, out: told("analyze", str(run.path), "--format", "json"),
    "html": lambda run, out: report(run, out, "html"),
    "markdown": lambda run, out: report(run, out, "markdown"),
    "log": lambda run, out: told("analyze", str(run.path / "logs" / "rank-00001.log"), "--format", "json"),
    "sql": lambda run, out: told("sql", str(run.path), "SELECT detail FROM events", "--format", "json"),
    "trace": traced, "parquet": parquet, "share": shared, "webhook": posted, "tracker": tracked, "mcp": asked,
    "metrics": measured,
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_no_way_out_tells_a_secret(run: RunDir, tmp_path: Path, way: str) -> None:
    found = WAYS[way](run, tmp_path)
    assert len(found) > 100
    assert [place for place, secret in SECRETS.items() if secret in found] == []
    assert [body for body in BODIES if body in found] == []


def test_no_collector_is_told_a_secret(run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = sent(run, tmp_path, monkeypatch)
    assert [body for body in BODIES if body in found] == []


def test_the_exception_is_still_told(run: RunDir) -> None:
    found = told("analyze", str(run.path), "--format", "json")
    assert "ValueError" in found
    assert "login(user='me', password='(redacted)'" in found
