"""A file to which a requeued job appended its attempts: the last one is judged, the ends before it are listed."""

from __future__ import annotations

from pathlib import Path

from analyzers.diagnose import Diagnosis
from analyzers.evidence.diagnose_files import diagnose_files

PREEMPTED = (
    "slurmstepd-n1: error: *** STEP 1.1 ON n1 CANCELLED AT 2026-11-23T01:17:33 DUE TO PREEMPTION ***\n"
    "slurmstepd-n1: error: *** JOB 1 ON n1 CANCELLED AT 2026-11-23T01:17:33 DUE TO PREEMPTION ***\n"
    "srun: Job step aborted: Waiting up to 122 seconds for job step to finish.\n"
    "step     7  Stopped as requested; saved step 7.\n"
    "srun: error: n1: task 0: Exited with exit code 143\n"
)
NODE_LOST = (
    "slurmstepd-n2: error: *** JOB 1 ON n2 CANCELLED AT 2026-11-23T01:19:24 DUE TO NODE FAILURE, SEE SLURMCTLD ***\n"
    "srun: error: Node failure on n3\n"
    "Preempted. Received SIGTERM. Nothing was saved at this stop: a resume continues from the newest checkpoint.\n"
    "srun: error: n2: task 0: Exited with exit code 143\n"
)
FINISHED = "Finished after 1 restart. Next: rankscope analyze /data/runs/1/gpt\n"
CRASH = (
    "[rank1]: Traceback (most recent call last):\n"
    '[rank1]:   File "/job/train.py", line 7, in step\n[rank1]: ValueError: label 99\n'
)


def launched(*nodes: int, resumed: bool = True) -> str:
    how = "resumed: " if resumed else ""
    return "".join(f"node {node}: {how}run /data/runs/1/gpt  2 ranks \n(dp_replicate 2)  120 steps\n" for node in nodes)


def steps(first: int, last: int) -> str:
    return "".join(f"step {step:5d}/120  loss 2.5  1 k tokens/s  80 ms/step\n" for step in range(first, last))


def analyzed(folder: Path, text: str) -> Diagnosis:
    (folder / "slurm-1.log").write_text(text, encoding="utf-8")
    return diagnose_files([folder / "slurm-1.log"])


def test_a_job_that_finished_after_a_preemption_and_a_lost_node_is_well(tmp_path: Path) -> None:
    text = launched(0, 1, resumed=False) + steps(1, 7) + PREEMPTED + launched(0, 1) + steps(7, 99) + NODE_LOST
    found = analyzed(tmp_path, text + launched(0, 1) + steps(96, 120) + FINISHED)
    assert found.fired == ()
    assert found.verdict.startswith("The job finished (slurm-1.log:144")
    ends = [(end["cause"], end["host"]) for end in found.run["logs"]["earlier_ends"]]
    assert ends == [("preempted", "n1"), ("node_failed", "n3")]
    assert found.run["ended"] == "finished, after 2 earlier attempts: preempted (n1), node_failed (n3)"


def test_the_error_of_the_last_attempt_is_the_verdict(tmp_path: Path) -> None:
    (finding,) = analyzed(tmp_path, launched(0, 1) + PREEMPTED + launched(0, 1) + steps(7, 20) + CRASH).fired
    assert (finding.cause, finding.ranks) == ("exception", (1,))


def test_an_error_before_the_preemption_is_of_the_earlier_attempt(tmp_path: Path) -> None:
    (finding,) = analyzed(tmp_path, CRASH + PREEMPTED + launched(0, 1) + steps(7, 20) + NODE_LOST).fired
    assert finding.cause == "node_failed"


def test_without_a_start_after_it_a_preemption_is_the_end(tmp_path: Path) -> None:
    found = analyzed(tmp_path, launched(0, 1, resumed=False) + steps(1, 7) + PREEMPTED)
    assert [one.cause for one in found.fired] == ["preempted"]
    assert found.run["ended"] == "cancelled by Slurm at 2026-11-23T01:17:33 (preemption)"


