"""Errors without a rank, attributed by the launcher's report; and waits for rank 0."""

from __future__ import annotations

from pathlib import Path

import pytest

from analyzers.report.wording.explained import next_step
from tests.analyzers.evidence.test_log_proof import TABLE, TORCHRUN, raised
from tests.analyzers.evidence.test_logs import diagnose

ONE = "E0301 02:07:08.1 71 torch/distributed/elastic/multiprocessing/api.py:833] failed (exitcode: 1) local_rank: 4 (pid: 9) of binary: python\n"  # noqa: E501
OTHER = (
    "Failures:\n[1]:\n  time      : 2026-03-01_08:30:01\n  rank      : 2 (local_rank: 2)\n  exitcode  : 1 (pid: 8)\n"
)
WORKER = """Traceback (most recent call last):
  File "/job/train.py", line 61, in epoch
    for batch in loader:
  File "/v/lib/python3.11/site-packages/torch/_utils.py", line 750, in reraise
    raise exception
IndexError: Caught IndexError in DataLoader worker process 3.
Original Traceback (most recent call last):
  File "/job/corpus.py", line 35, in __getitem__
    return fields[1]
IndexError: list index out of range

"""


@pytest.mark.parametrize("text", [raised(""), WORKER, raised("", "torch.OutOfMemoryError: CUDA out of memory.")])
def test_the_only_traceback_is_of_the_only_rank_that_ended_with_code_1(tmp_path: Path, text: str) -> None:
    first = diagnose(tmp_path, job=text + ONE).fired[0]
    assert (first.status, first.ranks) == ("fired", (4,))
    assert first.summary.startswith("Rank 4 ")


@pytest.mark.parametrize(
    "text",
    [
        raised("") + raised("", "IndexError: 9") + ONE,  # two errors
        ONE + raised(""),  # it came after the end
        raised("") + TORCHRUN.format(code=-9, local=2),  # a signal writes no traceback
        raised("") + ONE + TORCHRUN.format(code=-11, local=2),
        raised("") + TABLE.format(second=1, host="a", rank=12, local=4, code=1, pid=9),  # one node's table of several
        raised("") + OTHER + TABLE.format(second=1, host="a", rank=4, local=4, code=1, pid=9),
    ],
)  # fmt: skip
def test_no_rank_is_named_where_another_may_have_raised_it(tmp_path: Path, text: str) -> None:
    own = [one for one in diagnose(tmp_path, job=text).fired if one.cause == "exception"]
    assert not any(one.ranks for one in own)


def test_a_missing_shared_seed_suspects_the_first_rank(tmp_path: Path) -> None:
    error = "RuntimeError: Timed out receiving the shared seed from the distribtued store on Rank 5. (world_size=8)"
    first = diagnose(tmp_path, job=raised("loader-1  | ", error)).fired[0]
    assert (first.cause, first.status, first.ranks) == ("not_entered", "suspect", (0,))
    assert "Rank 5 gave up waiting for rank 0" in first.summary


@pytest.mark.parametrize("work", ["Running tokenizer on dataset", "Packing (num_proc=1)"])
@pytest.mark.parametrize(
    ("name", "code"), [("main_process_first", "507046"), ("torch_distributed_zero_first", "107020")]
)
def test_a_barrier_that_lets_the_first_rank_work_blames_no_rank_in_it(
    tmp_path: Path, name: str, code: str, work: str
) -> None:
    frames = f'[rank3]: Traceback (most recent call last):\n[rank3]:   File "/job/x.py", line 9, in {name}\n'
    error = (
        f"[rank3]: RuntimeError: npuSynchronizeDevice:NPUStream.cpp:435 NPU function error: f, error code is {code}\n"
    )
    bar = f"{work}:  41%|####      | 820/2000 [30:01<43:12, 4.01 examples/s]\n"
    first = diagnose(tmp_path, job=bar + frames + error).fired[0]
    assert (first.cause, first.status, first.ranks) == ("not_entered", "suspect", (0,))
    assert "820 of 2,000" in first.summary
    far = diagnose(tmp_path, job=bar + frames.replace("rank3", "rank12") + error.replace("rank3", "rank12")).fired[0]
    assert (far.cause, far.ranks) == ("not_entered", ())  # each node's first rank does it
    itself = diagnose(tmp_path, job=frames.replace("rank3", "rank0") + error.replace("rank3", "rank0"))
    assert all(0 not in one.ranks or one.cause != "not_entered" for one in itself.fired)


