"""Prometheus series on a fleet's hosts, devices and configurations, for node_exporter's textfile collector.

fleet_series(fleet)      # "# HELP rankscope_fleet_hours ..."
"""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Gauge, generate_latest

from analyzers.fleet.fleet import Fleet
from analyzers.fleet.speed_changes import ConfigurationSpeed

__all__ = ["fleet_series"]


def fleet_series(fleet: Fleet) -> str:
    """Return the series in Prometheus' text format. The label `device` is empty for a host."""
    registry = CollectorRegistry()

    def gauge(name: str, help: str) -> Gauge:
        return Gauge(f"rankscope_fleet_{name}", help, ("host", "device"), registry=registry)

    hours = gauge("hours", "Hours of runs that the host or device took part in.")
    runs = gauge("bad_runs", "Runs in which the host or device had an incident.")
    rate = gauge("incidents_per_hour", "Estimated number of runs with an incident per hour.")
    low = gauge("incidents_per_hour_low", "Lower bound (90 %) of the runs with an incident per hour.")
    high = gauge("incidents_per_hour_high", "Upper bound (90 %) of the runs with an incident per hour.")
    suspicious = gauge("suspicious", "1 if the host or device has more incidents than chance explains.")
    members = [(host, host.name, "") for host in fleet.hosts]
    members += [(device, device.host, device.name) for device in fleet.devices]
    for member, host, device in members:
        hours.labels(host, device).set(member.hours)
        runs.labels(host, device).set(member.bad_runs)
        rate.labels(host, device).set(member.rate.mean_per_h)
        low.labels(host, device).set(member.rate.low_per_h)
        high.labels(host, device).set(member.rate.high_per_h)
        suspicious.labels(host, device).set(member.is_suspicious)
    if fleet.mtbf_h is not None:  # absent if nothing failed: not measured is not 0
        mtbf = Gauge("rankscope_fleet_mtbf_hours", "Hours between failures, over all runs.", registry=registry)
        mtbf.set(fleet.mtbf_h)
    _configurations(fleet.speeds, registry)
    return generate_latest(registry).decode()


def _configurations(speeds: Sequence[ConfigurationSpeed], registry: CollectorRegistry) -> None:
    """Series of configurations: absent if none has two runs. The ratio is absent if no change was found."""
    if not speeds:
        return
    labels = ("configuration", "title", "unit")

    def gauge(name: str, help: str) -> Gauge:
        return Gauge(f"rankscope_fleet_configuration_{name}", help, labels, registry=registry)

    runs = gauge("runs", "Runs of the configuration.")
    speed = gauge("speed", "Median speed of its runs since the last change, in the unit of the label.")
    judged = gauge("judged", "1 if the configuration has enough runs to show a change.")
    ratio = gauge("change_ratio", "Speed after the newest change, divided by the speed before it; below 1: slower.")
    for configuration in speeds:
        values = (configuration.fingerprint, configuration.title, configuration.unit)
        runs.labels(*values).set(len(configuration.run_ids))
        speed.labels(*values).set(configuration.newest)
        judged.labels(*values).set(configuration.status != "too_few_runs")
        if configuration.changes:
            ratio.labels(*values).set(configuration.changes[-1].ratio)
