"""What a run needs at its end, asked for before it begins: nothing is to fail after hours of training."""

from __future__ import annotations

from unilab import video
from unilab.config import RunConfig
from unilab.export import missing_for_export
from unilab.hardware import HostUnfit
from unilab.wandb_log import missing_for_wandb


def require_packages(config: RunConfig) -> None:
    """Refuse a run that would miss a package.

    Raises:
        HostUnfit: naming it and what to type.
    """
    training = config.training
    exports = training.export_onnx and not training.no_play
    missing = (exports and missing_for_export()) or (training.logger == "wandb" and missing_for_wandb())
    if missing:
        raise HostUnfit(missing)


def require_playback(config: RunConfig) -> None:
    """Refuse a run whose policy could not be evaluated or recorded, where that is wanted.

    Raises:
        ValueError: if there will be no checkpoint to evaluate.
        HostUnfit: if no video can be made here.
    """
    if config.training.no_play:
        return
    if config.algo.save_interval < 0:
        raise ValueError("algo.save_interval=-1 leaves no policy to evaluate; add training.no_play=true to go without")
    try:
        video.find_renderer()
    except video.VideoError as error:
        raise HostUnfit(f"{error}; add training.no_play=true to go without") from None
