"""Actors of one's own: imported, built, and looked at before a run begins.

The learner samples, squashes and takes densities by itself, from noise that it is given. So a network returns the
parameters of a Gaussian, and everything else of acting and learning stays as it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from importlib import import_module
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.func import functional_call

from unilab.actor_semantics import TRANSFORM
from unilab.flash_sac.actor_spec import GIVEN, ActorSpec, refusal
from unilab.flash_sac.networks import SquashedGaussian

ROWS = (4, 6)  # of the observations that an actor is tried with


class CustomActor(SquashedGaussian):
    """A network of one's own as FlashSAC's policy.

    Running statistics that a batch would make not finite stay as they are: nothing that learns skips only a step.

    Args:
        network: `network(observations, training=...)` returns mean and log standard deviation.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, obs: Tensor, training: bool = False) -> tuple[Tensor, Tensor]:
        """See `SquashedGaussian.forward`."""
        if not training:
            mean, log_std = self.network(obs, training=False)
            return mean.float(), log_std.float()
        moved = {name: buffer.clone() for name, buffer in self.network.named_buffers()}
        mean, log_std = functional_call(self.network, moved, (obs,), {"training": True})
        with torch.no_grad():  # what the backward pass needs are the copies
            for name, value in moved.items():
                buffer = self.network.get_buffer(name)
                buffer.copy_(torch.where(value.isfinite(), value, buffer))
        return mean.float(), log_std.float()


def build_custom_actor(
    spec: ActorSpec, obs_dim: int, action_dim: int, device: torch.device | str = "cpu"
) -> CustomActor:
    """Import the builder, call it, and look at what it returns.

    Args:
        spec: builder and arguments.
        obs_dim: width of the policy observation.
        action_dim: width of the action.
        device: where its parameters and buffers go.

    Raises:
        ValueError: one line, for whatever is wrong with it but what it computes.
    """
    network = _call(_find_builder(spec), spec, {"obs_dim": obs_dim, "action_dim": action_dim, "device": device})
    if not isinstance(network, nn.Module):
        raise refusal(f"{spec.builder} returned {type(network).__name__}, a torch.nn.Module is needed")
    transform = getattr(network, "action_transform_id", None)
    if transform is None:
        raise refusal(f"{type(network).__name__} has no action_transform_id; set it to {TRANSFORM!r}")
    if transform != TRANSFORM:
        raise refusal(f"action_transform_id is {transform!r}, the learner supports {TRANSFORM!r} alone")
    _check_parameters(network)
    _check_saved(network)
    return CustomActor(network.to(device))


def check_custom_actor(spec: ActorSpec, obs_dim: int, action_dim: int) -> None:
    """Build an actor and try it: shapes, finite values, gradients, and nothing that a CUDA graph cannot hold.

    Raises:
        ValueError: one line naming what is wrong.
    """
    actor = build_custom_actor(spec, obs_dim, action_dim)
    source, stream = torch.Generator().manual_seed(0), torch.get_rng_state()
    for rows in ROWS:
        obs = torch.randn(rows, obs_dim, generator=source)
        for training in (True, False):
            found = _forward(actor.network, obs, training)
            _check_outputs(found, (rows, action_dim))
    if not torch.equal(torch.get_rng_state(), stream):
        raise refusal("forward draws random numbers; noise is the learner's, and a policy is evaluated without any")
    _check_rows_apart(actor.network, obs, found)
    _check_gradient(actor, torch.randn(ROWS[0], obs_dim, generator=source))
    _check_capturable(actor.network, obs_dim)


def _find_builder(spec: ActorSpec) -> Callable[..., Any]:
    module, name = spec.place
    try:
        found = attrgetter(name)(import_module(module))
    except ModuleNotFoundError as error:
        hint = "it must be installed or in a folder on PYTHONPATH, for every process of a run"
        raise refusal(f"cannot import {module!r}: {error}; {hint}") from None
    except AttributeError:
        raise refusal(f"module {module!r} has no {name!r}") from None
    except Exception as error:  # of somebody's module, which can be anything
        raise refusal(f"importing {module!r} failed: {_words(error)}") from None
    if not callable(found):
        raise refusal(f"{spec.builder} is {type(found).__name__}, something that can be called is needed")
    callable_: Callable[..., Any] = found
    return callable_


