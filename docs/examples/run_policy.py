"""Run an exported policy in plain MuJoCo: run_policy.py policy.onnx scene_flat.xml [SECONDS]."""

import json
import sys

import mujoco
import numpy as np
import onnxruntime


def rollout(policy, scene, command, seconds):
    """Yield data, observation and action of every control step; `command` in m/s, m/s and rad/s."""
    session = onnxruntime.InferenceSession(policy, providers=["CPUExecutionProvider"])
    about = {key: json.loads(value) for key, value in session.get_modelmeta().custom_metadata_map.items()}
    sensor, gait = {block["name"]: block["sensor"] for block in about["observation"]}, about["gait"]
    model = mujoco.MjModel.from_xml_path(scene)
    motors = [model.actuator(name).id for name in about["actuators"]]
    model.actuator_gainprm[motors, 0] = about["kp"]
    model.actuator_biasprm[motors, 1], model.actuator_biasprm[motors, 2] = np.negative([about["kp"], about["kd"]])
    model.opt.timestep = about["timestep"]
    data, pose, action = mujoco.MjData(model), np.array(about["default_pose"]), np.zeros(len(motors))
    mujoco.mj_resetDataKeyframe(model, data, model.key(about["keyframe"]).id)
    mujoco.mj_forward(model, data)  # the first observation needs sensors
    for step in range(round(seconds * about["control_rate"])):
        cycles = gait["frequency"] * step / about["control_rate"]
        terms = {
            "base_ang_vel": data.sensor(sensor["base_ang_vel"]).data,
            "projected_gravity": -data.sensor(sensor["projected_gravity"]).data,
            "joint_pos": data.qpos[7:] - pose,
            "joint_vel": data.qvel[6:],
            "actions": action,
            "command": command,
            "gait_phase": (np.array(gait["offsets"]) + cycles * gait["period"]) % gait["period"],
        }
        obs = np.concatenate([block["scale"] * np.asarray(terms[block["name"]]) for block in about["observation"]])
        (action,) = session.run(["action"], {"obs": obs[None].astype(np.float32)})[0]
        yield data, obs, action
        data.ctrl[motors] = pose + about["action_scale"] * action
        mujoco.mj_step(model, data, nstep=about["decimation"])


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    seconds = float(sys.argv[3]) if len(sys.argv) > 3 else 10.0
    for data, _, _ in rollout(sys.argv[1], sys.argv[2], (0.5, 0.0, 0.0), seconds):
        last = data
    print(f"after {seconds:g} s: {last.qpos[0]:.2f} m ahead at 0.5 m/s commanded, base {last.qpos[2]:.2f} m high")
