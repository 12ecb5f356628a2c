"""Layers of FlashSAC's networks. Every parameter has a leading axis of members, networks evaluated as one.

Each layer says what its parameters are after an optimizer step (`normalized`); a `Normalizer` does that to a network.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ALIGNMENT = 8  # matrix sizes that are no multiple of 8 fall off the fast bfloat16 kernels
ROW_EPSILON, SCALE_EPSILON = 1e-8, 1e-8
BATCH_EPSILON, RMS_EPSILON = 1e-5, 1e-6
MOMENTUM = 0.01  # weight of the batch in the running statistics


class Layer(nn.Module):
    """A layer whose parameters are brought back to a norm after each optimizer step."""

    @staticmethod
    def normalized(values: Sequence[Tensor]) -> list[Tensor]:
        """What takes the place of `values`, one for each parameter in order."""
        raise NotImplementedError


class UnitLinear(Layer):
    """A linear layer whose rows, one per output, have norm 1.

    Args:
        members: independent networks, M below.
        in_features: I below.
        out_features: O below.
        bias: add a free bias, at first 0.
    """

    def __init__(self, members: int, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__()
        weight = torch.stack([nn.init.orthogonal_(torch.empty(out_features, in_features)) for _ in range(members)])
        self.weight = nn.Parameter(weight)
        self.bias = nn.Parameter(torch.zeros(members, out_features)) if bias else None

    def forward(self, features: Tensor) -> Tensor:
        """`(M, B, O)` of `(M, B, I)` or `(1, B, I)`."""
        members, out_features, in_features = self.weight.shape
        pad_in, pad_out = -in_features % ALIGNMENT, -out_features % ALIGNMENT
        weight = _padded(self.weight, pad_in, pad_out)
        product = torch.bmm(_padded(features, pad_in).expand(members, -1, -1), weight.transpose(1, 2))
        product = product[..., :out_features]
        return product if self.bias is None else product + self.bias.unsqueeze(1)

    @staticmethod
    def normalized(values: Sequence[Tensor]) -> list[Tensor]:
        """Rows of norm 1; the bias as it is."""
        weight, *bias = values
        return [F.normalize(weight, dim=-1, eps=ROW_EPSILON), *bias]


class BatchNorm(Layer):
    """Batch normalisation that is told whether to use the statistics of the rows at hand.

    Weight and bias together have norm sqrt(features). The running statistics are float32 and written in place.

    Args:
        members: M below.
        features: I below.

    Attributes:
        running_mean: `(M, 1, I)`.
        running_var: `(M, 1, I)`, unbiased.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, members: int, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(members, 1, features))
        self.bias = nn.Parameter(torch.zeros(members, 1, features))
        self.register_buffer("running_mean", torch.zeros(members, 1, features))
        self.register_buffer("running_var", torch.ones(members, 1, features))

    def forward(self, features: Tensor, training: bool) -> Tensor:
        """Normalised rows, in the type of `features`.

        Args:
            features: `(M, B, I)` or `(1, B, I)`.
            training: take the statistics of these rows and move the running ones towards them.
        """
        values = features.float()
        mean, variance = self.running_mean, self.running_var
        if training:
            variance, mean = torch.var_mean(values, 1, correction=0, keepdim=True)
            self._track(mean.detach(), variance.detach(), values.shape[1])
        normalised = (values - mean) * torch.rsqrt(variance + BATCH_EPSILON)
        return (normalised * self.weight + self.bias).to(features.dtype)

    def _track(self, mean: Tensor, variance: Tensor, rows: int) -> None:
        """Rows that are not finite leave no trace: nothing that learns skips only a step."""
        unbiased = variance * (rows / max(rows - 1, 1))
        for running, value in ((self.running_mean, mean), (self.running_var, unbiased)):
            moved = torch.lerp(running, value.expand_as(running), MOMENTUM)
            running.copy_(torch.where(moved.abs() < math.inf, moved, running))  # half the kernels of isfinite

    @staticmethod
    def normalized(values: Sequence[Tensor]) -> list[Tensor]:
        """Weight and bias scaled by one factor."""
        weight, bias = values
        squares = weight.square().sum(-1, keepdim=True) + bias.square().sum(-1, keepdim=True)
        factor = _factor(squares, weight.shape[-1])
        return [weight * factor, bias * factor]


