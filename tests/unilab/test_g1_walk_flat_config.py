from __future__ import annotations

import math
from typing import Any

import pytest
from omegaconf import OmegaConf
from omegaconf.errors import ConfigKeyError

from unilab.tasks.g1_walk_flat import G1WalkFlatConfig, G1WalkFlatRewards


def test_defaults_are_valid_and_give_the_documented_timing() -> None:
    config = G1WalkFlatConfig()
    config.validate()
    G1WalkFlatRewards().validate()
    assert config.sim_dt == 0.006666666666666667
    assert (config.decimation, config.max_episode_steps) == (3, 1000)
    assert config.pose_weights == [0.01, 1, 5, 0.01, 5, 5, 0.01, 1, 5, 0.01, 5, 5] + [50.0] * 17


def test_both_are_omegaconf_schemas() -> None:
    node = OmegaConf.structured(G1WalkFlatConfig)
    merged = OmegaConf.merge(node, {"gait_frequency": 2, "reset_yaw": [0, 1], "observation_noise": {"joint_pos": 0.02}})
    config = OmegaConf.to_object(merged)
    assert isinstance(config, G1WalkFlatConfig)
    config.validate()
    assert (config.gait_frequency, config.reset_yaw) == (2.0, [0.0, 1.0])
    assert config.observation_noise == {"joint_pos": 0.02, "joint_vel": 0.1}
    with pytest.raises(ConfigKeyError, match="alve"):
        OmegaConf.merge(OmegaConf.structured(G1WalkFlatRewards), {"alve": 1.0})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ctrl_dt": 0.021}, "ctrl_dt must be a whole number of sim_dt steps"),
        ({"sim_dt": 0.0}, "ctrl_dt must be a whole number"),
        ({"sim_dt": 0.05}, "ctrl_dt must be a whole number"),
        ({"max_episode_seconds": -20.0}, "max_episode_seconds must be a whole number"),
        ({"gait_frequency": math.nan}, "gait_frequency must be finite, got nan"),
        ({"tracking_sigma": 0.0}, "tracking_sigma must be positive, got 0.0"),
        ({"swing_height": -0.1}, "swing_height must be at least 0, got -0.1"),
        ({"command_velocity_x": [1.0, -0.6]}, r"command_velocity_x must be \[low, high\].*got \[1.0, -0.6\]"),
        ({"reset_yaw": [0.0]}, "reset_yaw must be"),
        ({"gain_scale": [0.0, 1.0]}, "gain_scale must be positive"),
        ({"pose_weights": [1.0] * 28}, "pose_weights must be 29 numbers"),
        ({"max_tilt_degrees": 181.0}, "max_tilt_degrees must be at most 180"),
        ({"observation_noise": {"joint_pos": 0.01}}, "observation_noise must be one number for each of joint_pos"),
        ({"observation_noise": {"joint_pos": 0.01, "joint_vel": -1.0}}, "observation_noise must be at least 0"),
        ({"observation_scales": {"joint_pos": 1.0}}, "observation_scales must be one number for each"),
        ({"penalty_scale_initial": 0.5}, r"penalty_scale_initial must be within \[0.0625, 0.125\], got 0.5"),
        ({"penalty_scale_degree": 1.0}, "penalty_scale_degree must be"),
        ({"penalty_down_below_steps": 800.0}, "penalty_down_below_steps must be at most penalty_up_above_steps=750"),
        ({"penalty_window_at_4096_envs": 0}, "penalty_window_at_4096_envs must be positive"),
    ],
)
def test_bad_values_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        G1WalkFlatConfig(**changes).validate()


def test_infinite_reward_weight_is_refused() -> None:
    with pytest.raises(ValueError, match="alive must be finite, got inf"):
        G1WalkFlatRewards(alive=math.inf).validate()
