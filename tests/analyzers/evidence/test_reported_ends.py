"""Lines that report another node's end, alternatives of a cause, causes deep in a line, and steps without a number."""

from __future__ import annotations

from pathlib import Path

import pytest

from analyzers.report.wording.explained import next_step
from tests.analyzers.evidence.written import diagnosed

RAY = "(TrainController pid=77, ip=10.0.0.1) "


def verdict(tmp_path: Path, text: str) -> str:
    return diagnosed(tmp_path, "job.log", text).verdict


def test_a_controller_does_not_report_its_own_node(tmp_path: Path) -> None:
    text = (
        f"{RAY}loss: 2.09\n(Worker pid=9, ip=10.0.0.2) loss: 2.08\n"
        "WARNING worker.py:1462 -- The node with node id: 8f20 and ip: 10.0.0.2 has been marked dead because the "
        f"detector has missed too many heartbeats from it.\n{RAY}The actor is dead because its node has died.\n"
    )
    assert verdict(tmp_path, text) == "The scheduler reports that a node failed (10.0.0.2)."
    said = verdict(tmp_path, f"{RAY}The actor is dead because its node has died. Node Id: 8f20\n")
    assert said == "The scheduler reports that a node failed."


def test_a_reclaimed_node_did_not_fail(tmp_path: Path) -> None:
    text = f"{RAY}The actor died because its node has died.\n{RAY}the actor's node was preempted: capacity reclaimed\n"
    diagnosis = diagnosed(tmp_path, "job.log", text)
    assert [one.cause for one in diagnosis.fired] == ["preempted"]
    assert "10.0.0.1" not in diagnosis.verdict


@pytest.mark.parametrize(
    "alternatives",
    [
        "Failed to send RPC to coordination service. Either the leader task was preempted/died/restarted.",
        "Failed to send RPC to coordination service. Perhaps the leader task was preempted.",
        "Connection reset by peer: the remote task was preempted, or crashed.",
        "Connection reset by peer. This happens when a node was preempted.",
    ],
)
def test_one_of_several_possible_causes_is_not_claimed(tmp_path: Path, alternatives: str) -> None:
    assert "took the job's nodes away" not in verdict(tmp_path, f"UNAVAILABLE: {alternatives}\n")
    assert "took the job's nodes away" in verdict(tmp_path, "the job was preempted by a job of higher priority\n")


def test_a_task_of_hccl_that_timed_out_is_not_the_error_of_the_line_that_waited(tmp_path: Path) -> None:
    text = (
        'Traceback (most recent call last):\n  File "train.py", line 4, in <module>\n    loss.item()\n'
        "RuntimeError: ACL stream synchronize failed.\nEI9999: The error from device(chipId:1, dieId:0), serial number "
        "is 7, hccl fftsplus task timeout occurred during task execution, stream_id:5\n"
    )
    assert verdict(tmp_path, text).startswith("A task on a device did not end in time (hccl fftsplus task timeout).")


def test_a_long_line_is_quoted_from_its_cause(tmp_path: Path) -> None:
    before = "Attempting to fetch value instead of handling error Internal: failed initializing executor 0 of it: "
    text = f"F statusor.cc:34] {before}{before}failed call: CUDA_ERROR_ECC_UNCORRECTABLE: uncorrectable ECC error\n"
    assert verdict(tmp_path, text).endswith("reported a device error: …uncorrectable ECC error.")


def test_steps_that_print_only_what_they_took_are_judged(tmp_path: Path) -> None:
    took = [32.1 + n % 3 for n in range(30)] + [103.0 + n % 4 for n in range(20)]
    text = "".join(f"Iteration took {seconds:.3f} s.\n" for seconds in took)
    assert "slower since printed line 31" in verdict(tmp_path, text)
    assert "slower" not in verdict(tmp_path, "".join(f"Iteration took {one:.3f} s.\n" for one in took[:30]))


def test_the_time_for_data_beside_a_step_without_it(tmp_path: Path) -> None:
    text = "".join(
        f"load_data_time: {19.6 if n % 6 == 3 else 0.0001}, train_step_time: 0.6{n % 10}\n" for n in range(60)
    )
    diagnosis = diagnosed(tmp_path, "job.log", text)
    assert diagnosis.verdict.startswith("The steps have waited for data 84 % of the time")
    healthy = "".join(f"load_data_time: 0.0001, train_step_time: 0.6{n % 10}\n" for n in range(60))
    assert not diagnosed(tmp_path, "healthy.log", healthy).fired