def _call(builder: Callable[..., Any], spec: ActorSpec, given: dict[str, Any]) -> Any:
    try:
        inspect.signature(builder).bind(**given, **spec.kwargs)
    except TypeError as error:
        asked = ", ".join([*GIVEN, *spec.kwargs])
        raise refusal(f"{spec.builder} cannot be called with {asked}: {error}") from None
    except ValueError:  # builtins need not have a signature
        pass
    try:
        return builder(**given, **spec.kwargs)
    except Exception as error:
        raise refusal(f"{spec.builder} failed: {_words(error)}") from None


def _check_parameters(network: nn.Module) -> None:
    parameters = dict(network.named_parameters())
    if not parameters:
        raise refusal(f"{type(network).__name__} has no parameters")
    for name, parameter in parameters.items():
        if isinstance(parameter, nn.UninitializedParameter):
            raise refusal(f"parameter {name} has no shape yet; give lazy layers their input width")
        if parameter.dtype != torch.float32:
            raise refusal(f"parameter {name} is {parameter.dtype}, float32 is needed")
        if not parameter.requires_grad:
            raise refusal(f"parameter {name} takes no gradient; what is not learned belongs into a buffer")


def _check_saved(network: nn.Module) -> None:
    """Refuse state that a checkpoint would lack, and what it could not hold as plain data."""
    owned = {name for name, _ in (*network.named_parameters(remove_duplicate=False), *_buffers(network))}
    saved = set(network.state_dict())
    if lost := sorted(owned - saved):
        raise refusal(f"{lost[0]} is no part of its state_dict, so checkpoints would lack it; register it persistent")
    if extra := sorted(saved - owned):
        raise refusal(f"its state_dict holds {extra[0]}, which is neither a parameter nor a buffer")


def _buffers(network: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return network.named_buffers(remove_duplicate=False)


def _check_rows_apart(network: nn.Module, obs: Tensor, together: tuple[Tensor, Tensor]) -> None:
    """Refuse a policy in which a robot's action depends on the other rows of a batch, or moves what it is made of."""
    before = {name: value.clone() for name, value in _buffers(network)}
    alone = _forward(network, obs[:1], False)
    moved = [name for name, value in _buffers(network) if not torch.equal(value, before[name])]
    if moved:
        raise refusal(f"forward(observations, training=False) moves buffer {moved[0]}; only training=True may")
    for name, one, many in zip(("mean", "log_std"), alone, together, strict=True):
        if not torch.allclose(one, many[:1], rtol=1e-3, atol=1e-3):
            raise refusal(f"forward(observations, training=False): {name} of a row depends on the rows beside it")


def _forward(network: nn.Module, obs: Tensor, training: bool) -> Any:
    try:
        return network(obs, training=training)
    except Exception as error:
        what = f"forward(observations, training={training}) failed on observations {tuple(obs.shape)}"
        raise refusal(f"{what}: {_words(error)}") from None


def _check_outputs(found: Any, shape: tuple[int, int]) -> None:
    """Refuse what is not a pair of finite `(B, A)` tensors."""
    if not isinstance(found, tuple) or len(found) != 2 or not all(isinstance(value, Tensor) for value in found):
        raise refusal(f"forward must return the tensors mean and log_std, it returned {_kind(found)}")
    for name, value in zip(("mean", "log_std"), found, strict=True):
        if value.shape != shape or not value.is_floating_point():
            asked = f"float {shape}"
            raise refusal(f"forward's {name} is {value.dtype} {tuple(value.shape)}, {asked} is needed")
        if not value.isfinite().all():
            raise refusal(f"forward's {name} is not finite on normal observations")


def _check_gradient(actor: CustomActor, obs: Tensor) -> None:
    try:
        mean, log_std = actor(obs, training=True)
        (mean.sum() + log_std.sum()).backward()
    except RuntimeError as error:
        raise refusal(f"no gradient goes through forward: {_words(error)}") from None
    odd = [name for name, p in actor.network.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]
    if odd:
        raise refusal(f"the gradient of parameter {odd[0]} is not finite on normal observations")


def _check_capturable(network: nn.Module, obs_dim: int) -> None:
    """Run it on tensors without values: what reads one on the host, or sizes tensors by one, cannot."""
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        obs = torch.empty(ROWS[0], obs_dim)
        try:
            network(obs, training=True)
            network(obs, training=False)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            why = "forward reads a value on the host or sizes a tensor by one, which a CUDA graph cannot hold"
            raise refusal(f"{why} ({_words(error)})") from None


def _kind(value: Any) -> str:
    return f"a tuple of {len(value)}" if isinstance(value, tuple) else type(value).__name__


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
