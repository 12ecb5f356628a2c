from __future__ import annotations

import math

import mujoco
import numpy as np
import pytest
import torch
from reset_draws import assert_uniform, world_spin, yaw_of
from torch import Tensor

from unilab.physics.mujoco_pool import load_model
from unilab.tasks.go2_joystick_flat import Go2JoystickFlat, Go2JoystickFlatConfig, Go2JoystickFlatRewards

N = 4096
CPU = torch.device("cpu")
ONE = torch.tensor(1.0)
LEGS = ("FL", "FR", "RL", "RR")
FRESH = ("gyro", "upvector", "local_linvel")


@pytest.fixture(scope="module")
def task() -> Go2JoystickFlat:
    return Go2JoystickFlat(Go2JoystickFlatConfig(), Go2JoystickFlatRewards(), 1, CPU, "reference")


def still(task: Go2JoystickFlat) -> dict[str, Tensor]:
    """Fields of one robot at rest, upright, in the default pose, feet at 0 m and in the air."""
    return {name: value.clone() for name, value in task.fields(task.idle_row.unsqueeze(0)).items()}


def terms(
    task: Go2JoystickFlat,
    physics: dict[str, Tensor],
    action: float = 0.0,
    previous: float = 0.0,
    command: tuple[float, float, float] = (0.0, 0.0, 0.0),
    clock: float = 0.0,
) -> dict[str, float]:
    actions = torch.full((1, 12), action), torch.full((1, 12), previous)
    row = task.reward_terms(physics, *actions, torch.tensor([command]), torch.tensor([[clock]]), ONE)
    return dict(zip(task.reward_names, row[0].tolist(), strict=True))


# --- constants and actions -------------------------------------------------------------------------------------------


def test_dimensions_and_physics_row(task: Go2JoystickFlat) -> None:
    assert (task.obs_dim, task.critic_dim, task.action_dim, task.uniform_width) == (49, 52, 12, 137)
    assert (task.spec.timestep, task.spec.decimation, task.spec.width, task.spec.reset_width) == (0.01, 2, 63, 65)
    assert (task.max_episode_steps, task.push_interval) == (1000, 750)
    assert task.joint_default.tolist() == pytest.approx([0, 0.8, -1.5, 0, 0.8, -1.5, 0, 1.0, -1.5, 0, 1.0, -1.5])
    assert (task.initial_penalty_scale, task.next_penalty_scale(ONE, ONE)) == (1.0, ONE)


def test_targets_reach_the_actuators_of_their_joints(task: Go2JoystickFlat) -> None:
    action = torch.arange(12.0).unsqueeze(0)
    targets = task.control_targets(action)[0]
    assert torch.equal(targets, (task.joint_default + 0.4 * action)[0, [3, 4, 5, 0, 1, 2, 9, 10, 11, 6, 7, 8]])
    model = load_model(task.spec)
    for actuator, joint in enumerate(model.actuator_trnid[:, 0]):
        leg, part, _ = model.joint(joint).name.split("_")
        index = 3 * LEGS.index(leg) + ("hip", "thigh", "calf").index(part)
        assert targets[actuator].item() == pytest.approx(task.joint_default[index].item() + 0.4 * index)


# --- rewards ---------------------------------------------------------------------------------------------------------


def test_rewards_of_a_robot_at_rest(task: Go2JoystickFlat) -> None:
    # Phases at 0: FL and RR stand (0), FR and RL too (0.5). No foot touches, so no contact is as it should be.
    assert terms(task, still(task)) == pytest.approx(
        {
            "tracking_lin_vel": 1.0,
            "tracking_ang_vel": 0.2,
            "lin_vel_z": 0.0,
            "ang_vel_xy": 0.0,
            "base_height": 0.0,
            "action_rate": 0.0,
            "similar_to_default": 0.0,
            "contact": 0.0,
            "swing_feet_z": 0.0,
        }
    )


def test_tracking_rewards_and_errors(task: Go2JoystickFlat) -> None:
    physics = still(task)
    physics["local_linvel"][0] = torch.tensor([0.7, -0.1, 0.0])
    physics["gyro"][0, 2] = -0.1
    found = terms(task, physics, command=(0.4, 0.3, 0.4))
    assert found["tracking_lin_vel"] == pytest.approx(math.exp(-(0.09 + 0.16) / 0.5))
    assert found["tracking_ang_vel"] == pytest.approx(0.2 * math.exp(-0.25 / 0.5))
    errors = task.tracking_errors(physics, torch.tensor([[0.4, 0.3, 0.4]]))
    assert {name: value.item() for name, value in errors.items()} == pytest.approx(
        {"tracking_error_lin": 0.5, "tracking_error_ang": 0.5}
    )


