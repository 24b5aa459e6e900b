"""Print a plan: needs, a bar of the memory, traffic, time, warnings, the candidate layouts.

render(expected, hardware, warnings, found, console)
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from trainer.plan.call_time import LINK_EFFICIENCY
from trainer.plan.expected import EFFICIENCY, Expected
from trainer.plan.float8 import Float8Products
from trainer.plan.footprint.memory import RankMemory
from trainer.plan.hardware import Hardware
from trainer.plan.strategies import Strategies, Strategy

__all__ = ["amount", "render", "seconds"]

_BAR = 60
_BUS_BYTES = "bus bytes: what a rank sends in a step, counted as nccl-tests does for its busbw"
_PARTS = (("parameters", "P"), ("gradients", "G"), ("optimizer", "O"), ("gathered", "g"), ("activations", "A"),
          ("working", "w"), ("compression", "k"), ("context", "c"))  # fmt: skip


def render(
    expected: Expected,
    hardware: Hardware,
    warnings: Sequence[str],
    found: Strategies | None,
    console: Console,
    *,
    is_assumed: bool = False,
) -> None:
    """Print everything. `found`: candidate layouts; None leaves them out. `is_assumed`: the user named no device."""
    plan, config = expected.plan, expected.config
    count = expected.num_parameters
    console.print(
        f"{amount(count)} parameters, {amount(expected.flops_per_token)}FLOP a token, "
        f"{config.train.global_batch_size * config.data.seq_len:,} tokens a step, {config.train.precision}",
        highlight=False,
    )
    nodes = -(-plan.world_size // hardware.gpus_per_node)
    memory, assumed = f"{hardware.memory_bytes / 1e9:.0f} GB", " (assumed: see --gpu)" * is_assumed
    console.print(
        f"{plan.world_size} x {hardware.gpu}{assumed} of {memory} on {nodes} node{'s' * (nodes > 1)} "
        f"({hardware.inside} inside, {hardware.between} between)   layout: {expected.layout}\n",
        highlight=False,
    )
    _memory(expected.memory, hardware, console)
    _time(expected, hardware, console)
    if warnings:
        console.print("[bold]Warnings[/]")
        for warning in warnings:
            console.print(f"  ! {warning}", highlight=False, markup=False)
        console.print()
    if found is not None:
        _ladder(found, hardware, console)


def _memory(memory: RankMemory, hardware: Hardware, console: Console) -> None:
    stage = f" (pipeline rank {memory.pp_rank})" if memory.pp_rank else ""
    console.print(f"[bold]Memory[/] of the fullest rank{stage}, GB", highlight=False)
    scale = max(memory.sum, hardware.memory_bytes) / _BAR
    bar = "".join(letter * round(getattr(memory, name) / scale) for name, letter in _PARTS)
    limit = min(_BAR, round(hardware.memory_bytes / scale))
    picture = bar.ljust(_BAR, ".")
    console.print(f"  {picture[:limit]}|{picture[limit:]}", highlight=False, markup=False)
    legend = [f"{letter} {name} {getattr(memory, name) / 1e9:.2f}" for name, letter in _PARTS if getattr(memory, name)]
    console.print(f"  {'   '.join(legend)}   | device memory {hardware.memory_bytes / 1e9:.0f}", highlight=False)
    console.print(
        f"  peak [bold]{memory.peak / 1e9:.2f}[/] (activations are freed as gradients are allocated); "
        f"{memory.num_parameters:,} parameters on this rank\n"
        + (
            f"  host memory {memory.host / 1e9:.2f} per rank: parameters, gradients, optimizer. The times below "
            "exclude the optimizer step on the host.\n"
            if memory.host
            else ""
        ),
        highlight=False,
    )


def _time(expected: Expected, hardware: Hardware, console: Console) -> None:
    console.print(
        f"[bold]A step[/] {seconds(expected.step_s)}, {amount(expected.tokens_per_s)}tokens/s, MFU {expected.mfu:.0%}"
        f" of {_peak(expected, hardware)}\n"
        f"  assumes: matmuls run at {EFFICIENCY:.0%} of the peak of their precision, links at {LINK_EFFICIENCY:.0%}",
        highlight=False,
    )
    console.print(
        f"  compute {seconds(expected.compute_s)}   exposed communication {seconds(expected.exposed_s)} "
        f"({expected.communication_share:.1%})   bubble {expected.bubble_share:.1%}   "
        f"roofline {expected.flops_per_memory_byte:.0f} FLOP/byte, ridge {expected.ridge_flops_per_byte:.0f}",
        highlight=False,
    )
    if expected.float8 is not None:
        console.print(f"  {_float8(expected, expected.float8)}", highlight=False)
    if expected.groups:
        titles = ("  collective", "group", "calls", "bus bytes", "time", "exposed", "over")
        table = _table(titles, left=("  collective", "group", "over"))
        for group in expected.groups:
            call = group.call
            table.add_row(
                f"  {call.op} of {call.what}", f"{call.dimension} {call.size}", f"{call.calls}",
                f"{amount(call.bus_bytes)}B", seconds(group.seconds), seconds(group.exposed_s),
                "the bus" if call.dimension == "host" else hardware.between if group.crosses_nodes else hardware.inside,
            )  # fmt: skip
        console.print(table)
        console.print(f"  {_BUS_BYTES}", highlight=False)
    records, step_s, probes = expected.records, expected.step_s, expected.config.probes
    if records.tape_bytes:
        window = " plus the window's tapes" if probes.retain == "window" else ""
        kept = records.per_hour(step_s, on_tapes=probes.retain == "all")
        budget = f", held to {probes.budget_mb:g} MB (probes.budget_mb)" if probes.budget_mb else ""
        console.print(
            f"[bold]Records[/] {amount(records.tape_bytes)}B per step and rank on tapes, {amount(records.store_bytes)}"
            f"B in the store (estimated): {amount(kept)}B per rank and hour{window}{budget}; "
            f"{amount(kept * step_s / 3600)}B per step, "
            f"{amount(kept * step_s / 3600 * expected.config.train.steps * expected.plan.world_size)}B for all ranks "
            f"and {expected.config.train.steps} steps",
            highlight=False,
        )
    console.print()


def _peak(expected: Expected, hardware: Hardware) -> str:
    """Text with the peak to which MFU is relative: the peak of the training precision, even with fp8 products."""
    precision = expected.config.train.precision
    return f"the {precision} peak ({amount(hardware.peak(precision))}FLOP/s)"


def _float8(expected: Expected, float8: Float8Products) -> str:
    share, others = float8.flops_per_token / expected.flops_per_token, list(float8.others)
    listed = f"{', '.join(others[:-1])} and {others[-1]}"
    return (
        f"fp8 {share:.0%} of the operations, at a peak of {amount(float8.flops_per_s)}FLOP/s; {listed} in "
        f"{expected.config.train.precision}. Scaling and rounding are not in the time."
    )


def _ladder(found: Strategies, hardware: Hardware, console: Console) -> None:
    simplest, fastest = found.simplest, found.fastest
    shown = [strategy.expected for strategy in found.tried]
    has_misfits, has_bubbles = any(not one.fits for one in shown), any(one.bubble_share > 0 for one in shown)
    first = f"[bold]Layouts[/], the simplest first{'' if has_misfits or not shown else '; all fit'}"
    titles = (first, "GB a rank", *["fits"] * has_misfits, "step", "exposed", *["bubble"] * has_bubbles, "MFU", "")
    table = _table(titles, left=(first, "fits", ""), no_wrap=titles[1:])
    for strategy, expected in zip(found.tried, shown, strict=True):
        mark = "<- simplest" if strategy is simplest else "<- fastest" if strategy is fastest else ""
        table.add_row(
            Padding(strategy.name, (0, 0, 0, 2)), f"{expected.memory.peak / 1e9:.1f}",
            *["yes" if expected.fits else "no"] * has_misfits,
            seconds(expected.step_s), f"{expected.communication_share:.0%}",
            *[f"{expected.bubble_share:.0%}"] * has_bubbles, f"{expected.mfu:.0%}", mark,
        )  # fmt: skip
    console.print(table)
    if any(one.float8 is not None for one in shown):
        peak = _peak(shown[0], hardware)
        console.print(f"  MFU is relative to {peak}, also in fp8, whose own peak is higher", highlight=False)
    for why in dict.fromkeys(why for _, why in found.impossible):
        names = ", ".join(name for name, reason in found.impossible if reason == why)
        console.print(f"  not possible: {names}: {why}", highlight=False, markup=False)
    if simplest is None:
        _would_fit(found.would_fit, console)
    for title, chosen in (("The simplest that fits", simplest), ("The fastest", fastest)):
        if chosen is not None:
            for line in _options(f"{title}:", chosen, console.width):
                console.print(line, highlight=False, markup=False, soft_wrap=True)


def _would_fit(ways: Sequence[str], console: Console) -> None:
    if not ways:
        console.print("\nNothing fits. Try shorter sequences or a smaller model.", highlight=False)
        return
    console.print("\nNothing fits. What would:", highlight=False)
    for way in ways:
        console.print(f"  {way}", highlight=False, markup=False)


def _table(titles: Sequence[str], *, left: Sequence[str], no_wrap: Sequence[str] = ()) -> Table:
    """Make a table without a frame; columns in `left` are left-aligned, others right-aligned; columns in `no_wrap` are
    never cut."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in titles:
        table.add_column(title, justify="left" if title in left else "right", no_wrap=title in no_wrap)
    return table


def _options(title: str, strategy: Strategy, width: int) -> list[str]:
    """Options to copy into a command. They are on one line; if that is too wide, one per line with a backslash."""
    options = [f"--set {override}" for override in strategy.overrides] or [strategy.name]
    if len(whole := " ".join([title, *options])) <= width:
        return ["", whole]
    return ["", title, *(f"  {option} \\" for option in options[:-1]), f"  {options[-1]}"]


def amount(value: float) -> str:
    """12_400_000 -> `12.4 M`."""
    for unit, factor in (
        ("Y", 1e24),
        ("Z", 1e21),
        ("E", 1e18),
        ("P", 1e15),
        ("T", 1e12),
        ("G", 1e9),
        ("M", 1e6),
        ("k", 1e3),
    ):
        if value >= factor:
            return f"{value / factor:.3g} {unit}"
    return f"{value:.0f} "


def seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.1f} ms" if value >= 1e-3 else f"{value * 1e6:.0f} us"
