"""Settings of an attached run: the launcher's options override the script's, which override the defaults.

os.environ[VARIABLE] = json.dumps({"publish": {"address": "s3://lake/rankscope"}})     # rankscope run --set
attached_config({"probes": {"retain": "window"}})     # both, and {"recovery": {"enabled": False}}

The launcher has checked its options. The script's options are checked by the trainer's configuration in a separate
process, because that code needs packages and module names that a user's process should not load.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
from collections.abc import Mapping
from typing import Any

from ..fail_open import failing_open
from .launch.own_process import own_process

__all__ = ["SECTIONS", "VARIABLE", "attached_config"]

logger = logging.getLogger("rankscope.probes")
VARIABLE = "RANKSCOPE_ATTACH_CONFIG"
SECTIONS = ("probes", "profiler", "recovery", "metrics", "alerts", "otel", "publish", "trackers")
"""Sections that concern the records and `watch`; all others belong to the trainer."""
_DEFAULTS = {"recovery": {"enabled": False}}  # attaching is not a request to kill ranks
CHECK_S = 30.0
"""Time limit of the check in seconds; it usually takes half a second."""


def attached_config(config: Mapping[str, Any], *, warn: bool = True) -> dict[str, Any]:
    """Merge the configuration setting by setting; invalid settings get their defaults.

    `warn`: log a warning that names each invalid setting.
    """
    given = _merged(config, json.loads(os.environ.get(VARIABLE) or "{}"))
    if any(section in config for section in SECTIONS):
        with failing_open("attach.config"):
            given |= _usable({section: given[section] for section in SECTIONS if section in given}, warn=warn)
    # Add the defaults last: a loop without `recovery.enabled` has no recovery, while `watch` would assume it is on.
    return _merged(_DEFAULTS, given)


def _usable(given: Mapping[str, Any], *, warn: bool) -> dict[str, Any]:
    """Drop invalid settings; an invalid section becomes empty. Raises if the settings cannot be checked."""
    command, environment = own_process("trainer.config.attached_settings")
    done = subprocess.run(
        command, input=json.dumps(given, default=str), env=environment, capture_output=True, text=True,
        timeout=CHECK_S, check=True,
    )  # fmt: skip
    checked = json.loads(done.stdout)
    for problem in checked["problems"] if warn else ():
        logger.warning("rankscope ignores a setting of attach(config=...): %s", problem)
    return {section: checked["settings"].get(section, {}) for section in given}


def _merged(*several: Mapping[str, Any]) -> dict[str, Any]:
    """Merge sections; later ones override earlier ones."""
    merged: dict[str, Any] = {}
    for settings_of in several:
        for section, settings in settings_of.items():
            before = merged.get(section)
            known = before if isinstance(before, dict) else {}
            merged[section] = {**known, **settings} if isinstance(settings, Mapping) else settings
    return merged
