"""Actors of one's own: what is refused, that they learn, and what their checkpoints say."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import own_actors
import pytest
import torch
from rank_rig import assert_registry_is_whole, begun, differences, flash_settings

from unilab import bench, train
from unilab import eval as evaluation
from unilab.actor_semantics import describe_actor, verify_actor
from unilab.config import load_config, restore_config
from unilab.flash_sac.actor_spec import ActorSpec
from unilab.flash_sac.config import FlashSacConfig, FlashSacParams
from unilab.flash_sac.custom_actor import CustomActor, build_custom_actor, check_custom_actor
from unilab.probes import __main__ as probes

KEY = "algo.algo_params.actor_config"
NAMES = ["--algo", "flashsac", "--task", "g1_walk_flat", "--sim", "mujoco"]
SMALL = [
    *(
        "training.smoke=true",
        "training.no_play=true",
        "algo.num_envs=8",
        "algo.batch_size=16",
        "algo.replay_buffer_n=16",
    ),
    *("algo.critic_hidden_dim=8", "algo.num_atoms=11", "algo.learning_starts=4", "algo.max_iterations=3"),
]
HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def own(name: str = "Plain", **kwargs: Any) -> dict[str, Any]:
    return {"builder": f"own_actors:{name}", "kwargs": kwargs}


def refused(value: Any) -> str:
    with pytest.raises(ValueError, match=f"^{KEY}: ") as caught:
        check_custom_actor(ActorSpec.parse(value), 6, 3)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            "own_actors:Plain",
            "must be null or a mapping, got 'own_actors:Plain'; type 'algo.algo_params.actor_config={",
        ),
        ({"builder": "a:b", "kwarg": {}}, "unknown entry 'kwarg'; there is builder and kwargs"),
        ({}, "builder must be text like package.module:name, got None"),
        ({"builder": 3}, "builder must be text like package.module:name, got 3"),
        ({"builder": "Plain"}, "builder must be text like package.module:name, got 'Plain'"),
        ({"builder": ":Plain"}, "builder must be text like"),
        ({"builder": "a:b", "kwargs": [1]}, "kwargs must be a mapping of names to values, got [1]"),
        ({"builder": "a:b", "kwargs": {"x": {1}}}, "kwargs must be JSON values: Object of type set is not JSON"),
        ({"builder": "a:b", "kwargs": {"x": math.nan}}, "kwargs must be JSON values: Out of range float values"),
        ({"builder": "a:b", "kwargs": {"obs_dim": 3}}, "kwargs must not have obs_dim, every builder is called with"),
        ({"builder": "nowhere.at_all:A"}, "cannot import 'nowhere.at_all': No module named 'nowhere'; it must be inst"),
        ({"builder": "own_actors:Nobody"}, "module 'own_actors' has no 'Nobody'"),
        ({"builder": "own_actors:NUMBER"}, "own_actors:NUMBER is int, something that can be called is needed"),
        (own(width=3), "own_actors:Plain cannot be called with obs_dim, action_dim, device, width: got an unexpected"),
        (own("fails"), "own_actors:fails failed: OSError: no pretrained weights here"),
        (own("a_dict"), "own_actors:a_dict returned dict, a torch.nn.Module is needed"),
        (own("NoTransform"), "NoTransform has no action_transform_id; set it to 'tanh'"),
        (own("OtherTransform"), "action_transform_id is 'clip', the learner supports 'tanh' alone"),
        (own("NotATransform"), "action_transform_id is 3, the learner supports 'tanh' alone"),
        (own("NoParameters"), "NoParameters has no parameters"),
        (own("Doubles"), "parameter body.0.weight is torch.float64, float32 is needed"),
        (own("Frozen"), "parameter body.0.weight takes no gradient; what is not learned belongs into a buffer"),
        (own("NoTrainingArgument"), "forward(observations, training=True) failed on observations (4, 6): TypeError: "),
        (own("OneTensor"), "forward must return the tensors mean and log_std, it returned Tensor"),
        (own("ThreeTensors"), "forward must return the tensors mean and log_std, it returned a tuple of 3"),
        (own("OneColumn"), "forward's log_std is torch.float32 (4, 1), float (4, 3) is needed"),
        (own("FixedRows"), "forward's mean is torch.float32 (4, 3), float (6, 3) is needed"),
        (own("WholeNumbers"), "forward's mean is torch.int64 (4, 3), float (4, 3) is needed"),
        (own("NotFinite"), "forward's log_std is not finite on normal observations"),
        (own("NotFiniteInTraining"), "forward's mean is not finite on normal observations"),
        (own("NoGradient"), "no gradient goes through forward: RuntimeError: "),
        (own("SteepGradient"), "the gradient of parameter body.0.weight is not finite on normal observations"),
        (own("NotSaved"), "offset is no part of its state_dict, so checkpoints would lack it; register it persistent"),
        (own("SavesMore"), "its state_dict holds _extra_state, which is neither a parameter nor a buffer"),
        (own("Lazy"), "parameter body.0.weight has no shape yet; give lazy layers their input width"),
        (own("Noisy"), "forward draws random numbers; noise is the learner's"),
        (own("Dropped"), "forward draws random numbers; noise is the learner's"),
        (own("AmongOthers"), "forward(observations, training=False): mean of a row depends on the rows beside it"),
        (own("Moving"), "forward(observations, training=False) moves buffer offset; only training=True may"),
        (own("HostRead"), "forward reads a value on the host or sizes a tensor by one, which a CUDA graph cannot hold"),
        (own("SizedByValues"), "forward reads a value on the host or sizes a tensor by one, which a CUDA graph cannot"),
    ],
)
def test_what_is_wrong_is_one_line(value: Any, message: str) -> None:
    assert message in refused(value)


def test_a_module_that_cannot_be_imported_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_actor.py").write_text("import torch\nraise RuntimeError('no\\nlicence')\n")
    (tmp_path / "misspelt_actor.py").write_text("class A(:\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert "importing 'broken_actor' failed: RuntimeError: no licence" in refused({"builder": "broken_actor:A"})
    assert "importing 'misspelt_actor' failed: SyntaxError: " in refused({"builder": "misspelt_actor.A"})


@pytest.mark.parametrize("command", ["train", "bench", "probe"])
@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("{builder:own_actors:OneTensor}", "it returned Tensor"),
        ("{builder:own_actors:Nobody}", "module 'own_actors' has no 'Nobody'"),
        ("own_actors:Plain", "must be null or a mapping"),
    ],
)
def test_every_command_refuses_alike_before_anything_begins(
    command: str, value: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    override = f"{KEY}={value}"
    if command == "train":
        code = train.main([*NAMES, *SMALL, f"training.log_root={tmp_path}", override])
    elif command == "bench":
        code = bench.main(["learner", *NAMES, *SMALL, override])
    else:
        code = probes.main(["correctness", "--algo", "flashsac", "--smoke", override])
    captured = capsys.readouterr()
    assert (code, captured.out, list(tmp_path.iterdir())) == (2, "", [])
    assert message in captured.err and KEY in captured.err and captured.err.count("\n") == 1


def settings(name: str, **kwargs: Any) -> FlashSacConfig:
    return flash_settings(algo_params=FlashSacParams(actor_config=own(name, **kwargs)))


@pytest.mark.parametrize("name", ["Plain", "Normalised"])
def test_it_learns_within_the_phases_and_its_state_is_registered(name: str) -> None:
    rig, other = (begun(seed, config=settings(name)) for seed in (3, 4))
    start = rig.registry.snapshot()
    assert_registry_is_whole(rig, other, "actor/parameters")
    moved = differences(rig.registry.snapshot(), start)
    assert {"actor/parameters", "critic/parameters", "temperature/parameters"} <= set(moved)
    assert rig.registry.snapshot()["learner/Train/skipped_updates"] == 0


def test_running_statistics_survive_rows_that_are_not_finite() -> None:
    """A batch norm of torch's would keep the NaN, and the actor would never act again."""
    rig = begun(config=settings("Normalised"))
    for _ in range(2):
        rig.tick()
    rows = rig.replay.rows.clone()
    rig.replay.rows.fill_(torch.nan)
    rig.update.run()
    rig.replay.rows.copy_(rows)
    network = rig.learner.actor.network
    assert all(buffer.isfinite().all() for buffer in network.buffers())
    skipped = rig.registry.snapshot()["learner/Train/skipped_updates"].clone()
    rig.update.run()
    assert rig.registry.snapshot()["learner/Train/skipped_updates"] == skipped == 6


