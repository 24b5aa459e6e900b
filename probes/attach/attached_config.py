"""Settings of an attached run: what the launcher was told, over what the script says, over what attaching stands for.

os.environ[VARIABLE] = json.dumps({"publish": {"address": "s3://lake/rankscope"}})     # rankscope run --set
attached_config({"probes": {"retain": "window"}})     # both, and {"recovery": {"enabled": False}}
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

__all__ = ["SECTIONS", "VARIABLE", "attached_config"]

VARIABLE = "RANKSCOPE_ATTACH_CONFIG"
SECTIONS = ("probes", "profiler", "recovery", "metrics", "alerts", "otel", "publish", "trackers")
"""What concerns the records and `watch`. The other sections are of our own trainer."""
_DEFAULTS = {"recovery": {"enabled": False}}  # attaching is no request to kill ranks


def attached_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The run's configuration, merged setting by setting."""
    merged: dict[str, Any] = {section: dict(settings) for section, settings in _DEFAULTS.items()}
    for given in (config, json.loads(os.environ.get(VARIABLE) or "{}")):
        for section, settings in given.items():
            known = merged.get(section)
            is_table = isinstance(known, dict) and isinstance(settings, Mapping)
            merged[section] = {**known, **settings} if is_table else settings  # type: ignore[dict-item]
    return merged
