"""Secrets are redacted, and nothing that a diagnosis needs."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from probes.tape.redaction.secrets import Redactor, redacted_command, with_secrets, without_secrets
from probes.tape.rundir import SECRETS, RunDir
from tests.probes.tape.secret_forms import BODIES, BODY, FORMS


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("WANDB_API_KEY=0123abcd4567ef89", "0123abcd4567ef89"),
        ("export HF_TOKEN='hf_abcdefghijklmnopqrstuvwx'", "hf_abcdefghijklmnopqrstuvwx"),
        ('{"password": "hunter22"}', "hunter22"),
        ("{'db_password': 'hunter22'}", "hunter22"),
        ('{"detail": "{\\"secret\\": \\"hunter22\\"}"}', "hunter22"),
        ("db_password='correct horse, battery; staple'", "horse, battery; staple"),
        ("train.py --api-key hunter22 --lr 3", "hunter22"),
        ("Authorization: Bearer abcdef0123456789abcdef", "abcdef0123456789abcdef"),
        ("got 401 with bearer abcdef0123456789abcdef", "abcdef0123456789abcdef"),
        ("s3 at https://me:hunter22@store/bucket", "hunter22"),
        ("posting to https://hooks.slack.com/services/T0/B0/abcdefgh", "abcdefgh"),
        ("key AKIAABCDEFGHIJKLMNOP used", "AKIAABCDEFGHIJKLMNOP"),
        ("ghp_0123456789abcdefghijklmnopqrst", "ghp_0123456789abcdefghijklmnopqrst"),
    ],
)
def test_secrets_are_redacted(text: str, secret: str) -> None:
    found = Redactor()(text)
    assert secret not in found
    assert "(redacted)" in found
    assert Redactor()(found) == found


@pytest.mark.parametrize("form", FORMS)
def test_secrets_of_many_services_and_notations_are_redacted(form: str) -> None:
    for text in (form, f"{{'message': {form!r}}}", f"first\n[rank1]: {form}\nlast"):
        found = Redactor()(text.replace("{}", BODY))
        assert [body for body in BODIES if body in found] == []
        assert "(redacted)" in found
        assert Redactor()(found) == found


@pytest.mark.parametrize(
    "text",
    [
        "step 40: tokens/s 1024.5, num_tokens=4096, token: 50256, token_count: 12",
        "tokenizer=gpt2 tokenizer: byte-level",
        "KeyError: 'blocks.3.mlp.up.weight' at train.py:12",
        "https://pytorch.org:443/docs and tcp://10.0.0.1:29500",
        "RuntimeError: author=someone, secret=None, password: (redacted)",
        "The secret of a fast loader is prefetch",
        '__all__ = ["flops_per_token", "looks_up_tokens", "num_padded"]',
        "PWD=/home/me/run OLDPWD=~/x and os.getcwd()",
        "commit a1b2c3d4a1b2c3d4a1b2c3d4a1b2c3d4a1b2c3d4 of sk-learn, task_sk_1, gh_actions, hf_hub_download",
        "kind: ConfigMap\ndata:\n  seed: abcdefgh\n",
        "mlp.key_proj.weight key=3 keys: 12, dict_keys(['a', 'b']), KeyError: 'token'",
        "curl https://pytorch.org -o x and mysql is down, basic training, cookie cutter",
    ],
)
def test_plain_text_is_not_redacted(text: str) -> None:
    assert Redactor()(text) == text


def test_secret_settings_and_named_values_are_redacted_and_json_stays_valid() -> None:
    manifest = {
        "config": {"alerts": {"webhook": "https://example.org/h/xyz123", "command": ""}, "optim": {"lr": 0.1}},
        "command": ["rankscope", "train", "--set", "alerts.webhook=https://example.org/h/xyz123"],
        "versions": {"my_token": "plain-word", "tokens": "4096 per step"},
    }
    redactor = Redactor.of(manifest)
    found = json.dumps(redactor.within(manifest))
    assert "xyz123" not in found
    assert "plain-word" not in found
    assert "4096 per step" in found
    assert json.loads(redactor(json.dumps(manifest)))["config"]["optim"] == {"lr": 0.1}


MANIFEST = {
    "config": {
        "alerts": {"webhook": "https://example.org/h/xyz123", "command": "", "at_most_per_hour": 60},
        "data": {"path": ["a.txt", "s3://me:hunter22@store/x"]},
        "metrics": {"token_file": "/etc/token"},
        "logger": {"api_key": "hunter22"},
    },
    "command": [
        "train.py",
        "--api-key",
        "hunter22",
        "--lr",
        "3",
        "--auth-token=hunter22",
        "https://example.org/h/xyz123",
    ],
    "cwd": "/home/me",
}


def test_a_manifest_is_split_and_put_together_again() -> None:
    public, secrets = without_secrets(MANIFEST)
    text = json.dumps(public)
    assert "xyz123" not in text
    assert "hunter22" not in text
    assert public["config"]["metrics"] == MANIFEST["config"]["metrics"]  # type: ignore[index]
    assert with_secrets(public, secrets)["config"] == MANIFEST["config"]
    again, kept = without_secrets(public, secrets)
    assert (again, kept) == (public, secrets), "redacted once is redacted, and nothing is lost"
    assert without_secrets(public, {})[1] == {}


def test_a_run_keeps_its_secrets_in_a_separate_file(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, name="x", manifest=dict(MANIFEST))
    assert "hunter22" not in (run.path / "run.json").read_text()
    assert (run.path / SECRETS).stat().st_mode & 0o777 == 0o600
    run.write_manifest(run.manifest() | {"versions": {}})
    assert run.private_manifest()["config"] == MANIFEST["config"]
    cleared = run.private_manifest()
    cleared["config"]["alerts"]["webhook"] = ""
    run.write_manifest(cleared)
    assert "xyz123" not in (run.path / SECRETS).read_text()


def test_a_run_without_secrets_has_no_such_file(tmp_path: Path) -> None:
    run = RunDir.create(
        tmp_path, name="x", manifest={"config": {"optim": {"lr": 0.1}}, "command": ["train", "--lr", "3"]}
    )
    assert not (run.path / SECRETS).exists()


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (["x.py", "--api-key", "abc", "y"], ["x.py", "--api-key", "(redacted)", "y"]),
        (["x.py", "-api_key", "abc"], ["x.py", "-api_key", "(redacted)"]),
        (["x.py", "--use-token", "--lr", "3"], ["x.py", "--use-token", "--lr", "3"]),
        (["x.py", "--tokenizer", "gpt2", "--num-tokens", "12"], ["x.py", "--tokenizer", "gpt2", "--num-tokens", "12"]),
        (["HF_TOKEN=abcdef", "x.py"], ["HF_TOKEN=(redacted)", "x.py"]),
        (["--set=alerts.command=mail me"], ["--set=alerts.command=(redacted)"]),
    ],
)
def test_command_lines(given: list[str], shown: list[str]) -> None:
    assert redacted_command(given) == shown


def test_a_long_line_takes_linear_time() -> None:
    begin = time.process_time()
    for text in ("x" * 300_000, "a." * 150_000, "://" * 100_000, "token " * 50_000, "https://" * 40_000):
        Redactor()(text)
    assert time.process_time() - begin < 60
