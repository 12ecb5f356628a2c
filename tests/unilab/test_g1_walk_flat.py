from __future__ import annotations

import math

import mujoco
import numpy as np
import pytest
import torch
from reset_draws import assert_uniform, world_spin, yaw_of
from torch import Tensor

from unilab.physics.spec import ROBOTS
from unilab.tasks.g1_walk_flat import G1WalkFlat, G1WalkFlatConfig, G1WalkFlatRewards

N = 4096
CPU = torch.device("cpu")
HALF = torch.tensor(0.5)  # a penalty factor outside the curriculum's bounds, easy to compute with


def build(num_envs: int, reward: G1WalkFlatRewards | None = None) -> G1WalkFlat:
    return G1WalkFlat(G1WalkFlatConfig(), reward or G1WalkFlatRewards(), num_envs, CPU, "reference")


@pytest.fixture(scope="module")
def task() -> G1WalkFlat:
    return build(1)


def still(task: G1WalkFlat) -> dict[str, Tensor]:
    """Fields of one robot at rest, upright, in the default pose."""
    return {name: value.clone() for name, value in task.fields(task.idle_row.unsqueeze(0)).items()}


def terms(
    task: G1WalkFlat,
    physics: dict[str, Tensor],
    action: float = 0.0,
    previous: float = 0.0,
    command: tuple[float, float, float] = (0.0, 0.0, 0.0),
    phase: tuple[float, float] = (math.pi, math.pi),
) -> dict[str, float]:
    row = task.reward_terms(
        physics,
        torch.full((1, 29), action),
        torch.full((1, 29), previous),
        torch.tensor([command]),
        torch.tensor([phase]),
        HALF,
    )
    return dict(zip(task.reward_names, row[0].tolist(), strict=True))


# --- constants -------------------------------------------------------------------------------------------------------


def test_dimensions_and_physics_row(task: G1WalkFlat) -> None:
    assert (task.obs_dim, task.critic_dim, task.action_dim, task.uniform_width) == (98, 101, 29, 187)
    assert (task.spec.timestep, task.spec.decimation, task.spec.width) == (0.006666666666666667, 3, 95)
    assert [name for name, _ in task.spec.sensors] == [
        "torso_gyro",
        "torso_upvector",
        "pelvis_local_linvel",
        "left_foot_quat",
        "right_foot_quat",
        "left_foot_pos",
        "right_foot_pos",
    ]
    assert task.spec.reset_width == 36 + 35 + 29 + 29
    assert list(task.uniform_columns.values())[-1].stop == task.uniform_width


def test_gains_and_pose_come_from_the_model(task: G1WalkFlat) -> None:
    assert task.kp[:3].tolist() == pytest.approx([40.179, 99.098, 40.179])
    assert task.kd[26:].tolist() == pytest.approx([0.907, 1.068, 1.068])
    assert task.joint_default[:6].tolist() == pytest.approx([-0.312, 0, 0, 0.669, -0.363, 0])


def test_control_targets_are_offsets_from_the_default_pose(task: G1WalkFlat) -> None:
    targets = task.control_targets(torch.full((1, 29), 0.5))
    assert targets[0, :4].tolist() == pytest.approx([0.188, 0.5, 0.5, 1.169])


def test_environments_must_be_positive() -> None:
    with pytest.raises(ValueError, match="num_envs must be at least 1, not 0"):
        build(0)


def test_profiles_are_checked_by_name() -> None:
    with pytest.raises(ValueError, match="physics_profile=quick; use one of reference, exact, fast"):
        G1WalkFlat(G1WalkFlatConfig(), G1WalkFlatRewards(), 1, CPU, "quick")


# --- rewards ---------------------------------------------------------------------------------------------------------


def test_rewards_of_a_robot_at_rest(task: G1WalkFlat) -> None:
    assert terms(task, still(task)) == pytest.approx(
        {
            "tracking_lin_vel": 2.0,
            "tracking_ang_vel": 1.5,
            "penalty_ang_vel_xy": 0.0,
            "penalty_orientation": 0.0,
            "penalty_action_rate": 0.0,
            "pose": 0.0,
            "penalty_feet_ori": 0.0,
            "feet_phase": 5.0,
            "alive": 10.0,
        }
    )