def test_penalties(task: Go2JoystickFlat) -> None:
    physics = still(task)
    physics["local_linvel"][0, 2] = 0.2
    physics["gyro"][0, :2] = torch.tensor([0.3, -0.4])
    physics["qpos"][0, 2] = 0.2
    physics["qpos"][0, 7:9] += torch.tensor([0.5, -0.25])
    found = terms(task, physics, action=0.5, previous=0.3)
    assert found["lin_vel_z"] == pytest.approx(-5 * 0.04)
    assert found["ang_vel_xy"] == pytest.approx(-0.1 * 0.25)
    assert found["base_height"] == pytest.approx(-20 * 0.01, rel=1e-5)
    assert found["action_rate"] == pytest.approx(-0.02 * 12 * 0.04)
    assert found["similar_to_default"] == pytest.approx(-0.4 * 0.75)


def test_contact_rewards_each_foot_that_does_what_its_phase_says(task: Go2JoystickFlat) -> None:
    physics = still(task)
    for leg, reading in zip(LEGS, (1.0, 1.0, 0.0, 0.1), strict=True):
        physics[f"{leg}_foot_contact"][0] = reading
    # Clock 0.2: FL and RR at 0.2 stand, FR and RL at 0.7 swing. Right are FL (touches) and RL (does not).
    assert terms(task, physics, clock=0.2)["contact"] == pytest.approx(1.5 * 2 / 4)


def test_swinging_feet_are_rewarded_at_their_height(task: Go2JoystickFlat) -> None:
    physics = still(task)
    for leg, height in zip(LEGS, (0.1, 0.1, 0.05, 0.1), strict=True):
        physics[f"{leg}_pos"][0] = torch.tensor([5.0, 5.0, height])
    expected = 4 * (1 + math.exp(-(0.05**2) / 0.01)) / 4  # FR and RL swing
    assert terms(task, physics, clock=0.2)["swing_feet_z"] == pytest.approx(expected, rel=1e-5)
    assert terms(task, physics, clock=0.59)["swing_feet_z"] == 0  # all four stand
    assert terms(task, physics, clock=0.6)["swing_feet_z"] == pytest.approx(2.0)  # FL and RR swing


# --- terminations and gait clock -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tilt", "terminated"), [(59.9, False), (60.1, True), (180.0, True), (0.0, False)])
@pytest.mark.parametrize("heading", [0.0, 2.0])
def test_the_bases_own_tilt_terminates(task: Go2JoystickFlat, tilt: float, heading: float, terminated: bool) -> None:
    physics = still(task)
    half, turn = math.radians(tilt) / 2, heading / 2  # tilted about x, then turned about z
    quaternion = [
        math.cos(turn) * math.cos(half),
        math.cos(turn) * math.sin(half),
        math.sin(turn) * math.sin(half),
        math.sin(turn) * math.cos(half),
    ]
    physics["qpos"][0, 3:7] = torch.tensor(quaternion)
    physics["qpos"][0, 2] = 0.01
    assert task.terminated(physics).tolist() == [terminated]


def test_the_clock_turns_in_25_steps_and_feet_trot(task: Go2JoystickFlat) -> None:
    clock = torch.zeros(1, 1)
    assert task.observed_phase(clock).tolist() == [[0.0, 0.5, 0.5, 0.0]]
    for step in range(1, 51):
        clock = task.advance_phase(clock)
        off = abs(clock.item() - 0.04 * step % 1)
        assert min(off, 1 - off) < 1e-6
        assert 0 <= clock.item() < 1
    phases = task.observed_phase(torch.tensor([[0.75]]))
    assert phases.tolist() == [[0.75, 0.25, 0.25, 0.75]]


def test_resets_leave_the_clock_alone(task: Go2JoystickFlat, uniforms: Tensor) -> None:
    clock = torch.full((N, 1), 0.36)
    assert torch.equal(task.reset_phase(uniforms, clock), clock)