def test_a_loader_that_ends_in_the_destructor_of_a_finished_job_is_no_failure(tmp_path: Path) -> None:
    text = "".join(f"step:{i} - actor/pg_loss:0.0{i} - timing_s/step:52.{i}\n" for i in range(1, 9))
    text += "(\"Final validation metrics: {'val/reward': 0.71}\")\n"
    end = "Exception ignored in: <function _MultiProcessingDataLoaderIter.__del__ at 0x7f2a>\n"
    end += raised("", "RuntimeError: DataLoader worker (pid 4122) is killed by signal: Killed. ")
    found = diagnose(tmp_path, job=text + end)
    assert found.fired == ()
    assert "finished" in found.verdict


def test_the_rank_that_hccl_waits_for_is_a_rank_of_its_group(tmp_path: Path) -> None:
    line = "EI0002: The wait execution of the Notify register times out. Reason: The Notify register has not received the Notify record from remote rank {}. base information\n"  # noqa: E501
    known = diagnose(tmp_path, job=line.format("[24]")).fired[0]
    assert (known.cause, known.ranks) == ("connection_lost", ())
    assert "comes from rank 24 of its group" in known.summary
    assert "comes from rank" not in diagnose(tmp_path, job=line.format("[4294967295]")).verdict


def test_frames_of_the_standard_library_are_not_named_as_the_place_of_an_error(tmp_path: Path) -> None:
    text = (
        'Traceback (most recent call last):\n  File "/opt/site-packages/tuner/main.py", line 663, in <module>\n'
        '  File "/usr/lib64/python3.11/os.py", line 225, in makedirs\n  File "<frozen os>", line 225, in mkdir\n'
        "PermissionError: [Errno 13] Permission denied: '/.cache'\n"
    )
    assert "(tuner/main.py:663 in <module>)" in diagnose(tmp_path, job=text).verdict


def test_a_rocm_memory_fault_asks_for_the_kernel_at_fault(tmp_path: Path) -> None:
    text = "Memory access fault by GPU node-1 (Agent handle: 0x55) on address 0x7f5c42600000. Reason: Page not present or supervisor privilege.\n"  # noqa: E501
    first = diagnose(tmp_path, job=text).fired[0]
    assert first.cause == "device_error"
    assert "AMD_SERIALIZE_KERNEL" in next_step(first)


def test_forty_lines_suffice_to_find_slower_training(tmp_path: Path) -> None:
    text = "".join(
        f"step {i} loss: 2.{i % 5} step_time: {810 + i % 7 if i < 20 else 1620 + i % 7}ms\n" for i in range(1, 37)
    )
    first = diagnose(tmp_path, job=text).fired[0]
    assert (first.kind, abs((first.first_step or 0) - 20) < 3) == ("throughput", True)
    assert "ms per step instead of 8" in first.summary


def test_a_kill_by_the_launcher_after_the_end_is_not_a_failure(tmp_path: Path) -> None:
    end = "{'train_runtime': 712.1, 'train_loss': 1.8, 'epoch': 1.0}\n"
    kill = (
        "[ERROR] [launch.py:341:sigkill_handler] ['python', 'dpo.py', '--local_rank=6'] exits with return code = -9\n"
    )
    after = diagnose(tmp_path, job=end + kill)
    assert after.fired == ()
    assert "After that, a process was ended" in after.verdict
    ended = "E1 torch/distributed/elastic/multiprocessing/api.py:874] failed (exitcode: -9) local_rank: 0 (pid: 9) of binary: python\n"  # noqa: E501
    (found,) = diagnose(tmp_path, job=end + ended).fired  # torchrun reports what it did not kill
    assert (found.status, found.ranks) == ("suspect", (0,))
    assert "Training had finished before that" in found.summary
    (found,) = diagnose(tmp_path, job=kill).fired
    assert (found.cause, found.status, found.ranks) == (
        "signal",
        "suspect",
        (),
    )  # its last process is not the killed one


