"""Expected cost of a layout: memory, the time of a step by cause, and the distance from the device's limits.

    expected = expect(config, plan, hardware)
    expected.memory.peak, expected.fits
    expected.step_s, expected.communication_share, expected.bubble_share, expected.tokens_per_s

The time model is simple on purpose, with explicit assumptions. Matrix products run at `EFFICIENCY` of the peak. Rings
run at `LINK_EFFICIENCY` of the slowest link, with a latency per hop (`call_time`). Communication is hidden only by work
with which it can overlap. The model can rank layouts and find disproportionate costs. It is not an accurate forecast.
"""

from __future__ import annotations

from dataclasses import dataclass

from analyzers.account.bubble import expected_idle
from probes.tape.format.schema import TABLES
from probes.tape.format.writer import record_layout
from trainer.config.config import Config
from trainer.layout.plan import MESH_DIMS, Plan
from trainer.model.size import flops_per_token, num_parameters
from trainer.plan.call_time import call_s
from trainer.plan.float8 import Float8Products, float8_products
from trainer.plan.footprint.activations import compute_bytes
from trainer.plan.footprint.memory import RankMemory, worst_rank_memory
from trainer.plan.footprint.weights import rank_units
from trainer.plan.hardware import Hardware
from trainer.plan.traffic import CollectiveCall, rank_traffic, sends_per_microbatch

__all__ = ["EFFICIENCY", "HEADROOM", "Expected", "GroupTime", "expect"]

STORE_BYTES = {"steps": 150.0, "spans": 26.0, "collectives": 30.0, "gradients": 24.0, "nccl_calls": 60.0}
"""Estimated bytes per row in the store, by table."""
SPANS_A_STEP = 6
"""Number of spans in a step with one microbatch: data, forward, backward, optimizer and their parts."""
SPANS_A_MICROBATCH = 2
SMALL_CALLS = 3
"""Number of small collectives per step (loss, norm and verdict) that `rank_traffic` leaves out."""
TENSORS_A_LAYER = 9
HOUR_S = 3600.0

EFFICIENCY = 0.5
"""Share of peak that matrix products of usual size reach. Well-tuned trainings reach an MFU of 0.4 to 0.55."""
MUON_ITERATIONS = 5
"""Newton-Schulz iterations of an update, as in `trainer.training.muon`."""
HEADROOM = 0.92
"""Usable share of the device's memory. The rest is left for fragmentation and other processes."""
_WAITED_FOR = ("ep", "ep+tp", "cp", "cp+tp", "tp", "pp")
"""Mesh dimensions in which collectives run within each microbatch."""
_FLOAT8_BYTES = 1
_FORWARD_SHARE = 1 / 3  # of all operations of a step


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTime:
    """One kind of collective."""

    call: CollectiveCall
    crosses_nodes: bool
    seconds: float
    """Time per step if nothing overlapped it."""
    exposed_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    config: Config
    plan: Plan
    memory: RankMemory
    fits: bool
    num_parameters: int
    flops_per_token: int
    float8: Float8Products | None
    """Matmuls at the device's fp8 rate; None if all run in the training precision."""
    compute_s: float
    """Compute time of the busiest rank, including recomputation and Muon's matmuls."""
    groups: tuple[GroupTime, ...]
    bubble_share: float
    """Idle share of the pipeline's time. For zero-bubble schedules an upper bound: half of the share with 1f1b."""
    step_s: float
    tokens_per_s: float
    mfu: float
    """Model FLOPs utilisation, relative to the peak of the training precision even with fp8 matmuls, as in measured
    runs."""
    flops_per_memory_byte: float
    """Arithmetic intensity of the matrix products: operations per byte that they move."""
    ridge_flops_per_byte: float
    """Below this intensity the device's memory is the limit, not its arithmetic."""
    records: RecordVolume

    @property
    def exposed_s(self) -> float:
        return sum(group.exposed_s for group in self.groups)

    @property
    def communication_share(self) -> float:
        """Share of exposed communication in the step time."""
        return self.exposed_s / self.step_s

    @property
    def layout(self) -> str:
        """Text such as `dp_shard 8 x tp 2`."""
        used = [f"{dim} {size}" for dim, size in self.plan.sizes.items() if size > 1]
        return " x ".join(used) or "one rank"


