"""Every mistake on the command line ends with exit code 2 and one line that names what is wrong; nothing is started."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from rankscope.cli import main

RUN = "{run}"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an empty folder, a file that is no configuration, and a run without records."""
    from tests.factories import empty_run

    path = tmp_path_factory.mktemp("place")
    (path / "empty").mkdir()
    (path / "broken.toml").write_text("steps = = 3\n")
    (path / "random.bin").write_bytes(bytes(range(256)) * 8)
    (path / "broken.py").write_text("x = 1\ndef f(:\n")
    (path / "fine.py").write_text("")
    (path / "package").mkdir()
    (path / "package" / "__init__.py").write_text("raise AssertionError('imported')\n")
    empty_run(path, name="bare", world_size=1)
    return path


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["analize", "runs"], ["analize", "Did you mean 'analyze'?"]),
        (["--bogus"], ["--bogus", "rankscope --help"]),
        (["prepare", "none.jsonl", "--tokenizer", "bytes", "--out", "out"], ["none.jsonl: no such file or folder"]),
        (["prepare", "my.txt", "--tokenizer", "bytes", "--out", "o", "--document", "page"], ["choose file or line"]),
        (["plan", "debug", "--price-per-gpu-hour", "2"], ["--price-per-gpu-hour", "needs --tokens"]),
        (["plan", "debug", "--gpus", "1", "--tokens", "lots"], ["--tokens lots", "like 300B"]),
        (["train", "gpt2"], ["gpt2", "did you mean gpt2-124m?", "Presets: debug"]),
        (["train", "nothing"], ["nothing: no such file or preset", "Presets: debug"]),
        (["train", "my.toml"], ["my.toml: no such file or preset", "Presets: debug"]),
        (["train", "examples/gpt-dem.toml"], ["no such file", "did you mean gpt-demo?"]),
        (["train", "broken.toml"], ["broken.toml: not valid TOML"]),
        (["train", "debug", "--set", "train.stepz=3"], ["train.stepz", "did you mean steps?"]),
        (["train", "debug", "--set", "trian.steps=3"], ["trian", "did you mean train?"]),
        (["train", "debug", "--set", "train.steps=ten"], ["train.steps = 'ten'", "must be a whole number"]),
        (["train", "debug", "--set", "train.steps"], ["--set train.steps", "section.key=value"]),
        (["train", "debug", "--set", "parallel.tp=3"], ["parallel.tp = 3"]),
        (["train", "debug", "--nproc-per-node", "3", "--set", "parallel.tp=2"], ["does not divide the world size 3"]),
        (["train", "debug", "--nproc-per-node", "many"], ["--nproc-per-node", "whole number"]),
        (["train", "debug", "--fault", "nan_grd@step=3,rank=0"], ["nan_grd", "did you mean nan_grad?"]),
        (["train", "debug", "--fault", "foo@step=3,rank=0"], ["foo", "rankscope drill --list"]),
        (["train", "debug", "--fault", "xyz@step=3,rank=0"], ["xyz", "rankscope drill --list"]),
        (["train", "debug", "--fault", "kill@rank=0"], ["step=N is missing"]),
        (["train", "debug", "--fault", "kill@step=3"], ["rank=R is missing"]),
        (["train", "debug", "--fault", "kill@step=3,rank=7"], ["rank = 7", "only rank 0"]),
        (["train", "debug", "--fault", "kill@step=3000,rank=0"], ["step = 3000", "200 steps"]),
        (["train", "debug", "--fault", "slow_compute@step=9,until=5,rank=0,factor=2"], ["until = 5", "step = 9"]),
        (["train", "debug", "--fault", "missing_send@step=3,rank=0"], ["parallel.pp = 1"]),
        (["train", "debug", "--fault", "order_inversion@step=3,rank=0"], ["more than one rank"]),
        (["train", "debug", "--fault", "loader_killed@step=3,rank=0"], ["data.num_workers = 0"]),
        (["train", "debug", "--fault", "nan_grad@step=3,rank=0,parameter=a.b"], ["'a.b'", "no such parameter"]),
        (["train", "debug", "--steps", "5"], ["--steps. A setting is given as --set train.steps=VALUE."]),
        (["plan", "debug", "--seq-len", "5"], ["--set data.seq_len=VALUE"]),
        (["train", "debug", "--nnodes", "two"], ["--nnodes two"]),
        (["train", "debug", "--nnodes", "2"], ["--rdzv-endpoint", "HOST:PORT"]),
        (["train", "debug", "--node-rank", "3"], ["--node-rank 3", "--nnodes"]),
        (["train", "--resume", "empty"], ["empty holds no run"]),
        (["train", "debug", "--resume", "empty"], ["--resume empty", "not debug.", "--set"]),
        (["train", "debug", "--force"], ["--force needs --resume"]),
        (["plan", "lama-8b"], ["lama-8b", "did you mean llama-8b?"]),
        (["plan", "llama-8b", "--gpus", "7"], ["7"]),
        (["analyze"], ["PATH..."]),
        (["analyze", "nowhere"], ["no run at nowhere", "no log or folder", "see `ls runs`"]),
        (["analyze", "empty", "job.log"], ["no run at job.log"]),
        (["analyze", "random.bin"], ["random.bin is no run, no text log"]),
        (["analyze", "empty"], ["empty holds no run, no text log"]),
        (["analyze", RUN, "--format", "xml"], ["--format xml", "text or json"]),
        (["analyze", RUN, "--fail-on", "never"], ["--fail-on never"]),
        (["analyze", RUN, "--why-spike", "soon"], ["--why-spike soon", "step number"]),
        (["analyze", RUN, RUN, "--why-spike", "3"], ["--why-spike 3: name only one run"]),
        (["analyze", "gs://lake/run"], ["no run at gs://lake/run: ", "s3://bucket/prefix or file:///folder"]),
        (["report", "nowhere"], ["no run at nowhere"]),
        (["report", RUN, "--html", "empty"], ["--html empty", "is a folder; name a file"]),
        (["report", RUN, "--steps", "1:3"], ["--steps 1:3", "--chrome-trace FILE"]),
        (["compare", "nowhere", RUN], ["no run at nowhere"]),
        (["compare", RUN, f"{RUN}/"], ["name different runs"]),
        (["export", RUN, "--to", "nothing"], ["'--to': 'nothing' is not one of"]),
        (["rebuild", "empty"], ["empty holds no run"]),
        (["replay", RUN], ["--step"]),
        (["export", RUN], ["--out is missing"]),
        (["export", RUN, "--to", "parquet", "--step", "3"], ["--step 3", "safetensors"]),
        (["export", RUN, "--out", "w.safetensors", "--steps", "1:3"], ["--steps 1:3", "chrome-trace"]),
        (["sql", RUN], ["give a statement"]),
        (["sql", RUN, "FROM steps", "--tables"], ["--tables takes no statement", "'FROM steps'"]),
        (["sql", RUN, "SELECT 'caf\udce9'"], ["character 12 of the statement is not UTF-8"]),
        (["sql", RUN, "FROM steps", "--limit-s", "1e12"], ["--limit-s", "must be at most 31622400"]),
        (["plan", "debug", "--gpus", "1", "--gpu-hours", "inf"], ["'--gpu-hours': must be a finite number"]),
        (["sql", RUN, "DELETE FROM steps"], ["DELETE is not allowed"]),
        (["sql", RUN, "SELECT nothing FROM steps"], ["nothing", "clause; Candidate"]),
        (["sql", RUN, "FROM nosuch"], ["nosuch does not exist", "; --tables lists the tables"]),
        (["dashboard", "--port", "abc"], ["--port", "must be a whole number"]),
        (["sql", RUN, "FROM '/etc/passwd'"], ["passwd"]),
        (["sql", RUN, "FROM steps", "--format", "xml"], ["--format xml"]),
        (["top"], ["Missing argument 'RUN', for example `rankscope top runs/latest`."]),
        (["top", "nowhere"], ["no run at nowhere"]),
        (["top", RUN, "--every-s", "1e12"], ["--every-s", "must be at most 31622400"]),
        (["top", ""], ["'RUN': is empty; name a path"]),
        (["analyze", RUN, ""], ["'PATH...': is empty; name a path"]),
        (["report", RUN, "--html", ""], ["'--html': is empty; name a path"]),
        (["share", RUN, "--last-steps", "0"], ["'--last-steps': must be at least 1"]),
        (["top", RUN, "--every-s", "inf"], ["--every-s"]),
        (["top", "runs"], ["runs is a folder of runs", "for example runs/latest"]),
        (["top", "s3://lake/runs/a"], ["no run at s3://lake/runs/a: ", "an address is read by"]),
        (["share", "nowhere"], ["no run at nowhere"]),
        (["share", RUN, "--out", "empty"], ["--out empty", "name a file"]),
        (["stacks", "4194304999"], ["4194304999"]),
        (["drill", "debug", "--faults", "nan_grd"], ["nan_grd", "did you mean nan_grad?"]),
        (["drill", "--script", "fine.py", "--faults", "kil"], ["--faults kil", "did you mean kill?"]),
        (["drill", "debug", "--html", "missing/drill.html"], ["--html missing/drill.html", "no folder missing"]),
        (["preflight", "--runs", "broken.toml"], ["--runs broken.toml is a file", "name a folder"]),
        (["collect-evidence", "--into", "broken.toml"], ["--into broken.toml", "name a folder"]),
        (["dashboard", "nowhere"], ["no folder nowhere: name the folder that holds the runs"]),
        (["dashboard", "broken.toml"], ["broken.toml is a file", "name the folder"]),
        (["run", "nothing.py"], ["nothing.py"]),
        (["run", "broken.py"], ["broken.py", "not a Python script", "line 2"]),
        (["run", "-m", "no_such.module"], ["-m no_such.module", "no module no_such"]),
        (["run", "-m", "package.trian"], ["-m package.trian", "no module package.trian"]),
        (["run", "-m", "package"], ["-m package", "a package without __main__.py"]),
        (["run", "--run-dir", "empty/..", "fine.py"], ["--run-dir empty/..", "not a run"]),
        (["run"], ["name a script"]),
        (["run", "--nproc-per-node", "2"], ["required: SCRIPT", "rankscope run --help"]),
        (["run", "--bogus", "2", "train.py"], ["--bogus"]),
        (["run", "--nproc-per-node", "two", __file__], ["--nproc-per-node two", "give a number"]),
        (["run", "--nproc-per-node", "0", __file__], ["--nproc-per-node 0", "1 or more"]),
        (["run", "--nnodes", "few", __file__], ["--nnodes few", "MIN:MAX"]),
        (["run", "--set", "model.dim=64", __file__], ["model", "rankscope train"]),
        (["run", "--set", "publish.adress=x", __file__], ["publish.adress", "address"]),
        (["run", "--set", "probes.retian=window", __file__], ["probes.retian", "did you mean retain"]),
        (["run", "--set", "alerts.command=mail 'ops", __file__], ["alerts.command = (redacted)", "not a command line"]),
        (["run", "--set", "metrics.listen=9400", __file__], ["metrics.listen = '9400'", "HOST:PORT"]),
        (["collect", RUN], ["Missing option '--into'"]),
        (["collect", "nowhere", "--into", "all"], ["no run at nowhere"]),
        (["collect", RUN, "--into", "broken.toml"], ["broken.toml"]),
        (["fleet"], ["RUNS_DIR"]),
        (["fleet", "nowhere"], ["no folder nowhere: name the folder"]),
        (["fleet", "broken.toml"], ["broken.toml is a file", "name the folder"]),
        (["watch", RUN, "--tls-cert", "cert.pem"], ["--tls-cert needs --listen HOST:PORT"]),
        (["fleet", "empty"], ["empty holds no run: name the folder that holds the runs"]),
        (["fleet", "runs/latest"], ["runs/latest is a run: name the folder that holds the runs, runs"]),
        (["preflight", "--fleet", RUN], ["is a run: name the folder that holds the runs, runs"]),
        (["mcp", RUN], ["is a run: name the folder that holds the runs, runs"]),
        (["fleet", "runs", "--exclude", "lsf"], ["--exclude lsf", "slurm or kubernetes"]),
        (["fleet", "runs", "runs/"], ["runs is given twice"]),
        (["fleet", "runs", "--exclude", "slurm", "--format", "json"], ["leave out --format json"]),
        (["fleet", "s3://lake/runs"], ["no folder s3://lake/runs: ", "an address is read by"]),
        (["mcp", "nowhere"], ["no folder nowhere: name the folder"]),
        (["mcp", "runs", "--port", "99999"], ["--port"]),
        (["note", "nowhere", "--tag", "a"], ["no run at nowhere"]),
        (["note", RUN, "--tag", "two words"], ["tag 'two words'", "without spaces"]),
        (["note", RUN, "--format", "xml"], ["--format xml"]),
        (["doctor", "nowhere"], ["nowhere"]),
        (["doctor", "--runs", "broken.toml"], ["broken.toml"]),
        (["doctor", "--dcgm-url", "nothing"], ["--dcgm-url nothing"]),
    ],
    ids=lambda value: " ".join(value)[:50] if isinstance(value, list) else None,
)
def test_a_mistake_is_one_line(
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    arguments: list[str],
    words: list[str],
) -> None:
    (run,) = (place / "runs").glob("bare-*")
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "argv", ["rankscope", *(argument.format(run=run) for argument in arguments)])
    runs = place / "runs"
    before = {path.name: path.readlink() if path.is_symlink() else None for path in runs.iterdir()}
    with pytest.raises(SystemExit) as ended:
        main()
    told = capfd.readouterr()
    assert ended.value.code == 2, told
    lines = told.err.strip().splitlines()
    assert told.out == ""
    assert len(lines) == 1 or arguments[0] == "sql", lines  # DuckDB points at the place in the statement
    assert lines[0].startswith(("rankscope: ", "rankscope watch: "))
    assert all(word in lines[0] for word in words), lines
    assert "pg_" not in lines[0], "no table of a user"
    assert {path.name: path.readlink() if path.is_symlink() else None for path in runs.iterdir()} == before


