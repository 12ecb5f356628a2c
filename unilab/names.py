"""Names that other programs rely on: files of a run directory, TensorBoard tags, exit codes.

This module imports nothing, so that the collector and the suite can read it without torch.
"""

SCHEMA_VERSION = 1

# Update graphs hold the gradient all-reduces of several ranks; tests/unilab/test_capture.py looks whether they do.
GRAPH_HOOKS = True

# Files of a run directory, in the order they appear.
CONFIG_FILE = "config.json"
COMMAND_FILE = "command.json"
MANIFEST_FILE = "manifest.json"
PROGRESS_FILE = "progress.jsonl"
EVENT_FILE_PREFIX = "events.out.tfevents."
CHECKPOINT_PATTERN = "model_{iteration}.pt"
ATTEMPT_PATTERN = "attempt-{number}"  # what a resumed run writes, the same files inside; three digits, from 002 on
STATES_FILE = "physics_states.npz"
MEETING_FILE = ".ranks"  # where several ranks meet, while they run
EVAL_FILE = "eval.json"
POLICY_FILE = "policy.onnx"
VIDEO_FILE = "play_video.mp4"
STILL_FILE = "play_still.png"
RUN_END_FILE = "run_end.json"
TRACE_FILE = "trace.json"  # with training.trace_enabled, before the first tick

# `dp_sync.mode` of manifest.json, where there are several ranks.
GRADIENT_MEAN = "gradient_mean_per_optimizer_step"

# How NCCL carries data between ranks: the setting, its value for a choice by trial, and what of a user wins over it.
TRANSPORT_KEY = "training.nccl_transport"
AUTO_TRANSPORT = "auto"
TRANSPORT_VARIABLES = ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_P2P_LEVEL", "NCCL_NET")

# Values of run_end.json's `status`.
COMPLETED = "completed"
FAILED = "failed"
INTERRUPTED = "interrupted"

# TensorBoard tags the suite reads. The step axis is cumulative global env steps.
TOTAL_FPS = "Perf/total_fps"
ITERATION_TIME = "Perf/iteration_time"
LEARNING_TIME = "Perf/learning_time"
PHYSICS_FRACTION = "Perf/physics_fraction"
EXPOSED_MS = "Perf/exposed_ms"
COLLECTOR_WAIT_MS = "Perf/learner_collector_wait_ms"
INFERENCE_MS = "Perf/learner_inference_ms"
ACTION_WAIT_MS = "Perf/collector_learner_action_wait_ms"
APPLY_MS = "Perf/collector_env_step_apply_action_ms"
BACKEND_MS = "Perf/collector_env_step_backend_ms"
PACK_MS = "Perf/collector_replay_write_ms"
INVALID_ROWS = "Train/invalid_rows"
TRAIN_ITERATION = "Train/iteration"
MEAN_REWARD = "Train/mean_reward"
MEAN_EPISODE_LENGTH = "Train/mean_episode_length"
TIMEOUT_RATE = "Episode/timeout_rate"
TRACKING_ERROR_LIN = "Episode/tracking_error_lin"  # m/s
TRACKING_ERROR_ANG = "Episode/tracking_error_ang"  # rad/s


def rank_tag(tag: str, rank: int) -> str:
    """The tag of one rank's own value of a `Perf/` tag, written where there are several ranks."""
    return f"Perf/rank{rank}/{tag.removeprefix('Perf/')}"


# What makes a process of the trainer print its Python stacks; the number differs between systems.
STACKS_SIGNAL = "SIGUSR2"

# Exit codes of every command line.
EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_HOST_UNFIT = 3
EXIT_INCOMPLETE = 4
EXIT_INTERRUPTED = 130