def test_the_node_that_failed_is_named_and_not_the_one_that_reports_it(tmp_path: Path) -> None:
    (finding,) = analyzed(tmp_path, launched(0, 1) + steps(1, 9) + NODE_LOST).fired
    assert (finding.cause, finding.evidence["host"]) == ("node_failed", "n3")
    assert "(n3)" in finding.summary


def test_a_requeued_torchrun_is_a_new_attempt(tmp_path: Path) -> None:
    start = (
        "W1123 01:20:51.736000 12128 torch/distributed/run.py:874] Setting OMP_NUM_THREADS environment variable for "
        "each process to be 1 in default\n"
    )
    (finding,) = analyzed(tmp_path, start + CRASH + NODE_LOST + start + steps(1, 9) + PREEMPTED).fired
    assert finding.cause == "preempted"


def test_the_second_nodes_start_does_not_hide_the_error_of_the_first(tmp_path: Path) -> None:
    (finding,) = analyzed(tmp_path, launched(0, resumed=False) + CRASH + launched(1, resumed=False)).fired
    assert finding.cause == "exception"


BEGIN = "2026-11-23 {hour}:00:{second:02d},118 - trainer - INFO - {text}\n"
BEGUN = ("Reading the settings of tiny-lm from conf/b7.yaml", "Building tokenizer files for run 4401")
TRACEBACK = (
    "Traceback (most recent call last):\n"
    '  File "/job/fit.py", line 90, in <module>\n    main()\n'
    '  File "/job/fit.py", line 41, in main\n    sample = shards[11]\n'
    "IndexError: list index out of range\n"
)


def begun(hour: int, *more: str) -> str:
    lines = (*BEGUN, *more)
    return "".join(BEGIN.format(hour=hour, second=second, text=text) for second, text in enumerate(lines))


def test_repeated_first_lines_are_another_attempt(tmp_path: Path) -> None:
    found = analyzed(tmp_path, begun(10) + steps(1, 20) + TRACEBACK + begun(10) + steps(1, 40))
    assert found.fired == ()
    assert found.verdict.startswith("The log ends in training")


def test_the_time_since_a_failure_separates_a_restart_from_another_process(tmp_path: Path) -> None:
    failed = begun(10, "Reading shard 3") + TRACEBACK
    assert analyzed(tmp_path, failed + begun(12)).fired == ()
    (finding,) = analyzed(tmp_path, failed + begun(10)).fired  # perhaps another process of the same start
    assert (finding.cause, finding.evidence["error_type"]) == ("exception", "IndexError")


def test_the_failure_of_the_last_of_three_attempts_is_the_verdict(tmp_path: Path) -> None:
    first = begun(10) + steps(1, 20) + TRACEBACK
    last = TRACEBACK.replace("IndexError: list index out of range", "KeyError: 'mask'")
    (finding,) = analyzed(tmp_path, first + begun(11) + steps(1, 9) + begun(12) + steps(1, 30) + last).fired
    assert finding.evidence["error_type"] == "KeyError"


def test_first_lines_below_a_failure_are_no_second_start(tmp_path: Path) -> None:
    limit = "slurmstepd: error: *** JOB 6 ON n1 CANCELLED AT 2026-11-23T09:17:33 DUE TO TIME LIMIT ***\n"
    (finding,) = analyzed(tmp_path, steps(8, 9) + limit + begun(10)).fired
    assert finding.cause == "time_limit"


def test_first_lines_of_another_rank_do_not_hide_an_error(tmp_path: Path) -> None:
    ranks = "".join(f"[rank{rank}]: {text}\n" for rank in (0, 1) for text in BEGUN)
    text = ranks + steps(1, 20) + CRASH + "".join(f"[rank0]: {text}\n" for text in BEGUN)
    (finding,) = analyzed(tmp_path, text).fired
    assert (finding.cause, finding.ranks) == ("exception", (1,))


