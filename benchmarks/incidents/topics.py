"""Cases by topic in the formats of public programs (slow jobs, finished jobs, numerics, deaths), with the right
answers.

    for case in CASES: case.files, case.causes, case.ranks, case.words

Half of the first cases (`is_held_out`) were scored only once, when the rules were complete: `FIRST_SCORE`. Later cases
cover mechanisms that were missing when new threads were read.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.incidents.printed import printed

__all__ = ["CASES", "FIRST_SCORE", "Case"]

FIRST_SCORE = {"open": {"right": 57, "silent": 2, "wrong": 1}, "held-out": {"right": 72, "wrong": 4}}
"""Outcomes in all forms at the first scoring; none of the wrong ones named a rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """`causes`: accepted causes of the first finding; empty for a healthy job. `words`: the report contains one of each
    group.
    """

    name: str
    topic: str
    files: dict[str, str]
    causes: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    words: tuple[tuple[str, ...], ...] = ()
    is_held_out: bool = False


def _watchdog(rank: int, seq: int, op: str, size: int, group: bool = True) -> str:
    state = (f"[rank{rank}]:[E301 10:00:0{rank % 10}.123457 ProcessGroupNCCL.cpp:2303] [PG ID 0 PG GUID 0(default_pg) Rank {rank}]  failure "
             f"detected by watchdog at work sequence id: {seq} PG status: last enqueued work: {seq}, last completed work: {seq - 1}\n")  # fmt: skip
    return (f"[rank{rank}]:[E301 10:00:0{rank % 10}.123456 ProcessGroupNCCL.cpp:689] [Rank {rank}] Watchdog caught collective operation "
            f"timeout: WorkNCCL(SeqNum={seq}, OpType={op}, NumelIn={size}, NumelOut={size}, Timeout(ms)=600000) ran for 600{rank:03d} "
            f"milliseconds before timing out.\n{state if group else ''}")  # fmt: skip


_FRAMES = """Traceback (most recent call last):
  File "/app/pretrain.py", line 88, in <module>
    main()
  File "/app/pretrain.py", line 71, in main
    train(model, loader)
  File "/app/corpus/reader.py", line 133, in __next__
    row = self.table[self.order[index]]
"""
_OOM = """Traceback (most recent call last):
  File "/app/finetune.py", line 201, in step
    loss.backward()
  File "/opt/conda/lib/python3.11/site-packages/torch/_tensor.py", line 626, in backward
    torch.autograd.backward(
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.50 GiB. GPU 2 has a total capacity of 39.38 GiB of which 811.00 MiB is free. Process 4410 has 38.57 GiB memory in use. Of the allocated memory 36.10 GiB is allocated by PyTorch, and 1.02 GiB is reserved by PyTorch but unallocated.
"""
_ELASTIC = ("E0301 10:00:09.100000 512 torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: {code}) local_rank: {rank} "
            "(pid: {pid}) of binary: /opt/conda/bin/python\n")  # fmt: skip
_LOADING = "Loading checkpoint shards:  {p:3d}%|####      | {n}/30 [{m:02d}:10<20:11, 41.2s/it]\n"

