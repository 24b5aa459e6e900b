"""Links to a finding in the dashboard, for terminal, JSON, HTML report and alerts.

    finding_path(diagnosis.run, finding)     # "/findings?run=demo-...&finding=straggler-0-60-r3"
    finding_link(diagnosis.run, finding)     # with the address: http://127.0.0.1:8501/findings?run=...

`rankscope dashboard` serves it; RANKSCOPE_DASHBOARD_URL is its address where it runs elsewhere.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

from analyzers.finding import Finding

__all__ = ["DEFAULT_PORT", "finding_link", "finding_path"]

DEFAULT_PORT = 8501


def finding_path(facts: Mapping[str, Any], finding: Finding) -> str:
    """Path and query of the page that shows the finding; empty if the run (`diagnosis.run`) is none of ours.

    Nothing in either name can leave the query.
    """
    run_id = facts.get("run_id")
    if not isinstance(run_id, str) or not run_id or "input" in facts:  # dumps and traces have no page
        return ""
    return f"/findings?{urlencode({'run': run_id, 'finding': finding.id})}"


def finding_link(facts: Mapping[str, Any], finding: Finding) -> str:
    """The whole address; empty where there is no page."""
    path = finding_path(facts, finding)
    if not path:
        return ""
    base = os.environ.get("RANKSCOPE_DASHBOARD_URL", "").rstrip("/")
    if not base.startswith(("http://", "https://")):
        base = f"http://127.0.0.1:{DEFAULT_PORT}"
    return base + path
