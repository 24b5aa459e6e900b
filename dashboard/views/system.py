"""Page on the system: versions, topology, process groups, NCCL, and settings of torch and its backends."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any

import streamlit as st

from analyzers.source import Source
from analyzers.verdict.rank_facts import rank_facts
from analyzers.wording import of_world_size
from dashboard.data.flat_settings import flat
from dashboard.data.sql import system_queries
from dashboard.drawing.elements import empty_state, table, tiles
from dashboard.frame import View, framed
from probes.settings.described import ParallelFacts
from probes.settings.section import read
from probes.tape.redaction.printable import visible

__all__ = ["system"]

MESH = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
_PIPELINE_SETTINGS = ("schedule", "stages_per_rank", "stage_costs")
"""Settings in section `parallel` that have no effect without a pipeline."""
TRAIN_SETTINGS = ("precision", "activation_checkpointing", "compile", "compile_backend", "device", "backend")
"""Settings in section `train` that concern torch and its backends."""
MAX_VARIABLES = 100


def load_system(source: Source) -> dict[str, Any]:
    """Load ranks, process groups, communicators, and the profiler plugin's state on each rank."""
    return {
        "counted": rank_facts(source), "ranks": system_queries.ranks(source), "groups": system_queries.groups(source),
        "communicators": system_queries.communicators(source), "plugin": system_queries.plugin_states(source),
    }  # fmt: skip


@framed("System")
def system(view: View) -> None:
    """Draw the run's hardware, versions and settings."""
    found = view.ask(load_system)
    if found is None:
        return
    manifest = view.manifest
    _tiles(manifest, found["ranks"], found["counted"])
    left, right = st.columns(2, gap="medium")
    with left:
        st.subheader("Versions", anchor=False)
        _versions(manifest)
    with right:
        st.subheader("Parallelism and torch", anchor=False)
        _settings(manifest)
    st.subheader("Topology", anchor=False)
    _topology(found["ranks"])
    st.subheader("Process groups", anchor=False)
    listed, num_others = found["groups"]
    if listed:
        table(
            listed, key="system-groups", column_config={"group": st.column_config.Column(pinned=True, width=150)}
        )  # fmt: skip
        if num_others:
            st.caption(f"The {len(listed)} largest groups; {num_others:,} more are in SQL (`process_groups`).")
    else:
        empty_state("No process group was recorded.", "A rank reports each group at its first call.")
    st.subheader("NCCL", anchor=False)
    _nccl(found)


def _tiles(manifest: Mapping[str, Any], ranks: list[dict[str, Any]], counted: Mapping[str, Any]) -> None:
    sizes = manifest.get("mesh")
    mesh = sizes if isinstance(sizes, Mapping) else {}
    dimensions = [f"{name} {mesh[name]}" for name in MESH if isinstance(mesh.get(name), int) and mesh[name] > 1]
    hosts = {row["host"] for row in ranks if row["host"]}
    kinds = {str(row["device"]).split(":")[0] for row in ranks if row["device"]}
    num_ranks = counted["num_ranks"] or manifest.get("world_size") or "unknown"
    tiles(
        [
            ("Ranks", f"{num_ranks}{of_world_size(counted)}", None, None),
            ("Hosts", str(len(hosts) or "unknown"), None, None),
            ("Devices", visible(", ".join(sorted(kinds)))[:40] or "unknown", None, None),
            ("Mesh", " x ".join(dimensions) or ("all 1" if mesh else "unknown"), None,
             "Dimensions of the device mesh that are larger than one."),
        ],
        key="system",
    )  # fmt: skip


def _versions(manifest: Mapping[str, Any]) -> None:
    versions = manifest.get("versions")
    known = dict(versions) if isinstance(versions, Mapping) else {}
    known.setdefault("rankscope", manifest.get("rankscope_version"))
    known["schema of the tapes"] = manifest.get("schema_version")
    known["GPU"] = manifest.get("device_name")
    rows = [{"what": str(name)[:80], "version": str(value)[:200]} for name, value in known.items() if value is not None]
    if rows:
        table(rows, key="system-versions")
    if not versions:
        st.caption("The versions of Python and torch were not recorded.")
    others = "NCCL and CUDA" if "gpu driver" in known else "NCCL, CUDA and a GPU driver"
    st.caption(f"Versions of {others} are not recorded with this run: `rankscope preflight` shows them.")


def _settings(manifest: Mapping[str, Any]) -> None:
    without_effect = () if (read(ParallelFacts, manifest).pp or 0) > 1 else _PIPELINE_SETTINGS
    rows = [
        {"setting": f"{section}.{name}", "value": value}
        for section, name, value in flat(manifest.get("config"))
        if (section == "parallel" and name not in without_effect) or (section == "train" and name in TRAIN_SETTINGS)
    ]
    if matmul := manifest.get("float32_matmul_precision"):
        rows.append({"setting": "torch.float32_matmul_precision", "value": str(matmul)[:80]})
    variables = manifest.get("environment")
    for name, value in islice(variables.items() if isinstance(variables, Mapping) else (), MAX_VARIABLES):
        rows.append({"setting": visible(str(name))[:80], "value": visible(str(value))[:200]})
    if rows:
        table(rows, key="system-settings")
    else:
        empty_state("The run has no recorded settings.", "Only Rankscope's trainer records them.")
    source = "are those of rank 0" if isinstance(variables, Mapping) else "were not recorded with this run"
    st.caption(f"Variables of NCCL, gloo, CUDA and torch {source}: `rankscope preflight` compares them between nodes.")


def _topology(ranks: list[dict[str, Any]]) -> None:
    if not ranks:
        empty_state("No rank has reported where it runs.")
        return
    constant = [name for name in MESH if all(row[name] == 0 for row in ranks)]
    unknown = [name for name in (*MESH, "device_uuid") if all(row[name] is None for row in ranks)]
    left_out = {*constant, *unknown, "world_size"}
    table([{name: value for name, value in row.items() if name not in left_out} for row in ranks], key="system-ranks")
    if constant:
        st.caption(f"Dimensions in which all ranks have coordinate 0 are not shown: {', '.join(constant)}.")


def _nccl(found: dict[str, Any]) -> None:
    if found["plugin"]:
        st.caption("Profiler plugin, as the ranks found it")
        table(found["plugin"], key="system-plugin")
    if found["communicators"]:
        st.caption("Communicators that the profiler plugin saw")
        table(found["communicators"], key="system-communicators")
    else:
        empty_state(
            "No communicator of NCCL was recorded.",
            "Ranks on CPUs use gloo. On GPUs the profiler plugin records them if NCCL loads it (`rankscope doctor` "
            "checks this).",
        )
