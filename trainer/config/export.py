"""Sections of the configuration for exports of a run: Prometheus, a webhook, OpenTelemetry, trackers."""

from __future__ import annotations

import shlex
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, ValidationInfo, field_validator

from probes.settings.sections import AlertsSettings, MetricsSettings, OtelSettings, TrackersSettings
from trainer.config.section import Section, shared_default

__all__ = ["AlertsConfig", "MetricsConfig", "OtelConfig", "TrackersConfig"]


class MetricsConfig(Section):
    """Address at which `watch` serves `/metrics`. An address beyond loopback needs all three files."""

    listen: str = shared_default(MetricsSettings, "listen")
    """HOST:PORT of each node's endpoint; port 0 takes a free one, empty = none."""
    tls_cert: str = shared_default(MetricsSettings, "tls_cert")
    """PEM file with the certificate chain."""
    tls_key: str = shared_default(MetricsSettings, "tls_key")
    """PEM file with its key."""
    token_file: str = shared_default(MetricsSettings, "token_file")
    """File with the bearer token that scrapes must send."""

    @field_validator("listen")
    @classmethod
    def _is_address(cls, value: str) -> str:
        _, colon, port = value.rpartition(":")
        if value and not (colon and port.isdecimal() and int(port) < 2**16):
            raise ValueError(f"metrics.listen = {value!r}: must be HOST:PORT, for example 127.0.0.1:9400, or empty")
        return value


class AlertsConfig(Section):
    """Receivers of findings as they appear, besides Prometheus."""

    webhook: str = Field(default="", pattern=r"^(https?://.+)?$")
    """URL to which each finding is posted as JSON."""
    command: str = shared_default(AlertsSettings, "command")
    """Program and arguments, run without a shell for each finding. The program reads the finding as JSON."""
    min_severity: Literal["info", "warning", "critical"] = shared_default(AlertsSettings, "min_severity")
    """Lowest severity of findings that are sent."""
    at_most_per_hour: int = shared_default(AlertsSettings, "at_most_per_hour")
    """Maximum number of findings sent per hour; others are counted and left out."""
    dashboard_url: str = Field(default="", pattern=r"^(https?://.+)?$")
    """URL of `rankscope dashboard` for links in alerts and reports. Empty = RANKSCOPE_DASHBOARD_URL."""
    runbook_url: str = Field(default="", pattern=r"^(https?://.+)?$")
    """URL of a page with the runbook's anchors, for links in alerts. Empty = the dashboard's Runbook page."""

    @field_validator("webhook", "dashboard_url", "runbook_url")
    @classmethod
    def _is_url(cls, value: str, info: ValidationInfo) -> str:
        try:
            parts = urlsplit(value)
            usable = not value or (bool(parts.hostname) and parts.port != 0)
        except ValueError:
            usable = False
        if not usable or any(letter.isspace() or not letter.isprintable() for letter in value):
            shown = "(redacted)" if info.field_name == "webhook" else repr(value[:80])
            raise ValueError(
                f"alerts.{info.field_name} = {shown}: must be a URL with a host, for example https://host/path"
            )
        return value

    @field_validator("command")
    @classmethod
    def _is_command(cls, value: str) -> str:
        try:
            usable = not value or (bool(shlex.split(value)) and "\0" not in value)
        except ValueError as error:
            raise ValueError(f"alerts.command = (redacted): is not a command line ({error})") from None
        if not usable:
            raise ValueError("alerts.command = (redacted): must name a program, or be empty")
        return value


class OtelConfig(Section):
    """Signals for an OpenTelemetry collector, if OTEL_EXPORTER_OTLP_ENDPOINT is set."""

    group: Literal["default", "per_step", "all"] = shared_default(OtelSettings, "group")
    """Spans to send: steps; steps and phases; or steps, phases, microbatches and collectives."""
    ranks: Literal["single_rank", "first_rank_per_node", "sampled", "all_ranks"] = shared_default(OtelSettings, "ranks")
    """Ranks whose spans are sent; sampled = eight."""


class TrackersConfig(Section):
    """Experiment trackers that `watch` keeps up to date while the run is alive."""

    to: list[Literal["tensorboard", "wandb"]] = Field(default_factory=list)
    """Trackers to use."""
    ranks: Literal["none", "sampled", "all"] = shared_default(TrackersSettings, "ranks")
    """Ranks whose own values are sent: none, at most eight, or all."""
    every_s: float = shared_default(TrackersSettings, "every_s")
    """Pause between two uploads."""
    tensorboard_dir: str = shared_default(TrackersSettings, "tensorboard_dir")
    """Parent of the folder for the run's event files. Empty = `tensorboard/` in the run's folder."""
    wandb_project: str = shared_default(TrackersSettings, "wandb_project")
    """W&B's project."""
    wandb_entity: str = shared_default(TrackersSettings, "wandb_entity")
    """Team or user. Empty = W&B's default."""
    wandb_mode: Literal["", "online", "offline"] = shared_default(TrackersSettings, "wandb_mode")
    """Empty = WANDB_MODE if set, else online if W&B has a key and offline otherwise."""
