"""All kinds of faults: what happens, and the required finding and response. This table is the only source of both.

    kind = CATALOGUE["nan_grad"]
    kind.fault_id, kind.what                  # "F22", "one element of a gradient becomes NaN before it is reduced"
    kind.expected[0].kinds, kind.expected[0].rank   # ("non_finite",), "rank"

F1 to F48 number the faults that the suite must cover. `trainer/faults/injectors/` implements the kinds; this module
does not need torch, so that a command can list them.
"""

from __future__ import annotations

from probes.tape import event_kinds
from trainer.faults.kind import Expected, Kind, Whose

__all__ = ["CATALOGUE", "MESHES", "NOT_DRILLED"]

_LOST = Expected(("rank_lost",), ("signal",))
_RAISED = Expected(("rank_lost",), ("exception",))
_LASTING = ("step", "rank", "factor", "until")
_SPIKE_STEP = 36  # from here on the spike detector has enough history, and the initial steep loss descent is over
_SLOW_AFTER = 70  # steps: about ten seconds of a small model, in which the live straggler analyzer runs twice


def _stuck(*causes: str, rank: Whose = "rank") -> tuple[Expected, ...]:
    return (Expected(("hang",), causes, rank),)


CATALOGUE: dict[str, Kind] = {
    # Processes.
    "kill": Kind(fault_id="F1", what="a rank is killed (SIGKILL)", expected=(_LOST,), recovery="restarts"),
    "stop": Kind(
        fault_id="F2",
        what="a rank is stopped (SIGSTOP)",
        expected=_stuck("stopped"),
        recovery="restarts",
        needs="ranks",
    ),
    "segfault": Kind(fault_id="F3", what="a rank reads from address 0", expected=(_LOST,), recovery="restarts"),
    "abort": Kind(fault_id="F3", what="a rank calls abort()", expected=(_LOST,), recovery="restarts"),
    "exception": Kind(fault_id="F4", what="a rank raises RuntimeError", expected=(_RAISED,), recovery="restarts"),
    "exit": Kind(
        fault_id="F4",
        what="a rank exits with code 1 and no message",
        expected=(Expected(("rank_lost",), ("exit",)),),
        recovery="restarts",
    ),
    "gil": Kind(
        fault_id="F5",
        what="a rank hangs in C and holds Python's lock",
        expected=_stuck("gil", "not_entered", "data", "busy"),
        recovery="restarts",
        needs="ranks",
    ),
    "oom": Kind(
        fault_id="F44",
        what="a rank allocates more memory than is available",
        expected=(Expected(("rank_lost",), ("out_of_memory",)),),
        recovery="restarts",
    ),
    # Collectives.
    "hang": Kind(
        fault_id="F10",
        what="a rank stops joining collectives and sleeps",
        expected=_stuck("not_entered", "p2p_unmatched"),  # p2p_unmatched: in a pipeline, a stage waits for its message
        recovery="restarts",
        needs="ranks",
    ),
    "skip_collective": Kind(
        fault_id="F10",
        what="a rank skips one all-reduce",
        expected=_stuck("skipped", "not_entered"),
        recovery="restarts",
        needs="ranks",
    ),
    "wrong_collective": Kind(
        fault_id="F8",
        what="a rank calls all-gather where the others call all-reduce",
        expected=_stuck("mismatch_operation"),
        recovery="restarts",
        needs="ranks",
    ),
    "wrong_size": Kind(
        fault_id="F9",
        what="a rank passes twice the elements to an all-reduce",
        expected=_stuck("mismatch_size"),
        recovery="restarts",
        needs="ranks",
    ),
    "wrong_dtype": Kind(
        fault_id="F9",
        what="a rank passes another element type to an all-reduce",
        expected=_stuck("mismatch_dtype"),
        recovery="restarts",
        needs="ranks",
    ),
    "order_inversion": Kind(
        fault_id="F11",
        what="two ranks use two groups in opposite order",
        expected=_stuck("order_inversion", rank="among"),
        recovery="restarts",
        armed_everywhere=True,
        needs="ranks",
    ),
    "missing_send": Kind(
        fault_id="F12",
        what="a pipeline stage drops one send",
        expected=_stuck("p2p_unmatched", rank="among"),
        recovery="restarts",
        needs="pipeline",
    ),
    # Data.
    "slow_data": Kind(
        fault_id="F16",
        what="every batch of a rank is delayed",
        expected=(Expected(("straggler",), ("data",)),),
        keys=(*_LASTING, "seconds"),
        needs="ranks",
        parameters="factor=2.5",
        first_step=24,
        steps_after=_SLOW_AFTER,
    ),
    "data_ends": Kind(
        fault_id="F13", what="a rank runs out of data (StopIteration)", expected=(_RAISED,), recovery="restarts"
    ),
    "loader_killed": Kind(
        fault_id="F17",
        what="a worker process of a rank's data loader is killed",
        expected=(_RAISED,),
        recovery="restarts",
        settings=("data.num_workers=1",),
    ),
    "bad_batch": Kind(
        fault_id="F25",
        what="the batch of a step (or `batch`) holds random tokens",
        expected=(Expected(("loss_spike",), ("batch",), "none"),),
        recovery="skips",
        keys=("step", "rank", "batch"),
        all_ranks=True,
        first_step=_SPIKE_STEP,
    ),
    "failing_batch": Kind(
        fault_id="F46",
        what="one batch produces a NaN whenever it is trained on",
        expected=(Expected(("non_finite",), ("forward",), "none"),),
        recovery="skips",
        keys=("step", "rank", "batch"),
        all_ranks=True,
    ),
    "failing_data": Kind(
        fault_id="F46",
        what="every batch from a given step on produces a NaN",
        expected=(Expected(("non_finite",), ("forward",), "none"),),
        recovery="stops",
        keys=("step", "rank", "batch"),
        all_ranks=True,
    ),
    # Numbers.
    "nan_grad": Kind(
        fault_id="F22",
        what="one element of one gradient becomes NaN before it is reduced",
        expected=(Expected(("non_finite",), ("backward",)),),
        recovery="skips",
        keys=("step", "rank", "parameter"),
    ),
    "inf_activation": Kind(
        fault_id="F23",
        what="one element of a block's output becomes Inf",
        expected=(Expected(("non_finite",), ("forward",), "tensor_group"),),
        recovery="skips",
    ),
    "overflow": Kind(
        fault_id="F24",
        what="finite gradients overflow when they are summed over the ranks",
        expected=(Expected(("non_finite",), ("reduction",), "none"),),
        recovery="skips",
        keys=("step", "rank", "parameter"),
        all_ranks=True,
        needs="ranks",
    ),
    "lr_spike": Kind(
        fault_id="F26",
        what="the learning rate is 100 times too high for one step",
        expected=(Expected(("loss_spike",), ("learning_rate",), "none"),),
        recovery="skips",
        keys=("step", "rank", "factor"),
        all_ranks=True,
        first_step=_SPIKE_STEP,
    ),
    "divergence": Kind(
        fault_id="F27",
        what="the learning rate keeps growing by a third per step",
        expected=(Expected(("loss_spike", "divergence"), ("learning_rate", "divergence", "trend"), "none"),),
        recovery="stops",
        keys=_LASTING,
        all_ranks=True,
        parameters="factor=1.33",
        first_step=_SPIKE_STEP,
        steps_after=100,
    ),
    # Bits.
    "bit_flip": Kind(
        fault_id="F28, F30",
        what="one bit of a parameter flips in a rank's memory",
        expected=(Expected(("replica_mismatch", "fingerprint_chain_broken"), ("parameter",)),),
        recovery="skips",
        keys=("step", "rank", "where", "tensor", "bit"),
        settings=("probes.chain_interval=1",),
    ),
    "bit_flip_optimizer": Kind(
        fault_id="F29",
        what="one bit of a rank's optimizer state flips",
        expected=(Expected(("replica_mismatch", "fingerprint_chain_broken"), ("optimizer", "parameter")),),
        recovery="skips",
        keys=("step", "rank", "tensor", "bit"),
        settings=("probes.chain_interval=1",),
    ),
    "bit_flip_gradient": Kind(
        fault_id="F29",
        what="one bit of a rank's gradient flips before it is reduced, and the value becomes large but finite",
        expected=(Expected(("gradient_corrupted",), ("gradient",)),),
        needs="data ranks",
        keys=("step", "rank", "tensor", "bit"),
        required_event=(event_kinds.GRADIENT_OUTLIER, ""),
        first_step=14,  # before this step, the detector of outlying gradients warms up
    ),
    "skip_restore": Kind(
        fault_id="F31",
        what="a rank is killed and, once restarted, does not restore its random generators (or `where`)",
        expected=(_LOST, Expected(("resume_differs",), ("rng",))),
        recovery="restarts",
        keys=("step", "rank", "where"),
        # only a checkpoint on disk has signatures to compare
        settings=("checkpoint.interval=5", "checkpoint.memory_survives=false"),
        first_step=14,
    ),
    # Time.
    "slow_compute": Kind(
        fault_id="F15",
        what="a rank's forward and backward take longer because of extra computation",
        expected=(Expected(("straggler",), ("compute",)),),
        keys=_LASTING,
        needs="ranks",
        parameters="factor=2.5",
        first_step=24,
        steps_after=_SLOW_AFTER,
    ),
    "slow_link": Kind(
        fault_id="F18",
        what="a rank's network connections carry `rate_mb` (1) MB/s",
        expected=(Expected(("straggler",), ("communication",), "among"),),
        keys=("step", "rank", "until", "rate_mb"),
        needs="groups",
        parameters="rate_mb=4",
        first_step=24,
        steps_after=_SLOW_AFTER,
    ),
    "pause": Kind(
        fault_id="F19",
        what="one garbage collection on a rank takes half a second",
        keys=("step", "rank", "seconds"),
        steps_after=30,
    ),
    "slow_logging": Kind(
        fault_id="F20",
        what="rank 0 logs for 30 ms after each step",
        keys=("step", "rank", "seconds", "until"),
        drilled_rank=0,
        first_step=24,
        steps_after=60,
    ),
    # The node.
    "watch_killed": Kind(fault_id="F38", what="the node's watch process is killed", steps_after=30),
    "store_corrupt": Kind(fault_id="F38", what="the first pages of the store are overwritten", steps_after=30),
    "clock_shift": Kind(
        fault_id="F40",
        what="a rank's clock is ten minutes ahead from the start",
        keys=("step", "rank", "seconds"),
        steps_after=30,
    ),
    "late_writer": Kind(
        fault_id="F41",
        what="a rank is killed, and a stale copy of it continues after the next attempt has started",
        expected=(_LOST,),
        recovery="restarts",
        required_event=(event_kinds.FENCED, ""),
        steps_after=16,
    ),
    "flood": Kind(
        fault_id="F39",
        what="ranks write ten times as many records",
        keys=("step", "rank", "until"),
        all_ranks=True,
        steps_after=30,
    ),
    # Checkpoints and their disk.
    "kill_in_save": Kind(
        fault_id="F32",
        what="a rank is killed inside a save",
        expected=(_LOST,),
        recovery="restarts",
        settings=("checkpoint.interval=2",),
    ),
    "torn_checkpoint": Kind(
        fault_id="F33",
        what="a shard of the newest checkpoint is truncated, and the rank is killed",
        expected=(_LOST,),
        recovery="restarts",
        settings=("checkpoint.memory_survives=false",),
        required_event=(event_kinds.CHECKPOINT, "condemned"),
        first_step=24,
        steps_after=16,
    ),
    "flipped_checkpoint": Kind(
        fault_id="F34",
        what="a bit of a shard of the newest checkpoint flips, and the rank is killed",
        expected=(_LOST,),
        recovery="restarts",
        settings=("checkpoint.memory_survives=false",),
        required_event=(event_kinds.CHECKPOINT, "condemned"),
        first_step=24,
        steps_after=16,
    ),
    "disk_full": Kind(
        fault_id="F35",
        what="a rank cannot write files longer than 64 KiB",
        expected=(Expected(("checkpoint_failed",), ("failed",), "none"),),
        keys=("step", "rank", "until"),
        settings=("checkpoint.interval=5",),
        allowed=("checkpoint_age",),
        required_event=(event_kinds.CHECKPOINT, "failed"),
        steps_after=24,
    ),
    "slow_disk": Kind(
        fault_id="F36",
        what="every fsync of a rank takes a second longer",
        keys=("step", "rank", "seconds", "until"),
        settings=("checkpoint.interval=5",),
        allowed=("checkpoint_age",),  # if steps are short, a save of some seconds makes the newest checkpoint old
        steps_after=24,
    ),
    # Pairs of faults in one run.
    "kill_in_recovery": Kind(
        fault_id="F45",
        what="a rank produces a NaN and is killed during the rollback",
        expected=(Expected(("non_finite",), ("backward",)), _LOST),
        recovery="restarts",
        keys=("step", "rank", "parameter"),
    ),
}
"""Kind by name, family by family."""

