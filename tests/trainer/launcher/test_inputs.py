"""What ranks could not open or carry out is told by the launcher in one line, before a run has a folder."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file

from probes.tape.rundir import RunError
from trainer.config.config import Config
from trainer.config.load import ConfigError
from trainer.launcher.inputs import check_memory
from trainer.launcher.start import Options, launch_run
from trainer.layout.resolve import resolve
from trainer.model.size import num_parameters


def refusal(overrides: list[str], nproc: int = 0) -> str:
    with pytest.raises(ConfigError) as refused:
        launch_run(
            Options(overrides=[*overrides, "train.device=cpu"], nproc=nproc),
            version="0",
            console=Console(file=io.StringIO()),
        )
    return str(refused.value)


DDP = ["parallel.dp_replicate=2", "parallel.dp_shard=1"]
PIPELINE = ["parallel.pp=2", "parallel.dp_shard=1"]

SETTINGS: dict[str, tuple[list[str], str]] = {
    "nothing to evaluate on": (["train.eval_interval=5", "data.validation_ratio=0"], "train.eval_interval = 5: "),
    "a rank that is not there": (["profiler.interval=5", "profiler.ranks=[0,9]"], "there is no rank 9 of 1"),
    "a separator beyond the vocabulary": (["data.document_mask=true", "data.separator=5000"], "data.separator = 5000"),
    "zero-1 with shards": (["parallel.zero1=true", "parallel.dp_shard=2"], "needs DDP, here it is fsdp"),
    "a loss in chunks in a pipeline": (["train.chunked_loss=true", *PIPELINE], "train.chunked_loss = true: needs"),
    "fp8 without a layer for it": (
        ["train.float8=tensorwise", "train.float8_emulated=true", "model.dim=24", "model.num_heads=2"],
        "model.dim = 24 must be a multiple of 16",
    ),
    "fp8 without a matrix to gather in it": (
        [
            "train.float8=tensorwise",
            "train.float8_emulated=true",
            "parallel.float8_all_gather=true",
            "parallel.dp_shard=3",
            "train.global_batch_size=3",
        ],
        "no matrix has rows for 3 equal shards",
    ),
    "late, compressed": (
        ["recovery.verdict=late", "parallel.gradient_compression=topk", *DDP],
        "recovery.verdict = 'late': gradient compression",
    ),
    "late, in a pipeline": (["recovery.verdict=late", *PIPELINE], "recovery.verdict = 'late': supported with data"),
    "metrics for everybody": (["metrics.listen=10.0.0.1:9400"], "metrics.listen: 10.0.0.1:9400 can"),
    "metrics without a key": (
        ["metrics.listen=127.0.0.1:0", f"metrics.tls_cert={__file__}"],
        "needs a certificate and",
    ),
    "no certificate": (
        ["metrics.listen=127.0.0.1:0", f"metrics.tls_cert={__file__}", f"metrics.tls_key={__file__}"],
        "are not a certificate and its key",
    ),
    "captures without records": (["profiler.on_anomaly=true", "probes.enabled=false"], "profiler.on_anomaly needs"),
    "stragglers without records": (["recovery.on_straggler=exclude", "probes.enabled=false"], "on_straggler needs"),
    "no URL": (["probes.dcgm_url=localhost:9400"], "probes.dcgm_url = 'localhost:9400': must begin with http"),
    "an unknown address": (["checkpoint.remote=foo://x/y"], "checkpoint.remote = foo://x/y: cannot be opened"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name.startswith("fp8"):
        pytest.importorskip("torchao")
    monkeypatch.chdir(tmp_path)
    overrides, words = SETTINGS[name]
    assert words in refusal(overrides)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("overrides", "nproc", "words"),
    [
        (["model.dim=1000000"], 1, "model with 48,000,"),
        (["model.vocab_size=1000000000", "optim.name=adamw8bit"], 1, "model with 256,000,"),
        (["model.max_seq_len=100000000000"], 1, "model.max_seq_len = 100000000000: the rotary angles of 1 rank need"),
        (
            ["train.global_batch_size=10000000000"],
            1,
            "train.global_batch_size = 10000000000: the tokens of 1 rank need",
        ),
        (
            ["data.prefetch=1000000000", "data.num_workers=1"],
            1,
            "data.prefetch = 1000000000: the batches of 1 rank need",
        ),
        (["train.global_batch_size=1000000"], 1000000, "--nproc-per-node 1000000: the processes of 1000000 ranks"),
        (["data.num_workers=16777216"], 2, "data.num_workers = 16777216: the processes of 2 ranks need at least"),
    ],
)
def test_more_than_the_memory_of_this_host(
    overrides: list[str], nproc: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert refusal(overrides, nproc).startswith(words)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("parallel", "copies"),
    [({"dp_replicate": 4, "dp_shard": 1}, 4), ({"dp_shard": 4}, 1), ({"dp_shard": 2, "dp_replicate": 2}, 2),
     ({"pp": 2, "tp": 2, "dp_shard": 1}, 1)],
)  # fmt: skip
def test_state_counts_once_for_each_replica(
    parallel: dict[str, int], copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config.model_validate({"parallel": parallel})
    plan = resolve(config, 4)
    state, rest = 16 * num_parameters(config.model), 4 * ((16 << 20) + 256 * 16 * plan.local_batch_size + 1024 * 32 * 4)
    for spare in (0, -1):
        values = {"memory_total_bytes": float(copies * state + rest + spare)}
        monkeypatch.setattr("watch.health.host.Host._memory", lambda _, values=values: values)
        if not spare:
            check_memory(config, plan, num_ranks=4, on_host=True)
            continue
        check_memory(config, plan, num_ranks=4, on_host=False)  # it is on the devices
        with pytest.raises(ConfigError, match="of 4 ranks need at least"):
            check_memory(config, plan, num_ranks=4, on_host=True)


def _weights(path: Path) -> None:
    save_file({"embed.weight": torch.zeros(3, 3)}, path)


def _folder_with_a_pipe(path: Path) -> None:
    path.mkdir()
    os.mkfifo(path / "pipe")


FILES: dict[str, tuple[str, Callable[[Path], object], str, str]] = {
    "no text": ("a.txt", lambda path: path.write_text(""), "data.path=['{}']", "holds no text"),
    "a pipe": ("a.txt", os.mkfifo, "data.path=['{}']", "is neither a file nor a folder"),
    "a folder with a pipe": ("a", _folder_with_a_pipe, "data.path=['{}']", "/a']: holds no text"),
    "too short": ("a.txt", lambda path: path.write_text("short"), "data.path=['{}']", "fewer than one sequence"),
    "no sidecar": ("a.bin", lambda path: path.write_bytes(b"ab"), "data.path=['{}']", "needs a.json"),
    "no table": ("a.parquet", lambda path: path.write_bytes(b"PAR1"), "data.path=['{}']", "cannot be read"),
    "no column": (
        "a.parquet",
        lambda path: pq.write_table(pa.table({"other": ["x"]}), path),
        "data.path=['{}']",
        "a.parquet has other",
    ),
    "too large tokens": (
        "a.parquet",
        lambda path: pq.write_table(pa.table({"input_ids": [[1, 300]] * 500}), path),
        "data.path=['{}']",
        "the data has tokens up to 300",
    ),
    "not prepared": ("a.txt", lambda path: path.write_text("x"), "data.validation={{a='{}'}}", "is not a folder of"),
    "no weights": ("a", lambda path: path.mkdir(), "model.weights={}", "no .safetensors file found"),
    "damaged weights": ("a.safetensors", lambda path: path.write_bytes(b"x"), "model.weights={}", "cannot be read"),
    "other shapes": ("a.safetensors", _weights, "model.weights={}", "embed.weight is 3 x 3"),
}


@pytest.mark.parametrize("name", FILES)
def test_files(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file, write, override, words = FILES[name]
    write(tmp_path / file)
    cache = tmp_path / "cache"
    assert words in refusal([override.format(tmp_path / file), f"data.cache_dir={cache}"])
    assert {path.name for path in tmp_path.iterdir()} <= {file, cache.name}


def test_a_folder_whose_name_no_system_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("text " * 200)
    options = Options(overrides=["run.dir=a\0b", "data.path=a.txt", "data.seq_len=16", "train.device=cpu"])
    with pytest.raises(
        RunError, match=r"^cannot make the run's folder .*: embedded null byte; choose another run\.dir$"
    ):
        launch_run(options, version="0", console=Console(file=io.StringIO()))


def test_inductor_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert "needs a C++ compiler" in refusal(["train.compile=true"])
    assert not [*tmp_path.iterdir()]