def test_an_unreachable_tracker_is_not_a_lost_rank(tmp_path: Path) -> None:
    error = "wandb.errors.errors.CommError: Run initialization has timed out after 90.0 sec."
    (found,) = diagnose(tmp_path, job=raised("[rank0]: ", error)).fired
    assert (found.cause, found.status, found.ranks) == ("download", "fired", (0,))
    other = diagnose(tmp_path, job=raised("[rank0]: ", "subprocess.TimeoutExpired: Command 'x' timed out")).fired[0]
    assert (other.cause, other.ranks) == ("exception", (0,))


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        ("OSError: [Errno 116] Stale file handle: '/shared/run7/shard-3.bin'", "file_system"),
        ("OSError: [Errno 122] Disk quota exceeded: '/home/u/ckpt/step-40'", "disk_full"),
        (
            "requests.exceptions.HTTPError: 504 Server Error: Gateway Time-out for url: https://hub/m",
            "download",
        ),
    ],
)
def test_an_external_cause_names_only_the_ranks_that_reported_it(tmp_path: Path, error: str, cause: str) -> None:
    (found,) = diagnose(tmp_path, job=raised("[rank2]: ", error) + raised("[rank5]: ", error)).fired
    assert (found.cause, found.status, found.ranks) == (cause, "fired", ())
    assert found.evidence["reported_by_ranks"] == [2, 5]
    assert "anks 2 and 5" in found.summary
    (tmp_path / "alone").mkdir()
    (alone,) = diagnose(tmp_path / "alone", job=raised("[rank2]: ", error)).fired
    assert (alone.cause, alone.ranks) == (cause, (2,))


def test_an_unprinted_loss_is_not_called_finite(tmp_path: Path) -> None:
    line = " iteration {i}/ 900 | elapsed time per iteration (ms): 81.0 | {loss}grad norm: nan | TFLOPs: 7.4 |\n"
    bare = diagnose(tmp_path, job="".join(line.format(i=i, loss="") for i in range(20, 40)))
    assert "not finite from step 20 on" in bare.verdict
    assert "while the loss is" not in bare.verdict
    both = diagnose(tmp_path, job="".join(line.format(i=i, loss="lm loss: 2.1 | ") for i in range(20, 40)))
    assert "while the loss is" in both.verdict


def test_an_agent_that_lost_the_store_names_its_node(tmp_path: Path) -> None:
    text = (
        "The node 'gpu-7_18728_0' has failed to send a keep-alive heartbeat to the rendezvous 'none' due to an error."
    )
    (found,) = diagnose(tmp_path, job=f"{text}\n").fired
    assert (found.cause, found.ranks) == ("connection_lost", ())
    assert "The launcher of gpu-7 lost the connection to the rendezvous store" in found.summary


def test_an_adapter_that_does_not_start_is_named_by_its_address(tmp_path: Path) -> None:
    text = "Mar  7 10:00:01 gpu-7 kernel: NVRM: GPU 0000:09:00.0: RmInitAdapter failed! (0x22:0x56:894)\n"
    (found,) = diagnose(tmp_path, job=text).fired
    assert (found.cause, found.ranks) == ("device_error", ())
    assert found.summary.startswith("GPU 0000:09:00.0 of gpu-7 does not answer")


