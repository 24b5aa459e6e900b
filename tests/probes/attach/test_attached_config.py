"""Settings of an attached run."""

from __future__ import annotations

import json
import logging

import pytest

from probes.attach import attach as attach_module
from probes.attach.attached_config import VARIABLE, attached_config
from probes.recorder import NullRecorder


def test_attaching_is_no_request_to_kill_ranks() -> None:
    assert attached_config({})["recovery"] == {"enabled": False}
    assert attached_config({"recovery": {"grace_s": 5}})["recovery"] == {"enabled": False, "grace_s": 5}
    assert attached_config({"recovery": {"enabled": True}})["recovery"] == {"enabled": True}


def test_the_launcher_has_the_last_word_on_each_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, json.dumps({"publish": {"address": "file:///lake"}, "probes": {"retain": "all"}}))
    config = attached_config({"publish": {"address": "s3://mine", "every_s": 3}, "lr": 0.1})
    assert config["publish"] == {"address": "file:///lake", "every_s": 3}
    assert (config["probes"], config["lr"]) == ({"retain": "all"}, 0.1)


def test_a_config_that_comes_too_late_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(attach_module, "_current", attach_module.Attached(NullRecorder(), None))
    with caplog.at_level(logging.WARNING):
        attach_module.attach(config={"lightning": {"version": "2"}})
        assert not caplog.records
        attach_module.attach(config={"publish": {"address": "s3://lake"}})
    assert "too late for publish" in caplog.text
    assert "rankscope run --set" in caplog.text
