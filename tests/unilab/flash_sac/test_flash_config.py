"""FlashSAC's settings: documented defaults, the task's leaf, refusals; and a run from the command line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from unilab import eval as evaluation
from unilab.config import CONF, RunConfig, load_config, restore_config
from unilab.flash_sac.config import FlashSacConfig
from unilab.flash_sac.learner import METRICS
from unilab.scripts import train_flashsac
from unilab.train import main

NAMES = ["--algo", "flashsac", "--task", "g1_walk_flat", "--sim", "mujoco"]
SMALL = [
    *("training.smoke=true", "training.no_play=true", "algo.num_envs=8", "algo.batch_size=32", "algo.num_atoms=11"),
    *("algo.actor_hidden_dim=16", "algo.critic_hidden_dim=16", "algo.max_iterations=4", "algo.learning_starts=5"),
]


def load(*overrides: str) -> RunConfig:
    return load_config("flashsac", "g1_walk_flat", "mujoco", overrides)


def test_documented_defaults() -> None:
    algo = FlashSacConfig()
    assert (algo.num_envs, algo.max_iterations, algo.tau, algo.save_interval) == (1024, 5000, 0.01, 1000)
    assert (algo.algo_params.actor_num_blocks, algo.algo_params.critic_num_blocks) == (2, 2)
    switches = ("use_compile", "compile_full_objectives", "use_whole_cycle_cuda_graph", "dp_whole_cycle_cuda_graph")
    assert all(getattr(algo.algo_params, name) is True for name in switches)


def test_the_file_and_the_schema_hold_the_same_defaults() -> None:
    written = OmegaConf.to_container(OmegaConf.load(CONF / "flashsac" / "config.yaml"))
    assert isinstance(written, dict)
    assert written["algo"] == asdict(FlashSacConfig())
    assert set(written) == {"defaults", "algo", "training"}


def test_the_task_sets_its_own_sizes_and_rewards() -> None:
    config, sac = load(), load_config("sac", "g1_walk_flat", "mujoco", [])
    algo = config.algo
    assert (algo.num_envs, algo.batch_size, algo.updates_per_step, algo.policy_frequency) == (4096, 2048, 8, 2)
    assert (algo.replay_buffer_n, algo.learning_starts, algo.tau, algo.max_iterations) == (256, 49, 0.05, 5000)
    assert config.env.feet_phase_sigma == 0.005
    assert config.env.pose_weights == [0.01, 2.0, 5.0, 0.01, 5.0, 5.0] * 2 + [50.0] * 17
    found, others = asdict(config.reward), asdict(sac.reward)
    apart = {name: value for name, value in found.items() if value != others[name]}
    assert apart == {"penalty_action_rate": -5.0, "penalty_feet_ori": -25.0}


def test_the_go2_has_its_own_sizes_and_the_environment_of_its_schema() -> None:
    config, sac = (load_config(algo, "go2_joystick_flat", "mujoco", []) for algo in ("flashsac", "sac"))
    algo = config.algo
    assert (algo.num_envs, algo.batch_size, algo.updates_per_step, algo.policy_frequency) == (1024, 2048, 2, 2)
    assert (algo.replay_buffer_n, algo.learning_starts, algo.tau, algo.max_iterations) == (4096, 50, 0.05, 4000)
    assert (config.env, config.reward) == (sac.env, sac.reward)


def test_a_saved_configuration_comes_back_with_its_own_schema() -> None:
    config = load("algo.algo_params.temp_target_sigma=0.2")
    assert restore_config(json.loads(json.dumps(config.to_json()))) == config
    with pytest.raises(ValueError, match="the saved configuration does not fit this version: it names no known algo"):
        restore_config({**config.to_json(), "algo": {"algo": "ppo"}})


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("algo.actor_lr=1e-3", "unknown key 'algo.actor_lr'"),
        ("algo.algo_params.alpha_lr=1e-3", "unknown key 'algo.algo_params.alpha_lr'"),
        ("algo.algo=sac", "algo.algo must be flashsac (the --algo option chooses), got 'sac'"),
        ("algo.algo_params.n_step=3", "algo.algo_params.n_step must be 1, returns of more steps are not supported"),
        (
            "algo.algo_params.actor_config={builder:a.b,width:3}",
            "algo.algo_params.actor_config: unknown entry 'width'; there is builder and kwargs",
        ),
        ("algo.algo_params.amp_dtype=fp16", "algo.algo_params.amp_dtype must be auto or bf16, got 'fp16'"),
        ("algo.algo_params.critic_max_v=-5", "algo.algo_params.critic_max_v must be finite and above -5.0, got -5.0"),
        ("algo.algo_params.actor_noise_zeta_max=0", "algo.algo_params.actor_noise_zeta_max must be at least 1, got 0"),
        ("algo.algo_params.learning_rate_peak=0", "algo.algo_params.learning_rate_peak must be positive and finite"),
        ("algo.algo_params.learning_rate_warmup_steps=-1", "learning_rate_warmup_steps must be 0 or positive, got -1"),
        ("algo.algo_params.temp_target_entropy=nan", "temp_target_entropy must be null or finite, got nan"),
        ("algo.actor_hidden_dim=0", "algo.actor_hidden_dim must be at least 1, got 0"),
    ],
)
def test_refusals_are_one_line(override: str, message: str) -> None:
    with pytest.raises(ValueError, match=r"\S") as caught:
        load(override)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning")
def test_a_smoke_run_learns_and_its_checkpoint_is_evaluated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from repro.events import read_scalars

    assert main([*NAMES, *SMALL, f"training.log_root={tmp_path}"]) == 0
    (run,) = (tmp_path / "G1WalkFlat").iterdir()
    scalars = read_scalars(run)
    assert set(METRICS) <= set(scalars)
    checkpoint = torch.load(run / "model_4.pt", weights_only=True)
    assert checkpoint["actor_semantics"]["kwargs"]["hidden_dim"] == 16
    assert "trunk.norm.running_mean" in checkpoint["actor"]
    state = checkpoint["state"]
    assert (state["critic/adamw_step"], state["actor/adamw_step"], state["temperature/adamw_step"]) == (32, 16, 16)
    assert state["learner/Train/skipped_updates"] == 0
    assert state["reward_scale/count"] == pytest.approx(8 * 8, abs=1e-3)  # 5 ticks until the first update, 3 after it
    assert all(value.isfinite().all() for name, value in state.items() if name.startswith(("actor", "critic", "rew")))
    assert json.loads((run / "manifest.json").read_text())["learner"]["algo"] == "flashsac"
    capsys.readouterr()
    assert evaluation.main([*NAMES, "--load-run", str(run), "--episodes", "2"]) == 0
    assert re.search(r"at iteration 4, \d+ env steps\n2 episodes", capsys.readouterr().out)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("default")  # compilers may warn
@pytest.mark.parametrize("region", [True, False])
def test_a_run_on_a_gpu_is_compiled_and_captured(tmp_path: Path, region: bool) -> None:
    switch = f"algo.algo_params.compile_full_objectives={region}".lower()
    blocks = "algo.algo_params.actor_num_blocks=1", "algo.algo_params.critic_num_blocks=1"  # less to compile
    arguments = [*NAMES, *SMALL[1:], *blocks, switch, f"training.log_dir={tmp_path / 'run'}"]
    subprocess.run([sys.executable, "-m", "unilab.train", *arguments], check=True, timeout=500)
    learner = json.loads((tmp_path / "run" / "manifest.json").read_text())["learner"]
    assert (learner["compiled"], learner["cuda_graph"], learner["amp"]) == (True, True, True)
    state = torch.load(tmp_path / "run" / "model_4.pt", weights_only=True)["state"]
    assert (state["critic/adamw_step"], state["actor/adamw_step"]) == (32, 16)
    assert state["learner/Train/skipped_updates"] == 0
    assert all(value.isfinite().all() for name, value in state.items() if name.startswith(("actor", "critic", "rew")))


def test_runs_go_below_the_documented_folder() -> None:
    assert load().algo.algo_log_name == "flash_sac"


def test_the_script_is_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert train_flashsac.main(["task=g1_walk_flat/mujoco", "algo.actor_lr=1"]) == 2
    assert "unknown key 'algo.actor_lr'" in capsys.readouterr().err
    assert train_flashsac.main(["task=g1_walk_flat"]) == 2
