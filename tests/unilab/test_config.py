"""Every refusal a setting can cause, the documented defaults, and the quoting of paths."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from unilab.config import CONF, RunConfig, TrainingConfig, load_config, restore_config
from unilab.sac.config import SacConfig
from unilab.tasks.g1_walk_flat_config import G1WalkFlatConfig, G1WalkFlatRewards
from unilab.tasks.go2_joystick_flat_config import Go2JoystickFlatConfig, Go2JoystickFlatRewards

KNOWN_TASKS = "g1_walk_flat, go2_joystick_flat"
POOLS = "training.dp_collector_cpu_ids"
TWO_RANKS = f"for two ranks type {POOLS}=[[2,3],[4,5]]"


def load(*overrides: str) -> RunConfig:
    return load_config("sac", "g1_walk_flat", "mujoco", overrides)


def refusal(*overrides: str, algo: str = "sac", task: str = "g1_walk_flat", sim: str = "mujoco") -> str:
    with pytest.raises(ValueError, match=r"\S") as caught:
        load_config(algo, task, sim, overrides)
    return str(caught.value)


def numbers(value: Any) -> Iterator[float]:
    """Every number in a JSON value."""
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from numbers(item)
    elif isinstance(value, int | float):
        yield value


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"algo": "sacc"}, "unknown algorithm 'sacc', did you mean 'sac'?; there is sac, flashsac"),
        ({"algo": "ppo"}, "unknown algorithm 'ppo'; there is sac, flashsac"),
        ({"algo": ""}, "unknown algorithm ''; there is sac, flashsac"),
        ({"task": "g1_walk_flt"}, f"unknown task 'g1_walk_flt', did you mean 'g1_walk_flat'?; there is {KNOWN_TASKS}"),
        ({"task": "../sac"}, f"unknown task '../sac'; there is {KNOWN_TASKS}"),
        ({"sim": "mujco"}, "unknown backend 'mujco', did you mean 'mujoco'?; there is mujoco"),
        ({"sim": "isaacgym"}, "unknown backend 'isaacgym'; there is mujoco"),
    ],
)
def test_unknown_names(names: dict[str, str], message: str) -> None:
    assert refusal(**names) == message


@pytest.mark.parametrize(
    ("override", "message"),
    [
        # unknown keys, with the nearest known one
        ("algo.num_env=3", "unknown key 'algo.num_env', did you mean 'algo.num_envs'?"),
        ("traning.smoke=true", "unknown key 'traning.smoke', did you mean 'training.smoke'?"),
        ("smoke=true", "unknown key 'smoke', did you mean 'training.smoke'?"),
        ("+num_envs=3", "unknown key 'num_envs', did you mean 'algo.num_envs'?"),
        ("algo.alpha_init=1", "unknown key 'algo.alpha_init', did you mean 'algo.algo_params.alpha_init'?"),
        ("env.cpu_ids.0=1", "unknown key 'env.cpu_ids.0', did you mean 'env.cpu_ids'?"),
        ("quux=1", "unknown key 'quux'"),
        ("hydra/launcher=basic", "unknown key 'hydra/launcher'"),
        ("=3", "unknown key ''"),
        # what is no setting
        (
            "task=g1_walk_flat/mujoco",
            "'task=g1_walk_flat/mujoco' is no setting; the task is chosen as in --task g1_walk_flat --sim mujoco",
        ),
        ("algo=sac", "'algo' is a group of keys; set one of them, as in algo.algo=VALUE"),
        ("algo={num_envs:3}", "'algo' is a group of keys; set one of them, as in algo.algo=VALUE"),
        ("~training", "'training' is a group of keys; set one of them, as in training.task_name=VALUE"),
        (
            "algo.algo_params=3",
            "'algo.algo_params' is a group of keys; set one of them, as in algo.algo_params.alpha_lr=VALUE",
        ),
        (
            "~algo.num_envs",
            "'~algo.num_envs' deletes a key; every key has a value, set it with algo.num_envs=VALUE",
        ),
        ("algo.num_envs@x=3", "'algo.num_envs@x=3' names a package; type algo.num_envs=VALUE"),
        # sweeps and lists
        (
            "training.devices=0,1",
            "'training.devices=0,1' is a sweep over values; for a list type training.devices=[0,1]",
        ),
        ("+env.cpu_ids=0,1", "'+env.cpu_ids=0,1' is a sweep over values; for a list type env.cpu_ids=[0,1]"),
        ("algo.num_envs=8,16", "'algo.num_envs=8,16' is a sweep over values; give algo.num_envs one value"),
        ("algo.seed=range(1,4)", "'algo.seed=range(1,4)' is a sweep over values; give algo.seed one value"),
        ("env.cpu_ids=3", "env.cpu_ids takes a list, got 3; type env.cpu_ids=[3]"),
        (f"{POOLS}=0,1", f"'{POOLS}=0,1' is a sweep over values; {TWO_RANKS}"),
        (f"{POOLS}=[0],[1]", f"'{POOLS}=[0],[1]' is a sweep over values; {TWO_RANKS}"),
        *(
            (f"{POOLS}={value}", f"{POOLS} takes one list of CPUs per rank, got {value}; {TWO_RANKS}")
            for value in (
                "3",
                "[0,1]",
                "[[0],1]",
                "[[0],null]",
                "[[a]]",
                "[[0.5]]",
                "[[true]]",
                "[['1']]",
                "x",
                "{a:1}",
            )
        ),
        # types
        ("algo.num_envs=8.7", "algo.num_envs: Value '8.7' of type 'float' could not be converted to Integer"),
        ("algo.num_envs=1e3", "algo.num_envs: Value '1000.0' of type 'float' could not be converted to Integer"),
        ("algo.num_envs=true", "algo.num_envs: Value 'True' of type 'bool' could not be converted to Integer"),
        ("algo.num_envs=many", "algo.num_envs: Value 'many' of type 'str' could not be converted to Integer"),
        ("algo.num_envs=[8]", "algo.num_envs: Value '[8]' of type 'ListConfig' could not be converted to Integer"),
        ("algo.num_envs=null", "algo.num_envs: Incompatible value 'None' for field of type 'int'"),
        ("algo.gamma=true", "algo.gamma: Value 'True' of type 'bool' could not be converted to Float"),
        ("training.smoke=maybe", "training.smoke: Value 'maybe' is not a valid bool (type str)"),
        ("env.cpu_ids=[0,a]", "env.cpu_ids[1]: Value 'a' of type 'str' could not be converted to Integer"),
        ("env.cpu_ids=[0.5]", "env.cpu_ids[0]: Value '0.5' of type 'float' could not be converted to Integer"),
        ("training.log_dir=[a,b]", "training.log_dir: Cannot convert 'ListConfig' to string: '['a', 'b']'"),
        ("training.log_dir=${nope}", "training.log_dir: Interpolation key 'nope' not found"),
        # ranges
        ("algo.num_envs=0", "algo.num_envs must be at least 1, got 0"),
        ("algo.batch_size=-1", "algo.batch_size must be at least 1, got -1"),
        ("algo.learning_starts=0", "algo.learning_starts must be at least 1, got 0"),
        ("algo.max_iterations=0", "algo.max_iterations must be at least 1, got 0"),
        ("algo.save_interval=-2", "algo.save_interval must be -1, 0 or positive, got -2"),
        ("algo.gamma=1", "algo.gamma must be in [0, 1), got 1.0"),
        ("algo.gamma=nan", "algo.gamma must be in [0, 1), got nan"),
        ("algo.tau=0", "algo.tau must be in (0, 1], got 0.0"),
        ("algo.num_atoms=1", "algo.num_atoms must be at least 2, got 1"),
        ("algo.actor_hidden_dim=6", "algo.actor_hidden_dim must be a positive multiple of 4 (it halves twice), got 6"),
        ("algo.actor_lr=inf", "algo.actor_lr must be positive and finite, got inf"),
        ("algo.algo_params.alpha_init=0", "algo.algo_params.alpha_init must be positive and finite, got 0.0"),
        ("algo.algo_params.alpha_lr=nan", "algo.algo_params.alpha_lr must be positive and finite, got nan"),
        ("algo.algo_params.target_entropy_ratio=nan", "algo.algo_params.target_entropy_ratio must be finite, got nan"),
        ("algo.algo_params.amp_dtype=fp16", "algo.algo_params.amp_dtype must be auto or bf16, got 'fp16'"),
        ("algo.algo=flashsac", "algo.algo must be sac (the --algo option chooses), got 'flashsac'"),
        ("training.sim_backend=mjwarp", "training.sim_backend must be mujoco (--sim chooses), got 'mjwarp'"),
        ("training.task_name=Mine", "training.task_name must be G1WalkFlat (--task chooses), got 'Mine'"),
        ("training.logger=csv", "training.logger must be tensorboard or wandb or none, got 'csv'"),
        ("training.wandb_mode=dryrun", "training.wandb_mode must be online, offline, disabled or null, got 'dryrun'"),
        ("training.wandb_project=", "training.wandb_project must be a name, got ''"),
        ("training.wandb_tags=fast", "training.wandb_tags: "),
        ("training.nccl_transport=nvlink", "training.nccl_transport must be auto or p2p or shm or tcp, got 'nvlink'"),
        ("training.log_interval=0", "training.log_interval must be at least 1, got 0"),
        ("training.record_states=-1", "training.record_states must be 0 to 1000, got -1"),
        ("training.record_states=1001", "training.record_states must be 0 to 1000, got 1001"),
        ("training.log_dir=", "training.log_dir must be a path or null, got ''"),
        ("env.physics_profile=faster", "env.physics_profile must be reference or exact or fast, got 'faster'"),
        ("env.reset_yaw=[1]", "env.reset_yaw must be [low, high] with low <= high, got [1.0]"),
        # grammar
        ("algo.num_envs", "cannot read 'algo.num_envs' as key=value: missing EQUAL at '<EOF>'"),
        ("algo.num_envs=int(", "cannot read 'algo.num_envs=int(' as key=value: "),
        ("", "cannot read '' as key=value: "),
        ("training.log_root=a\nb", "cannot read 'training.log_root=a\\nb' as key=value: "),
    ],
)
def test_refused_settings(override: str, message: str) -> None:
    assert refusal(override).startswith(message)


@pytest.mark.parametrize(
    "key", ["quux", "algo.obs_normalization", "algo.target_frequency", "training.cam_distance", "training.play_only"]
)
def test_a_name_that_is_not_near_is_not_suggested(key: str) -> None:
    assert refusal(f"{key}=1") == f"unknown key {key!r}"


@pytest.mark.parametrize(
    "override",
    [
        "algo.algo_params.max_grad_norm=inf",
        "algo.algo_params.target_entropy_ratio=-inf",
        "algo.algo_params.alpha_lr=inf",
        "algo.algo_params.alpha_init=inf",
        "env.action_scale=nan",
        "env.gain_scale=[1,inf]",
        "env.observation_noise.joint_pos=inf",
        "reward.alive=-inf",
    ],
)
def test_no_number_may_be_infinite(override: str) -> None:
    assert "finite, got " in refusal(override)


def test_one_bad_override_among_good_ones_is_found() -> None:
    assert refusal("algo.num_envs=8", "algo.batch=3", "training.smoke=true").startswith("unknown key 'algo.batch'")


def test_documented_defaults() -> None:
    defaults = asdict(SacConfig())
    documented = {"algo_log_name": "sac", "num_envs": 4096, "batch_size": 8192, "max_iterations": 500}
    assert {key: defaults[key] for key in documented} == documented
    assert TrainingConfig().use_amp is True


def test_the_task_sets_its_own_sizes() -> None:
    algo = load().algo
    assert (algo.num_envs, algo.batch_size, algo.updates_per_step, algo.max_iterations) == (2048, 8192, 8, 5000)
    assert (algo.learning_starts, algo.algo_params.alpha_init) == (10, 0.001)
    assert (load().training.task_name, load().training.sim_backend) == ("G1WalkFlat", "mujoco")


def test_the_file_and_the_schema_hold_the_same_defaults() -> None:
    written = OmegaConf.to_container(OmegaConf.load(CONF / "sac" / "config.yaml"))
    assert isinstance(written, dict)
    assert written["algo"] == asdict(SacConfig())
    assert written["training"].items() <= asdict(TrainingConfig()).items()
    assert set(written) == {"defaults", "algo", "training"}


def test_what_no_file_mentions_is_the_schemas_default() -> None:
    config = load()
    assert config.env == G1WalkFlatConfig()
    assert config.reward == G1WalkFlatRewards()


@pytest.mark.parametrize("prefix", ["", "+", "++"])
def test_a_leading_plus_changes_nothing(prefix: str) -> None:
    assert load(f"{prefix}env.cpu_ids=[0,1]").env.cpu_ids == [0, 1]
    assert load(f"{prefix}{POOLS}=[[0,1],[2]]").training.dp_collector_cpu_ids == [[0, 1], [2]]
    assert load(f"{prefix}algo.num_envs=8").algo.num_envs == 8


def test_values_of_every_type() -> None:
    config = load(
        "algo.gamma=0.5",
        "algo.tau=1",
        "training.smoke=true",
        "training.devices=[0]",
        "env.cpu_ids=null",
        "env.reset_yaw=[-1,1]",
        "env.observation_noise.joint_pos=0.5",
        "training.log_root=${oc.env:HOME}",
    )
    assert (config.algo.gamma, config.algo.tau) == (0.5, 1.0)
    assert config.training.smoke is True
    assert (config.training.devices, config.env.cpu_ids) == ([0], None)
    assert config.env.reset_yaw == [-1.0, 1.0]
    assert config.env.observation_noise == {"joint_pos": 0.5, "joint_vel": 0.1}
    assert config.training.log_root == str(Path.home())


def test_the_last_of_two_values_counts() -> None:
    assert load("algo.num_envs=8", "algo.num_envs=16").algo.num_envs == 16


@pytest.mark.parametrize(
    ("typed", "path"),
    [
        ("/tmp/a b/c-d_e.f", "/tmp/a b/c-d_e.f"),
        ("2026-01-02_03-04-05", "2026-01-02_03-04-05"),
        ('"/tmp/a, b"', "/tmp/a, b"),
        ("'/tmp/a,b'", "/tmp/a,b"),
        ('"/tmp/it\'s"', "/tmp/it's"),
        (r'"/tmp/a \"b\""', '/tmp/a "b"'),
        ('"/tmp/k=v (1)"', "/tmp/k=v (1)"),
        ('"/tmp/größe/日本"', "/tmp/größe/日本"),
        ('"~/runs"', "~/runs"),
    ],
)
def test_paths_with_characters_of_the_grammar_are_quoted(typed: str, path: str) -> None:
    assert load(f"training.log_dir={typed}").training.log_dir == path


@pytest.mark.parametrize(
    "path", ["/tmp/a,b", "/tmp/k=v", "/tmp/(1)", "~/runs", "/tmp/größe", '/tmp/a,"b"', "/tmp/o'clock"]
)
def test_the_refusal_of_an_unquoted_path_says_what_works(path: str) -> None:
    message = refusal(f"training.log_dir={path}")
    advice = message.split("for text with such characters type ")[1]
    (argument,) = shlex.split(advice)
    assert load(argument).training.log_dir == path


def test_the_resolved_configuration_is_plain_json() -> None:
    config = load("env.cpu_ids=[1]", "training.devices=[0]")
    text = json.dumps(config.to_json(), allow_nan=False)
    values = json.loads(text)
    assert values == config.to_json()
    assert set(values) == {"algo", "training", "env", "reward"}
    assert all(map(math.isfinite, numbers(values)))
    assert values["env"]["cpu_ids"] == [1]
    assert (values["env"]["sim_dt"], values["env"]["ctrl_dt"]) == (0.006666666666666667, 0.02)


def test_every_task_has_its_own_keys() -> None:
    config = load_config("sac", "go2_joystick_flat", "mujoco", ["env.kp=[30,40]", "reward.contact=2", "algo.seed=3"])
    assert config.env == Go2JoystickFlatConfig(kp=[30.0, 40.0])
    assert config.reward == Go2JoystickFlatRewards(contact=2.0)
    assert (config.training.task_name, config.algo.num_envs, config.algo.max_iterations) == (
        "Go2JoystickFlat",
        1024,
        4000,
    )


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("env.gain_scale=[1,1]", "unknown key 'env.gain_scale'"),
        ("reward.alive=1", "unknown key 'reward.alive'"),
        ("reward.action_rat=1", "unknown key 'reward.action_rat', did you mean 'reward.action_rate'?"),
        ("env.kp=[0,1]", "env.kp must be positive, got [0.0, 1.0]"),
        ("training.task_name=G1WalkFlat", "training.task_name must be Go2JoystickFlat (--task chooses), got"),
    ],
)
def test_keys_of_another_task_are_refused(override: str, message: str) -> None:
    assert refusal(override, task="go2_joystick_flat").startswith(message)


@pytest.mark.parametrize("task", ["g1_walk_flat", "go2_joystick_flat"])
@pytest.mark.parametrize("algo", ["sac", "flashsac"])
def test_a_saved_configuration_is_restored_with_the_types_of_its_task(algo: str, task: str) -> None:
    config = load_config(algo, task, "mujoco", ["env.physics_groups=1", "reward.tracking_lin_vel=3"])
    assert restore_config(json.loads(json.dumps(config.to_json()))) == config


def test_a_saved_configuration_of_an_unknown_task_is_refused() -> None:
    values = load().to_json()
    values["training"]["task_name"] = "Other"
    with pytest.raises(ValueError, match=r"does not fit this version: it names no known .* or training.task_name"):
        restore_config(values)


def test_loading_leaves_no_state_behind() -> None:
    load("algo.num_envs=8")
    refusal("algo.num_envs=none")
    assert load().algo.num_envs == 2048
