"""Many recorded robots in one picture. Imports mujoco under the renderer that MUJOCO_GL names: see `unilab.video`."""

from __future__ import annotations

import math
from types import TracebackType

import mujoco
import numpy as np
from numpy.typing import NDArray

from unilab.physics.spec import ROBOTS
from unilab.video import Image, Recording

SPACING = 2.0  # m between neighbours on the grid
DISTANCE, ELEVATION, AZIMUTH = 9.0, -20.0, 90.0  # m and degrees from what the camera looks at
SMOOTHING = 1.0  # s over which the camera's path is averaged
SUN = np.array((0.0, 0.0, 3.0))  # m from what the camera looks at
SHADOWS = 14.0  # m around it in which robots throw shadows; with less the floor throws some on itself
HORIZON = 60.0  # m at which the floor ends in haze


class Stage:
    """The scene of a recording with all its robots, drawn frame by frame.

    Every robot keeps its own place on a square grid and walks from there; robots are simulated apart and pass through
    each other. One `MjData` is posed for each robot in turn, and its geoms are added to the picture. The camera follows
    the median of all robots. The robot's model is as published; floor, sky and light are those of the scene, with what
    makes motion visible added here.

    Args:
        recording: what to draw.
        size: width and height, pixels.
    """

    def __init__(self, recording: Recording, size: tuple[int, int]) -> None:
        self._model = _compile(ROBOTS / recording.scene, size)
        self._data = mujoco.MjData(self._model)
        count = recording.qpos.shape[1]
        self._qpos = recording.qpos.astype(np.float64)
        self._qpos[:, :, :2] += _grid(count)
        self._targets = _follow(self._qpos[:, :, :3], round(SMOOTHING * recording.fps))
        self._renderer = mujoco.Renderer(self._model, size[1], size[0], max_geom=(count + 1) * self._model.ngeom + 100)
        self._camera, self._options, self._perturb = mujoco.MjvCamera(), mujoco.MjvOption(), mujoco.MjvPerturb()
        self._camera.distance, self._camera.elevation, self._camera.azimuth = DISTANCE, ELEVATION, AZIMUTH

    def __enter__(self) -> Stage:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._renderer.close()

    def draw(self, index: int) -> Image:
        """Frame `index` as an image (H, W, 3)."""
        self._camera.lookat[:] = self._targets[index]
        first, *others = self._qpos[index]
        self._pose(first)
        self._renderer.update_scene(self._data, self._camera, self._options)
        for qpos in others:
            self._pose(qpos)
            mujoco.mjv_addGeoms(
                self._model,
                self._data,
                self._options,
                self._perturb,
                int(mujoco.mjtCatBit.mjCAT_DYNAMIC),
                self._renderer.scene,
            )
        image: Image = self._renderer.render()
        return image

    def _pose(self, qpos: NDArray[np.float64]) -> None:
        self._data.qpos[:] = qpos
        mujoco.mj_kinematics(self._model, self._data)
        mujoco.mj_camlight(self._model, self._data)
        self._data.light_xpos[:] = self._camera.lookat + SUN  # shadows are drawn around the light


def _compile(scene: object, size: tuple[int, int]) -> mujoco.MjModel:
    spec = mujoco.MjSpec.from_file(str(scene))
    visual = spec.visual
    visual.global_.offwidth, visual.global_.offheight = size
    visual.quality.numslices, visual.quality.numstacks = 12, 6  # a fifth of the triangles, for renderers on the CPU
    visual.quality.offsamples, visual.quality.shadowsize = 0, 2048  # several samples double the time on a CPU
    sky = spec.add_texture(name="sky", type=mujoco.mjtTexture.mjTEXTURE_SKYBOX, width=64, height=384)
    sky.builtin = mujoco.mjtBuiltin.mjBUILTIN_GRADIENT
    sky.rgb1[:], sky.rgb2[:] = (0.45, 0.55, 0.68), (0.80, 0.84, 0.88)
    visual.rgba.haze[:] = (0.80, 0.84, 0.88, 1.0)
    model = spec.compile()
    model.vis.map.shadowclip, model.vis.map.zfar = SHADOWS / model.stat.extent, HORIZON / model.stat.extent
    return model


def _grid(count: int) -> NDArray[np.float64]:
    """Places (N, 2) of the robots, m, in rows of a square around the origin."""
    side = math.ceil(math.sqrt(count))
    rows, columns = np.divmod(np.arange(count), side)
    return SPACING * (np.stack((columns, rows), axis=1) - (side - 1) / 2)


def _follow(positions: NDArray[np.float64], window: int) -> NDArray[np.float64]:
    """What the camera looks at (T, 3): the median of robots (T, N, 3), smoothed, at the height of the first frame."""
    path = np.median(positions, axis=1)
    path[:, 2] = path[0, 2]
    before, after = window // 2, window - window // 2 - 1
    padded = np.pad(path, ((before, after), (0, 0)), mode="edge")
    smooth: NDArray[np.float64] = np.lib.stride_tricks.sliding_window_view(padded, window, axis=0).mean(axis=-1)
    return smooth