# --- observations ----------------------------------------------------------------------------------------------------


def test_columns_hold_their_terms(task: Go2JoystickFlat) -> None:
    physics = still(task)
    physics["gyro"][0] = torch.tensor([1.0, 2.0, 3.0])
    physics["upvector"][0] = torch.tensor([0.1, -0.2, 0.9])
    physics["qpos"][0, 7:] += 0.5
    physics["qvel"][0, 6:] = torch.arange(12.0)
    physics["local_linvel"][0] = torch.tensor([0.5, -0.5, 0.25])
    critic = task.critic_observation(
        physics, torch.full((1, 12), 0.7), torch.tensor([[0.1, 0.2, 0.3]]), torch.tensor([[0.75]])
    )[0]
    assert critic[:6].tolist() == pytest.approx([1.0, 2.0, 3.0, -0.1, 0.2, -0.9])
    assert critic[6:18].tolist() == pytest.approx([0.5] * 12)
    assert critic[18:30].tolist() == list(range(12))
    assert critic[30:42].tolist() == pytest.approx([0.7] * 12)
    assert critic[42:].tolist() == pytest.approx([0.1, 0.2, 0.3, 0.75, 0.25, 0.25, 0.75, 0.5, -0.5, 0.25])


def test_policy_and_critics_see_noise_of_their_own(task: Go2JoystickFlat) -> None:
    """Draw i < 24 moves the policy's column 6 + i, the others the critics', by at most the noise."""
    physics = {name: value.expand(48, -1) for name, value in still(task).items()}
    given = torch.zeros(48, 12), torch.zeros(48, 3), torch.zeros(48, 1)
    clean = task.critic_observation(physics, *given)
    policy, critic = task.observe(physics, *given, 0.5 + 0.5 * torch.eye(48))
    assert (policy.shape, critic.shape) == ((48, 49), (48, 52))
    moved = (policy - clean[:, :49]).nonzero(), (critic - clean).nonzero()
    index = torch.arange(24)
    assert torch.equal(moved[0], torch.stack((index, index + 6), dim=1))
    assert torch.equal(moved[1], torch.stack((index + 24, index + 6), dim=1))
    for values, first in ((policy, 0), (critic, 24)):
        most = (values - clean[:, : values.shape[1]])[first + index, index + 6]
        assert most.tolist() == pytest.approx([0.01] * 12 + [0.1] * 12, rel=1e-4)


# --- resets and pushes -----------------------------------------------------------------------------------------------


def test_reset_state_distribution(task: Go2JoystickFlat, resets: dict[str, Tensor]) -> None:
    assert_uniform(resets["qpos"][:, 0], -0.5, 0.5)
    assert_uniform(resets["qpos"][:, 1], -0.5, 0.5)
    assert_uniform(yaw_of(resets["qpos"][:, 3:7]), -math.pi, math.pi)
    for axis in range(3):
        assert_uniform(resets["qvel"][:, axis], -0.5, 0.5)
        assert_uniform(world_spin(resets)[:, axis], -0.5, 0.5)
    assert (resets["qpos"][:, 2] == np.float32(0.3)).all()
    assert (resets["qpos"][:, 4:6] == 0).all()
    assert (resets["qpos"][:, 7:] == task.joint_default).all()
    assert (resets["qvel"][:, 6:] == 0).all()


def test_reset_model_distribution(resets: dict[str, Tensor]) -> None:
    for column in resets["kp"].unbind(1):
        assert_uniform(column, 31.5, 38.5)
    for column in resets["kd"].unbind(1):
        assert_uniform(column, 0.45, 0.55)
    assert_uniform(resets["root_mass"][:, 0] - 6.921, -1.5, 1.5)
    assert_uniform(resets["root_com"][:, 0] - 0.021112, -0.05, 0.05)
    assert (resets["root_com"][:, 1:] == torch.tensor([0.0, -0.005366])).all()


def test_command_distribution(task: Go2JoystickFlat, uniforms: Tensor) -> None:
    command = task.reset_command(uniforms)
    for column, (low, high) in zip(command.unbind(1), ((-0.6, 1.0), (-0.4, 0.4), (-0.8, 0.8)), strict=True):
        assert_uniform(column, low, high)


