"""Secret of a launch, with which the watches of its nodes sign their messages.

    create_job_secret(run)          # node 0's launcher, before the other nodes open the run's folder
    job_secret(run)                 # every node's watch; b"" if there is none

`rankscope train` writes it to `job.secret` (mode 0600) in the run's shared folder, a new one for each launch. If nodes
have separate folders (torchrun without a shared disk), set RANKSCOPE_JOB_SECRET to the same value on all nodes; it
takes precedence over the file.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping

from probes.tape.files.safe_open import read_plain, write_private
from probes.tape.rundir import RunDir

__all__ = ["FILE", "VARIABLE", "create_job_secret", "job_secret"]

FILE = "job.secret"
VARIABLE = "RANKSCOPE_JOB_SECRET"
_MAX_BYTES = 4096


def create_job_secret(run: RunDir) -> None:
    """Write a new secret. Raises OSError."""
    write_private(run.path / FILE, secrets.token_hex(32) + "\n")


def job_secret(run: RunDir, environment: Mapping[str, str] = os.environ) -> bytes:
    """Return the secret of the launch, from the environment or the run's folder; empty if there is none."""
    if given := environment.get(VARIABLE, "").strip():
        return given.encode()
    try:
        return read_plain(run.path / FILE, _MAX_BYTES).strip()
    except OSError:
        return b""
