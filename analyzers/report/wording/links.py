"""Links to a finding in the dashboard and to its section of the runbook, for terminal, JSON, HTML report and alerts.

    finding_path(diagnosis.run, finding)     # "/findings?run=demo-...&finding=straggler-0-60-r3"
    finding_link(diagnosis.run, finding)     # with the address: https://ml.example.org/findings?run=...; or ""
    alert_links(manifest).runbook("hang-gil")       # "https://ml.example.org/runbook?section=hang-gil", or ""

`rankscope dashboard` serves the pages. The dashboard's public address is the run's setting `alerts.dashboard_url`.
Without it, the environment variable RANKSCOPE_DASHBOARD_URL is used. Without either there are no links, because there
may be no dashboard.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from analyzers.finding import Finding
from probes.settings.section import read
from probes.settings.sections import AlertsSettings

__all__ = ["DEFAULT_PORT", "AlertLinks", "alert_links", "finding_link", "finding_path"]

DEFAULT_PORT = 8501


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertLinks:
    """Addresses of the dashboard and the runbook that work from any machine; empty if unknown."""

    dashboard_url: str = ""
    runbook_url: str = ""

    def finding(self, run_id: str, finding: Finding) -> str:
        """Address of a finding's page."""
        path = finding_path({"run_id": run_id}, finding)
        return self.dashboard_url + path if self.dashboard_url else ""

    def runbook(self, anchor: str) -> str:
        """Address of a section of the runbook."""
        if not anchor:
            return ""
        return f"{self.runbook_prefix}{anchor}" if self.runbook_prefix else ""

    @property
    def runbook_prefix(self) -> str:
        """Address to which an anchor is appended: a page with all sections, or the dashboard's Runbook page."""
        if self.runbook_url:
            return f"{self.runbook_url.partition('#')[0]}#"
        return f"{self.dashboard_url}/runbook?section=" if self.dashboard_url else ""


def alert_links(manifest: Mapping[str, Any]) -> AlertLinks:
    """Take the addresses from the run's settings, or else from this machine's environment."""
    given = read(AlertsSettings, manifest)
    return AlertLinks(
        dashboard_url=_address(given.dashboard_url) or _address(os.environ.get("RANKSCOPE_DASHBOARD_URL")),
        runbook_url=_address(given.runbook_url),
    )


def finding_path(facts: Mapping[str, Any], finding: Finding) -> str:
    """Path and query of the page that shows the finding; empty if Rankscope did not record the run (`diagnosis.run`).

    Both names are quoted, so that no character of them can end the query.
    """
    run_id = facts.get("run_id")
    if not isinstance(run_id, str) or not run_id or "input" in facts:  # findings on dumps and traces have no page
        return ""
    return f"/findings?{urlencode({'run': run_id, 'finding': finding.id})}"


def finding_link(facts: Mapping[str, Any], finding: Finding) -> str:
    """Return the complete address; empty if the finding has no page or the dashboard's address is unknown."""
    path = finding_path(facts, finding)
    if not path:
        return ""
    base = _address(facts.get("dashboard_url")) or _address(os.environ.get("RANKSCOPE_DASHBOARD_URL"))
    return base + path if base else ""


def _address(value: object) -> str:
    text = value.rstrip("/") if isinstance(value, str) else ""
    return text if text.startswith(("http://", "https://")) else ""
