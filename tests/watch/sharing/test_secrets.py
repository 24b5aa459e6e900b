"""Secrets are redacted, and nothing that a diagnosis needs."""

from __future__ import annotations

import json

import pytest

from watch.sharing.secrets import Redactor


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("WANDB_API_KEY=0123abcd4567ef89", "0123abcd4567ef89"),
        ("export HF_TOKEN='hf_abcdefghijklmnopqrstuvwx'", "hf_abcdefghijklmnopqrstuvwx"),
        ('{"password": "hunter22"}', "hunter22"),
        ("{'db_password': 'hunter22'}", "hunter22"),
        ('{"detail": "{\\"secret\\": \\"hunter22\\"}"}', "hunter22"),
        ("train.py --api-key hunter22 --lr 3", "hunter22"),
        ("Authorization: Bearer abcdef0123456789abcdef", "abcdef0123456789abcdef"),
        ("got 401 with bearer abcdef0123456789abcdef", "abcdef0123456789abcdef"),
        ("s3 at https://me:hunter22@store/bucket", "hunter22"),
        ("posting to https://hooks.slack.com/services/T0/B0/abcdefgh", "abcdefgh"),
        ("key AKIAABCDEFGHIJKLMNOP used", "AKIAABCDEFGHIJKLMNOP"),
        ("ghp_0123456789abcdefghijklmnopqrst", "ghp_0123456789abcdefghijklmnopqrst"),
    ],
)
def test_secrets_go(text: str, secret: str) -> None:
    found = Redactor()(text)
    assert secret not in found
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
    ],
)
def test_plain_text_stays(text: str) -> None:
    assert Redactor()(text) == text


def test_settings_and_named_values_go_and_json_stays_json() -> None:
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
