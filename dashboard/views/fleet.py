"""Fleet page: hosts and devices over all runs of the folder, most incidents first, and speed per configuration."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import streamlit as st

from analyzers import wording
from analyzers.fleet.exclude_list import FORMS, exclude_list
from analyzers.fleet.fleet import COUNTED, Fleet, Member
from analyzers.fleet.speed_changes import ConfigurationSpeed
from analyzers.kinds import title_of
from dashboard.data.processes.fleet_process import FleetAnswer, fleet_in_process, fleet_version
from dashboard.drawing import units
from dashboard.drawing.elements import chart, empty_state, markdown_text, table, tiles
from dashboard.drawing.fleet_speed import speed_history
from dashboard.frame import IDLE_S, POLL_S, runs_folder, shared_answers

__all__ = ["fleet"]

PATIENCE_S = 0.4
RETRY_S = 10.0
"""Seconds between attempts to read runs that could not be read."""
MAX_SHOWN = 500
"""Maximum members per table; those with the highest rates are shown."""
MAX_PROBLEMS = 5
MAX_DRAWN = 5
"""Maximum number of configurations for which the runs are drawn."""
ALL_WELL = "No host or device has more trouble than chance explains."


def fleet() -> None:
    """Draw the page, and update it while it is open."""
    st.title("Fleet", anchor=False)
    polls = st.session_state.get("fleet_polls", True)

    def draw() -> None:
        is_pending = _page()
        if is_pending != polls:
            st.session_state["fleet_polls"] = is_pending
            st.rerun()

    st.fragment(draw, run_every=POLL_S if polls else IDLE_S, key="fleet")()


def _page() -> bool:
    """Draw what has been computed; return True if more will follow soon."""
    folder = runs_folder()
    # If another process had some runs open, `turn` changes every `RETRY_S`, so that they are read again.
    turn = int(time.time() / RETRY_S) if st.session_state.get("fleet_problems") else 0
    version = (fleet_version(folder), turn)
    answer = shared_answers().get(
        ("fleet", str(folder.path)), version, lambda: fleet_in_process(folder), patience_s=PATIENCE_S
    )
    if answer.error is not None:
        st.warning(f"The runs could not be read: {markdown_text(answer.error, 400)}", icon=":material/error:")
    found: FleetAnswer | None = answer.value
    if found is None:
        if answer.error is None:
            empty_state(
                "Diagnosing the runs…", "Each run is diagnosed once. With many runs, the first visit takes minutes."
            )
        return True
    st.session_state["fleet_problems"] = bool(found.problems)
    _draw(found.fleet)
    for name, problem in list(found.problems.items())[:MAX_PROBLEMS]:
        st.caption(f"{markdown_text(name, 80)} is left out: {markdown_text(problem, 300)}")
    if len(found.problems) > MAX_PROBLEMS:
        st.caption(f"{len(found.problems) - MAX_PROBLEMS} more runs could not be read.")
    return not answer.is_fresh


def _draw(found: Fleet) -> None:
    tiles(
        [
            ("Runs", f"{found.num_runs:,}", None, None),
            ("Hours", wording.number(found.hours), None, "From the first record of a run to its last, over all runs."),
            ("Hosts", f"{len(found.hosts):,}", None, None),
            ("Devices", f"{len(found.devices):,}", None, "Devices with a UUID, which ranks on GPUs record."),
            ("Hours between failures", wording.number(found.mtbf_h) if found.mtbf_h else "no failure", None, None),
        ],
        key="fleet",
    )  # fmt: skip
    suspicious = [member.name for member in (*found.hosts, *found.devices) if member.is_suspicious]
    if suspicious:
        names = markdown_text(", ".join(suspicious), 400)
        st.warning(f"More trouble than chance explains: {names}. Test them before the next job.", icon=":material/dns:")
    else:
        st.markdown(ALL_WELL)
    _exclude(found)
    st.subheader("Hosts", anchor=False)
    _members(found.hosts, key="fleet-hosts", missing="No run recorded its hosts.")
    st.subheader("Devices", anchor=False)
    _members(found.devices, key="fleet-devices", missing="No run recorded a device. Ranks on a CPU have none.")
    st.caption(
        f"{COUNTED} A run counts once, however many incidents it has. The rate is shrunk towards that of the fleet "
        "(empirical Bayes) and has a 90 % interval; `chance` is the probability that an ordinary member has as many. "
        "In a terminal: `rankscope fleet RUNS_DIR`."
    )
    st.subheader("Speed of the same configuration", anchor=False)
    _speeds(found.speeds)


def _exclude(found: Fleet) -> None:
    """Draw the suspicious hosts as texts to copy, one per format."""
    texts = {form: exclude_list(found, form) for form in FORMS}
    if not any(texts.values()):
        return
    st.subheader("Exclude them from the next job", anchor=False)
    for tab, (form, text) in zip(st.tabs([form.capitalize() for form in texts]), texts.items(), strict=True):
        tab.code(text, language="bash" if form == "slurm" else "json")


def _members(members: Sequence[Member], *, key: str, missing: str) -> None:
    if not members:
        empty_state(missing)
        return
    table([_row(number, member) for number, member in enumerate(members[:MAX_SHOWN], 1)], key=key)
    if len(members) > MAX_SHOWN:
        st.caption(f"{len(members) - MAX_SHOWN:,} more with lower rates.")


def _speeds(speeds: Sequence[ConfigurationSpeed]) -> None:
    """Draw a row per configuration and change, and the runs of configurations that changed."""
    if not speeds:
        empty_state("No configuration has two runs with a recorded speed.")
        return
    slower = [one for one in speeds if one.status == "slower"]
    if slower:
        names = markdown_text("; ".join(one.title for one in slower), 400)
        st.warning(f"Slower than before: {names}.", icon=":material/trending_down:")
    table([row for one in speeds[:MAX_SHOWN] for row in _speed_rows(one)], key="fleet-speeds")
    for one in [one for one in speeds if one.changes][:MAX_DRAWN]:
        st.markdown(markdown_text(one.title, 200))
        what = f"Speed of each run of {one.title} ({one.unit}), and the medians between changes."
        chart(speed_history, one, key=f"fleet-speed-{one.fingerprint}", what=what)
    st.caption(
        "Runs with the same settings, mesh and devices, ordered by start time; runs with injected faults are "
        "excluded. A change is shown if it is at least 2 % and a permutation test over all configurations gives p of "
        "at most 1 %. A simultaneous change is not necessarily the cause."
    )


def _speed_rows(one: ConfigurationSpeed) -> list[dict[str, Any]]:
    known = {"configuration": one.title, "runs": len(one.run_ids), "now": f"{one.newest:,.4g} {one.unit}"}
    if not one.changes:
        words = {"too_few_runs": "too few runs to tell"}.get(one.status, "none found")
        return [known | {"change": words, "since run": "", "changed at the same time": "", "p": ""}]
    return [
        known | {
            "change": f"{100 * (change.ratio - 1):+.1f} %", "since run": change.first_run,
            "changed at the same time": change.with_versions, "p": f"{change.p_value:.2g}",
        }
        for change in one.changes
    ]  # fmt: skip


def _row(number: int, member: Member) -> dict[str, Any]:
    rate = member.rate
    return {
        "#": number, "name": member.name, **({"host": member.host} if member.host != member.name else {}),
        "suspicious": "yes" if member.is_suspicious else "",
        "runs": member.runs, "hours": float(f"{member.hours:.3g}"), "runs with trouble": member.bad_runs,
        "per 1,000 h": float(f"{1e3 * rate.mean_per_h:.3g}"),
        "from": float(f"{1e3 * rate.low_per_h:.3g}"), "to": float(f"{1e3 * rate.high_per_h:.3g}"),
        "chance": f"{member.chance:.2g}",
        "incidents": ", ".join(f"{title_of(kind).lower()} {count}" for kind, count in member.kinds.items()),
        "time lost": units.duration(member.cost_s) if member.cost_s else "",
    }  # fmt: skip
