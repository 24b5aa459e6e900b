"""Check the settings of an attached loop, in a separate process.

    echo '{"probes": {"retian": "window"}}' | python -m trainer.config.attached_settings
    {"settings": {"probes": {}}, "problems": ["probes.retian = 'window': unknown key; did you mean retain?"]}

A user's process imports only `probes`: `probes.attach.attached_config` runs this module, and records with the valid
settings. Settings arrive on standard input, because other users can read a command line, and `alerts` may contain a
token.
"""

from __future__ import annotations

import json
import sys

from trainer.config.load import usable_settings

if __name__ == "__main__":
    settings, problems = usable_settings(json.load(sys.stdin))
    json.dump({"settings": settings, "problems": problems}, sys.stdout)
