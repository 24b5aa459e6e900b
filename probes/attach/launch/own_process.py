"""Command line and environment of a Rankscope process that finds Rankscope's modules before others of the same name.

    command, environment = own_process("watch.node_process", str(run.path))
    subprocess.Popen(command, env=environment)

`-P` keeps the working folder off the path, where a user may have a `trainer` or `dashboard`; PYTHONPATH comes
before installed packages, which may have these names too.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

__all__ = ["own_process"]

_PACKAGES = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))


def own_process(
    module: str, *arguments: str, environment: Mapping[str, str] = os.environ
) -> tuple[list[str], dict[str, str]]:
    """Return the command line that runs `module`, and `environment` with a PYTHONPATH on which it is found."""
    path = os.pathsep.join(filter(None, [_PACKAGES, environment.get("PYTHONPATH")]))
    return [sys.executable, "-P", "-u", "-m", module, *arguments], {**environment, "PYTHONPATH": path}
