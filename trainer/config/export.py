"""Sections of the configuration for exports of a run: Prometheus, a webhook, OpenTelemetry, trackers."""

from __future__ import annotations

import shlex
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from trainer.config.section import Section

__all__ = ["AlertsConfig", "MetricsConfig", "OtelConfig", "TrackersConfig"]


class MetricsConfig(Section):
    """Address at which `watch` serves `/metrics`. Beyond loopback it needs all three files."""

    listen: str = "127.0.0.1:0"
    """HOST:PORT of each node's endpoint; port 0 takes a free one, empty = none."""
    tls_cert: str = ""
    """PEM file with the certificate chain."""
    tls_key: str = ""
    """PEM file with its key."""
    token_file: str = ""
    """File that holds the bearer token which a scrape must show."""

    @field_validator("listen")
    @classmethod
    def _is_address(cls, value: str) -> str:
        _, colon, port = value.rpartition(":")
        if value and not (colon and port.isdecimal() and int(port) < 2**16):
            raise ValueError(f"metrics.listen = {value!r}: must be HOST:PORT, for example 127.0.0.1:9400, or empty")
        return value


class AlertsConfig(Section):
    """Receivers of findings as they are made, besides Prometheus."""

    webhook: str = Field(default="", pattern=r"^(https?://.+)?$")
    """URL to which each finding is posted as JSON."""
    command: str = ""
    """Program and arguments that are run for each finding, which they read as JSON; no shell."""
    min_severity: Literal["info", "warning", "critical"] = "warning"
    at_most_per_hour: int = Field(default=60, ge=1)
    """Findings beyond are counted and left out."""

    @field_validator("webhook")
    @classmethod
    def _is_url(cls, value: str) -> str:
        try:
            parts = urlsplit(value)
            usable = not value or (bool(parts.hostname) and parts.port != 0)
        except ValueError:
            usable = False
        if not usable or any(letter.isspace() or not letter.isprintable() for letter in value):
            raise ValueError("alerts.webhook = (redacted): must be a URL with a host, for example https://host/path")
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

    group: Literal["default", "per_step", "all"] = "default"
    """Spans: of steps; of their phases too; of microbatches and collectives too."""
    ranks: Literal["single_rank", "first_rank_per_node", "sampled", "all_ranks"] = "single_rank"


class TrackersConfig(Section):
    """Experiment trackers that `watch` keeps up to date while the run is alive."""

    to: list[Literal["tensorboard", "wandb"]] = Field(default_factory=list)
    """Which."""
    ranks: Literal["none", "sampled", "all"] = "sampled"
    """Ranks whose own values go there: none, at most eight, all."""
    every_s: float = Field(default=5.0, ge=0.2)
    """Pause between two uploads."""
    tensorboard_dir: str = ""
    """Folder in which the run gets a folder for its event files; without it, `tensorboard/` in the run's own."""
    wandb_project: str = "rankscope"
    wandb_entity: str = ""
    """Team or user; without it, W&B's default."""
    wandb_mode: Literal["", "online", "offline"] = ""
    """Without it WANDB_MODE, else online where W&B has a key and offline where it has none."""