def test_every_second_step_is_compared_with_the_others(tmp_path: Path) -> None:
    text = "".join(
        f"Epoch: 1/30, Step: {n}/951, Loss: 3.2, Time/step: {44.0 if n % 2 else 4.0}\n" for n in range(1, 99)
    )
    assert "Every 2 steps one takes 11.00x as long" in verdict(tmp_path, text)


@pytest.mark.parametrize(
    "line",
    [
        "step:{0} smpl:64 ep:2 epch:0.00 loss:1.05 grdn:4.48 lr:1.8e-06 updt_s:0.3 data_s:{1}\n",
        "  0%|     | {0}/900 [03:05<80:21:46, 20.00s/it, data_times={2}, model_times=2.008\r",
    ],
)
def test_data_time_in_the_words_of_robot_trainers(tmp_path: Path, line: str) -> None:
    slow = "".join(line.format(n, 13.3 if n % 8 == 1 else 0.001, 18.1) for n in range(1, 90))
    assert "waited for data" in verdict(tmp_path, slow)
    healthy = "".join(line.format(n, 0.001, 0.001) for n in range(1, 90))
    assert not diagnosed(tmp_path, "healthy.log", healthy).fired


def test_a_growing_step_time_is_not_elapsed_time(tmp_path: Path) -> None:
    text = "".join(
        f" iteration {n}/ 900 | elapsed time per iteration (ms): {800 + 20 * n}.0 | lm loss: 2.1E+00 |\n"
        for n in range(5, 400, 5)
    )
    assert "become slower with every step" in verdict(tmp_path, text)
    clock = "".join(f"step {n} loss 2.1 Time: {2 * n}.1 sec\n" for n in range(60))
    assert not diagnosed(tmp_path, "clock.log", clock).fired


def test_waits_at_irregular_intervals_are_counted_once(tmp_path: Path) -> None:
    waits = [n for n in range(80) if n * n % 7 in (1, 2)]
    text = "".join(
        f"iter: {n} iter_time: {9.1 if n in waits else 0.3}s, data_time: {8.8 if n in waits else 0.001}s, "
        "total_loss: 5.8\n" for n in range(80)
    )  # fmt: skip
    (found,) = [one for one in diagnosed(tmp_path, "job.log", text).fired if one.kind == "data_bound"]
    assert found.cause != "irregular" or f"in {found.evidence['starved_steps']} of" in found.summary


def test_the_loss_of_keras_is_that_of_whole_epochs(tmp_path: Path) -> None:
    losses = ("0.48", "0.31", "0.25", "nan", "nan")
    text = "".join(
        f"Epoch {n}/5\n 3/10 [=====>.....] - ETA: 2s - loss: 9.9\n10/10 [==========] - 6s 3ms/step - loss: {loss}\n"
        for n, loss in enumerate(losses, 1)
    )
    assert verdict(tmp_path, text).startswith("The loss is not finite from printed line 4 on.")


def test_wrong_values_in_nccl_tests(tmp_path: Path) -> None:
    table = "#  size  count  type  redop  time  algbw  busbw #wrong\n  8   2   float   sum   20.1  0.0  0.0  {}\n"
    end = "# Out of bounds values : {}\n# Avg bus bandwidth    : 65.1\n"
    assert "finished" in verdict(tmp_path, table.format(0) + end.format("0 OK"))
    wrong = verdict(tmp_path, table.format(12) + end.format("12 FAILED"))
    assert "reported a device error" in wrong
    assert "Out of bounds values : 12 FAILED" in wrong


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("node7 kernel: LustreError: 11-0: scratch-OST0002: This client was evicted by it", "file system"),
        ("[rank: 0] Received SIGTERM: 15", "ended from outside"),
        ("slurmstepd: error: Prolog failed on node gpu-07: exit status 1", "could not start processes on a node"),
        ("maintenance event: TERMINATE_ON_HOST_MAINTENANCE", "took the job's nodes away"),
        ("RuntimeError: [Rank:1] FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed for size::64", "device memory"),
        ("MPI_ABORT was invoked on rank 3 in communicator MPI_COMM_WORLD\nwith errorcode 1.", "Rank 3 ended with exit"),
        ("Training job failed: AlgorithmError: ExecuteUserScriptError: ExitCode 137", "SIGKILL"),
        ("<error> [2026-11-27, 08:20:22] allocation failed: container failed with non-zero exit code: 137", "SIGKILL"),
        ("The replica workerpool1-0 exited with a non-zero status of 139. Termination reason: Error.", "SIGSEGV"),
    ],
)
def test_ends_in_the_words_of_their_program(tmp_path: Path, line: str, said: str) -> None:
    assert said in verdict(tmp_path, f"{line}\n")


