"""Check that the tests can fail: insert hand-made defects one at a time, and count those that the tests find.

    python -m benchmarks.accuracy.mutations                  # only the tests listed with a defect; some three minutes
    python -m benchmarks.accuracy.mutations --folders        # all tests of the broken package; more than an hour
    python -m benchmarks.accuracy.mutations --only votes --only queue

Everything happens in a copy of the working tree. A defect replaces a piece of text that must occur exactly once, so a
defect whose code has moved is refused and not counted (tests/test_mutations.py). The same tests first run on the
unchanged tree: a test that fails there can find no defect.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.harness import argument_parser, markdown_head, markdown_row

__all__ = ["MUTATIONS", "ROOT", "Mutation", "occurrences"]

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 900.0
"""Time limit for the tests of one defect; a defect that makes them wait forever counts as found."""


@dataclass(frozen=True, slots=True)
class Mutation:
    """Replaces `old` in `file` with `new`; `tests` are the tests of `make test` that should fail then."""

    name: str
    file: str
    old: str
    new: str
    tests: str


MUTATIONS = (
    # probes
    Mutation("step duration negative", "probes/step_clock.py",
             "row[_DURATION] = now - self._start_ns", "row[_DURATION] = self._start_ns - now",
             "tests/probes/test_recorder.py::test_a_step_has_its_phases_and_its_values"),
    Mutation("only a phase's last piece counts", "probes/step_clock.py",
             "row[phase] += end_ns - start_ns", "row[phase] = end_ns - start_ns",
             "tests/probes/test_recorder.py::test_phases_and_gaps_add_up_to_the_step"),
    Mutation("quoted passwords not redacted", "probes/tape/redaction/secret_patterns.py",
             "for pattern in (_HEADER, _QUOTED, _NAMED, _OPTION,", "for pattern in (_HEADER, _NAMED, _OPTION,",
             "tests/probes/tape/test_secrets.py::test_secrets_are_redacted"),
    Mutation("passwords by name not redacted", "probes/tape/redaction/secret_patterns.py",
             "for pattern in (_HEADER, _QUOTED, _NAMED, _OPTION,", "for pattern in (_HEADER, _QUOTED, _OPTION,",
             "tests/probes/tape/test_secrets.py::test_secrets_are_redacted"),
    Mutation("an incident ends one step late", "probes/guard/decisions.py",
             "position.step >= ledger.incident_step + self", "position.step > ledger.incident_step + self",
             "tests/probes/guard/test_decisions.py::test_an_incident_ends_with_enough_quiet_steps"),
    Mutation("threshold of a loss spike doubled", "probes/guard/spike_detector.py",
             "strong_z: float = 8.0", "strong_z: float = 16.0",
             "tests/probes/guard/test_spike_detector.py"),
    # store
    Mutation("an event of each read is dropped", "store/ingest/transaction.py",
             "for content in added.events:", "for content in added.events[1:]:",
             "tests/store/ingest/test_ingest.py::test_ticks_and_rebuild_agree"),
    Mutation("records stored under another rank", "store/ingest/transaction.py",
             "rank=added.folder.rank,\n                    attempt=added.header.attempt",
             "rank=added.folder.rank ^ 1,\n                    attempt=added.header.attempt",
             "tests/store/ingest/test_columns.py::test_every_tape_table_comes_back"),
    Mutation("an old read position overwrites the new one", "store/ingest/read_positions.py",
             "segments=self.segments | changes.segments", "segments=changes.segments | self.segments",
             "tests/store/ingest/test_ingest.py::test_a_killed_rank_keeps_all_its_records"),
    Mutation("the writer's lock is not taken", "store/database.py",
             "while not _locked(self._fd):", "while False:",
             "tests/store/ingest/test_ingest.py::test_only_one_writer"),
    Mutation("totals of folded calls are negative", "store/ingest/retention.py",
             'f"end_ns - issue_ns AS duration_ns', 'f"issue_ns - end_ns AS duration_ns',
             "tests/store/ingest/test_retention.py::test_older_calls_become_totals_that_add_up"),
    # analyzers
    Mutation("first and last arrival swapped", "analyzers/stragglers/comparison/arrivals.py",
             "SELECT arg_min(rank, took) AS shortest", "SELECT arg_max(rank, took) AS shortest",
             "tests/analyzers/stragglers/test_straggler.py::test_a_finding_says_who_since_when_how_much_and_why"),
    Mutation("smallest slowdown doubled", "analyzers/stragglers/policy.py",
             "min_effect_ratio: float = 0.035", "min_effect_ratio: float = 0.07",
             "tests/analyzers/stragglers/test_straggler.py::test_five_percent_are_found_without_a_time_before"),
    Mutation("waiting ranks are blamed for a hang", "analyzers/hangs/culprits.py",
             "rank in roots if not heads.get(rank))", "rank in roots if heads.get(rank))",
             "tests/analyzers/hangs/test_hang.py::test_the_rank_that_never_entered_is_named_and_the_others_wait"),
    Mutation("forward and backward swapped for a NaN", "analyzers/numerics/nonfinite_origin.py",
             'phase="forward" if forward else "backward",', 'phase="backward" if forward else "forward",',
             "tests/analyzers/numerics/test_nonfinite.py::test_the_earliest_flag_names_the_rank_and_the_rest_is_fallout"),
    Mutation("a growth of the memory is dropped", "analyzers/memory/analyze.py",
             "if total < max(policy.min_growth_bytes", "if total > max(policy.min_growth_bytes",
             "tests/analyzers/memory/test_memory.py::test_a_leak_with_its_slope_and_the_time_that_is_left"),
    Mutation("discarded steps are training", "analyzers/account/goodput.py",
             'return self.seconds["training"] / self.wall_s',
             'return (self.seconds["training"] + self.seconds["recomputed"]) / self.wall_s',
             "tests/analyzers/account/test_goodput.py::test_steps_that_were_refused_or_rolled_back_are_discarded"),
    Mutation("a corruption names another rank", "analyzers/corruption/gradient_outlier.py",
             "rank = int(outliers[0])", "rank = int(np.argmin(rises))",
             "tests/analyzers/corruption/test_gradient_outlier.py::test_a_rank_that_rises_alone_is_named"),
    Mutation("suspects are not reported", "analyzers/diagnose.py",
             'if finding.status in ("fired", "suspect"))', 'if finding.status == "fired")',
             "tests/analyzers/evidence/test_dump_verdicts.py::test_a_rank_dumped_before_the_call_is_not_accused_for_sure"),
    Mutation("text of a run not escaped in a report", "probes/tape/redaction/printable.py",
             r'_LIST_NUMBER.sub(r"\1\\\2", _SPECIAL.sub(r"\\\g<0>", visible(shown).strip()))', "visible(shown).strip()",
             "tests/analyzers/report/test_files.py::test_nothing_of_a_hostile_run_is_obeyed_by_a_ticket"),
    # watch
    Mutation("a clock that is ahead is behind", "watch/digests/clock_offsets.py",
             "return self.answered_ns - (self.sent_ns + self.received_ns) // 2",
             "return (self.sent_ns + self.received_ns) // 2 - self.answered_ns",
             "tests/watch/digests/test_digests.py::test_digests_clocks_and_verdicts_go_over_the_store"),
    Mutation("unsigned messages are accepted", "watch/digests/signed_messages.py",
             "if not hmac.compare_digest(mac, self._mac(purpose, sender, to, signed)):", "if not mac:",
             "tests/watch/digests/test_strangers.py::test_forged_and_replayed_digests_change_nothing"),
    Mutation("the queue of findings has no end", "watch/exporting/webhook.py",
             "if len(self._queue) >= _MAX_WAITING:", "if not self._queue and _MAX_WAITING < 0:",
             "tests/watch/exporting/test_webhook.py::test_undelivered_findings_are_reported_at_close"),
    Mutation("waiting ranks are killed", "watch/culprit.py",
             "culprits = blamed & processes.keys()", "culprits = processes.keys() - blamed",
             "tests/watch/test_culprit.py::test_a_culprit_of_this_node_is_killed_alone_and_at_once"),
    Mutation("excluded only after twice the time", "watch/exclusion/requester.py",
             "if now_s - since_s >= self._settings.straggler_after_s",
             "if now_s - since_s >= 2 * self._settings.straggler_after_s",
             "tests/watch/exclusion/test_requester.py::test_a_rank_that_stays_slow_is_requested_once_on_its_node"),
    # trainer
    Mutation("a checkpoint's hash is not compared", "trainer/checkpoint/disk_tier/manifest.py",
             "if found != expected:", "if found is None:",
             "tests/trainer/checkpoint/disk_tier/test_checkpoint_damage.py::test_damage_is_found_and_the_newest_whole_one_is_loaded"),
    Mutation("a peer's copy is not compared", "trainer/checkpoint/memory_tier/slots.py",
             'if hashlib.blake2b(region, digest_size=32).hexdigest() != note["blake2b"]:', "if region is None:",
             "tests/trainer/checkpoint/memory_tier/test_peer_copies.py::test_bytes_that_changed_on_their_way_are_no_copy"),
    Mutation("the last sequence has no target", "trainer/data/batches.py",
             "max(0, last - first - 1) // self.seq_len", "max(0, last - first) // self.seq_len",
             "tests/trainer/data/test_data.py::test_the_last_sequence_has_its_last_target_in_its_own_split"),
    Mutation("votes are read in another order", "trainer/guard/votes.py",
             "integrity=IntegrityVote(*islice(values, len(IntegrityVote._fields))),\n"
             "            save=SaveVote(*islice(values, len(SaveVote._fields))),",
             "save=SaveVote(*islice(values, len(SaveVote._fields))),\n"
             "            integrity=IntegrityVote(*islice(values, len(IntegrityVote._fields))),",
             "tests/trainer/guard/test_integrity.py::test_a_flipped_bit_is_named_and_undone"),
    Mutation("copies count twice in the gradient norm", "trainer/training/clipping.py",
             "square if copies == 1 else square / copies", "square",
             "tests/trainer/parallel/test_equivalence.py::test_two_ranks"),
    # dashboard and front door
    Mutation("the page shows the peers' values for the rank", "dashboard/data/rank_at_step.py",
             "max(c{number}) FILTER (rank = $1)", "max(c{number}) FILTER (rank <> $1)",
             "tests/dashboard/data/test_rank_at_step.py::test_a_rank_is_shown_beside_the_peers_of_its_stage_in_its_newest_attempt"),
    Mutation("the page shows only the oldest events", "dashboard/data/sql/event_queries.py",
             'f"WHERE {where} ORDER BY wall_ns DESC LIMIT {MAX_EVENTS}"',
             'f"WHERE {where} ORDER BY wall_ns LIMIT {MAX_EVENTS}"',
             "tests/dashboard/data/test_event_queries.py"),
    Mutation("truncated rows are returned", "rankscope/api.py",
             "if answer.is_cut:", "if not answer.names:",
             "tests/rankscope/test_api.py::test_records_as_tables"),
)  # fmt: skip


def occurrences(mutation: Mutation, root: Path = ROOT) -> int:
    """Number of occurrences of the text to replace; the mutation is applicable if it is 1."""
    return (root / mutation.file).read_text(encoding="utf-8").count(mutation.old)


def copy_tree(target: Path) -> None:
    """Copy the tracked and the untracked, not ignored files of the working tree."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, check=True, text=True,
    ).stdout  # fmt: skip
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def failing(root: Path, tests: str) -> tuple[bool, str]:
    """Return True if the tests fail in a tree, and their last line."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests.split()]
    environment = os.environ | {"PYTHONPATH": str(root)}
    try:
        done = subprocess.run(
            command, cwd=root, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return True, f"they did not end in {TIMEOUT_S:.0f} s"
    lines = done.stdout.strip().splitlines()
    last = next((line for line in lines if line.startswith(("FAILED", "ERROR"))), lines[-1] if lines else done.stderr)
    if done.returncode in (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.NO_TESTS_COLLECTED):
        raise SystemExit(f"No such test: {tests}")
    return done.returncode != 0, last.partition(" - ")[0].removeprefix("FAILED ")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--folders", action="store_true", help="all tests of the package")
    parser.add_argument("--after-green", action="store_true", help="skip the run without a defect")
    parser.add_argument("--only", action="append", default=[], help="part of a name")
    options = parser.parse_args(arguments)
    chosen = [one for one in MUTATIONS if not options.only or any(part in one.name for part in options.only)]
    moved = [one.name for one in chosen if occurrences(one) != 1]
    if moved:
        print(f"No longer applicable: {', '.join(moved)}", file=sys.stderr)
        return 2

    def tests_of(one: Mutation) -> str:
        return f"tests/{Path(one.file).parts[0]}" if options.folders else one.tests

    found = 0
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        root = Path(folder)
        copy_tree(root)
        whole = " ".join(sorted({path for one in chosen for path in tests_of(one).split()}))
        is_red, line = (False, "") if options.after_green else failing(root, whole)
        if is_red:
            print(f"Failed without a defect: {line}", file=sys.stderr)
            return 2
        print(markdown_head("defect", "file", "found", "seconds", "by"), flush=True)
        for one in chosen:
            text = (root / one.file).read_text(encoding="utf-8")
            (root / one.file).write_text(text.replace(one.old, one.new), encoding="utf-8")
            begun = time.monotonic()
            is_found, line = failing(root, tests_of(one))
            (root / one.file).write_text(text, encoding="utf-8")
            found += is_found
            seconds = time.monotonic() - begun
            result = ("yes", f"{seconds:.0f}", line) if is_found else ("**no**", f"{seconds:.0f}", "")
            print(markdown_row(one.name, one.file, *result), flush=True)
    print(f"\n{found} of {len(chosen)} found")
    return 0 if found == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