def test_tracking_rewards(task: G1WalkFlat) -> None:
    physics = still(task)
    physics["pelvis_local_linvel"][0] = torch.tensor([0.7, -0.1, 9.0])
    physics["torso_gyro"][0, 2] = -0.1
    found = terms(task, physics, command=(0.4, 0.3, 0.4))
    assert found["tracking_lin_vel"] == pytest.approx(2 * math.exp(-(0.09 + 0.16) / 0.25))
    assert found["tracking_ang_vel"] == pytest.approx(1.5 * math.exp(-0.25 / 0.25))


def test_tracking_errors_are_distances_from_the_command(task: G1WalkFlat) -> None:
    physics = {name: value.repeat(3, 1) for name, value in still(task).items()}
    physics["pelvis_local_linvel"][:] = torch.tensor([[0.7, -0.1, 9.0], [0.4, 0.3, -9.0], [-0.6, 0.0, 0.0]])
    physics["torso_gyro"][:] = torch.tensor([[5.0, 5.0, -0.1], [0.0, 0.0, 0.4], [0.0, 0.0, 0.9]])
    found = task.tracking_errors(physics, torch.tensor([[0.4, 0.3, 0.4]] * 3))
    assert list(found) == ["tracking_error_lin", "tracking_error_ang"]
    assert found["tracking_error_lin"].tolist() == pytest.approx([0.5, 0.0, math.sqrt(1.0 + 0.09)])  # 3-4-5 triangle
    assert found["tracking_error_ang"].tolist() == pytest.approx([0.5, 0.0, 0.5])


def test_tracking_errors_are_those_that_the_rewards_pay_for(task: G1WalkFlat) -> None:
    physics, command = still(task), (0.4, 0.3, 0.4)
    physics["pelvis_local_linvel"][0] = torch.tensor([0.7, -0.1, 9.0])
    physics["torso_gyro"][0, 2] = -0.1
    rewards = terms(task, physics, command=command)
    errors = {name: float(value) for name, value in task.tracking_errors(physics, torch.tensor([command])).items()}
    assert rewards["tracking_lin_vel"] == pytest.approx(2 * math.exp(-(errors["tracking_error_lin"] ** 2) / 0.25))
    assert rewards["tracking_ang_vel"] == pytest.approx(1.5 * math.exp(-(errors["tracking_error_ang"] ** 2) / 0.25))


def test_penalties_carry_the_common_factor(task: G1WalkFlat) -> None:
    physics = still(task)
    physics["torso_gyro"][0, :2] = torch.tensor([0.3, -0.4])
    physics["torso_upvector"][0, :2] = torch.tensor([0.1, 0.2])
    physics["left_foot_quat"][0] = torch.tensor([9.0, 0.1, 0.2, 9.0])
    physics["right_foot_quat"][0] = torch.tensor([9.0, -0.3, 0.0, 9.0])
    found = terms(task, physics, action=0.5, previous=0.3)
    assert found["penalty_ang_vel_xy"] == pytest.approx(-0.5 * 0.25)
    assert found["penalty_orientation"] == pytest.approx(-0.5 * 10 * 0.05)
    assert found["penalty_action_rate"] == pytest.approx(-0.5 * 4 * 29 * 0.04)
    assert found["penalty_feet_ori"] == pytest.approx(-0.5 * 20 * (0.01 + 0.04 + 0.09))


def test_pose_penalty_weighs_each_joint(task: G1WalkFlat) -> None:
    physics = still(task)
    physics["qpos"][0, [7, 8, 9, 10, 35]] += torch.tensor([1.0, 0.1, 0.1, -1.0, 0.1])
    assert terms(task, physics)["pose"] == pytest.approx(-0.5 * 0.5 * (0.01 + 0.01 + 0.05 + 0.01 + 0.5), rel=1e-5)


def test_feet_phase_rewards_each_foot_at_its_height(task: G1WalkFlat) -> None:
    physics = still(task)
    physics["left_foot_pos"][0] = torch.tensor([5.0, 5.0, 0.05])
    physics["right_foot_pos"][0] = torch.tensor([5.0, 5.0, -0.01])
    found = terms(task, physics, phase=(math.pi / 2, 3 * math.pi))  # targets 0.045 and 0
    assert found["feet_phase"] == pytest.approx(5 * math.exp(-(0.005**2 + 0.01**2) / 0.04))


