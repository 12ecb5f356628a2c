"""Triton kernels of the learner; `unilab/sac/fused.py` says what each computes and when it is used."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from unilab.sac.objectives import INDEX_SLACK, LOG_PROBABILITY_FLOOR, V_MAX, V_MIN, reach


class Tile(NamedTuple):
    """How a normalisation is cut up.

    Attributes:
        elements: that a program holds at a time.
        programs: of all members together; an H200 has 132 multiprocessors.
        stages: tiles in flight.
    """

    elements: int
    programs: int
    stages: int


# The fastest measured on an H200 with 8192 rows: by members (one, more) and by width (up to `NARROW`, wider).
NARROW = 256
FORWARD = Tile(1024, 528, 3), Tile(2048, 1056, 1)
BACKWARD = Tile(2048, 264, 3), Tile(1024, 528, 3)
LOSS_TILE = 256  # elements a program of the loss holds


@triton.jit
def _normalised(product, bias, at, inside, WIDTH: tl.constexpr, EPSILON: tl.constexpr):
    hidden = tl.load(product + at, mask=inside, other=0.0).to(tl.float32) + bias
    centred = tl.where(inside, hidden - (tl.sum(hidden, 1) / WIDTH)[:, None], 0.0)
    deviation = tl.rsqrt(tl.sum(centred * centred, 1) / WIDTH + EPSILON)[:, None]
    return centred * deviation, deviation


@triton.jit
def _forward(
    product, bias, scale, shift, out, rows, EPSILON: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    member = tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    within = columns < WIDTH
    own = member * WIDTH + columns
    bias_row = tl.load(bias + own, mask=within, other=0.0)[None, :]
    scale_row = tl.load(scale + own, mask=within, other=0.0)[None, :]
    shift_row = tl.load(shift + own, mask=within, other=0.0)[None, :]
    for start in tl.range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        row = start + tl.arange(0, ROWS)
        at = (member * rows + row)[:, None] * WIDTH + columns[None, :]
        inside = (row < rows)[:, None] & within[None, :]
        normalised, _ = _normalised(product, bias_row, at, inside, WIDTH, EPSILON)
        value = normalised * scale_row + shift_row
        tl.store(out + at, (value * tl.sigmoid(value)).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    gradient, product, bias, scale, shift, out, sums, rows, EPSILON: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    program, member = tl.program_id(0), tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    within = columns < WIDTH
    own = member * WIDTH + columns
    bias_row = tl.load(bias + own, mask=within, other=0.0)[None, :]
    scale_row = tl.load(scale + own, mask=within, other=0.0)[None, :]
    shift_row = tl.load(shift + own, mask=within, other=0.0)[None, :]
    to_bias = tl.zeros((ROWS, BLOCK), tl.float32)
    to_scale = tl.zeros((ROWS, BLOCK), tl.float32)
    to_shift = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in tl.range(program * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        row = start + tl.arange(0, ROWS)
        at = (member * rows + row)[:, None] * WIDTH + columns[None, :]
        inside = (row < rows)[:, None] & within[None, :]
        slope = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
        normalised, deviation = _normalised(product, bias_row, at, inside, WIDTH, EPSILON)
        value = normalised * scale_row + shift_row
        gate = tl.sigmoid(value)
        slope = slope * gate * (1.0 + value * (1.0 - gate))
        scaled = slope * scale_row
        along = (tl.sum(scaled * normalised, 1) / WIDTH)[:, None]
        down = deviation * (scaled - (tl.sum(scaled, 1) / WIDTH)[:, None] - normalised * along)
        tl.store(out + at, down.to(out.dtype.element_ty), mask=inside)
        if SUMS:
            to_bias += tl.where(inside, down, 0.0)
            to_scale += slope * normalised
            to_shift += slope
    if SUMS:
        partial = sums + (member * tl.num_programs(0) + program) * WIDTH + columns
        every = tl.num_programs(1) * tl.num_programs(0) * WIDTH
        tl.store(partial, tl.sum(to_bias, 0), mask=within)
        tl.store(partial + every, tl.sum(to_scale, 0), mask=within)
        tl.store(partial + 2 * every, tl.sum(to_shift, 0), mask=within)


def norm_silu(product: Tensor, bias: Tensor, scale: Tensor, shift: Tensor, epsilon: float) -> Tensor:
    """See `fused.norm_silu`."""
    members, rows, width = product.shape
    product, out = product.contiguous(), product.new_empty(product.shape)
    parameters = [parameter.contiguous() for parameter in (bias, scale, shift)]
    tile = FORWARD[members > 1]
    grid = triton.cdiv(tile.programs, members), members
    _forward[grid](product, *parameters, out, rows, epsilon, **_constants(tile, width))
    return out


def norm_silu_backward(
    gradient: Tensor, product: Tensor, bias: Tensor, scale: Tensor, shift: Tensor, epsilon: float, sums: bool
) -> tuple[Tensor, Tensor]:
    """See `fused.norm_silu_backward`; the sums are partial, one row a program."""
    members, rows, width = product.shape
    gradient, product, out = gradient.contiguous(), product.contiguous(), product.new_empty(product.shape)
    grid = programs(members, width), members
    partial = bias.new_empty((3, members, grid[0] if sums else 0, width))
    parameters = [parameter.contiguous() for parameter in (bias, scale, shift)]
    tile = BACKWARD[width > NARROW]
    _backward[grid](gradient, product, *parameters, out, partial, rows, epsilon, **_constants(tile, width), SUMS=sums)
    return out, partial


def programs(members: int, width: int) -> int:
    """Programs of each member backwards, and so partial sums of its parameters' gradients."""
    return -(-BACKWARD[width > NARROW].programs // members)


def _constants(tile: Tile, width: int) -> dict[str, int]:
    block = triton.next_power_of_2(width)
    return {"WIDTH": width, "BLOCK": block, "ROWS": max(tile.elements // block, 1), "STAGES": tile.stages}


@triton.jit
def _hat(distance):
    share = 1.0 - tl.abs(distance)
    return tl.where(share < 0.0, 0.0, share)  # keeps NaN, as everywhere here: a bad row must spoil the loss


@triton.jit
def _cross_entropy(
    logits, target, rewards, discounts, losses, slopes, means, rows, low, spacing, floor, slack,
    ATOMS: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Positions on the support are in spacings from its lowest point, so that atom k of the support lies at k."""
    member = tl.program_id(1)
    atom = tl.arange(0, BLOCK)[None, :]
    position = atom.to(tl.float32)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    exists = row < rows
    inside = exists & (atom < ATOMS)
    at = (member * rows + row) * ATOMS + atom
    reward = tl.load(rewards + row, mask=exists, other=0.0)
    discount = tl.load(discounts + row, mask=exists, other=0.0)
    raised = tl.load(target + at, mask=inside, other=float("-inf"))
    raw = tl.load(logits + at, mask=inside, other=float("-inf"))
    raised = tl.where(exists, raised, 0.0)  # rows that do not exist stay finite
    raw = tl.where(exists, raw, 0.0)

    top = tl.max(raised, 1)[:, None]
    share = tl.exp(raised - top)  # of the target distribution, times its total
    total = tl.sum(share, 1)[:, None]
    origin = (reward + discount * low - low) / spacing  # where the lowest atom lands
    moved = origin + discount * position
    below, above = moved <= 0.0, moved >= ATOMS - 1.0
    landed = tl.where(below, 0.0, tl.where(above, ATOMS - 1.0, moved))
    tl.store(means + member * rows + row, low + spacing * (tl.sum(share * landed, 1)[:, None] / total), mask=exists)
    mass = tl.where(atom == 0, tl.sum(tl.where(below, share, 0.0), 1)[:, None], 0.0)
    mass += tl.where(atom == ATOMS - 1, tl.sum(tl.where(above, share, 0.0), 1)[:, None], 0.0)
    alive = discount != 0.0
    first = tl.ceil((position - 1.0 - origin) * (1.0 / tl.where(alive, discount, 1.0)) - slack)
    first = tl.where(first > 0.0, first, 0.0)
    first = tl.where(first < ATOMS - COUNT, first, ATOMS - COUNT)
    there = target + (member * rows + row) * ATOMS + first.to(tl.int32)
    for index in tl.static_range(COUNT):
        moved = origin + discount * (first + index)
        part = tl.where((moved <= 0.0) | (moved >= ATOMS - 1.0), 0.0, _hat(moved - position))
        mass += tl.exp(tl.load(there + index, mask=inside, other=0.0) - top) * part
    alone = tl.where(origin < 0.0, 0.0, tl.where(origin > ATOMS - 1.0, ATOMS - 1.0, origin))
    mass = tl.where(alive, mass, total * _hat(alone - position)) * (1.0 / total)
    mass = tl.where(inside, mass, 0.0)

    raw -= tl.max(raw, 1)[:, None]
    weight = tl.exp(raw)
    size = tl.sum(weight, 1)[:, None]
    logarithm = raw - tl.log(size)
    cut = logarithm < floor
    tl.store(losses + member * rows + row, -tl.sum(mass * tl.where(cut, floor, logarithm), 1)[:, None], mask=exists)
    moving = tl.where(cut, 0.0, mass)
    slope = weight * (tl.sum(moving, 1)[:, None] / size) - moving
    tl.store(slopes + at, slope, mask=inside)


def cross_entropy(
    logits: Tensor, target: Tensor, reward: Tensor, discount: Tensor, gamma: float
) -> tuple[Tensor, Tensor, Tensor]:
    """See `fused.cross_entropy`."""
    members, rows, atoms = logits.shape
    losses, means = logits.new_empty(logits.shape[:2]), logits.new_empty(logits.shape[:2])
    slopes = logits.new_empty(logits.shape)
    inputs = [value.contiguous() for value in (logits, target, reward, discount)]
    block = triton.next_power_of_2(atoms)
    tile = max(LOSS_TILE // block, 1)
    # One warp a program: sums over a row then need no barrier.
    _cross_entropy[(triton.cdiv(rows, tile), members)](
        *inputs, losses, slopes, means, rows, V_MIN, (V_MAX - V_MIN) / (atoms - 1), LOG_PROBABILITY_FLOOR, INDEX_SLACK,
        ATOMS=atoms, COUNT=reach(atoms, gamma), BLOCK=block, ROWS=tile, num_warps=1,
    )  # fmt: skip
    return losses, slopes, means
