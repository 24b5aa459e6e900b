"""Histories of all runs in a folder: a finished run is diagnosed once, and cached in `.fleet` next to the runs.

found = read_histories(RunsFolder(Path("runs")))
found.histories, found.problems             # one per run; {run: why it could not be read}
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from analyzers.account.long_run import MEMORY_BYTES
from analyzers.diagnose import diagnose
from analyzers.fleet.history import RunHistory, history_of
from analyzers.run.live.folder_state import folder_state
from analyzers.run.policy import stall_policy
from store import Store, is_watched
from store.published.copy_time import stored_until_ns
from store.runs_folder import RunsFolder

__all__ = ["Histories", "read_histories"]

FORMAT = 5
"""Format version of the stored diagnoses; files of another version are rewritten."""


@dataclass(slots=True, kw_only=True)
class Histories:
    """The runs that could be read, the newest first, and what was wrong with the others."""

    histories: list[RunHistory] = field(default_factory=list)
    problems: dict[str, str] = field(default_factory=dict)


def read_histories(folder: RunsFolder) -> Histories:
    """Read each run, from `.fleet` if it has not changed since. A damaged run does not hide the others."""
    found = Histories()
    for name in folder.run_ids():
        try:
            found.histories.append(_history(folder, name))
        except (ValueError, OSError) as error:
            found.problems[name] = str(error)
    return found


def _history(folder: RunsFolder, name: str) -> RunHistory:
    run = folder.open(name)
    cache = folder.path / ".fleet" / f"{name}.json"
    with Store.open(run, memory_bytes=MEMORY_BYTES, spills=True) as store:
        version = [FORMAT, *([path.name, path.stat().st_size] for path in run.stores())]
        try:
            known = json.loads(cache.read_text(encoding="utf-8"))
            if known["version"] == version:
                return RunHistory.of_json(known["history"])
        except (OSError, ValueError, KeyError, TypeError):
            pass
        manifest = run.manifest() | {"run_id": name}
        until_ns, watched = stored_until_ns(run), is_watched(run.stores())
        is_live = watched and folder_state(run, store, stall_policy(manifest), now_ns=until_ns).is_live
        diagnosis = diagnose(store, manifest, now_ns=until_ns if is_live else None, stacks_dir=run.stacks)
        history = history_of(store, manifest, diagnosis, is_live=is_live)
    if not watched:
        try:
            cache.parent.mkdir(exist_ok=True)
            cache.write_text(json.dumps({"version": version, "history": history.to_json()}), encoding="utf-8")
        except OSError:
            pass  # the folder is read-only: its runs are diagnosed each time
    return history