def test_an_end_after_the_training_is_reported_as_such(tmp_path: Path) -> None:
    steps = "".join(f"step {n}/9 loss 2.{n}\n" for n in range(1, 10))
    swift = "[INFO:swift] End time of running main: 2026-11-27 18:07:01.611\n"
    assert "had finished before that (job.log:10)" in verdict(
        tmp_path, f"{steps}{swift}Segmentation fault (core dumped)\n"
    )
    said = verdict(tmp_path, f"{steps}Training completed\nSegmentation fault (core dumped)\n")
    assert said.endswith("Training had finished before that (job.log:10).")
    waited = "[rank1]:[E1 Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=BROADCAST, "
    waited += "NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600041 milliseconds before timing out.\n"
    assert "Training had finished before that" in verdict(tmp_path, f"{steps}Training completed\n{waited}")
    next_fold = verdict(tmp_path, f"{steps}Training completed\n{steps}Segmentation fault (core dumped)\n")
    assert "had finished" not in next_fold


@pytest.mark.parametrize(
    "text",
    [
        "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.\n"
        "\tclass_name: WorkerDict\n\tpid: 4471\n\tname: kXWorkerDict_1:0\n\tip: 10.0.3.9\n",
        "(raylet) A worker died or was killed while executing a task by an unexpected system error. Worker IP address: "
        "10.0.3.9 Worker port: 10012 Worker PID: 4471 Worker exit type: SYSTEM_ERROR\n",
    ],
)
def test_the_process_of_a_dead_ray_worker_is_named(text: str, tmp_path: Path) -> None:
    (finding,) = diagnosed(tmp_path, "driver.log", text).fired
    assert finding.status == "suspect"
    assert "process 4471 on 10.0.3.9" in finding.summary


@pytest.mark.parametrize(
    ("text", "cause", "words"),
    [
        ("RuntimeError: It looks like your LightningModule has parameters that were not used in producing the loss "
         "returned by training_step.\n", "unused_parameters", "did not use all parameters"),
        ('Error from server (BadRequest): container "pytorch" in pod "sft-master-0" is waiting to start: trying and '
         "failing to pull image\n", "launch_failed", "sft-master-0"),
        ("  Warning  Failed   9m (x3 over 11m)  kubelet   Failed to pull image \"sft:7\": rpc error: not found\n",
         "launch_failed", 'node: Failed to pull image "sft:7"'),
        ("AzureMLCompute job failed.\nPreemptionError: Nodes of this job got pre-empted.\n", "preempted", "preemption"),
        ("[09:49:15] /opt/dgl/src/rpc/network/tcp_socket.cc:76: Failed bind on 10.3.0.7:30050 , error: Success\n",
         "port_in_use", "30050"),
        ("[rank1]: Traceback (most recent call last):\n"
         '[rank1]:   File "/venv/torch/distributed/distributed_c10d.py", line 2820, in all_reduce\n'
         "[rank1]: RuntimeError: oneCCL: fd.cpp:144 init: EXCEPTION: opendir failed: could not open device directory\n",
         "exception", "could not open device directory"),
    ],
)  # fmt: skip
def test_further_wordings_of_a_cause(text: str, cause: str, words: str, tmp_path: Path) -> None:
    (finding,) = diagnosed(tmp_path, "job.log", text).fired
    assert finding.cause == cause
    assert words in finding.summary