CASES: tuple[Case, ...] = (
    Case(name="hf-slows-down", topic="slow", files={"train.log": printed("hf", steps=240, slow_from=120)},
         causes=("unknown",), words=(("slower since step",),)),
    Case(name="lightning-slows-down", topic="slow", is_held_out=True,
         files={"train.log": printed("lightning", steps=240, slow_from=130, slow_factor=1.7)},
         causes=("unknown",), words=(("slower since step",),)),
    Case(name="titan-loses-half-its-tokens", topic="slow", files={"train.log": printed("torchtitan", steps=240, slow_from=110)},
         causes=("unknown",), words=(("slower since step",),)),
    Case(name="fairseq-slows-down", topic="slow", is_held_out=True,
         files={"train.log": printed("fairseq", steps=200, slow_from=100, slow_factor=3)},
         causes=("unknown",), words=(("slower since step",),)),
    Case(name="nemo-slows-down", topic="slow", is_held_out=True,
         files={"train.log": printed("nemo", steps=200, slow_from=90, slow_factor=1.5)},
         causes=("unknown",), words=(("slower since step",),)),
    Case(name="verl-slows-down", topic="slow", files={"train.log": printed("verl", steps=120, seconds=88, slow_from=60)},
         causes=("unknown",), words=(("slower since step",),)),
    Case(name="deepspeed-slows-down", topic="slow", is_held_out=True,
         files={"train.log": printed("deepspeed", steps=200, slow_from=100)},
         causes=("unknown",), words=(("slower since step",),)),
    Case(name="megatron-every-25th", topic="slow", files={"train.log": printed("megatron", steps=400, every=25, slow_factor=3)},
         causes=("periodic",), words=(("Every 25 steps",),)),
    Case(name="litgpt-every-10th", topic="slow", is_held_out=True,
         files={"train.log": printed("litgpt", steps=300, every=10, slow_factor=2)},
         causes=("periodic",), words=(("Every 10 steps",),)),
    Case(name="timm-waits-for-data", topic="slow", files={"train.log": printed("timm", steps=100, data_share=0.7)},
         causes=("steady",), words=(("waited for data 7", "waited for data 6"),)),
    Case(name="open-clip-waits-for-data", topic="slow", is_held_out=True,
         files={"train.log": printed("open_clip", steps=60, data_share=0.6)}, causes=("steady",), words=(("waited for data",),)),
    Case(name="imagenet-waits-for-data", topic="slow", files={"train.log": printed("imagenet", steps=80, data_share=0.75)},
         causes=("steady",), words=(("waited for data",),)),
    Case(name="detectron2-waits-for-data", topic="slow", is_held_out=True,
         files={"train.log": printed("detectron2", steps=80, data_share=0.5)}, causes=("steady",), words=(("waited for data",),)),
    Case(name="hf-finished", topic="finished", words=(("finished",),), files={"train.log": printed("hf", steps=150, total=150)
         + "\n{'train_runtime': 181.2, 'train_samples_per_second': 6.6, 'train_steps_per_second': 0.83, 'train_loss': 2.9, 'epoch': 1.0}\n"}),
    Case(name="lightning-finished", topic="finished", is_held_out=True, words=(("finished",),),
         files={"train.log": printed("lightning", steps=150, total=150) + "\n`Trainer.fit` stopped: `max_epochs=1` reached.\n"}),
    Case(name="megatron-finished", topic="finished", is_held_out=True, words=(("finished", "last step"),),
         files={"train.log": printed("megatron", steps=200, total=200) + "[after training is done] datetime: 2026-03-01 10:04:11\n"}),
    Case(name="warning-then-finished", topic="finished", words=(("finished",),), files={"train.log":
         "WARNING:huggingface_hub.utils._http:HTTPSConnectionPool(host='hub.example', port=443): Max retries exceeded with url: /a\n"
         + printed("hf", steps=60, total=60) + "\n{'train_runtime': 71.0, 'train_steps_per_second': 0.8, 'train_loss': 2.9, 'epoch': 1.0}\n"}),
    Case(name="gradient-first", topic="numerics", causes=("non_finite",), words=(("gradient went first",),),
         files={"train.log": printed("megatron", steps=200, gradient_from=150, nan_from=153)}),
    Case(name="fairseq-nan", topic="numerics", is_held_out=True, causes=("non_finite",), words=(("90",),),
         files={"train.log": printed("fairseq", steps=140, nan_from=90, gradient_from=90)}),
    Case(name="titan-diverges", topic="numerics", is_held_out=True, causes=("divergence", "trend"), words=(("loss",),),
         files={"train.log": printed("torchtitan", steps=300, diverge_from=220)}),
    Case(name="megatron-skips", topic="numerics", causes=("non_finite",), words=(("left out",),),
         files={"train.log": printed("megatron", steps=300, skip_from=180)}),
    Case(name="scale-exhausted", topic="numerics", is_held_out=True, causes=("non_finite",), words=(("loss scale",), ("bf16",)),
         files={"train.log": printed("hf", steps=90) + "".join(
             f"\r {90 + i}/450 [2026-03-01 10:02:0{i % 10},233] [INFO] [loss_scaler.py:183:update_scale] [deepspeed] OVERFLOW! Rank 0 "
             f"Skipping step. Attempted loss scale: {2 ** (8 - i)}, reducing to {2 ** (7 - i)}\n" for i in range(8))
             + "Traceback (most recent call last):\n  File \"/app/train.py\", line 9, in <module>\n    trainer.train()\n"
             "Exception: Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.\n"}),
    Case(name="one-rank-raises", topic="death", causes=("exception",), words=(("IndexError",), ("reader.py:133",)),
         files={"train.log": printed("litgpt", steps=30) + _FRAMES + "IndexError: index 81231 is out of bounds\n"
                + _ELASTIC.format(code=1, rank=3, pid=99)}, ranks=(3,)),
    Case(name="raises-in-fairseq", topic="death", is_held_out=True, causes=("exception",), words=(("KeyError",), ("reader.py:133",)),
         files={"train.log": printed("fairseq", steps=30) + _FRAMES + "KeyError: 'input_ids'\n"
                + _ELASTIC.format(code=1, rank=1, pid=98)}, ranks=(1,)),
    Case(name="memory-of-gpu-2", topic="death", is_held_out=True, causes=("out_of_memory",), ranks=(2,), words=(("Rank 2", "GPU 2"),),
         files={"train.log": printed("litgpt", steps=20) + _OOM + "".join(_watchdog(r, 812, "_ALLGATHER_BASE", 4096) for r in (0, 1, 3))}),
    Case(name="odd-size", topic="hang", causes=("mismatch_size",), ranks=(5,), words=(("different sizes",),),
         files={"train.log": "".join(_watchdog(r, 417, "ALLREDUCE", 96 if r == 5 else 64) for r in range(1, 8))
                + _watchdog(0, 419, "ALLREDUCE", 8192)}),
    Case(name="odd-size-without-groups", topic="hang", is_held_out=True, causes=("mismatch_size",), ranks=(2,), words=(("different sizes",),),
         files={"train.log": _watchdog(0, 77, "BROADCAST", 12, group=False) + "".join(
             _watchdog(r, 75, "BROADCAST", 900 if r == 2 else 30, group=False) for r in (1, 2, 3, 4))}),
    Case(name="rank-0-tokenizes", topic="hang", causes=("not_entered",), ranks=(0,), words=(("Map",),),
         files={"train.log": "".join(f"Map (num_proc=8):  {n}%|#         | {n * 10000}/1000000 [{n:02d}:00<50:00, 166.2 examples/s]\n"
                                      for n in range(3, 40, 9)) + "".join(_watchdog(r, 3, "ALLREDUCE", 1) for r in (1, 2, 3))}),
    Case(name="killed-while-loading", topic="death", is_held_out=True, causes=("signal", "host_out_of_memory"), ranks=(1,),
         words=(("Loading checkpoint shards",),),
         files={"train.log": "".join(_LOADING.format(p=n * 3, n=n, m=n) for n in range(1, 12))
                + _ELASTIC.format(code=-9, rank=1, pid=4127)}),
    Case(name="cgroup-limit", topic="death", causes=("host_out_of_memory",), words=(("cgroup",), ("pt_main_thread", "4127")),
         files={"dmesg.txt": "[8121.331001] pt_main_thread invoked oom-killer: gfp_mask=0xcc0, order=0\n[8121.331101] Memory cgroup out of "
                "memory: Killed process 4127 (pt_main_thread) total-vm:99120344kB, anon-rss:64110212kB, file-rss:402144kB\n"}),
    Case(name="gpu-off-the-bus", topic="death", is_held_out=True, causes=("device_error",), words=(("0000:41:00.0",), ("PCIe",)),
         files={"dmesg.txt": "[ 911.100001] pcieport 0000:40:01.0: AER: Corrected error received: 0000:41:00.0\n[ 911.100009] nvidia "
                "0000:41:00.0: PCIe Bus Error: severity=Uncorrected (Non-Fatal), type=Transaction Layer, (Requester ID)\n[ 911.200001] NVRM: The "
                "NVIDIA GPU 0000:41:00.0\n               NVRM: (PCI ID: 10de:2330) installed in this system has\n               NVRM: fallen off "
                "the bus and is not responding to commands.\n"}),
    Case(name="link-local", topic="network", is_held_out=True, causes=("no_interface", "unreachable"), words=(("IFNAME",),),
         files={"train.log": "[rank1]: Traceback (most recent call last):\n[rank1]:   File \"/app/train.py\", line 12, in <module>\n[rank1]:     "
                "dist.init_process_group(\"gloo\")\n[rank1]: RuntimeError: Gloo connectFullMesh failed with [../third_party/gloo/gloo/transport/"
                "tcp/pair.cc:144] no error\n[W301 socket.cpp:752] [c10d] The client socket has failed to connect to [fe80::a1:b2ff:fe03:11]:29511 "
                "(errno: 113 - No route to host).\n"}),
    Case(name="driver-updated", topic="device", causes=("device_setup",), words=(("reboot",),),
         files={"out.txt": "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 570.158\n"}),
    Case(name="unknown-error-line", topic="death", causes=("unnamed_error",), words=(("did not settle",),),
         files={"train.log": printed("torchtitan", steps=30) + "E0301 10:09:40.101010    4410 ring.cc:310] Lane 3 did not settle in time\n"}),
    Case(name="no-provider", topic="network", causes=("no_interface",), words=(("FI_PROVIDER",),),
         files={"train.log": "2026:03:01-10:00:04:(  417) |CCL_ERROR| atl_ofi.cpp:243 init: can't find suitable provider\n" + _FRAMES
                + "RuntimeError: oneCCL: atl_ofi_comm.cpp:232 init_transport: EXCEPTION: failed to initialize ATL\n"}),
    Case(name="unlisted-task", topic="death", causes=("exit",), ranks=(21,), words=(("task 21",),),
         files={"slurm.out": "slurmstepd: error: *** STEP 71.0 ON n1 CANCELLED AT 2026-03-01T10:00:00 DUE TO TASK FAILURE ***\n"
                "srun: error: n1: tasks 0-20,22-31: Terminated\nsrun: Force Terminated StepId=71.0\n"}),
    Case(name="nfs-silent", topic="device", causes=("file_system",), words=(("fs7",),),
         files={"dmesg.txt": "[Sun Mar  1 10:00:00 2026] nfs: server fs7 not responding, timed out\n[Sun Mar  1 10:02:00 2026] INFO: task "
                "python3:41021 blocked for more than 120 seconds.\n"}),
    Case(name="worker-s-own-error", topic="death", causes=("exception",), words=(("equal size",), ("reader.py:133",)),
         files={"train.log": "Traceback (most recent call last):\n  File \"/app/pretrain.py\", line 88, in <module>\n    main()\nRuntimeError: "
                "Caught RuntimeError in DataLoader worker process 0.\nOriginal " + _FRAMES + "RuntimeError: stack expects each tensor to be "
                "equal size, but got [3, 448] at entry 0 and [3, 544] at entry 1\n"}),
    Case(name="composer-sigbus", topic="death", causes=("signal",), ranks=(2,), words=(("SIGBUS",),),
         files={"train.log": "Building trainer...\nERROR:composer.cli.launcher:Rank 2 crashed with exit code -7.\nGlobal rank 0 (PID 4411) exited "
                "with code -15\nGlobal rank 2 (PID 4413) exited with code -7\n"}),
    Case(name="store-refused", topic="network", causes=("download",), words=(("credentials",),),
         files={"train.log": _FRAMES + "botocore.exceptions.ClientError: An error occurred (ExpiredToken) when calling the PutObject operation: "
                "The provided token has expired.\n"}),
    Case(name="samples-per-second-halve", topic="slow", causes=("unknown",), words=(("slower since",),),
         files={"train.log": "".join(f"Iter #{i}: {(201 if i < 40 else 96) + i % 3}.5 img/sec per GPU\n" for i in range(90))}),
    Case(name="device-hidden", topic="device", is_held_out=True, causes=("device_setup",), words=(("CUDA_VISIBLE_DEVICES",),),
         files={"train.log": _FRAMES + "RuntimeError: No CUDA GPUs are available\n"}),
    Case(name="loader-killed-at-the-end", topic="finished", words=(("finished",),),
         files={"train.log": "".join(f"step:{i} - actor/pg_loss:0.0{10 + i} - timing_s/step:52.{i}\n" for i in range(10, 40)) +
                "(\"Final validation metrics: {'val/reward': 0.71}\")\nException ignored in: <function _Iter.__del__ at 0x7f2a>\n" + _FRAMES +
                "RuntimeError: DataLoader worker (pid 4122) is killed by signal: Killed. \n"}),
    Case(name="rank-0-prepares-first", topic="hang", causes=("not_entered",), ranks=(0,), words=(("rank 0, which runs this code before the others",),),
         files={"train.log": "Running tokenizer on dataset:  41%|####      | 820/2000 [30:01<43:12, 4.01 examples/s]\n" + "".join(
             f"[rank{r}]: {line}\n" for r in (1, 2, 3) for line in (
                 "Traceback (most recent call last):", '  File "/app/sft.py", line 40, in main',
                 '  File "/opt/conda/lib/python3.11/site-packages/transformers/training_args.py", line 2461, in main_process_first',
                 "RuntimeError: npuSynchronizeDevice:NPUStream.cpp:435 NPU function error: aclrtSynchronizeDevice, error code is 507046"))}),
    Case(name="the-only-end", topic="death", causes=("exception",), ranks=(4,), words=(("Rank 4 raised",), ("reader.py:133",)),
         files={"train.log": _FRAMES + "IndexError: list index out of range\n" + _ELASTIC.format(code=1, rank=4, pid=4114)}),
)  # fmt: skip