def test_layers_of_flashsac_keep_their_norms_and_others_are_free() -> None:
    rig = begun(config=settings("Normalised"))
    network = rig.learner.actor.network
    before = network.log_std.weight.detach().norm(dim=-1)
    running = network.norm.running_mean.clone()
    for _ in range(3):
        rig.tick()
    rows = network.trunk.embed.weight.norm(dim=-1)
    torch.testing.assert_close(rows, torch.ones_like(rows))
    assert not torch.equal(network.log_std.weight.detach().norm(dim=-1), before)
    assert not torch.equal(network.norm.running_mean, running) and int(network.norm.num_batches_tracked) > 0


def test_the_built_in_actor_as_ones_own_learns_alike() -> None:
    """The same network through the other door: only the names of its buffers differ."""
    states = []
    for config in (flash_settings(), settings("builtin", hidden=8, blocks=2)):
        rig = begun(config=config)
        for _ in range(2):
            rig.tick()
        states.append({name.replace("network.", ""): value for name, value in rig.registry.snapshot().items()})
    assert differences(*states) == []


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler's own modules
def test_the_compiler_takes_it_as_one_graph() -> None:
    """Without Inductor, whose code is a GPU's matter: traced forward and backward do what eager code does."""
    torch._dynamo.reset()
    states = []
    params = FlashSacParams(actor_config=own("Normalised"), critic_num_blocks=1)
    for traced in (False, True):
        rig = begun(config=flash_settings(algo_params=params, updates_per_step=2))
        if traced:
            for name, function in (("_actor_objective", "_judge_actor"), ("_next_action", "_sample")):
                given = getattr(rig.learner, function)
                setattr(rig.learner, name, torch.compile(given, backend="aot_eager", fullgraph=True, dynamic=False))
        for _ in range(2):
            rig.tick()
        states.append(rig.registry.snapshot())
    torch._dynamo.reset()
    eager, found = states
    for name in eager:
        torch.testing.assert_close(found[name], eager[name], rtol=1e-5, atol=1e-6, equal_nan=True, msg=name)


