"""The suspicious hosts of a fleet in the form that a scheduler takes, to keep a job off them.

exclude_list(fleet(histories), "slurm")      # "--exclude=gpu-07,gpu-12"; "" where no host stands out
"""

from __future__ import annotations

import json

from analyzers.fleet.fleet import Fleet

__all__ = ["FORMS", "exclude_list"]

FORMS = ("slurm", "kubernetes")


def exclude_list(found: Fleet, form: str) -> str:
    """The list as text in one of `FORMS`; empty if no host stands out."""
    hosts = sorted(host.name for host in found.hosts if host.is_suspicious)
    if not hosts:
        return ""
    if form == "slurm":
        return f"--exclude={','.join(hosts)}"
    expression = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": hosts}
    terms = {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}
    required = {"requiredDuringSchedulingIgnoredDuringExecution": terms}
    return json.dumps({"affinity": {"nodeAffinity": required}}, indent=2)
