"""Every mistake in a configuration is one line that names the key, the value and what is allowed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from probes.tape.redaction.secrets import redacted_command
from trainer.config.config import Config
from trainer.config.load import ConfigError, given_settings, load_config, usable_settings
from trainer.layout.resolve import resolve


def test_defaults_are_a_configuration() -> None:
    config = load_config(None)
    assert config == Config()
    assert resolve(config, 4).sizes == {"pp": 1, "dp_replicate": 1, "dp_shard": 4, "ep": 1, "cp": 1, "tp": 1}


def test_file_then_overrides(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[train]\nsteps = 7\n[optim]\nbetas = [0.8, 0.9]\n[data]\npath = ["a"]\n')
    config = load_config(path, ["train.steps=9", "run.name=007", "parallel.schedule=gpipe", "data.path=x.txt, y.txt"])
    assert (config.train.steps, config.optim.betas) == (9, (0.8, 0.9))
    assert (config.run.name, config.parallel.schedule) == ("007", "gpipe")
    assert config.data.path == ["x.txt", "y.txt"]
    assert load_config(None, ['data.path=["a,b"]', "optim.lr=1", "data.pin_memory=false"]).data.path == ["a,b"]


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("sh -c 'cat > /tmp/x'", "sh -c 'cat > /tmp/x'"),
        ("\"sh -c 'true'\"", "sh -c 'true'"),
        ("'a b' 'c d'", "'a b' 'c d'"),
        ("'true'", "true"),
    ],
)
def test_quotes_inside_a_command_are_kept(text: str, command: str) -> None:
    assert load_config(None, [f"alerts.command={text}"]).alerts.command == command


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.stepz=3", ["train.stepz = 3", "did you mean steps?"]),
        ("train.zzz=3", ["train.zzz = 3", "allowed are steps, global_batch_size"]),
        ("trian.steps=3", ["trian", "did you mean train?"]),
        ("train.steps=true", ["train.steps = True", "must be a whole number"]),
        ("train.steps=ten", ["train.steps = 'ten'", "must be a whole number"]),
        ("train.steps=0", ["train.steps = 0", "must be at least 1"]),
        ("optim.lr=-1", ["optim.lr = -1", "must be above 0"]),
        ("optim.lr=inf", ["optim.lr = inf", "finite"]),
        ("optim.betas=[0.9, 1.5]", ["optim.betas = [0.9, 1.5]", "below 1"]),
        ("optim.name=sgd", ["optim.name = 'sgd'", "'adamw', 'muon' or 'adamw8bit'"]),
        ("parallel.schedule=2f2b", ["parallel.schedule = '2f2b'", "'gpipe', '1f1b'"]),
        ("train.precision=fp8", ["train.precision = 'fp8'", "'float32', 'bf16' or 'fp16'"]),
        ("model.num_heads=3", ["model.num_heads = 3", "model.dim = 128"]),
        ("model.num_kv_heads=3", ["model.num_kv_heads = 3", "divide model.num_heads = 4"]),
        ("model.vocab_size=100", ["model.vocab_size = 100", "at least 256"]),
        ("data.seq_len=4096", ["data.seq_len = 4096", "model.max_seq_len = 1024"]),
        ("model.num_experts=1", ["model.num_experts = 1", "2 or more"]),
        ("model.experts_per_token=0", ["model.experts_per_token = 0"]),
        ("run.name=../up", ["run.name = '../up'", "begin with a letter or digit"]),
        ("train.compile=on", ["train.compile = 'on': must be true, false or 'auto'"]),
        ("train.chunked_loss=7", ["train.chunked_loss = 7: must be "]),
        ("checkpoint.remote=s3:/bucket", ["checkpoint.remote = 's3:/bucket'", "s3://bucket/folder"]),
        ("parallel.dp_shard=0", ["parallel.dp_shard = 0", "-1 to fill up"]),
        ("parallel.dp_replicate=-1", ["parallel.dp_replicate = -1", "only one"]),
        ("alerts.command=mail 'ops team", ["alerts.command = (redacted)", "not a command line", "quotation"]),
        ("alerts.webhook=ftp://x", ["alerts.webhook = (redacted)", "begin with http:// or https://"]),
        ("alerts.webhook=https://", ["alerts.webhook"]),
        ("alerts.webhook=https:///path", ["alerts.webhook = (redacted)", "a URL with a host"]),
        ("alerts.webhook=https://host:99999/", ["alerts.webhook", "a URL with a host"]),
        ("metrics.listen=9400", ["metrics.listen = '9400'", "HOST:PORT", "127.0.0.1:9400"]),
        ("metrics.listen=127.0.0.1:99999", ["metrics.listen = '127.0.0.1:99999'", "HOST:PORT"]),
        ("alerts.comand=curl", ["alerts.comand = (redacted)", "did you mean command?"]),
        ("alerts.min_severity=high", ["alerts.min_severity = 'high'", "'critical'"]),
        ("publish.address=lake", ["publish.address: ", "file:// or s3://"]),
        ("train.steps", ["--set train.steps", "section.key=value"]),
        ("steps=3", ["--set steps=3", "section.key=value"]),
    ],
)
def test_mistake_in_a_value(override: str, expected: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, [override])
    check_line(str(caught.value), expected)


@pytest.mark.parametrize("value", ['"x"', "[1, 2]", "3"])
def test_a_value_in_place_of_a_section(tmp_path: Path, value: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(f"train = {value}\n")
    for overrides in ([], ["train.steps=3"]):
        with pytest.raises(ConfigError, match=r"(^|run\.toml: )train = .*: is a section, not a value$"):
            load_config(path, overrides)


def test_a_mistake_names_the_file_or_the_option_that_holds_it(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[train]\nstepz = 5\n[model]\nnum_heads = 4\n")
    with pytest.raises(ConfigError, match=rf"^{path}: train\.stepz = 5: unknown key"):
        load_config(path, ["optim.lr=0.1"])
    path.write_text("[train]\nsteps = 5\n[model]\nnum_heads = 4\n")
    with pytest.raises(ConfigError, match=r"^--set train\.steps = 'many': must be"):
        load_config(path, ["train.steps=many"])
    with pytest.raises(ConfigError, match=r"^model\.num_heads = 4: "):  # neither alone is wrong
        load_config(path, ["model.dim=130"])
    with pytest.raises(ConfigError, match=r"^--set optim\.lr = -1: "):
        given_settings(["optim.lr=-1"])


@pytest.mark.parametrize(
    ("overrides", "world_size", "expected"),
    [
        (["parallel.dp_replicate=3"], 4, ["parallel.dp_shard = -1", "dp_replicate 3", "world size 4"]),
        (["parallel.dp_shard=3"], 4, ["makes 3 ranks", "world size is 4", "--set parallel.dp_shard=-1"]),
        (["parallel.tp=3"], 3, ["model.num_heads = 4", "divisible by parallel.tp = 3"]),
        (["parallel.tp=4", "model.num_kv_heads=2"], 4, ["model.num_kv_heads = 2", "parallel.tp = 4"]),
        (["parallel.tp=4", "model.vocab_size=257"], 4, ["model.vocab_size = 257", "parallel.tp = 4"]),
        (["parallel.tp=4", "data.seq_len=18"], 4, ["data.seq_len = 18", "parallel.tp = 4"]),
        (["train.global_batch_size=6"], 4, ["train.global_batch_size = 6", "4 data ranks"]),
        (["train.micro_batch_size=3"], 4, ["train.micro_batch_size = 3", "4 sequences"]),
        (["parallel.pp=8"], 8, ["parallel.pp = 8", "model.num_layers = 4"]),
        (["parallel.pp=4", "parallel.schedule=interleaved_1f1b"], 4, ["8 stages", "model.num_layers = 4"]),
        (["parallel.pp=2", "parallel.stages_per_rank=2"], 2, ["parallel.stages_per_rank = 2", "1f1b takes 1"]),
        (["parallel.pp=2", "parallel.stage_costs=[1, 2]"], 2, ["parallel.stage_costs = 2 numbers", "num_layers = 4"]),
        (["parallel.stage_costs=[1, 1, 1, 2]"], 4, ["parallel.stage_costs = 4 numbers", "needs parallel.pp above 1"]),
        (["parallel.pp=2", "data.document_mask=true"], 2, ["data.document_mask = true", "parallel.pp = 1"]),
        (["parallel.pp=2", "model.tie_embeddings=true"], 2, ["model.tie_embeddings = true", "parallel.pp = 1"]),
        (["parallel.pp=2", "train.micro_batch_size=16"], 2, ["makes 1 microbatch a step", "at least parallel.pp = 2"]),
        (
            ["parallel.pp=2", "parallel.schedule=zbv_zero_bubble", "train.activation_checkpointing=selective"],
            2,
            ["train.activation_checkpointing = 'selective'", "allowed: none, full, every_n"],
        ),
        (["parallel.dp_replicate=2", "parallel.zero1=true"], 4, ["parallel.zero1 = true", "needs DDP", "hsdp"]),
        (
            ["parallel.dp_replicate=-1", "parallel.dp_shard=1", "parallel.zero1=true", "train.global_batch_size=64"],
            64,
            ["parallel.zero1 = true", "64 replicas", "36", "use dp_shard"],
        ),
        (
            ["parallel.dp_replicate=4", "parallel.zero1=true", "parallel.cpu_offload=optimizer"],
            4,
            ["parallel.zero1 = true", "parallel.cpu_offload = 'optimizer'"],
        ),
        (
            ["parallel.dp_replicate=4", "parallel.reduce_dtype=bf16"],
            4,
            ["parallel.reduce_dtype = 'bf16'", "needs FSDP"],
        ),
        (
            ["parallel.pp=2", "parallel.dp_shard=2", "parallel.reduce_every_microbatch=true"],
            4,
            ["needs parallel.pp = 1"],
        ),
        (["parallel.gradient_compression=fp16"], 4, ["parallel.gradient_compression = 'fp16'", "needs DDP", "fsdp"]),
        (
            [
                "parallel.dp_replicate=2",
                "parallel.dp_shard=1",
                "parallel.pp=2",
                "parallel.gradient_compression=powersgd",
            ],
            4,
            ["parallel.gradient_compression = 'powersgd'", "needs parallel.pp = 1"],
        ),
        (
            ["train.compile=true", "parallel.pp=2", "parallel.schedule=zbv_zero_bubble"],
            2,
            ["train.compile = true", "cannot be split", "interleaved_1f1b"],
        ),
        (["parallel.async_tp=true"], 2, ["parallel.async_tp = true", "parallel.tp above 1"]),
        (
            ["parallel.async_tp=true", "parallel.tp=2", "parallel.sequence_parallel=false"],
            2,
            ["parallel.async_tp = true", "parallel.sequence_parallel = true"],
        ),
        (
            ["parallel.async_tp=true", "parallel.tp=2", "train.compile=false"],
            2,
            ["parallel.async_tp = true", "train.compile"],
        ),
        (
            ["parallel.async_tp=true", "parallel.tp=2", "train.backend=gloo"],
            2,
            ["parallel.async_tp = true", "train.backend = 'nccl'"],
        ),
        (
            ["parallel.cp=2", "parallel.cp_exchange=ring", "data.seq_len=18"],
            2,
            ["data.seq_len = 18", "4, the chunks of a ring"],
        ),
        (
            ["parallel.cp=2", "parallel.cp_exchange=ring", "model.num_experts=4", "model.capacity_factor=1.0"],
            2,
            ["parallel.cp_exchange = 'ring'", "model.capacity_factor = 1.0", "allowed: gather"],
        ),
        (["parallel.ep=2"], 4, ["parallel.ep = 2", "model.num_experts"]),
        (
            ["model.expert_products=grouped", "model.num_experts=4", "model.expert_dim=90"],
            1,
            ["the experts' width = 90", "multiple of 4"],
        ),
        (["parallel.ep=4", "model.num_experts=6"], 4, ["model.num_experts = 6", "parallel.ep = 4"]),
        (["parallel.tp=4", "model.num_experts=6"], 4, ["model.num_experts = 6", "parallel.tp = 4"]),
        (
            ["parallel.ep=2", "parallel.tp=4", "model.num_experts=4"],
            8,
            ["model.num_experts = 4", "parallel.ep x tp = 8"],
        ),
        (
            ["parallel.tp=4", "parallel.sequence_parallel=false", "model.num_experts=4", "data.seq_len=18"],
            4,
            ["data.seq_len = 18", "parallel.tp = 4"],
        ),
        (
            ["parallel.ep=2", "parallel.dp_shard=3", "model.num_experts=4", "train.global_batch_size=12"],
            6,
            ["model.dim = 128", "parallel.dp_shard = 3"],
        ),
        (
            ["parallel.ep=2", "parallel.cp=3", "model.num_experts=4", "data.seq_len=96"],
            6,
            ["model.dim = 128", "parallel.cp = 3"],
        ),
        (
            ["optim.name=muon", "parallel.dp_replicate=4", "parallel.dp_shard=1", "parallel.zero1=true"],
            4,
            ["optim.name = 'muon'", "parallel.zero1 = true", "use dp_shard"],
        ),
        (
            ["optim.name=muon", "parallel.cpu_offload=all"],
            4,
            ["optim.name = 'muon'", "parallel.cpu_offload = 'all'"],
        ),
        (
            ["optim.name=muon", "model.num_experts=4"],
            4,
            ["optim.name = 'muon'", "model.num_experts = 4", "use adamw"],
        ),
        (
            ["optim.name=adamw8bit", "parallel.dp_replicate=4", "parallel.dp_shard=1", "parallel.zero1=true"],
            4,
            ["optim.name = 'adamw8bit'", "parallel.zero1 = true", "use dp_shard"],
        ),
        (
            ["optim.name=adamw8bit", "model.dim=384", "model.num_heads=6", "parallel.tp=2"],
            2,
            ["optim.name = 'adamw8bit'", "parallel.tp = 2", "model.dim = 384", "multiples of 128"],
        ),
        (["parallel.cp=4", "data.seq_len=18"], 4, ["data.seq_len = 18", "parallel.cp = 4"]),
        (["parallel.cp=2", "data.document_mask=true"], 2, ["data.document_mask = true", "parallel.cp = 1"]),
        ([], 0, ["world size = 0"]),
    ],
)
def test_impossible_layout(overrides: list[str], world_size: int, expected: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(load_config(None, overrides), world_size)
    check_line(str(caught.value), expected)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"[train\nsteps = 3", "not valid TOML"),
        (b"\xff\xfe", "not UTF-8"),
        (b"train = 3", "train = 3"),
        (b"[train]\nsteps = 3\nsteps = 4", "not valid TOML"),
    ],
)
def test_file_that_is_no_configuration(tmp_path: Path, content: bytes, expected: str) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    check_line(str(caught.value), [expected])


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the configuration"):
        load_config(tmp_path / "none.toml")


@pytest.mark.parametrize("address", ["", "127.0.0.1:0", "[::1]:9400", ":9400", "localhost:9400"])
def test_an_address_for_metrics(address: str) -> None:
    assert load_config(None, [f"metrics.listen={address}"]).metrics.listen == address


def test_wrong_settings_are_left_out_one_by_one() -> None:
    given = {
        "probes": {"enabled": False, "retian": "window", "budget_mb": 5},
        "profiler": {"interval": 10, "ranges": True, "active_steps": 2},
        "trackers": {"to": ["wandb", "mlflow"], "every_s": 1.0},
    }
    kept, problems = usable_settings(given)
    assert kept == {"probes": {"enabled": False}, "profiler": {"active_steps": 2}, "trackers": {"every_s": 1.0}}
    assert [problem.split()[0] for problem in problems] == [
        "probes.retian", "probes.budget_mb", "trackers.to.1", "profiler.interval", "profiler.ranges",
    ]  # fmt: skip
    assert given["probes"] == {"enabled": False, "retian": "window", "budget_mb": 5}


def test_a_tracker_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # what an import system says of a missing module
    with pytest.raises(ConfigError, match=r"trackers.to = wandb: not installed. Run pip install"):
        given_settings(["trackers.to=wandb"])
    assert usable_settings({"trackers": {"to": ["wandb"]}})[0] == {"trackers": {}}


def test_the_first_of_several_mistakes_is_reported() -> None:
    with pytest.raises(ConfigError, match=r"\(and 1 more\)$"):
        load_config(None, ["train.steps=0", "optim.lr=0"])


def test_ranks_are_numbered_with_tp_fastest() -> None:
    plan = resolve(
        load_config(None, ["parallel.dp_replicate=2", "parallel.dp_shard=2", "parallel.tp=2", "parallel.pp=2"]), 16
    )
    assert plan.coordinates(5) == {"pp": 0, "dp_replicate": 1, "dp_shard": 0, "ep": 0, "cp": 0, "tp": 1}
    assert [plan.data_rank(rank) for rank in range(16)] == [0, 0, 1, 1, 2, 2, 3, 3] * 2
    assert plan.mesh_dims == (("pp", 2), ("dp_replicate", 2), ("dp_shard", 2), ("tp", 2))


def test_unused_dimensions_get_no_groups() -> None:
    assert resolve(load_config(None), 1).mesh_dims == ()
    assert resolve(load_config(None), 4).mesh_dims == (("dp_shard", 4),)
    # DDP x TP is FSDP2 with shards of one, which needs that dimension.
    plan = resolve(load_config(None, ["parallel.dp_replicate=2", "parallel.tp=2"]), 4)
    assert plan.mesh_dims == (("dp_replicate", 2), ("dp_shard", 1), ("tp", 2))


def check_line(text: str, expected: list[str]) -> None:
    assert "\n" not in text
    for part in expected:
        assert part in text


def test_a_list_can_be_typed_with_commas() -> None:
    assert load_config(None, ["data.path=a.txt,b.txt"]).data.path == ["a.txt", "b.txt"]
    assert load_config(None, ["trackers.to=tensorboard, wandb"]).trackers.to == ["tensorboard", "wandb"]
    with pytest.raises(ConfigError, match=r"trackers\.to\.1 = 'mlflow': must be 'tensorboard' or 'wandb'"):
        load_config(None, ["trackers.to=wandb,mlflow"])


def test_a_command_line_is_recorded_without_its_secrets() -> None:
    given = [
        "train",
        "--set",
        "alerts.webhook=https://hooks/TOKEN",
        "--set=alerts.command=page --key TOKEN",
        "--set",
        "optim.lr=1",
    ]
    found = redacted_command(given)
    assert "TOKEN" not in " ".join(found)
    assert found == [
        "train",
        "--set",
        "alerts.webhook=(redacted)",
        "--set=alerts.command=(redacted)",
        "--set",
        "optim.lr=1",
    ]


@pytest.mark.parametrize("key", ["checkpoint.remote", "publish.address"])
def test_an_address_with_keys_is_refused_without_repeating_them(key: str) -> None:
    with pytest.raises(ConfigError, match="keys do not belong in an address") as raised:
        load_config(None, [f"{key}=s3://AKIANAME:very-secret@bucket/runs"])
    assert "very-secret" not in str(raised.value)


def test_an_address_of_azure_names_its_container_before_the_account() -> None:
    address = "abfs://checkpoints@account.dfs.core.windows.net/runs"
    assert load_config(None, [f"checkpoint.remote={address}"]).checkpoint.remote == address