def test_a_process_of_spawn_is_the_rank_of_its_number(tmp_path: Path) -> None:
    text = "torch.multiprocessing.spawn.ProcessExitedException: process 3 terminated with signal SIGSEGV\n"
    first = diagnosed(tmp_path, "job.log", text).fired[0]
    assert (first.cause, first.ranks) == ("signal", (3,))
    of_nodes = "  nnodes           : 2:2\n  min_nodes        : 2\n"
    assert diagnosed(tmp_path, "job.log", of_nodes + text).fired[0].ranks == ()


def test_labels_that_srun_aligns_are_ranks(tmp_path: Path) -> None:
    lines = [f"{task:3d}: loading shard {task}" for task in (0, 9, 10, 118)]
    text = "\n".join(
        [*lines, "118: !!!!!!! Segfault encountered !!!!!!!", '118:   File "<unknown>", line 0, in mz_crc\n']
    )
    first = diagnosed(tmp_path, "slurm.out", text).fired[0]
    assert (first.cause, first.ranks) == ("signal", (118,))


def test_a_programs_own_list_has_no_ranks(tmp_path: Path) -> None:
    layers = [f"  {place}: Layer{place}" for place in range(3)]
    text = "\n".join(["building the model", *layers, "start", "1: !!!!!!! Segfault encountered !!!!!!!", "end of it\n"])
    assert diagnosed(tmp_path, "slurm.out", text).fired[0].ranks == ()


LOADER = "/env/lib/python3.11/site-packages/torch/utils/data/dataloader.py"
INTERRUPTED = 'Traceback (most recent call last):\n  File "/job/fit.py", line 31, in main\n{at}KeyboardInterrupt\n'


def test_an_interruption_names_the_line_that_it_hit(tmp_path: Path) -> None:
    waits = f'    for batch in loader:\n  File "{LOADER}", line 701, in __next__\n    data = self._next_data()\n'
    first = diagnosed(tmp_path, "job.log", INTERRUPTED.format(at=waits)).fired[0]
    assert first.cause == "cancelled"
    assert "while it waited for its data loader (job/fit.py:31 in main)" in first.summary
    assert "py-spy dump" in next_step(first)
    computes = diagnosed(tmp_path, "job.log", INTERRUPTED.format(at="    loss.backward()\n")).fired[0]
    assert computes.summary.startswith(
        "The job was interrupted from outside (Ctrl-C or SIGTERM) (job/fit.py:31 in main)"
    )
    assert "loader" not in next_step(computes)


def test_an_assertion_in_native_code_does_not_ask_for_the_kernel_log(tmp_path: Path) -> None:
    text = "train: src/swap.cpp:80: int swap_in(): Assertion `num_read == num_bytes' failed.\n"
    text += "[2026-03-01 10:00:00,101] [ERROR] [launch.py:321:sigkill_handler] ['python'] exits with return code = -6\n"
    first = diagnosed(tmp_path, "job.log", text).fired[0]
    assert first.cause == "signal"
    assert "lines before the abort" in next_step(first)


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("slurmstepd: error: *** JOB 41 ON n-1 CANCELLED AT <time> DUE TO TIME LIMIT ***", "time_limit"),
        ("slurmstepd: error: *** JOB 41 ON n-1 CANCELLED AT <time> DUE TO PREEMPTION ***", "preempted"),
        ("slurmstepd: error: *** STEP 41.0 ON n-1 CANCELLED ***", "cancelled"),
        ("slurmstepd: error: JOB 41 CANCELLED DUE TO TIME LIMIT", "time_limit"),
        ("submitit INFO (2026-03-01 08:31:00,1) - Job has timed out. Ran 9 minutes out of requested 9.", "time_limit"),
        ("Handling auto-requeue signal: 10", "cancelled"),
        ("srun: sending Ctrl-C to StepId=41.0", "cancelled"),
        (
            '[rank1]: ValueError: Trying to set a tensor of shape torch.Size([2]) in "w" (which has ...',
            "checkpoint_differs",
        ),
        ("slurmstepd-n-2: error: pyxis: couldn't start container", "launch_failed"),
        ("[Cycle 0] Section 'step' has been open for 312.00 seconds. Timeout is 300.00 seconds.", "all_entered"),
        ("ERROR: [Errno 98] error while attempting to bind on ('::', 80): address already in use", "port_in_use"),
        ("plugin.go:9] XidCriticalError: Xid=48 on Device=GPU-1f, the device will go unhealthy.", "device_error"),
        ("n-4: GPU 3: Xid 74: NVLink error", "device_error"),
        ("[probe] XID error 94 detected on GPU 0", "device_error"),
    ],
)
def test_an_end_is_read_whatever_was_cut_from_its_line(tmp_path: Path, line: str, cause: str) -> None:
    assert diagnosed(tmp_path, "job.log", f"step 1 loss 2.0\n{line}\n").fired[0].cause == cause


