"""Check the settings of an attached loop, in a separate process.

    echo '{"probes": {"retian": "window"}}' | python -m trainer.config.attached_settings
    {"settings": {"probes": {}}, "problems": ["probes.retian = 'window': unknown key; did you mean retain?"]}

A user's process has `probes` alone: `probes.attach.attached_config` asks here, and records with what is left. Settings
come on standard input, since a command line can be read by everyone on the machine and `alerts` may hold a token.
"""

from __future__ import annotations

import json
import sys

from trainer.config.load import usable_settings

if __name__ == "__main__":
    settings, problems = usable_settings(json.load(sys.stdin))
    json.dump({"settings": settings, "problems": problems}, sys.stdout)
