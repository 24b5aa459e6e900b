"""Configuration sections that other packages than the trainer also read. docs/configuration.md has the meaning of each
field.

from probes.settings.section import read
read(ProbesSettings, run.manifest()).sync_s         # 5.0
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from .section import amount

__all__ = [
    "MAX_STEPS",
    "AlertsSettings",
    "DeviceResponse",
    "MetricsSettings",
    "OtelSettings",
    "ProbesSettings",
    "ProfilerSettings",
    "PublishSettings",
    "RecoverySettings",
    "TrackersSettings",
]

MAX_STEPS = 100
"""Maximum steps of one capture: a longer trace is too large to open."""
_DAY_S = 86400
DeviceResponse = Literal["report", "exclude", "replace"]
"""Action on a finding about a device. `exclude`: drop it, even if the run shrinks. `replace`: drop it only if a spare
device or node takes its place.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbesSettings:
    """Recording and retention."""

    section: ClassVar[str] = "probes"
    sample_stacks: bool = True
    sync_s: float = amount(5.0, least=0, most=_DAY_S)
    retain: Literal["all", "window"] = "all"
    retain_s: float = amount(3600.0, least=60)
    budget_mb: float = amount(0.0, least=0)
    health: bool = True
    dcgm_url: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilerSettings:
    """When torch.profiler records steps, and on which ranks."""

    section: ClassVar[str] = "profiler"
    interval: int = amount(0, least=0)
    active_steps: int = amount(3, least=1, most=MAX_STEPS)
    ranks: tuple[int, ...] = (0,)
    on_request: bool = True
    on_anomaly: bool = False
    anomaly_steps: int = amount(5, least=1, most=MAX_STEPS)
    cooldown_s: float = amount(300.0, least=0)
    max_captures: int = amount(8, least=0)
    ranges: bool = False
    record_shapes: bool = False
    with_stack: bool = False
    memory_history: int = amount(0, least=0)
    budget_mb: float = amount(256.0, above=0)

    def is_scheduled(self, rank: int, step: int) -> bool:
        """Return True if a capture of this rank begins with this step. Without `ranks`, all ranks are captured."""
        return self.interval > 0 and step % self.interval == 0 and (not self.ranks or rank in self.ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoverySettings:
    """Reactions to findings."""

    section: ClassVar[str] = "recovery"
    enabled: bool = True
    hang_floor_s: float = amount(5.0, above=0, most=_DAY_S)
    startup_s: float = amount(180.0, above=0, most=_DAY_S)
    grace_s: float = amount(20.0, above=0, most=_DAY_S)
    on_straggler: DeviceResponse = "report"
    straggler_after_s: float = amount(60.0, least=0)
    straggler_speedup: float = amount(1.2, above=1)
    on_xid: DeviceResponse = "report"
    """Default: exclude nothing. In the trainer, which can restart ranks, the default is `exclude`."""
    exclusion_cooldown_s: float = amount(600.0, least=0)
    exclusion_dry_run: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsSettings:
    """Address at which `watch` serves `/metrics`."""

    section: ClassVar[str] = "metrics"
    listen: str = "127.0.0.1:0"
    tls_cert: str = ""
    tls_key: str = ""
    token_file: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertsSettings:
    """Receivers of findings while the run trains."""

    section: ClassVar[str] = "alerts"
    webhook: str = ""
    command: str = ""
    min_severity: Literal["info", "warning", "critical"] = "warning"
    at_most_per_hour: int = amount(60, least=1)
    dashboard_url: str = ""
    runbook_url: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OtelSettings:
    """Settings for the export to an OpenTelemetry collector."""

    section: ClassVar[str] = "otel"
    group: Literal["default", "per_step", "all"] = "default"
    ranks: Literal["single_rank", "first_rank_per_node", "sampled", "all_ranks"] = "single_rank"


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishSettings:
    """Address to which `watch` publishes the records of its node."""

    section: ClassVar[str] = "publish"
    address: str = ""
    every_s: float = amount(10.0, least=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackersSettings:
    """Experiment trackers that `watch` keeps up to date."""

    section: ClassVar[str] = "trackers"
    to: tuple[str, ...] = ()
    ranks: Literal["none", "sampled", "all"] = "sampled"
    every_s: float = amount(5.0, least=0.2)
    tensorboard_dir: str = ""
    wandb_project: str = "rankscope"
    wandb_entity: str = ""
    wandb_mode: Literal["", "online", "offline"] = ""
