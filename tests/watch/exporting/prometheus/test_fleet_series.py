"""A fleet as Prometheus series: what the command prints is what Prometheus reads."""

from __future__ import annotations

from dataclasses import replace

from prometheus_client.parser import text_string_to_metric_families

from analyzers.fleet.fleet import fleet
from analyzers.fleet.speed_changes import speeds
from benchmarks.scale.fleet import BAD_DEVICE, BAD_HOSTS, histories, speed_runs
from watch.exporting.prometheus.fleet_series import fleet_series


def test_every_host_and_device_has_its_series() -> None:
    found = fleet(histories(200, num_hosts=64, seed=1))
    samples = {
        (one.name, one.labels.get("host"), one.labels.get("device")): one.value
        for family in text_string_to_metric_families(fleet_series(found))
        for one in family.samples
    }
    named = {
        device or host
        for (name, host, device), value in samples.items()
        if name == "rankscope_fleet_suspicious" and value
    }
    assert named == {one.name for one in (*found.hosts, *found.devices) if one.is_suspicious}
    assert named <= {*BAD_HOSTS, BAD_DEVICE}
    assert named
    for host in found.hosts:
        assert samples["rankscope_fleet_hours", host.name, ""] == host.hours
        assert samples["rankscope_fleet_incidents_per_hour", host.name, ""] == host.rate.mean_per_h
    assert samples["rankscope_fleet_mtbf_hours", None, None] == found.mtbf_h


def test_without_a_restart_there_is_no_mean_time_between_them() -> None:
    assert "mtbf" not in fleet_series(fleet(()))


def test_each_configuration_has_its_speed_and_change() -> None:
    slower = speeds(speed_runs(0, (12, 1.0), (12, 0.7)))
    few = speeds(speed_runs(0, (2, 1.0), configuration="b"))
    found = replace(fleet(()), speeds=(*slower, *few))
    samples = {
        (one.name.removeprefix("rankscope_fleet_configuration_"), one.labels["configuration"]): one.value
        for family in text_string_to_metric_families(fleet_series(found))
        for one in family.samples
        if "configuration" in one.labels
    }
    assert samples["change_ratio", slower[0].fingerprint] == slower[0].changes[-1].ratio < 0.75
    assert samples["speed", slower[0].fingerprint] == slower[0].newest
    assert (samples["judged", slower[0].fingerprint], samples["judged", few[0].fingerprint]) == (1, 0)
    assert ("change_ratio", few[0].fingerprint) not in samples, "no change found is no ratio of 1"