def test_a_watch_of_a_node_that_the_run_lacks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from probes.tape.attempts import claim
    from tests.factories import empty_run

    run = empty_run(tmp_path, world_size=1)
    claim(run, nodes=1)
    before = sorted(run.path.rglob("*"))
    monkeypatch.setattr(sys, "argv", ["rankscope", "watch", str(run.path), "--node-rank", "7"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert capfd.readouterr().err == f"rankscope: --node-rank 7: {run.path} has one node, which has index 0\n"
    assert sorted(run.path.rglob("*")) == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["watch", RUN, "--listen", "127.0.0.1:{port}"], ["--listen 127.0.0.1:{port}", "choose another port"]),
        (["mcp", "runs", "--port", "{port}"], ["cannot listen on 127.0.0.1:{port}", "choose another --port"]),
    ],
    ids=["watch", "mcp"],
)
def test_a_port_in_use_is_one_line(
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    arguments: list[str],
    words: list[str],
) -> None:
    (run,) = (place / "runs").glob("bare-*")
    monkeypatch.chdir(place)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        given = {"run": run, "port": taken.getsockname()[1]}
        monkeypatch.setattr(sys, "argv", ["rankscope", *(argument.format(**given) for argument in arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
    assert ended.value.code == 2
    (line,) = capfd.readouterr().err.strip().splitlines()
    assert all(word.format(**given) in line for word in words), line


def test_a_package_that_is_installed_and_cannot_be_imported_is_one_line(tmp_path: Path) -> None:
    from tests.factories import empty_run

    run = empty_run(tmp_path / "place", world_size=1)
    (tmp_path / "duckdb.py").write_text('raise ImportError("libmissing.so: cannot open", name="duckdb")\n')
    search = os.pathsep.join((str(tmp_path), str(Path(__file__).parents[2])))
    command = [sys.executable, "-m", "rankscope", "sql", str(run.path), "SELECT 1"]
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": search},
        cwd=tmp_path / "place",
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "duckdb cannot be imported (libmissing.so: cannot open): pip install" in done.stderr


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], "name a script"),
        (["--nproc-per-node", "two", "train.py"], "--nproc-per-node two: give a number of ranks"),
        (["--nnodes=1", "--nproc_per_node=2", "nothing.py", "--lr", "1"], "nothing.py: no such script"),
        (["--nproc-per-node=2", "/"], "/: is a folder; name a file"),
    ],
)
def test_common_mistakes_of_run_are_refused_before_torch_is_imported(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], given: list[str], words: str
) -> None:
    monkeypatch.setitem(sys.modules, "torch.distributed", None)
    monkeypatch.setattr(sys, "argv", ["rankscope", "run", *given])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert words in capfd.readouterr().err