def test_positive_weight_of_a_penalty_is_not_scaled() -> None:
    task = build(1, G1WalkFlatRewards(penalty_ang_vel_xy=3.0))
    physics = still(task)
    physics["torso_gyro"][0, 0] = 2.0
    assert terms(task, physics)["penalty_ang_vel_xy"] == pytest.approx(12.0)


@pytest.mark.parametrize(
    ("phase", "height"),
    [
        (0.0, 0.09),
        (math.pi, 0.0),
        (-math.pi, 0.0),
        (math.pi / 2, 0.045),
        (-math.pi / 2, 0.045),
        (3 * math.pi / 4, 0.09 * 0.15625),  # S(1/4) = 1/16 * 5/2
        (-math.pi / 4, 0.09 * 0.84375),  # S(3/4) = 9/16 * 3/2
        (2 * math.pi, 0.09),
        (2.5 * math.pi, 0.045),
    ],
)
def test_swing_height(task: G1WalkFlat, phase: float, height: float) -> None:
    assert task.swing_height(torch.tensor([phase])).item() == pytest.approx(height, abs=1e-7)


# --- terminations ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tilt_degrees", "height", "terminated"),
    [(64.99, 0.754, False), (65.01, 0.754, True), (180.0, 0.754, True), (0.0, 0.3001, False), (0.0, 0.2999, True)],
)
def test_termination_bounds(task: G1WalkFlat, tilt_degrees: float, height: float, terminated: bool) -> None:
    physics = still(task)
    tilt = math.radians(tilt_degrees)
    physics["torso_upvector"][0] = torch.tensor([math.sin(tilt), 0.0, math.cos(tilt)])
    physics["qpos"][0, 2] = height
    assert task.terminated(physics).tolist() == [terminated]


# --- gait phase ------------------------------------------------------------------------------------------------------


def test_phase_advances_and_wraps(task: G1WalkFlat) -> None:
    step = 2 * math.pi * 1.5 * 0.02
    phase = task.advance_phase(torch.tensor([[0.0, 6.2], [math.pi, 3 * math.pi - 0.01]]))
    expected = [0.0 + step, 6.2 + step - 2 * math.pi, math.pi + step, math.pi - 0.01 + step]
    assert phase.flatten().tolist() == pytest.approx(expected, abs=2e-6)


def test_phase_stays_in_bounds_over_an_episode(task: G1WalkFlat, uniforms: Tensor) -> None:
    phase = task.reset_phase(uniforms, torch.zeros(N, 2))
    for _ in range(200):
        phase = task.advance_phase(phase)
        assert float(phase.min()) >= 0
        assert float(phase.max()) < 2 * math.pi


# --- observations ----------------------------------------------------------------------------------------------------


def test_critic_columns_hold_scaled_terms(task: G1WalkFlat) -> None:
    physics = still(task)
    physics["torso_gyro"][0] = torch.tensor([1.0, 2.0, 3.0])
    physics["torso_upvector"][0] = torch.tensor([0.1, -0.2, 0.9])
    physics["qpos"][0, 7:] += 0.5
    physics["qvel"][0, 6:] = torch.arange(29.0)
    physics["pelvis_local_linvel"][0] = torch.tensor([0.5, -0.5, 0.25])
    critic = task.critic_observation(
        physics, torch.full((1, 29), 0.7), torch.tensor([[0.1, 0.2, 0.3]]), torch.tensor([[4.0, 7.0]])
    )[0]
    assert critic[:6].tolist() == pytest.approx([0.25, 0.5, 0.75, -0.1, 0.2, -0.9])
    assert critic[6:35].tolist() == pytest.approx([0.5] * 29)
    assert critic[35:64].tolist() == pytest.approx([0.05 * joint for joint in range(29)])
    assert critic[64:93].tolist() == pytest.approx([0.7] * 29)
    assert critic[93:].tolist() == pytest.approx([0.1, 0.2, 0.3, 4.0, 7.0, 1.0, -1.0, 0.5])


