"""What drawn reset states are compared with."""

from __future__ import annotations

import math

import torch
from scipy import stats
from torch import Tensor


def assert_uniform(values: Tensor, low: float, high: float) -> None:
    """Range, mean and variance of U(low, high) within 5 standard errors, and a Kolmogorov-Smirnov test."""
    unit = (values.double().numpy() - low) / (high - low)
    assert unit.min() >= -1e-6
    assert unit.max() <= 1 + 1e-6
    assert abs(unit.mean() - 0.5) < 5 * math.sqrt(1 / 12 / len(unit))
    assert abs(unit.var() - 1 / 12) < 5 * math.sqrt(1 / 180 / len(unit))
    assert stats.kstest(unit, "uniform").pvalue > 1e-5


def yaw_of(quaternion: Tensor) -> Tensor:
    return 2 * torch.atan2(quaternion[:, 3], quaternion[:, 0])


def world_spin(resets: dict[str, Tensor]) -> Tensor:
    yaw, spin = yaw_of(resets["qpos"][:, 3:7]), resets["qvel"][:, 3:6]
    x = torch.cos(yaw) * spin[:, 0] - torch.sin(yaw) * spin[:, 1]
    y = torch.sin(yaw) * spin[:, 0] + torch.cos(yaw) * spin[:, 1]
    return torch.stack((x, y, spin[:, 2]), dim=1)