MESHES = {
    "config": "as the configuration says",
    "ddp": "replicas on all ranks",
    "fsdp": "sharded over all ranks",
    "tp": "tensor parallel over all ranks",
    "hsdp": "two replicas, each sharded",
    "fsdp*tp": "tensor parallel over two ranks, sharded over the rest",
    "pp": "a pipeline of all ranks",
    "pp*fsdp": "a pipeline of two stages, sharded over the rest",
}
"""Layouts on which a drill can run a configuration."""

NOT_DRILLED = {
    "F6, F7": "a kernel that never ends, a device-side assertion: needs a GPU",
    "F14": "the launcher keeps the rendezvous store, and without it no rank restarts: tests/e2e/test_whole_run_killed "
    "kills it, tests/analyzers/deaths/test_rank_lost covers scripts with their own store",
    "F21": "uneven stages are a layout, not an event of a step: tests/analyzers/pipeline/test_stage_balance",
    "F37": "root can write to any folder: tests/trainer/hostile_disk mounts a read-only one in a namespace",
    "F42, F43": "a device that fails, or a driver that hangs: needs a GPU",
    "F47": "ranks and the launcher use no remote endpoint; for the exporters see tests/watch/exporting",
    "F48": "an untrusted run folder, not a fault of a training run: tests/hostile",
}
"""Faults that cannot be drilled with processes on one machine, with the reason and the substitute."""