def test_noise_touches_joint_columns_only_within_its_bounds(task: G1WalkFlat) -> None:
    critic = torch.zeros(2, 101)
    clean = [*range(6), *range(64, 98)]
    lowest = task.policy_observation(critic, torch.zeros(2, 58))[0]
    highest = task.policy_observation(critic, torch.ones(2, 58))[0]
    assert lowest.shape == (98,)
    assert lowest[clean].tolist() == highest[clean].tolist() == [0.0] * 40
    for bound, observed in ((-1, lowest), (1, highest)):
        assert observed[6:35].tolist() == pytest.approx([bound * 0.01] * 29)
        assert observed[35:64].tolist() == pytest.approx([bound * 0.1 * 0.05] * 29)


def test_each_noise_draw_moves_its_own_column(task: G1WalkFlat) -> None:
    moved = task.policy_observation(torch.zeros(58, 101), 0.5 + 0.25 * torch.eye(58))
    assert torch.equal(moved.nonzero(), torch.stack((torch.arange(58), torch.arange(6, 64)), dim=1))


# --- resets ----------------------------------------------------------------------------------------------------------


def test_reset_root_distribution(resets: dict[str, Tensor]) -> None:
    assert_uniform(resets["qpos"][:, 0], -0.5, 0.5)
    assert_uniform(resets["qpos"][:, 1], -0.5, 0.5)
    assert_uniform(yaw_of(resets["qpos"][:, 3:7]), -math.pi, math.pi)
    for axis in range(3):
        assert_uniform(resets["qvel"][:, axis], -0.5, 0.5)
        assert_uniform(world_spin(resets)[:, axis], -0.5, 0.5)


def test_reset_leaves_the_rest_at_the_default(task: G1WalkFlat, resets: dict[str, Tensor]) -> None:
    assert (resets["qpos"][:, 2] == np.float32(0.754)).all()
    assert (resets["qpos"][:, 4:6] == 0).all()
    assert (resets["qpos"][:, 7:] == task.joint_default).all()
    assert (resets["qvel"][:, 6:] == 0).all()
    assert resets["qpos"][:, 3:7].norm(dim=1).sub(1).abs().max() < 1e-6
    assert resets["qvel"][:, 3:6].abs().max() > 0.6  # a body axis can reach sqrt(0.5)


def test_reset_gains_are_independent_per_actuator(task: G1WalkFlat, resets: dict[str, Tensor]) -> None:
    factors = torch.cat((resets["kp"] / task.kp, resets["kd"] / task.kd), dim=1)
    for column in factors.unbind(1):
        assert_uniform(column, 0.9, 1.1)


def test_reset_columns_are_independent(task: G1WalkFlat, uniforms: Tensor, resets: dict[str, Tensor]) -> None:
    """No pair of the 187 columns that resets read correlates by more than 5.5 standard errors."""
    drawn = torch.cat(
        (
            resets["qpos"][:, :2],
            yaw_of(resets["qpos"][:, 3:7]).unsqueeze(1),
            resets["qvel"][:, :3],
            world_spin(resets),
            resets["kp"],
            resets["kd"],
            task.reset_command(uniforms)[:, 2:],
            task.reset_phase(uniforms, torch.zeros(N, 2))[:, :1],
            task.policy_observation(torch.zeros(N, 101), uniforms[:, task.uniform_columns["step_noise"]])[:, 6:64],
            task.policy_observation(torch.zeros(N, 101), uniforms[:, task.uniform_columns["reset_noise"]])[:, 6:64],
        ),
        dim=1,
    )
    correlation = torch.corrcoef(drawn.T.double()).fill_diagonal_(0)
    assert drawn.shape[1] == task.uniform_width - 2  # the planar command is tested beside its dead zone
    assert correlation.abs().max() < 5.5 / math.sqrt(N)