def test_reset_columns_are_independent(task: Go2JoystickFlat, uniforms: Tensor, resets: dict[str, Tensor]) -> None:
    """No pair of the 137 columns of a tick's draws that something reads correlates by more than 5.5 standard errors."""
    physics = {name: value.expand(N, -1) for name, value in still(task).items()}
    given = torch.zeros(N, 12), torch.zeros(N, 3), torch.zeros(N, 1)
    noise = [task.observe(physics, *given, uniforms[:, task.uniform_columns[f"{k}_noise"]]) for k in ("step", "reset")]
    drawn = torch.cat(
        (
            *(observed[:, 6:30] for pair in noise for observed in pair),
            resets["qpos"][:, :2],
            yaw_of(resets["qpos"][:, 3:7]).unsqueeze(1),
            resets["qvel"][:, :3],
            world_spin(resets),
            resets["kp"],
            resets["kd"],
            resets["root_mass"],
            resets["root_com"][:, :1],
            task.reset_command(uniforms),
            task.push(physics, uniforms)["qvel"][:, :3],
        ),
        dim=1,
    )
    correlation = torch.corrcoef(drawn.T.double()).fill_diagonal_(0)
    assert drawn.shape[1] == task.uniform_width
    assert correlation.abs().max() < 5.5 / math.sqrt(N)


def readings(task: Go2JoystickFlat, qpos: Tensor, qvel: Tensor) -> dict[str, np.ndarray]:
    """What mj_forward gives for the sensors that observations read."""
    model = load_model(task.spec)
    data = mujoco.MjData(model)
    rows: dict[str, list[np.ndarray]] = {name: [] for name in FRESH}
    for position, velocity in zip(qpos.numpy(), qvel.numpy(), strict=True):
        data.qpos[:], data.qvel[:] = position, velocity
        mujoco.mj_fwdPosition(model, data)
        mujoco.mj_sensorPos(model, data)
        mujoco.mj_fwdVelocity(model, data)
        mujoco.mj_sensorVel(model, data)
        for name in FRESH:
            rows[name].append(data.sensor(name).data.copy())
    return {name: np.array(values) for name, values in rows.items()}


def test_reset_fields_match_a_forward_pass(task: Go2JoystickFlat, resets: dict[str, Tensor]) -> None:
    fields = task.reset_fields(torch.cat(list(resets.values()), dim=1))
    expected = readings(task, resets["qpos"], resets["qvel"])
    for name in FRESH:  # float32 arithmetic on values up to 1.2
        np.testing.assert_allclose(fields[name].numpy(), expected[name], rtol=0, atol=5e-7)


def test_pushed_fields_match_a_forward_pass(task: Go2JoystickFlat, uniforms: Tensor) -> None:
    """From any state: turned any way, every joint bent and moving."""
    generator = torch.Generator().manual_seed(1)
    qpos = torch.randn(N, 19, generator=generator)
    qpos[:, 3:7] /= qpos[:, 3:7].norm(dim=1, keepdim=True)
    qvel = 2 * torch.randn(N, 18, generator=generator)
    pushed = task.push({"qpos": qpos, "qvel": qvel}, uniforms)
    kick = pushed["qvel"] - qvel
    for axis, bound in enumerate((1.0, 1.0, 0.5)):
        assert_uniform(kick[:, axis], -bound, bound)
    assert not kick[:, 3:].any()
    expected = readings(task, qpos, pushed["qvel"])
    for name in FRESH:  # values up to 14
        np.testing.assert_allclose(pushed[name].numpy(), expected[name], rtol=0, atol=5e-6)


# --- bounds ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kp": [0.0, 1.0]}, "env.kp must be positive"),
        ({"kd": [-0.1, 1.0]}, "env.kd must be at least 0"),
        ({"base_mass_offset": [1.0, -1.0]}, r"env.base_mass_offset must be \[low, high\]"),
        ({"stance_share": 1.5}, r"env.stance_share must be in \[0, 1\]"),
        ({"push_interval_seconds": 0.03}, "env.push_interval_seconds must be a whole number of ctrl_dt steps"),
        ({"swing_sigma": 0.0}, "env.swing_sigma must be positive"),
        ({"max_tilt_degrees": 200.0}, "env.max_tilt_degrees must be at most 180"),
    ],
)
def test_bad_values_are_refused_by_name(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Go2JoystickFlatConfig(**changes).validate()  # type: ignore[arg-type]