class RMSNorm(Layer):
    """Rows divided by their root mean square, times a scale of norm sqrt(features).

    Args:
        members: M below.
        features: I below.
    """

    def __init__(self, members: int, features: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(members, 1, features))

    def forward(self, features: Tensor) -> Tensor:
        """`(M, B, I)` in the type it came in."""
        values = features.float()
        root = torch.rsqrt(values.square().mean(-1, keepdim=True) + RMS_EPSILON)
        return (values * root * self.scale).to(features.dtype)

    @staticmethod
    def normalized(values: Sequence[Tensor]) -> list[Tensor]:
        """The scale scaled."""
        (scale,) = values
        return [scale * _factor(scale.square().sum(-1, keepdim=True), scale.shape[-1])]


class Block(nn.Module):
    """Inverted residual block: linear, batch norm and ReLU to four times the width and back, added to the input.

    Args:
        members: M below.
        features: I below.
    """

    EXPANSION = 4

    def __init__(self, members: int, features: int) -> None:
        super().__init__()
        wide = self.EXPANSION * features
        self.up, self.up_norm = UnitLinear(members, features, wide), BatchNorm(members, wide)
        self.down, self.down_norm = UnitLinear(members, wide, features), BatchNorm(members, features)

    def forward(self, features: Tensor, training: bool) -> Tensor:
        """`(M, B, I)`."""
        hidden = F.relu(self.up_norm(self.up(features), training))
        return features + F.relu(self.down_norm(self.down(hidden), training))


class Trunk(nn.Module):
    """What actor and critics have in common: batch norm of the input, a linear layer, blocks, RMS norm.

    Args:
        members: M below.
        in_features: I below.
        hidden: H below.
        blocks: inverted residual blocks.
    """

    def __init__(self, members: int, in_features: int, hidden: int, blocks: int) -> None:
        super().__init__()
        self.norm, self.embed = BatchNorm(members, in_features), UnitLinear(members, in_features, hidden)
        self.blocks = nn.ModuleList(Block(members, hidden) for _ in range(blocks))
        self.post = RMSNorm(members, hidden)

    def forward(self, inputs: Tensor, training: bool) -> Tensor:
        """`(M, B, H)` of `(B, I)`."""
        features = self.embed(self.norm(inputs.unsqueeze(0), training))
        for block in self.blocks:
            features = block(features, training)
        normalised: Tensor = self.post(features)
        return normalised


class Normalizer:
    """Brings the parameters of a network's layers back to their norms.

    Args:
        network: what belongs to no `Layer` stays as it is.
    """

    def __init__(self, network: nn.Module) -> None:
        places = {parameter: place for place, parameter in enumerate(network.parameters())}
        layers = [layer for layer in network.modules() if isinstance(layer, Layer)]
        self._plan = [(layer.normalized, [places[p] for p in layer.parameters(recurse=False)]) for layer in layers]

    def __call__(self, values: Sequence[Tensor]) -> list[Tensor]:
        """What takes the place of `values`, one for each parameter in the order of `network.parameters()`."""
        normalised = list(values)
        for normalized, places in self._plan:
            for place, value in zip(places, normalized([normalised[place] for place in places]), strict=True):
                normalised[place] = value
        return normalised


@torch.no_grad()
def normalize_(network: nn.Module) -> None:
    """Normalise a network in place."""
    parameters = list(network.parameters())
    for parameter, value in zip(parameters, Normalizer(network)(parameters), strict=True):
        parameter.copy_(value)


def share_buffers(network: nn.Module, source: nn.Module) -> None:
    """Make the buffers of `network` those of `source`, a network of the same structure."""
    for module, other in zip(network.modules(), source.modules(), strict=True):
        for name, buffer in other.named_buffers(recurse=False):
            setattr(module, name, buffer)


def _padded(matrix: Tensor, columns: int, rows: int = 0) -> Tensor:
    """With zeros behind its columns and rows; `F.pad` by nothing would copy."""
    return F.pad(matrix, (0, columns, 0, rows)) if columns or rows else matrix


def _factor(squares: Tensor, features: int) -> Tensor:
    return (features / (squares + SCALE_EPSILON)).sqrt()