def test_command_distribution_and_dead_zone_share(task: G1WalkFlat, uniforms: Tensor) -> None:
    command = task.reset_command(uniforms)
    assert_uniform(command[:, 2], -0.8, 0.8)
    at_rest = (command[:, :2] == 0).all(1)
    share = math.pi * 0.2**2 / (1.6 * 0.8)  # disc over rectangle: 9.8 %
    assert abs(at_rest.double().mean().item() - share) < 4 * math.sqrt(share * (1 - share) / N)
    moving = command[~at_rest]
    assert moving[:, :2].norm(dim=1).min() > 0.2
    assert moving[:, 0].min() >= -0.6
    assert moving[:, 0].max() <= 1.0
    assert moving[:, 1].abs().max() <= 0.4
    assert abs(moving[:, 0].mean().item() - 0.2 / (1 - share)) < 5 * 0.5 / math.sqrt(N)
    assert (at_rest & (command[:, 2] != 0)).sum() == at_rest.sum()


@pytest.mark.parametrize(("planar", "kept"), [((0.199, 0.0), False), ((0.0, -0.201), True), ((0.15, 0.15), True)])
def test_command_dead_zone_bounds(task: G1WalkFlat, planar: tuple[float, float], kept: bool) -> None:
    uniform = torch.zeros(1, task.uniform_width)
    wanted = torch.tensor([[(planar[0] + 0.6) / 1.6, (planar[1] + 0.4) / 0.8, 0.75]])
    uniform[:, task.uniform_columns["command"]] = wanted
    expected = [*(planar if kept else (0.0, 0.0)), 0.4]
    assert task.reset_command(uniform)[0].tolist() == pytest.approx(expected, abs=1e-7)


def test_command_on_the_dead_zone_bound_is_zero() -> None:
    config = G1WalkFlatConfig(command_velocity_x=[0.25, 0.25], command_velocity_y=[0.0, 0.0], planar_dead_zone=0.25)
    task = G1WalkFlat(config, G1WalkFlatRewards(), 1, CPU, "reference")
    assert task.reset_command(torch.zeros(1, task.uniform_width))[0, :2].tolist() == [0.0, 0.0]


def test_reset_phase_is_half_a_cycle_apart_and_not_wrapped(task: G1WalkFlat, uniforms: Tensor) -> None:
    left, right = task.reset_phase(uniforms, torch.zeros(N, 2)).unbind(1)
    assert_uniform(left, 0, 2 * math.pi)
    assert (right - left).sub(math.pi).abs().max() < 1e-6
    assert right.max() > 2.9 * math.pi


def test_reset_fields_match_a_forward_pass(task: G1WalkFlat, resets: dict[str, Tensor]) -> None:
    model = mujoco.MjModel.from_xml_path(str(ROBOTS / task.spec.scene))
    data = mujoco.MjData(model)
    fields = task.reset_fields(torch.cat(list(resets.values()), dim=1))
    for row in range(N):
        data.qpos[:] = resets["qpos"][row].numpy()
        data.qvel[:] = resets["qvel"][row].numpy()
        mujoco.mj_forward(model, data)
        for name in ("torso_gyro", "torso_upvector", "pelvis_local_linvel"):
            # float32 arithmetic on values up to 1.2
            np.testing.assert_allclose(fields[name][row].numpy(), data.sensor(name).data, rtol=0, atol=5e-7)


# --- penalty curriculum ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scale", "mean_length", "expected"),
    [
        (0.1, 149.9, 0.0999),
        (0.1, 150.0, 0.1),
        (0.1, 750.0, 0.1),
        (0.1, 750.1, 0.1001),
        (0.0625, 0.0, 0.0625),
        (0.12499, 1000.0, 0.125),
    ],
)
def test_penalty_scale_follows_episode_length(
    task: G1WalkFlat, scale: float, mean_length: float, expected: float
) -> None:
    assert task.next_penalty_scale(torch.tensor(scale), torch.tensor(mean_length)).item() == pytest.approx(expected)


def test_penalty_scale_takes_694_ups_from_bound_to_bound(task: G1WalkFlat) -> None:
    scale, long = torch.tensor(0.0625), torch.tensor(900.0)
    for _ in range(693):
        scale = task.next_penalty_scale(scale, long)
    assert scale.item() < 0.125
    assert task.next_penalty_scale(scale, long).item() == 0.125


@pytest.mark.parametrize(("num_envs", "window"), [(4096, 1000), (2048, 500), (8, 1), (4, 1), (64, 15)])
def test_curriculum_window(num_envs: int, window: int) -> None:
    assert build(num_envs).curriculum_window == window