def test_an_error_line_that_a_finished_attempt_printed_too_is_no_cause(tmp_path: Path) -> None:
    error = "Cannot read the cache of the tokenizer: building it"
    level = BEGIN.replace("INFO", "ERROR").format(hour=10, second=3, text=error)
    text = begun(10) + level + steps(1, 120) + BEGIN.format(hour=10, second=9, text="Training finished")
    found = analyzed(tmp_path, text + begun(12) + level.replace(" 10:", " 12:"))
    assert found.fired == ()


def test_a_program_that_was_refused_was_started_again(tmp_path: Path) -> None:
    refused = '  File "/job/fit.py", line 71\n    data = read()\n    ^\nSyntaxError: invalid syntax\n'
    (finding,) = analyzed(tmp_path, refused + TRACEBACK).fired
    assert finding.evidence["error_type"] == "IndexError"
    (finding,) = analyzed(tmp_path, refused).fired
    assert finding.evidence["error_type"] == "SyntaxError"


def test_the_end_of_another_job_in_the_same_file_is_ignored(tmp_path: Path) -> None:
    cancelled = "slurmstepd: error: *** STEP {job}.0 ON n1 CANCELLED AT 2026-11-2{day}T09:17:33 ***\n"
    text = steps(1, 20) + cancelled.format(job=71, day=1) + steps(1, 30) + cancelled.format(job=72, day=2)
    found = analyzed(tmp_path, text)
    assert found.run["ended"].startswith("cancelled by Slurm at 2026-11-22T09:17:33")
    (finding,) = analyzed(tmp_path, text.replace("STEP 71.0", "STEP 72.0")).fired
    assert finding.cause == "cancelled"


def test_each_job_environment_of_submitit_is_an_attempt(tmp_path: Path) -> None:
    start = "submitit INFO (2026-11-23 04:17:53,762) - Starting with JobEnvironment(job_id=6, hostname=n1, node=0(1))\n"
    found = analyzed(tmp_path, start + steps(1, 9) + TRACEBACK + start + steps(1, 4))
    assert found.fired == ()


def test_an_error_before_the_time_limit_is_the_cause(tmp_path: Path) -> None:
    limit = "slurmstepd: error: *** JOB 6 ON n1 CANCELLED AT 2026-11-23T09:17:33 DUE TO TIME LIMIT ***\n"
    (finding,) = analyzed(tmp_path, steps(1, 9) + TRACEBACK + limit).fired
    assert (finding.cause, finding.evidence["error_type"]) == ("exception", "IndexError")
    assert "then lasted until the scheduler ended it at its time limit" in finding.summary
    others = "".join(f"image {number} was written\n" for number in range(1200))
    (finding,) = analyzed(tmp_path, TRACEBACK + others + limit).fired  # of a program that ran before
    assert finding.cause == "time_limit"
    caught = TRACEBACK.replace('  File "/job/fit.py", line 90, in <module>\n    main()\n', "")
    (finding,) = analyzed(tmp_path, steps(1, 9) + caught + limit).fired
    assert finding.cause == "time_limit"


def test_the_error_that_ended_an_earlier_attempt_is_listed(tmp_path: Path) -> None:
    text = launched(0, 1, resumed=False) + steps(1, 7) + CRASH + launched(0, 1) + steps(5, 120) + FINISHED
    found = analyzed(tmp_path, text)
    assert found.fired == ()
    assert found.run["ended"] == "finished, after an earlier attempt: ValueError"
    (end,) = found.run["logs"]["earlier_ends"]
    assert end["line"] == f"slurm-1.log:{text[: text.index('[rank1]: ValueError')].count(chr(10)) - 1}"


def test_an_error_that_the_earlier_attempt_survived_is_not_its_end(tmp_path: Path) -> None:
    text = launched(0, 1, resumed=False) + steps(1, 4) + CRASH + steps(4, 7) + launched(0, 1) + steps(7, 120) + FINISHED
    assert analyzed(tmp_path, text).run["ended"] == "finished"
