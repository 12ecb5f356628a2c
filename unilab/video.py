"""Videos of recorded robots: `python -m unilab.video STATES.npz OUT.mp4 [STILL.png]`, a process of its own.

A renderer has to be chosen before mujoco is imported, and physics imports mujoco without one. So nothing here imports
mujoco in the process that asks for a video; only processes that draw import a renderer, under the MUJOCO_GL they were
given.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from fractions import Fraction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from unilab.atomic_file import replacing
from unilab.names import EXIT_FAILED, EXIT_HOST_UNFIT, EXIT_OK, EXIT_USAGE
from unilab.physics.process import bound_environment, end_with_parent, ending
from unilab.physics.spec import ROBOTS

if TYPE_CHECKING:
    import av

    from unilab.stage import Stage

RENDERERS = ("cgl",) if sys.platform == "darwin" else ("egl", "osmesa")  # need no display, the faster first
VARIABLE = "MUJOCO_GL"
ENCODER = "libx264"
SIZE = (1280, 720)
MOST_PROCESSES = 16
_CHECK_SECONDS = 60.0

Image = NDArray[np.uint8]


class VideoError(RuntimeError):
    """No video can be made, or was made; one line says why."""


class Recording(NamedTuple):
    """What robots did, to be drawn later.

    Attributes:
        scene: MJCF file below `unilab/robots`.
        qpos: (T, N, nq) positions of N robots in T frames, float32; each around the origin.
        fps: frames per second.
    """

    scene: str
    qpos: NDArray[np.float32]
    fps: float

    def save(self, path: Path) -> None:
        """Write it as the file that the program reads."""
        np.savez(path, scene=self.scene, qpos=self.qpos, fps=self.fps)

    @classmethod
    def load(cls, path: Path) -> Recording:
        """Read it again.

        Raises:
            ValueError: if the file is not such a recording.
        """
        try:
            with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
                scene, qpos, fps = str(file["scene"]), file["qpos"], float(file["fps"])
        except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
            raise ValueError(f"{path} is no recording of robots: {error}") from None
        if not (ROBOTS / scene).is_file():
            raise ValueError(f"{path} asks for the scene {scene}, which does not exist")
        if qpos.dtype.kind != "f":
            raise ValueError(f"{path} holds positions of type {qpos.dtype}, floating-point numbers are needed")
        if qpos.ndim != 3 or not qpos.size or not np.isfinite(qpos).all() or not 1 <= fps <= 1000:
            raise ValueError(f"{path} holds positions {qpos.shape} at {fps} frames per second; they cannot be drawn")
        return cls(scene, qpos, fps)


def find_renderer() -> str:
    """The renderer that works here: what MUJOCO_GL asks for, else EGL, else OSMesa. Tries it in a process of its own.

    Raises:
        VideoError: if none works, or nothing can encode.
    """
    asked = os.environ.get(VARIABLE, "").strip()
    faults = []
    for renderer in (asked,) if asked else RENDERERS:
        fault = _run(["--check"], renderer, _CHECK_SECONDS)
        if fault is None:
            return renderer
        faults.append(fault)
    raise VideoError(f"no video can be made here: {'; '.join(dict.fromkeys(faults))}")


def make_video(recording: Path, video: Path, still: Path, renderer: str) -> None:
    """Draw and encode a recording in a process of its own.

    Args:
        recording: as `Recording.save` writes it.
        video: the MP4 file, whole or absent.
        still: PNG of the frame in the middle, whole or absent.
        renderer: from `find_renderer`.

    Raises:
        VideoError: if it fails.
    """
    fault = _run([str(recording), str(video), str(still)], renderer, None)
    if fault is not None:
        raise VideoError(fault)


def _run(arguments: list[str], renderer: str, seconds: float | None) -> str | None:
    """Run this module as a program; its last words if it fails."""
    command = [sys.executable, "-P", "-m", "unilab.video", *arguments]
    environment = bound_environment() | {VARIABLE: renderer}
    try:
        done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, timeout=seconds)
    except subprocess.TimeoutExpired:
        return f"{VARIABLE}={renderer} does not answer within {seconds:.0f} s"
    if done.returncode == EXIT_OK:
        return None
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    return lines[-1].removeprefix("video: ") if lines else f"drawing with {renderer} {ending(done.returncode)}"


def main(argv: Sequence[str] | None = None) -> int:
    """Draw and encode a recording; returns the exit code.

    Args:
        argv: arguments after the program's name; None takes the process's own.
    """
    end_with_parent()
    parser = argparse.ArgumentParser(prog="video", description=__doc__, allow_abbrev=False)
    parser.add_argument("recording", nargs="?", type=Path, metavar="STATES.npz")
    parser.add_argument("video", nargs="?", type=Path, metavar="OUT.mp4")
    parser.add_argument("still", nargs="?", type=Path, metavar="STILL.png", help="also the frame in the middle")
    parser.add_argument(
        "--size", default="x".join(map(str, SIZE)), help="WIDTHxHEIGHT, even numbers (default %(default)s)"
    )
    parser.add_argument("--check", action="store_true", help="only say whether this host can do it")
    args = parser.parse_args(argv)
    if args.check:
        return _check()
    if args.video is None:
        parser.error("give a recording and the video to write, or --check")
    try:
        recording, size = Recording.load(args.recording), _size(args.size)
        _check_width(args.recording, recording)
    except ValueError as error:
        return _refuse(str(error), EXIT_USAGE)
    try:
        encode(_frames(args.recording, len(recording.qpos), size), recording, size, args.video, args.still)
    except (OSError, ValueError, VideoError) as error:
        return _refuse(f"{args.video.name} was not made: {error}", EXIT_FAILED)
    return EXIT_OK


def _check() -> int:
    """Open the encoder and draw a frame of nothing; whatever a library of graphics raises is a reason why not."""
    try:
        import av.codec

        av.codec.Codec(ENCODER, "w")
    except (ImportError, ValueError) as error:
        return _refuse(f"the encoder is missing ({error}): install `av` with {ENCODER}", EXIT_HOST_UNFIT)
    try:
        import mujoco

        with mujoco.Renderer(mujoco.MjSpec().compile(), 16, 16) as renderer:
            renderer.render()
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        return _refuse(f"{VARIABLE}={os.environ.get(VARIABLE, '')} does not draw ({reason})", EXIT_HOST_UNFIT)
    return EXIT_OK


def _size(text: str) -> tuple[int, int]:
    width, _, height = text.partition("x")
    if not (width.isdigit() and height.isdigit() and int(width) * int(height)) or int(width) % 2 or int(height) % 2:
        raise ValueError(f"--size {text}: give two even numbers, as in 1280x720")
    return int(width), int(height)


def _check_width(path: Path, recording: Recording) -> None:
    """Refuse positions of another robot, before a process fails to draw them."""
    from unilab.physics.mujoco_pool import load_scene  # without a renderer

    found, needed = recording.qpos.shape[2], load_scene(recording.scene).nq
    if found != needed:
        raise ValueError(f"{path} holds {found} positions of a robot; {recording.scene} has {needed}")


def _refuse(message: str, code: int) -> int:
    print(f"video: {' '.join(message.splitlines())}", file=sys.stderr)
    return code


def _frames(recording: Path, count: int, size: tuple[int, int]) -> Iterator[Image]:
    """The drawn frames in order. Each process draws every k-th and waits until it is read, or ends with its reader."""
    context = multiprocessing.get_context("spawn")
    processes = min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1, MOST_PROCESSES, count)
    readers = []
    for number in range(processes):
        reader, writer = context.Pipe(duplex=False)
        share = (recording, number, processes, size, writer)
        context.Process(target=_draw_share, args=share, daemon=True).start()
        writer.close()
        readers.append(reader)
    for index in range(count):
        try:
            drawn = readers[index % processes].recv_bytes()
        except EOFError:
            raise VideoError(f"the process that draws frame {index} of {count} died") from None
        yield np.frombuffer(drawn, np.uint8).reshape(size[1], size[0], 3)


def _draw_share(path: Path, first: int, step: int, size: tuple[int, int], out: Connection) -> None:
    from unilab.stage import Stage

    recording = Recording.load(path)
    with Stage(recording, size) as stage:
        _send(stage, range(first, len(recording.qpos), step), out)


def _send(stage: Stage, frames: range, out: Connection) -> None:
    for index in frames:
        try:
            out.send_bytes(stage.draw(index).tobytes())
        except BrokenPipeError:  # nobody wants the rest
            return


def encode(
    frames: Iterator[Image], recording: Recording, size: tuple[int, int], path: Path, still: Path | None = None
) -> None:
    """Write frames as H.264 in MP4, and the one in the middle as PNG; each file is whole or absent.

    Args:
        frames: (H, W, 3) images, one for each frame of the recording.
        recording: says how many and how fast.
        size: width and height.
        path: the video.
        still: the image.

    Raises:
        OSError, ValueError: if it cannot be written.
        VideoError: from the frames.
    """
    import av

    middle = len(recording.qpos) // 2
    with replacing(path) as temporary, av.open(str(temporary), "w", format="mp4") as container:
        stream = container.add_stream(ENCODER, rate=Fraction(recording.fps).limit_denominator(1000))
        assert isinstance(stream, av.VideoStream)
        (stream.width, stream.height), stream.pix_fmt = size, "yuv420p"
        for index, image in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(image, format="rgb24")
            container.mux(stream.encode(frame))
            if index == middle and still is not None:
                _write_png(frame, still)
        container.mux(stream.encode())


def _write_png(frame: av.VideoFrame, path: Path) -> None:
    import av

    codec = av.VideoCodecContext.create("png", "w")
    codec.width, codec.height, codec.pix_fmt, codec.time_base = frame.width, frame.height, "rgb24", Fraction(1)
    content = b"".join(bytes(packet) for packet in (*codec.encode(frame), *codec.encode()))
    with replacing(path) as temporary:
        temporary.write_bytes(content)


if __name__ == "__main__":
    sys.exit(main())
