"""The suspicious hosts of a fleet as a setting for a scheduler, to keep a job off them.

exclude_list(fleet(histories), "slurm")      # "--exclude=gpu-07,gpu-12"; "" where no host stands out
"""

from __future__ import annotations

import json
import re

from analyzers.fleet.fleet import Fleet

__all__ = ["FORMS", "exclude_list"]

FORMS = ("slurm", "kubernetes")
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
"""A valid host name. A run may have recorded any text, which must not become a part of a command."""


def exclude_list(found: Fleet, form: str) -> str:
    """The list as text in one of `FORMS`; empty if no host stands out. Invalid host names are left out."""
    hosts = sorted(host.name for host in found.hosts if host.is_suspicious and _HOST.fullmatch(host.name))
    if not hosts:
        return ""
    if form == "slurm":
        return f"--exclude={','.join(hosts)}"
    expression = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": hosts}
    terms = {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}
    required = {"requiredDuringSchedulingIgnoredDuringExecution": terms}
    return json.dumps({"affinity": {"nodeAffinity": required}}, indent=2)