@pytest.mark.parametrize(
    ("text", "cause", "words"),
    [
        ("Segmentation fault from GPU at 0xff00ffffff400000, ctx_id: 1 (CCS)", "device_error", "0xff00"),
        ("RuntimeError: FATAL :: MODULE:SYNHELPER workspace Allocation of size ::144 failed!", "out_of_memory", ""),
        ("(W pid=9) [E 19] logging.cc:97: Unhandled exception: N3c1E. what(): Collective call returned error",
         "connection_lost", ""),
        ("[ERROR] ME(1:2):2024-12-26-14:22:26.839.923 [_api.py:268] Worker process 130 exit with exception.",
         "exit", "worker process died"),
        ("sagemaker-containers ERROR    ExecuteUserScriptError:", "exit", "worker process died"),
    ],
)  # fmt: skip
def test_end_messages_of_other_platforms_have_their_cause(tmp_path: Path, text: str, cause: str, words: str) -> None:
    (found,) = diagnose(tmp_path, job=f"{text}\n").fired
    assert (found.cause, found.ranks) == (cause, ())
    assert words in found.summary


def test_a_broken_pipe_to_a_child_is_not_a_lost_peer_connection(tmp_path: Path) -> None:
    frame = 'Traceback (most recent call last):\n  File "/usr/lib/python3.11/multiprocessing/{}.py", line 9, in f\n'
    text = frame.format("queues").replace("\n", "\n", 1) + frame.format("connection").split("\n", 1)[1]
    (found,) = diagnose(tmp_path, job=f"{text}BrokenPipeError: [Errno 32] Broken pipe\n").fired
    assert (found.cause, found.status, found.ranks) == ("data_worker", "suspect", ())
    other = frame.format("x/torch/distributed/distributed_c10d") + "BrokenPipeError: [Errno 32] Broken pipe\n"
    assert diagnose(tmp_path, job=other).fired[0].cause == "connection_lost"


def test_a_rank_behind_a_prefix_that_is_learned_stays_a_rank(tmp_path: Path) -> None:
    text = raised("i.pretrain/0 [default3]:[rank3]: ", "RuntimeError: Worker failure: 1")
    assert diagnose(tmp_path, job=text).fired[0].ranks == (3,)


def test_a_traceback_quoted_in_one_line_is_read_to_its_error(tmp_path: Path) -> None:
    text = 'message: "The replica exited. \\nTraceback (most recent call last):\\n  File \\"/v/hub.py\\", line 5, in g'
    error = "requests.exceptions.HTTPError: 504 Server Error: Gateway Time-out for url: https://hub/x"
    (found,) = diagnose(tmp_path, job=f'{text}\\n{error}\\n"\n').fired
    assert found.cause == "download"
    assert "504 Server Error" in found.summary


def test_an_error_of_nccl_that_the_watchdog_repeats_is_no_lost_peer(tmp_path: Path) -> None:
    text = "[rank{0}]:[E P.cpp:1335] [PG 0 Rank {0}] NCCL watchdog thread terminated with exception: NCCL error: {1}\n"
    text += "terminate called after throwing an instance of 'c10::DistBackendError'\n  what():  [PG 0 Rank {0}] NCCL "
    text += "watchdog thread terminated with exception: NCCL error: {1}\n"
    own = text.format(0, "internal error - please report this issue to the NCCL developers, NCCL version 2.21.5")
    assert [(one.cause, one.ranks) for one in diagnose(tmp_path, job=own).fired] == [("nccl_error", ())]
    lost = text.format(0, "remote process exited or there was a network error, NCCL version 2.21.5")
    assert diagnose(tmp_path, job=lost).fired[0].cause == "connection_lost"


def test_a_cuda_driver_shutdown_message_is_not_the_cause(tmp_path: Path) -> None:
    end = "terminate called after throwing an instance of 'c10::Error'\n  what():  CUDA error: driver shutting down\n"
    found = diagnose(tmp_path, job=f"step 40/40 loss 2.2\nTraining finished.\n{end}")
    assert found.fired == ()
    assert "finished" in found.verdict


def test_a_symbol_missing_from_the_driver_library_is_a_version_mismatch(tmp_path: Path) -> None:
    text = "Can't find nvmlDeviceX: /lib64/libnvidia-ml.so.1: undefined symbol: nvmlDeviceX\n"
    assert [(one.cause, one.ranks) for one in diagnose(tmp_path, job=text).fired] == [("version_mismatch", ())]


