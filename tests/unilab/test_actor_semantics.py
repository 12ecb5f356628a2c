"""A checkpoint of another actor is refused before any weight is touched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from unilab.actor_semantics import describe_actor, verify_actor
from unilab.checkpoint import load_run
from unilab.config import load_config

FILE = Path("model_7.pt")
SEMANTICS = describe_actor(load_config("flashsac", "g1_walk_flat", "mujoco", []).algo, 98, 29)

NESTED: dict[str, Any] = {}
NESTED["a"] = NESTED


def refusal(found: Any) -> str:
    with pytest.raises(ValueError, match="no weight was restored") as caught:
        verify_actor({"actor": {}, "actor_semantics": found}, SEMANTICS, FILE)
    message = str(caught.value)
    assert message.startswith("model_7.pt: actor_semantics") and "\n" not in message
    return message


def test_the_entry_of_both_algorithms() -> None:
    assert SEMANTICS == {
        "schema_version": 1,
        "kind": "builtin",
        "builder": "unilab.flash_sac.networks:Actor",
        "kwargs": {"hidden_dim": 128, "num_blocks": 2, "noise_zeta_mu": 2.0, "noise_zeta_max": 16},
        "obs_dim": 98,
        "action_dim": 29,
        "action_transform": "tanh",
    }
    sac = describe_actor(load_config("sac", "g1_walk_flat", "mujoco", []).algo, 98, 29)
    assert (sac["builder"], sac["kwargs"]) == ("unilab.sac.networks:Actor", {"hidden": 512})


def test_builders_lead_to_the_actors_that_runs_build() -> None:
    from importlib import import_module

    for algo in ("sac", "flashsac"):
        config = load_config(algo, "g1_walk_flat", "mujoco", ["algo.actor_hidden_dim=16"]).algo
        module, _, name = describe_actor(config, 98, 29)["builder"].partition(":")
        assert type(config.build_actor(98, 29)) is getattr(import_module(module), name)


def test_the_same_actor_passes_whatever_else_is_there() -> None:
    verify_actor({"actor_semantics": {**SEMANTICS, "extra": 1}}, SEMANTICS, FILE)
    reordered = dict(reversed(SEMANTICS["kwargs"].items()))
    verify_actor({"actor_semantics": {**SEMANTICS, "kwargs": reordered}}, SEMANTICS, FILE)
    bare = {**SEMANTICS, "kwargs": {}}
    verify_actor({"actor_semantics": {**bare, "kwargs": None}}, bare, FILE)


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (None, "actor_semantics is missing, so this checkpoint is older than the format"),
        ([1], "actor_semantics must be a mapping, found list"),
        ({}, "actor_semantics.schema_version is None, expected 1"),
        ({**SEMANTICS, "schema_version": 2}, "actor_semantics.schema_version is 2, expected 1"),
        ({**SEMANTICS, "schema_version": True}, "actor_semantics.schema_version is True, expected 1"),
        ({**SEMANTICS, "kind": "fused"}, 'actor_semantics.kind is "fused", the configuration expects "builtin"'),
        ({**SEMANTICS, "kind": ["custom"]}, 'actor_semantics.kind is ["custom"], the configuration expects "builtin"'),
        ({**SEMANTICS, "action_transform": "clip"}, 'actor_semantics.action_transform is "clip", the configuration'),
        (
            {name: value for name, value in SEMANTICS.items() if name != "action_transform"},
            'actor_semantics.action_transform is "absent", the configuration expects "tanh"',
        ),
        (
            {name: value for name, value in SEMANTICS.items() if name != "kwargs"},
            'actor_semantics.kwargs is "absent", the configuration expects {"hidden_dim"',
        ),
    ],
)
def test_what_this_version_does_not_know_can_only_be_trained_again(found: Any, message: str) -> None:
    said = refusal(found)
    assert message in said
    assert "minimum supported format is actor_semantics with schema_version=1 and kind, builder, kwargs," in said
    assert said.endswith("retraining with the current version is the only way to recover")


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({**SEMANTICS, "kind": "custom"}, 'actor_semantics.kind is "custom", the configuration expects "builtin"'),
        ({**SEMANTICS, "builder": "a.b"}, 'actor_semantics.builder is "a:b", the configuration expects "unilab.flash'),
        ({**SEMANTICS, "builder": "ab"}, 'actor_semantics.builder is "ab", the configuration expects "unilab.flash'),
        ({**SEMANTICS, "builder": 7}, 'actor_semantics.builder is 7, the configuration expects "unilab.flash'),
        ({**SEMANTICS, "obs_dim": 49}, "actor_semantics.obs_dim is 49, the configuration expects 98"),
        (
            {**SEMANTICS, "kwargs": {**SEMANTICS["kwargs"], "noise_zeta_mu": 1.5}},
            'kwargs is {"hidden_dim": 128, "noise_zeta_max": 16, "noise_zeta_mu": 1.5, "num_blocks": 2}, the conf',
        ),
        ({**SEMANTICS, "kwargs": {1: 2, "a": 3}}, "actor_semantics.kwargs is {1: 2, 'a': 3}, the configuration"),
        ({**SEMANTICS, "kwargs": {(1, 2): 3}}, "actor_semantics.kwargs is {(1, 2): 3}, the configuration"),
        ({**SEMANTICS, "kwargs": {(1,): "\n" * 99}}, r"actor_semantics.kwargs is {(1,): '\n\n\n"),
        ({**SEMANTICS, "kwargs": NESTED}, "actor_semantics.kwargs is {'a': {'a': {'a': "),
    ],
)
def test_what_merely_differs_can_be_set(found: Any, message: str) -> None:
    said = refusal(found)
    assert message in said
    assert said.endswith("no weight was restored; set what it was trained with")


@pytest.mark.parametrize(("one", "other"), [("my.actor:A", "my.actor.A"), ("my.actor.A", "my.actor:A")])
def test_a_builder_has_two_spellings(one: str, other: str) -> None:
    expected = {**SEMANTICS, "kind": "custom", "builder": other}
    verify_actor({"actor_semantics": {**expected, "builder": one}}, expected, FILE)
    with pytest.raises(ValueError, match=r'builder is "my:actor\.A", the configuration expects "my\.actor:A"'):
        verify_actor({"actor_semantics": {**expected, "builder": "my:actor.A"}}, expected, FILE)


def test_every_mismatch_is_named() -> None:
    message = refusal({**SEMANTICS, "obs_dim": 1, "builder": "a:b"})
    assert "actor_semantics.obs_dim is 1" in message and 'actor_semantics.builder is "a:b"' in message


def test_a_run_with_another_actor_is_refused_before_its_weights_are_looked_at(tmp_path: Path) -> None:
    """The weights here are none at all."""
    import json

    config = load_config("flashsac", "g1_walk_flat", "mujoco", [])
    (tmp_path / "config.json").write_text(json.dumps({"schema_version": 1, **config.to_json()}))
    other = {**SEMANTICS, "kwargs": {**SEMANTICS["kwargs"], "hidden_dim": 64}}
    torch.save(
        {"iteration": 1, "env_steps": 8, "actor": "no weights", "actor_semantics": other}, tmp_path / "model_1.pt"
    )
    with pytest.raises(ValueError, match=r"model_1\.pt: actor_semantics\.kwargs is .*no weight was restored"):
        load_run(tmp_path, "flashsac", "g1_walk_flat", "mujoco")
    torch.save({"iteration": 2, "env_steps": 16, "actor": "no weights"}, tmp_path / "model_2.pt")
    with pytest.raises(ValueError, match=r"model_2\.pt: actor_semantics is missing"):
        load_run(tmp_path, "flashsac", "g1_walk_flat", "mujoco")