def test_the_entry_of_a_checkpoint_and_its_refusals() -> None:
    entry = describe_actor(settings("Plain"), 98, 29)
    assert entry == {
        **{"schema_version": 1, "kind": "custom", "builder": "own_actors:Plain", "kwargs": {}},
        **{"obs_dim": 98, "action_dim": 29, "action_transform": "tanh"},
    }
    verify_actor({"actor_semantics": entry}, entry, Path("model_1.pt"))
    for field, value in (
        ("builder", "own_actors:Normalised"),
        ("kwargs", {"hidden": 9}),
        ("action_transform", "clip"),
        ("kind", "builtin"),
    ):
        with pytest.raises(ValueError, match=rf"model_1.pt: actor_semantics.{field} is .*, the configuration expects"):
            verify_actor({"actor_semantics": {**entry, field: value}}, entry, Path("model_1.pt"))


def test_kwargs_are_compared_as_json_in_any_order() -> None:
    one, other = (
        ActorSpec.parse({"builder": " a:b ", "kwargs": kw}) for kw in ({"x": 1, "y": (2,)}, {"y": [2], "x": 1})
    )
    assert one == other and one.builder == "a:b" and list(one.kwargs) == ["x", "y"]
    assert ActorSpec.parse({"builder": "a.b.c"}).place == ("a.b", "c")


def test_the_setting_survives_its_file() -> None:
    config = load_config(
        "flashsac", "g1_walk_flat", "mujoco", [f"{KEY}={{builder:own_actors:Plain,kwargs:{{hidden:4}}}}"]
    )
    assert restore_config(json.loads(json.dumps(config.to_json()))) == config
    actor = config.algo.build_actor(98, 29)
    assert isinstance(actor, CustomActor) and isinstance(actor.network, own_actors.Plain)
    assert actor.network.body[0].out_features == 4


def test_the_deterministic_action_is_the_squashed_mean() -> None:
    actor = build_custom_actor(ActorSpec.parse(own()), 6, 3)
    obs = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(actor.deterministic(obs), torch.tanh(actor.network.body(obs)[:, :3]))


@pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning")
def test_the_documented_example_trains_and_its_checkpoint_is_evaluated_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / "docs" / "custom_actors.md").read_text()
    (tmp_path / "my_actor.py").write_text(text.split("```python\n")[1].split("```")[0])
    (override,) = {word for line in text.splitlines() for word in line.split("'") if word.startswith(f"{KEY}={{")}
    monkeypatch.syspath_prepend(tmp_path)
    run = tmp_path / "run"
    assert train.main([*NAMES, *SMALL, override, f"training.log_dir={run}"]) == 0
    file = run / "model_3.pt"
    checkpoint = torch.load(file, weights_only=True)
    assert checkpoint["actor_semantics"]["kind"] == "custom"
    assert checkpoint["actor_semantics"]["kwargs"] == {"hidden": 128}
    assert checkpoint["actor"]["network.body.0.weight"].shape == (128, 98)
    assert checkpoint["state"]["actor/adamw_step"] == 12
    capsys.readouterr()
    assert evaluation.main([*NAMES, "--load-run", str(run), "--episodes", "2"]) == 0
    assert "at iteration 3, 48 env steps\n2 episodes" in capsys.readouterr().out

    going_on = [*NAMES, *SMALL, "algo.max_iterations=4", "algo.resume=true", f"algo.load_run={run}"]
    assert train.main([*going_on, override.replace("128", "64")]) == 2
    assert 'kwargs is {"hidden": 128}, the configuration expects {"hidden": 64}; no weight' in capsys.readouterr().err
    assert train.main([*going_on, override]) == 0
    file = run / "attempt-002" / "model_4.pt"
    checkpoint = torch.load(file, weights_only=True)
    assert checkpoint["state"]["actor/adamw_step"] == 16
    capsys.readouterr()

    source = (tmp_path / "my_actor.py").read_text()
    monkeypatch.delitem(sys.modules, "my_actor")
    (tmp_path / "my_actor.py").write_text(source.replace("hidden)", "hidden + 1)").replace("(hidden,", "(hidden + 1,"))
    assert evaluation.main([*NAMES, "--load-run", str(run), "--episodes", "2"]) == 2
    refusal = capsys.readouterr().err
    assert "bias is float32 (128,), the actor that its builder makes now has float32 (129,)" in refusal

    checkpoint["actor_semantics"]["kwargs"] = {"hidden": 64}
    torch.save({**checkpoint, "actor": {}}, file)
    assert evaluation.main([*NAMES, "--load-run", str(run), "--episodes", "2"]) == 2
    refusal = capsys.readouterr().err
    assert 'kwargs is {"hidden": 64}, the configuration expects {"hidden": 128}; no weight was restored' in refusal
    written = file.with_name("config.json")
    config = json.loads(written.read_text())
    config["algo"]["algo_params"]["actor_config"]["builder"] = "gone_actor:Plain"
    written.write_text(json.dumps(config))
    assert evaluation.main([*NAMES, "--load-run", str(run), "--episodes", "2"]) == 2
    assert "cannot import 'gone_actor'" in capsys.readouterr().err


@pytest.mark.slow
def test_two_ranks_learn_as_one_and_keep_their_statistics(tmp_path: Path) -> None:
    """The correctness probe over gloo, with rows and first weights of each rank's own."""
    output, override = tmp_path / "found.json", f"{KEY}={{builder:own_actors:Normalised}}"
    command = [sys.executable, "-m", "unilab.probes", "correctness", "--smoke", "--algo", "flashsac", override]
    path = os.pathsep.join([str(HERE), str(ROOT), os.environ.get("PYTHONPATH", "")])
    ended = subprocess.run(
        [*command, "--output", str(output)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=110,
    )
    found = json.loads(output.read_text())
    checks = {check["name"]: check for check in found["checks"]}
    assert (ended.returncode, [check for check in found["checks"] if not check["passed"]]) == (0, [])
    wanted = "after 5 cycles: critic 40 of 40, temperature 20 of 20, actor 20 of 20"
    assert checks["optimizer_step_counts"]["detail"] == wanted
    assert checks["collectives_per_cycle"]["detail"].startswith("12 gradient all-reduces")
    local = checks["rank_local_buffers"]["detail"]
    for name in ("actor.network.trunk.norm", "actor.network.norm", "critic_target.trunk.blocks.1.down_norm"):
        assert f"{name}.running_mean" in local
    assert checks["gradient_of_joined_batch"]["required"] is False
    assert found["settings"] == {"algo": "flashsac", "compile_loss": False, "overrides": [override]}