def expect(config: Config, plan: Plan, hardware: Hardware) -> Expected:
    """The cost of a layout on GPUs. Raises ConfigError for a precision that the device lacks."""
    memory = worst_rank_memory(config, plan, "cuda")
    tokens = config.train.global_batch_size * config.data.seq_len
    per_token = flops_per_token(config.model, config.data.seq_len)
    peak = hardware.peak(config.train.precision)
    float8 = float8_products(config, plan, hardware)
    widest = float8.flops_per_s if float8 is not None and float8.has_feed_forward else peak
    useful_s = tokens / plan.world_size * _token_s(per_token, peak, float8)
    compute_s = useful_s * _imbalance(plan) * (1 + _recomputed_share(config) * _FORWARD_SHARE)
    timed = [_group_times(config, plan, rank, hardware, compute_s) for rank in range(plan.pp)]
    groups = max(timed, key=lambda found: sum(group.seconds for group in found))
    bubble = _bubble(plan)
    # Time that microbatches wait for collectives is part of the pipeline's time. Data-parallel traffic is not.
    inside = sum(group.exposed_s for group in groups if group.call.dimension in _WAITED_FOR)
    update_s = _update_flops(config, plan) / (hardware.flops_per_s.get("bf16", peak) * EFFICIENCY)
    step_s = (compute_s + inside) / (1 - bubble) + sum(group.exposed_s for group in groups) - inside + update_s
    return Expected(
        config=config,
        plan=plan,
        memory=memory,
        fits=memory.peak <= HEADROOM * hardware.memory_bytes and _fits_host(memory, plan, hardware),
        num_parameters=num_parameters(config.model),
        flops_per_token=per_token,
        float8=float8,
        compute_s=compute_s + update_s,
        groups=tuple(groups),
        bubble_share=bubble,
        step_s=step_s,
        tokens_per_s=tokens / step_s,
        mfu=tokens * per_token / plan.world_size / step_s / peak,
        flops_per_memory_byte=_intensity(config, plan, float8),
        ridge_flops_per_byte=widest / hardware.memory_bytes_per_s,
        records=expected_records(config, plan, calls_per_step=sum(group.call.calls for group in groups)),
    )


def _fits_host(memory: RankMemory, plan: Plan, hardware: Hardware) -> bool:
    """Return True if the host's memory suffices or is unknown."""
    have = hardware.host_memory_bytes
    return have is None or memory.host * min(plan.world_size, hardware.gpus_per_node) <= HEADROOM * have


def _token_s(flops: int, peak: float, float8: Float8Products | None) -> float:
    """Seconds that one device takes for a token's operations. fp8 operations are assumed to reach `EFFICIENCY` of the
    fp8 peak."""
    float8_flops = 0.0 if float8 is None else float8.flops_per_token
    float8_s = 0.0 if float8 is None else float8_flops / float8.flops_per_s
    return ((flops - float8_flops) / peak + float8_s) / EFFICIENCY


def _update_flops(config: Config, plan: Plan) -> int:
    """Operations of Muon on the busiest rank. Each iteration has two products with the whole matrix, and squares one
    matrix with the size of its shorter side. All ranks that share a matrix compute the whole update."""
    if config.optim.name != "muon":
        return 0
    units = [rank_units(config, plan, rank) for rank in range(plan.pp)]
    sizes = [[(min(w.rows, w.row_numel), w.numel()) for u in own for w in u.matrices] for own in units]
    return MUON_ITERATIONS * max(sum(4 * short * numel + 2 * short**3 for short, numel in own) for own in sizes)


def _imbalance(plan: Plan) -> float:
    """Number of layers of the busiest pipeline rank, divided by the mean over the ranks."""
    layers = [sum(len(plan.stages.layers[stage]) for stage in stages) for stages in plan.stages.of_rank]
    return max(layers) * len(layers) / sum(layers)


def _recomputed_share(config: Config) -> float:
    """Share of the forward pass that is recomputed; 5 % for `selective`, which repeats no matrix products."""
    kind = config.train.activation_checkpointing
    return {"none": 0.0, "full": 1.0, "every_n": 1 / config.train.checkpoint_every_n, "selective": 0.05}[kind]


def _bubble(plan: Plan) -> float:
    if plan.pp == 1:
        return 0.0
    per_rank = len(plan.stages.of_rank[0])
    idle = expected_idle(plan.schedule, ranks=plan.pp, microbatches=plan.num_microbatches, stages_per_rank=per_rank)
    if idle is not None:
        return idle
    bound = expected_idle("1f1b", ranks=plan.pp, microbatches=plan.num_microbatches)
    assert bound is not None
    return bound / 2


def _group_times(config: Config, plan: Plan, pp_rank: int, hardware: Hardware, compute_s: float) -> list[GroupTime]:
    """Time of each kind of call. In list order, each kind is hidden by the compute time that earlier kinds left."""
    room = {"backward": compute_s * (1 - _FORWARD_SHARE), "compute": compute_s * _FORWARD_SHARE}
    found = []
    for call in rank_traffic(config, plan, pp_rank=pp_rank):
        seconds, crosses_nodes = _seconds(call, plan, pp_rank, hardware)
        exposed = seconds
        # Gathers can overlap forward and backward, reductions only backward. The first gather and the last bucket
        # cannot overlap anything.
        kinds = {"backward": ("backward",), "compute": ("compute", "backward"), "": ()}[call.overlaps]
        for kind in kinds:
            hidden = min(room[kind], exposed * (1 - 1 / max(1, call.calls)))
            room[kind] -= hidden
            exposed -= hidden
        found.append(GroupTime(call=call, crosses_nodes=crosses_nodes, seconds=seconds, exposed_s=exposed))
    return found


