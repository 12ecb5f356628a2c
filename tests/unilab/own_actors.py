"""Actors of one's own, right and wrong ones, by the name of what is wrong."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from unilab.flash_sac.layers import Trunk, UnitLinear, normalize_
from unilab.flash_sac.networks import Actor

NUMBER = 3


class Plain(nn.Module):
    """The simplest one that works."""

    action_transform_id: Any = "tanh"

    def __init__(self, obs_dim: int, action_dim: int, device: Any, hidden: int = 8) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(obs_dim, hidden), nn.ELU(), nn.Linear(hidden, 2 * action_dim)).to(device)

    def forward(self, observations: Tensor, training: bool) -> Any:
        mean, raw = self.body(observations).chunk(2, -1)
        return mean, -4.0 + 6.0 * torch.tanh(raw)


class Normalised(nn.Module):
    """FlashSAC's trunk, a batch norm of torch's, and a free layer."""

    action_transform_id = "tanh"

    def __init__(self, obs_dim: int, action_dim: int, device: Any) -> None:
        super().__init__()
        self.trunk = Trunk(1, obs_dim, 8, 1)
        self.norm = nn.BatchNorm1d(8)
        self.mean, self.log_std = UnitLinear(1, 8, action_dim, bias=True), nn.Linear(8, action_dim)
        normalize_(self)
        self.to(device)

    def forward(self, observations: Tensor, training: bool) -> tuple[Tensor, Tensor]:
        features = self.norm.train(training)(self.trunk(observations, training).squeeze(0))
        return self.mean(features.unsqueeze(0)).squeeze(0), self.log_std(features).clamp(-10, 2)


class Masked(Normalised):
    """Infinite numbers and a negative count, which mean something to their owner alone."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.register_buffer("mask", torch.tensor([-float("inf"), 0.0]))
        self.register_buffer("mask_count", torch.tensor(-1.0))

    def forward(self, observations: Tensor, training: bool) -> tuple[Tensor, Tensor]:
        mean, log_std = super().forward(observations, training)
        return mean + self.get_buffer("mask").exp().sum(), log_std


class NoTransform(Plain):
    action_transform_id = None


class OtherTransform(Plain):
    action_transform_id = "clip"


class NotATransform(Plain):
    action_transform_id = 3


class NoTrainingArgument(Plain):
    def forward(self, observations: Tensor) -> Any:  # type: ignore[override]
        return super().forward(observations, False)


class OneTensor(Plain):
    def forward(self, observations: Tensor, training: bool) -> Any:
        return super().forward(observations, training)[0]


class ThreeTensors(Plain):
    def forward(self, observations: Tensor, training: bool) -> Any:
        return (*super().forward(observations, training), observations)


class OneColumn(Plain):
    def forward(self, observations: Tensor, training: bool) -> Any:
        mean, log_std = super().forward(observations, training)
        return mean, log_std[:, :1]


class FixedRows(Plain):
    def forward(self, observations: Tensor, training: bool) -> Any:
        mean, log_std = super().forward(observations, training)
        return mean[:4], log_std[:4]


class WholeNumbers(Plain):
    def forward(self, observations: Tensor, training: bool) -> Any:
        mean, log_std = super().forward(observations, training)
        return mean.long(), log_std


class NotFinite(Plain):
    def forward(self, observations: Tensor, training: bool) -> Any:
        mean, log_std = super().forward(observations, training)
        return mean, log_std.log()


class NotFiniteInTraining(Plain):
    def forward(self, observations: Tensor, training: bool) -> Any:
        mean, log_std = super().forward(observations, training)
        return mean / (0.0 if training else 1.0), log_std


class SteepGradient(Plain):
    def forward(self, observations: Tensor, training: bool) -> Any:
        mean, log_std = super().forward(observations, training)
        return (mean - mean).sqrt(), log_std


class NoGradient(Plain):
    def forward(self, observations: Tensor, training: bool) -> Any:
        mean, log_std = super().forward(observations, training)
        return mean.detach(), log_std.detach()


class HostRead(Plain):
    def forward(self, observations: Tensor, training: bool) -> Any:
        mean, log_std = super().forward(observations, training)
        return (mean, log_std) if mean.mean() < 100 else (mean + 1, log_std)


class SizedByValues(Plain):
    def forward(self, observations: Tensor, training: bool) -> Any:
        mean, log_std = super().forward(observations, training)
        return mean + 0.0 * observations[observations > 0].sum(), log_std


class NotSaved(Plain):
    def __init__(self, persistent: bool = False, **given: Any) -> None:
        super().__init__(**given)
        self.register_buffer("offset", torch.zeros(()), persistent=persistent)


class Moving(NotSaved):
    def __init__(self, **given: Any) -> None:
        super().__init__(persistent=True, **given)

    def forward(self, observations: Tensor, training: bool) -> Any:
        mean, log_std = super().forward(observations, training)
        offset = self.get_buffer("offset")
        offset.add_(0.1)
        return mean + offset, log_std


class SavesMore(Plain):
    def get_extra_state(self) -> Any:
        return "more"

    def set_extra_state(self, state: Any) -> None:
        pass


class Lazy(Plain):
    def __init__(self, obs_dim: int, action_dim: int, device: Any) -> None:
        super().__init__(obs_dim, action_dim, device)
        self.body[0] = nn.LazyLinear(8, device=device)


class Noisy(Plain):
    def forward(self, observations: Tensor, training: bool) -> Any:
        return super().forward(observations + torch.randn_like(observations), training)


class Dropped(Plain):
    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.body.append(nn.Dropout())


class AmongOthers(Plain):
    def forward(self, observations: Tensor, training: bool) -> Any:
        return super().forward(observations - observations.mean(0), training)


class Frozen(Plain):
    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.body[0].requires_grad_(False)


class Doubles(Plain):
    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.double()


class NoParameters(nn.Module):
    action_transform_id = "tanh"

    def __init__(self, obs_dim: int, action_dim: int, device: Any) -> None:
        super().__init__()

    def forward(self, observations: Tensor, training: bool) -> Any:
        return observations, observations


def fails(obs_dim: int, action_dim: int, device: Any) -> nn.Module:
    raise OSError("no pretrained\nweights here")


def a_dict(**given: Any) -> dict[str, Any]:
    return given


def builtin(obs_dim: int, action_dim: int, device: Any, hidden: int, blocks: int) -> nn.Module:
    actor = Actor(obs_dim, action_dim, hidden, blocks).to(device)
    actor.action_transform_id = "tanh"  # type: ignore[assignment]
    return actor