SPAWNED = "torch.multiprocessing.spawn.ProcessRaisedException:\n\n-- Process 3 terminated with the following error:\n"
CHAINED = "OSError: file 7 is truncated\n\nDuring handling of the above exception, another exception occurred:\n\n"


@pytest.mark.parametrize("text", [WORKER, raised("", CHAINED + raised("", "ValueError: bad sample"))])
def test_a_spawned_process_is_the_rank_that_raised_the_error(tmp_path: Path, text: str) -> None:
    first = diagnose(tmp_path, job=SPAWNED + text).fired[0]
    assert (first.cause, first.status, first.ranks) == ("exception", "fired", (3,))


def test_a_spawned_process_of_one_of_several_nodes_names_no_rank(tmp_path: Path) -> None:
    text = "launching with nnodes=2\n" + SPAWNED + WORKER
    assert diagnose(tmp_path, job=text).fired[0].ranks == ()


IN_THREAD = (
    "Exception in thread Reader-1:\nTraceback (most recent call last):\n"
    '  File "/v/threading.py", line 1016, in _bootstrap_inner\n    self.run()\n'
    '  File "/job/read.py", line 31, in run\n    item = self.queue.get(timeout=9)\n_queue.Empty\n'
)
RAISED = 'Traceback (most recent call last):\n  File "/job/train.py", line 9, in <module>\n    main()\n'
CLOSING = "W0301 02:07:08.0 71 torch/distributed/elastic/multiprocessing/api.py:900] Sending process 8 closing signal SIGTERM\n"  # noqa: E501


@pytest.mark.parametrize("text", [
    IN_THREAD + RAISED + "KeyError: 'text'\n" + CLOSING + ONE,
    RAISED + "KeyError: 'text'\n" + CLOSING + IN_THREAD + ONE,
    RAISED + "KeyError: 'text'\n" + CLOSING + RAISED + "RuntimeError: the store is gone\n" + ONE,
])  # fmt: skip
def test_the_only_rank_that_exited_raised_the_error_that_ends_a_process(tmp_path: Path, text: str) -> None:
    first = diagnose(tmp_path, job=text).fired[0]
    assert (first.cause, first.ranks) == ("exception", (4,))


def test_of_two_errors_that_end_a_process_neither_is_of_the_only_rank_that_exited(tmp_path: Path) -> None:
    text = RAISED + "KeyError: 'text'\n" + RAISED + "RuntimeError: the list is empty\n" + CLOSING + ONE
    assert diagnose(tmp_path, job=text).fired[0].ranks == ()


def test_a_message_whose_second_line_names_its_cause_is_of_the_only_rank_that_exited(tmp_path: Path) -> None:
    error = "RuntimeError: [ERROR] HCCL error in: hccl.cpp:6\nEJ0001: [PID: 9] Failed to initialize the HCCP process.\n"
    first = diagnose(tmp_path, job=RAISED + error + CLOSING + ONE).fired[0]
    assert (first.cause, first.ranks) == ("device_setup", (4,))


@pytest.mark.parametrize("crashed", [
    "[6bd2d5e37ea2:102] *** Process received signal ***\n[6bd2d5e37ea2:102] Signal: Bus error (7)\n",
    "[6bd2d5e37ea2:102  :0:364] Caught signal 7 (Bus error: nonexistent physical address)\n==== backtrace (tid: 364)\n",
])  # fmt: skip
def test_the_rank_of_a_process_in_a_container_whose_name_begins_with_a_digit(tmp_path: Path, crashed: str) -> None:
    ready = "".join(
        f"6bd2d5e37ea2:{100 + rank}:{200 + rank} [{rank}] NCCL INFO comm 0x55d{rank} rank {rank} nranks 4 "
        f"cudaDev {rank} busId 1000 - Init COMPLETE\n"
        for rank in range(4)
    )
    first = diagnose(tmp_path, job=ready + crashed).fired[0]
    assert (first.cause, first.ranks) == ("signal", (2,))
    assert "nonexistent" not in first.summary  # the signal's own line, not an error that the log reports before it
