"""Triton kernels of the learner; `unilab/sac/fused.py` says what each computes and when it is used."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from unilab.sac.objectives import INDEX_SLACK, LOG_PROBABILITY_FLOOR, V_MAX, V_MIN, reach

TILE = 1024  # elements a program holds at a time
PROGRAMS = 528  # of a normalisation: 4 for each of the 132 multiprocessors of an H200
STAGES = 3  # tiles in flight


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
        partial = sums + (member * tl.num_programs(0) + program) * 3 * WIDTH + columns
        tl.store(partial, tl.sum(to_bias, 0), mask=within)
        tl.store(partial + WIDTH, tl.sum(to_scale, 0), mask=within)
        tl.store(partial + 2 * WIDTH, tl.sum(to_shift, 0), mask=within)


def norm_silu(product: Tensor, bias: Tensor, scale: Tensor, shift: Tensor, epsilon: float) -> Tensor:
    """See `fused.norm_silu`."""
    members, rows, width = product.shape
    product, out = product.contiguous(), product.new_empty(product.shape)
    parameters = [parameter.contiguous() for parameter in (bias, scale, shift)]
    _forward[_grid(members)](product, *parameters, out, rows, epsilon, **_tile(width))
    return out


def norm_silu_backward(
    gradient: Tensor, product: Tensor, bias: Tensor, scale: Tensor, shift: Tensor, epsilon: float, sums: bool
) -> tuple[Tensor, Tensor]:
    """See `fused.norm_silu_backward`; the sums are partial, one row a program."""
    members, rows, width = product.shape
    gradient, product, out = gradient.contiguous(), product.contiguous(), product.new_empty(product.shape)
    grid = _grid(members)
    partial = bias.new_empty((members, grid[0] if sums else 0, 3, width))
    parameters = [parameter.contiguous() for parameter in (bias, scale, shift)]
    _backward[grid](gradient, product, *parameters, out, partial, rows, epsilon, **_tile(width), SUMS=sums)
    return out, partial


def programs(members: int) -> int:
    """Programs of each member, and so partial sums of its parameters' gradients."""
    return -(-PROGRAMS // members)


def _grid(members: int) -> tuple[int, int]:
    return programs(members), members


def _tile(width: int) -> dict[str, int]:
    block = triton.next_power_of_2(width)
    return {"WIDTH": width, "BLOCK": block, "ROWS": max(TILE // block, 1), "STAGES": STAGES}


@triton.jit
def _hat(shifted, point, spacing):
    share = 1.0 - tl.abs(shifted - point) / spacing
    return tl.where(share < 0.0, 0.0, share)  # keeps NaN, as everywhere here: a bad row must spoil the loss


@triton.jit
def _cross_entropy(
    logits, target, rewards, discounts, points, losses, slopes, means, rows, low, high, floor, slack,
    ATOMS: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    member = tl.program_id(1)
    atom = tl.arange(0, BLOCK)[None, :]
    within = atom < ATOMS
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    inside = (row < rows) & within
    at = (member * rows + row) * ATOMS + atom
    spacing = (high - low) / (ATOMS - 1)
    point = tl.load(points + atom, mask=within, other=0.0)
    reward = tl.load(rewards + row, mask=row < rows, other=0.0)
    discount = tl.load(discounts + row, mask=row < rows, other=0.0)

    raised = tl.load(target + at, mask=inside, other=float("-inf"))
    raised = tl.where(row < rows, raised, 0.0)  # rows that do not exist stay finite
    top = tl.max(raised, 1)[:, None]
    total = tl.sum(tl.exp(raised - top), 1)[:, None]
    probability = tl.where(within, tl.exp(raised - top) / total, 0.0)

    shifted = reward + discount * point
    below, above = shifted <= low, shifted >= high
    tl.store(
        means + member * rows + row,
        tl.sum(probability * tl.where(below, low, tl.where(above, high, shifted)), 1)[:, None],
        mask=row < rows,
    )
    mass = tl.where(atom == 0, tl.sum(tl.where(below, probability, 0.0), 1)[:, None], 0.0)
    mass += tl.where(atom == ATOMS - 1, tl.sum(tl.where(above, probability, 0.0), 1)[:, None], 0.0)
    alive = discount != 0.0
    first = tl.ceil(((point - spacing - reward) / tl.where(alive, discount, 1.0) - low) / spacing - slack)
    first = tl.where(first > 0.0, first, 0.0)
    first = tl.where(first < ATOMS - COUNT, first, ATOMS - COUNT).to(tl.int32)
    for index in tl.static_range(COUNT):
        source = first + index
        moved = reward + discount * tl.load(points + source)
        share = tl.where((moved <= low) | (moved >= high), 0.0, _hat(moved, point, spacing))
        there = tl.load(target + (member * rows + row) * ATOMS + source, mask=inside, other=0.0)
        mass += tl.exp(there - top) / total * share
    landed = tl.where(reward < low, low, tl.where(reward > high, high, reward))
    alone = tl.sum(probability, 1)[:, None] * _hat(landed, point, spacing)
    mass = tl.where(inside, tl.where(alive, mass, alone), 0.0)

    raw = tl.load(logits + at, mask=inside, other=float("-inf"))
    raw = tl.where(row < rows, raw, 0.0)
    raw -= tl.max(raw, 1)[:, None]
    weight = tl.exp(raw)
    size = tl.sum(weight, 1)[:, None]
    logarithm = raw - tl.log(size)
    cut = logarithm < floor
    loss = -tl.sum(tl.where(within, mass * tl.where(cut, floor, logarithm), 0.0), 1)[:, None]
    tl.store(losses + member * rows + row, loss, mask=row < rows)
    moving = tl.where(cut, 0.0, mass)
    slope = weight / size * tl.sum(moving, 1)[:, None] - moving
    tl.store(slopes + at, slope, mask=inside)


def cross_entropy(
    logits: Tensor, target: Tensor, reward: Tensor, discount: Tensor, points: Tensor, gamma: float
) -> tuple[Tensor, Tensor, Tensor]:
    """See `fused.cross_entropy`."""
    members, rows, atoms = logits.shape
    losses, means = logits.new_empty(logits.shape[:2]), logits.new_empty(logits.shape[:2])
    slopes = logits.new_empty(logits.shape)
    inputs = [value.contiguous() for value in (logits, target, reward, discount, points)]
    block = triton.next_power_of_2(atoms)
    tile = max(TILE // 2 // block, 1)
    _cross_entropy[(triton.cdiv(rows, tile), members)](
        *inputs, losses, slopes, means, rows, V_MIN, V_MAX, LOG_PROBABILITY_FLOOR, INDEX_SLACK,
        ATOMS=atoms, COUNT=reach(atoms, gamma), BLOCK=block, ROWS=tile,
    )  # fmt: skip
    return losses, slopes, means