@pytest.mark.parametrize(
    "line",
    [
        "ignoring Xid 43 as configured",
        "last XID: 0",
        "Xid codes that end a job: Xid 48, Xid 79",
        "no Xid errors on 8 GPUs",
        "the time limit of this job is 04:00:00",
        "if a job is CANCELLED DUE TO TIME LIMIT, resubmit it",
    ],
)
def test_a_line_that_only_mentions_an_end_is_none(tmp_path: Path, line: str) -> None:
    assert diagnosed(tmp_path, "job.log", f"step 1 loss 2.0\n{line}\n").fired == ()


def test_an_xid_that_the_job_outlived_is_no_end(tmp_path: Path) -> None:
    steps = "".join(f"step {i} loss {2 - i / 100:.2f} time 0.5\n" for i in range(20))
    assert diagnosed(tmp_path, "job.log", f"{steps}[probe] XID error 94 detected on GPU 0\n{steps}").fired == ()


TABLE = (
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n=====\ntrain.py FAILED\n-----\nFailures:\n"
    "  <NO_OTHER_FAILURES>\n-----\nRoot Cause (first observed failure):\n[0]:\n  time      : 2026-03-01_10:59:45\n"
    "  host      : gpu-07\n  rank      : 5 (local_rank: 1)\n  exitcode  : {code} (pid: 2140)\n  error_file: <N/A>\n"
    "  traceback : Signal {number} ({name}) received by PID 2140\n=====\n"
)


@pytest.mark.parametrize(("number", "name", "ranks"), [(6, "SIGABRT", ()), (11, "SIGSEGV", (5,))])
def test_the_exit_code_of_a_launcher_is_not_the_end_of_another_process(
    tmp_path: Path, number: int, name: str, ranks: tuple[int, ...]
) -> None:
    text = TABLE.format(code=-number, number=number, name=name)
    first = diagnosed(tmp_path, "job.log", f"{text}srun: error: gpu-07: task 0: Exited with exit code 1\n").fired[0]
    assert (first.cause, first.ranks) == ("signal", ranks)
    assert name in first.summary
    bare = diagnosed(tmp_path, "job.log", "srun: error: gpu-07: task 0: Exited with exit code 1\n").fired[0]
    assert bare.cause == "exit"


@pytest.mark.parametrize(
    ("line", "cause", "word"),
    [
        ("Exited by signal 11.", "signal", "SIGSEGV"),
        ("Exited with exit code 139.", "signal", "SIGSEGV"),
        ("Exited with exit code 3.", "exit", "exit code 3"),
        ("TERM_RUNLIMIT: job killed after reaching LSF run time limit.\nExited with exit code 140.", "time_limit", ""),
    ],
)
def test_the_end_that_lsf_reports_of_a_job(tmp_path: Path, line: str, cause: str, word: str) -> None:
    summary = "\nResource usage summary:\n\n    CPU time :       34.83 sec.\n    Max Memory :    51 GB\n"
    first = diagnosed(tmp_path, "lsf.out", f"epoch 1 loss 2.1\n{'-' * 60}\n{line}\n{summary}").fired[0]
    assert first.cause == cause
    assert word in first.summary
    own = diagnosed(tmp_path, "lsf.out", f"KeyError: 'label'\n{line}\n{summary}").fired[0]
    assert own.cause == (cause if cause == "time_limit" else "exception")
    assert not diagnosed(tmp_path, "lsf.out", f"epoch 1 loss 2.1\nSuccessfully completed.\n{summary}").fired


def test_an_exception_that_only_states_an_exit_code_names_the_signal(tmp_path: Path) -> None:
    first = diagnosed(tmp_path, "job.log", "starting train task\nAlgorithmError: Exit Code: 139\n").fired[0]
    assert (first.cause, "SIGSEGV" in first.summary) == ("signal", True)
