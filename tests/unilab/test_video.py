"""Recordings and their refusals, what is drawn, and files that are whole or absent."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from pathlib import Path

import av
import numpy as np
import pytest
from numpy.typing import NDArray

from unilab import video
from unilab.physics.mujoco_pool import load_model  # first: it imports mujoco without a renderer
from unilab.stage import _follow, _grid
from unilab.video import Image, Recording, VideoError, encode, find_renderer, make_video

SCENE = "unitree_g1/scene_flat.xml"
SIZE = (64, 48)


def standing(frames: int, robots: int = 2, fps: float = 25.0) -> Recording:
    """Upright G1s in the zero pose, 0.1 m further forward in every frame."""
    qpos = np.zeros((frames, robots, 36), np.float32)
    qpos[:, :, 2], qpos[:, :, 3] = 0.8, 1.0
    qpos[:, :, 0] = 0.1 * np.arange(frames)[:, None]
    return Recording(SCENE, qpos, fps)


def read(path: Path) -> list[Image]:
    with av.open(str(path)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


# --- recordings ------------------------------------------------------------------------------------------------------


def test_a_recording_is_read_as_it_was_written(tmp_path: Path) -> None:
    written = standing(3)
    written.save(tmp_path / "states.npz")
    read = Recording.load(tmp_path / "states.npz")
    assert (read.scene, read.fps) == (SCENE, 25.0)
    assert np.array_equal(read.qpos, written.qpos)


def _archive(**arrays: object) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # type: ignore[arg-type]
    return buffer.getvalue()


FINE = {"scene": SCENE, "qpos": np.zeros((2, 1, 36), np.float32), "fps": 50.0}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is no recording of robots"),
        (b"not an archive", "is no recording of robots"),
        (b"PK\x03\x04 cut off", "is no recording of robots"),
        (_archive(qpos=np.zeros(3)), "is no recording of robots: 'scene is not a file in the archive'"),
        (_archive(**FINE | {"scene": np.array([None])}), "is no recording of robots: Object arrays cannot be loaded"),
        (
            _archive(**FINE | {"scene": "unitree_h1/scene.xml"}),
            "asks for the scene unitree_h1/scene.xml, which does not",
        ),
        (_archive(**FINE | {"qpos": np.zeros((2, 36))}), "holds positions (2, 36) at 50.0 frames per second"),
        (_archive(**FINE | {"qpos": np.zeros((0, 1, 36))}), "holds positions (0, 1, 36)"),
        (_archive(**FINE | {"qpos": np.full((1, 1, 36), math.nan)}), "they cannot be drawn"),
        (
            _archive(**FINE | {"qpos": np.full((2, 1, 36), "far")}),
            "holds positions of type <U3, floating-point numbers",
        ),
        (_archive(**FINE | {"qpos": np.zeros((2, 1, 36), complex)}), "holds positions of type complex128, floating"),
        (_archive(**FINE | {"qpos": np.zeros((2, 1, 36), int)}), "holds positions of type int64, floating-point"),
        (
            _archive(**FINE | {"qpos": np.zeros((2, 1, 19))}),
            "holds 19 positions of a robot; unitree_g1/scene_flat.xml has 36",
        ),
        (_archive(**FINE | {"fps": 0.0}), "at 0.0 frames per second; they cannot be drawn"),
    ],
)
def test_what_is_no_recording_is_refused_in_one_line(
    tmp_path: Path, content: bytes, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "states.npz").write_bytes(content)
    assert video.main([str(tmp_path / "states.npz"), str(tmp_path / "out.mp4")]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["states.npz"]


@pytest.mark.parametrize("size", ["64", "63x48", "64x0", "axb", "64x48x3", "-2x-2"])
def test_sizes_that_cannot_be_encoded(tmp_path: Path, size: str, capsys: pytest.CaptureFixture[str]) -> None:
    standing(1).save(tmp_path / "states.npz")
    assert video.main([str(tmp_path / "states.npz"), str(tmp_path / "out.mp4"), f"--size={size}"]) == 2
    assert "give two even numbers, as in 1280x720" in capsys.readouterr().err


# --- where robots and camera are -------------------------------------------------------------------------------------


def test_robots_stand_on_a_square_grid_around_the_origin() -> None:
    assert _grid(4).tolist() == [[-1, -1], [1, -1], [-1, 1], [1, 1]]
    assert _grid(1).tolist() == [[0, 0]]
    assert _grid(16)[[0, 3, 12, 15]].tolist() == [[-3, -3], [3, -3], [-3, 3], [3, 3]]


def test_the_camera_follows_the_median_robot_without_jerks() -> None:
    positions = np.zeros((4, 3, 3))
    positions[:, :, 0] = [[0, 0, 0], [3, 3, 99], [3, 3, 99], [6, 6, 99]]
    positions[:, :, 2] = [[0.8] * 3, [0.3] * 3, [0.3] * 3, [0.3] * 3]
    assert np.allclose(_follow(positions, 3)[:, 0], [1, 2, 4, 5])  # means of three, the ends repeated
    assert np.allclose(_follow(positions, 3)[:, 2], 0.8)
    assert np.allclose(_follow(positions, 1)[:, 0], [0, 3, 3, 6])
    assert _follow(positions, 50).shape == (4, 3)


# --- drawing ---------------------------------------------------------------------------------------------------------


def test_robots_are_drawn_and_move(tmp_path: Path, renderer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(video.VARIABLE, renderer)
    standing(5).save(tmp_path / "states.npz")
    frames = list(video._frames(tmp_path / "states.npz", 5, SIZE))
    assert [frame.shape for frame in frames] == [(48, 64, 3)] * 5
    sky, floor = frames[0][:4].mean((0, 1)), frames[0][-4:].mean((0, 1))
    assert sky[2] > sky[0] + 20  # blue
    assert sky.mean() > floor.mean() + 30
    assert frames[0].max() > 180  # the robots are white
    assert np.abs(frames[4].astype(int) - frames[0]).max() > 60


def test_a_recording_becomes_a_video_and_a_still(tmp_path: Path, renderer: str) -> None:
    standing(2, robots=1).save(tmp_path / "states.npz")
    make_video(tmp_path / "states.npz", tmp_path / "out.mp4", tmp_path / "still.png", renderer)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.mp4", "states.npz", "still.png"]
    with av.open(str(tmp_path / "out.mp4")) as container:
        (stream,) = container.streams
        assert isinstance(stream, av.VideoStream)
        assert (stream.codec_context.name, stream.pix_fmt, stream.average_rate) == ("h264", "yuv420p", 25)
        assert (stream.width, stream.height, stream.frames) == (1280, 720, 2)


def test_the_published_model_is_drawn_as_it_is() -> None:
    from unilab.physics.spec import ROBOTS, PhysicsSpec
    from unilab.stage import _compile

    drawn = _compile(ROBOTS / SCENE, SIZE)
    published = load_model(PhysicsSpec(SCENE, 1 / 150, 3, "reference", 36, 35, 29, (), ()))
    for name in ("geom_size", "geom_pos", "geom_rgba", "geom_matid", "mat_rgba", "body_pos", "body_quat", "light_dir"):
        assert np.array_equal(getattr(drawn, name), getattr(published, name)), name


def test_a_process_that_dies_is_said_and_nothing_waits_for_it(tmp_path: Path) -> None:
    with pytest.raises(VideoError, match="the process that draws frame 0 of 2 died"):
        list(video._frames(tmp_path / "missing.npz", 2, SIZE))


# --- no renderer -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", ["disable", "nonsense"])
def test_a_renderer_that_was_asked_for_and_does_not_draw_is_named(monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    monkeypatch.setenv(video.VARIABLE, asked)
    with pytest.raises(
        VideoError, match=rf"^no video can be made here: MUJOCO_GL={asked} does not draw \(.+\)$"
    ) as found:
        find_renderer()
    assert "\n" not in str(found.value)


def test_the_next_renderer_is_tried_and_the_reasons_of_all_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(video.VARIABLE, raising=False)
    monkeypatch.setattr(video, "RENDERERS", ("egl", "osmesa"))
    faults = {"egl": "no EGL", "osmesa": None}
    monkeypatch.setattr(video, "_run", lambda arguments, renderer, seconds: faults[renderer])
    assert find_renderer() == "osmesa"
    faults["osmesa"] = "no OSMesa"
    with pytest.raises(VideoError, match=r"^no video can be made here: no EGL; no OSMesa$"):
        find_renderer()
    faults["egl"] = faults["osmesa"] = "the encoder is missing"
    with pytest.raises(VideoError, match=r"^no video can be made here: the encoder is missing$"):
        find_renderer()


def test_a_missing_encoder_is_said_before_anything_is_drawn(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(video, "ENCODER", "no_such_codec")
    assert video.main(["--check"]) == 3
    said = capsys.readouterr().err
    assert said.startswith("video: the encoder is missing (")
    assert said.count("\n") == 1


# --- files -----------------------------------------------------------------------------------------------------------


def plain(*values: int) -> Iterator[Image]:
    """Images of one grey each."""
    return (np.full((48, 64, 3), value, np.uint8) for value in values)


def test_frames_keep_their_order_and_the_still_is_the_middle_one(tmp_path: Path) -> None:
    encode(plain(0, 60, 120, 180, 240), standing(5), SIZE, tmp_path / "out.mp4", tmp_path / "still.png")
    assert [round(float(frame.mean()), -1) for frame in read(tmp_path / "out.mp4")] == [0, 60, 120, 180, 240]
    (still,) = read(tmp_path / "still.png")
    assert still.shape == (48, 64, 3)
    assert set(still.ravel().tolist()) == {120}


def test_a_failure_half_way_leaves_no_file(tmp_path: Path) -> None:
    def failing() -> Iterator[NDArray[np.uint8]]:
        yield from plain(0)
        raise VideoError("the process that draws frame 1 of 5 died")

    with pytest.raises(VideoError):
        encode(failing(), standing(5), SIZE, tmp_path / "out.mp4", tmp_path / "still.png")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    standing(1).save(tmp_path / "states.npz")
    assert video.main([str(tmp_path / "states.npz"), str(tmp_path / "nowhere" / "out.mp4"), "--size=64x48"]) == 1
    said = capsys.readouterr().err.splitlines()
    assert said[-1].startswith("video: out.mp4 was not made: ")