def _seconds(call: CollectiveCall, plan: Plan, pp_rank: int, hardware: Hardware) -> tuple[float, bool]:
    """Seconds of a rank's calls in a step if nothing overlaps them, and True if the calls cross nodes."""
    if call.dimension == "host":
        return call.calls * call_s(call, hardware, bandwidth=hardware.host_bytes_per_s, nodes=1), False
    if call.dimension != "pp":
        stride = _stride(plan, call.dimension)
        bandwidth = hardware.bandwidth(stride=stride, size=call.size)
        nodes = hardware.num_nodes(stride=stride, size=call.size)
        return call.calls * call_s(call, hardware, bandwidth=bandwidth, nodes=nodes), nodes > 1
    # Messages to both neighbours share the time: one boundary may be within a node and the other not.
    stage = _stride(plan, "pp")
    ranks = [range(rank * stage, (rank + 1) * stage) for rank in range(plan.pp)]
    sends = sends_per_microbatch(plan, pp_rank)
    beyond = {other: hardware.crosses_nodes(ranks[pp_rank], ranks[other]) for other in sends}
    message_s = {
        other: call_s(call, hardware, bandwidth=hardware.send_bandwidth(ranks[pp_rank], ranks[other]),
                      nodes=1 + beyond[other])
        for other in sends
    }  # fmt: skip
    microbatches = call.calls / sum(sends.values())
    return sum(microbatches * count * message_s[other] for other, count in sends.items()), any(beyond.values())


def _stride(plan: Plan, dimension: str) -> int:
    """Distance in rank between neighbours of a group: the product of the faster-varying dimensions."""
    if dimension == "host":
        return 1
    faster = MESH_DIMS[MESH_DIMS.index(dimension.rpartition("+")[2]) + 1 :]
    stride = 1
    for dim in faster:
        stride *= plan.sizes[dim]
    return stride


def _intensity(config: Config, plan: Plan, float8: Float8Products | None) -> float:
    """Operations per byte of the feed-forward layer's matmul, the largest of a block: 2 m n k operations for
    (m k + k n + m n) numbers moved. In fp8 both operands take one byte per number. For an expert, m is the number of
    rows that it gets from all ranks that share the experts, if all experts are used equally."""
    model, rows = config.model, plan.micro_batch_size * config.data.seq_len / plan.cp
    width, hidden = model.dim, model.ffn_dim / plan.tp
    if model.num_experts:
        rows, hidden = rows * plan.ep * model.experts_per_token / model.num_experts, model.expert_ffn_dim
    low = compute_bytes(config)
    factor = _FLOAT8_BYTES if float8 is not None and float8.has_feed_forward else low
    moved = (rows * width + width * hidden) * factor + rows * hidden * low
    return 2 * rows * width * hidden / moved


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordVolume:
    """Bytes of records per rank and step.

    Records on tapes have fixed sizes (`probes.tape.format.writer`). The bytes of a row in DuckDB are rough estimates:
    they depend on the values and on how full DuckDB's blocks are.
    """

    tape_bytes: float
    store_bytes: float

    def per_hour(self, step_s: float, *, on_tapes: bool = True) -> float:
        """Bytes per rank and hour. Without `on_tapes`, only the bytes that remain if ingested tapes are deleted."""
        return (self.store_bytes + (self.tape_bytes if on_tapes else 0.0)) * HOUR_S / step_s


def expected_records(config: Config, plan: Plan, *, calls_per_step: int) -> RecordVolume:
    """Estimate the records of a configuration. Collectives that NCCL's plugin records are in the store twice."""
    probes = config.probes
    if not probes.enabled:
        return RecordVolume(tape_bytes=0.0, store_bytes=0.0)
    rows: dict[str, float] = {"steps": 1.0, "spans": SPANS_A_STEP + SPANS_A_MICROBATCH * (plan.num_microbatches - 1)}
    calls = calls_per_step + SMALL_CALLS if probes.collectives else 0
    if probes.gradient_interval:
        rows["gradients"] = TENSORS_A_LAYER * config.model.num_layers / plan.pp / probes.gradient_interval
    on_tape = rows | {"nccl_calls": calls}
    in_store = on_tape | {"collectives": calls}
    return RecordVolume(
        tape_bytes=sum(number * record_layout(TABLES[table])[0].size for table, number in on_tape.items()),
        store_bytes=sum(number * STORE_BYTES[table] for table, number in in_store.items()),
    )
