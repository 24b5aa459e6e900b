"""Select the health sources of a node: the host, and its GPUs through NVML or a dcgm-exporter.

    with node_health(run, node_rank=0, events=events):
        ...

Without either, only the host is read. `probes.health = false` in the configuration turns it off.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from probes.settings.section import read
from probes.settings.sections import ProbesSettings
from probes.tape import event_kinds
from probes.tape.events import EventWriter
from probes.tape.rundir import RunDir
from watch.health import nvml
from watch.health.dcgm import Dcgm
from watch.health.device import Source
from watch.health.host import Host
from watch.health.sampler import sampling

__all__ = ["node_health"]


@contextmanager
def node_health(run: RunDir, node_rank: int, events: EventWriter) -> Iterator[None]:
    """Sample until the block ends; a source that fails is reported as an event, and the run goes on."""
    probes = read(ProbesSettings, run.manifest())
    sources: list[Source] = [Host(run.path)]
    xids: nvml.Xids | None = None
    if probes.dcgm_url:
        sources.append(Dcgm(probes.dcgm_url))
    elif nvml.has_driver():
        sources.append(nvml.Nvml())
        xids = nvml.Xids()
    with ExitStack() as stack:
        if probes.health:
            try:
                stack.enter_context(sampling(run.node_dir(node_rank), sources, events, xids=xids))
            except OSError as error:  # a full disk: the run goes on without readings
                events.write(event_kinds.HEALTH_FAILED, source="tape", reason=str(error))
        yield
