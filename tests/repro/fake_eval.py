"""An `eval` that simulates nothing: writes `eval.json` of made-up episodes into the folder of a run.

Environment variable:
    FAKE_EPISODES  JSON of `samples`, one list per measure; or `fail`, which ends with one line and exit code 1
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from pathlib import Path

import numpy as np
from scipy import stats

NAMES = ("episode_return", "episode_length", "tracking_error_lin", "tracking_error_ang")


def mean_of(values: list[float]) -> dict[str, float]:
    """By scipy's own interval, where the suite has its own few lines."""
    low, high = stats.t.interval(0.95, len(values) - 1, np.mean(values), stats.sem(values))
    return {"mean": float(np.mean(values)), "ci_low": float(low), "ci_high": float(high)}


def content_of(run: Path, model: Path, samples: dict[str, list[float]]) -> dict[str, object]:
    config, end = (json.loads((run / name).read_text()) for name in ("config.json", "run_end.json"))
    summaries: dict[str, dict[str, float]] = {name: mean_of(samples[name]) for name in NAMES}
    for name in ("lin", "ang"):
        summaries[f"tracking_error_{name}"]["standing_still"] = float(np.mean(samples[f"standing_error_{name}"]))
    count, total = sum(samples["fall"]), len(samples["fall"])
    wilson = stats.binomtest(int(count), total).proportion_ci(method="wilson")
    falls = {"count": count, "share": count / total, "ci_low": wilson.low, "ci_high": wilson.high}
    iteration = config["algo"]["max_iterations"]
    facts = {"file": model.name, "iteration": iteration, "env_steps": end["final_env_steps"]}
    checkpoint = {**facts, "sha256": hashlib.sha256(model.read_bytes()).hexdigest()}
    named = {"algo": config["algo"]["algo"], "task": config["training"]["task_name"], "checkpoint": checkpoint}
    told = {"schema_version": 1, "seed": 0, "versions": {}, "episodes": total, "confidence_level": 0.95}
    return {**named, **told, **summaries, "falls": falls, "samples": samples}


def main() -> int:
    parser = argparse.ArgumentParser()
    for name in ("algo", "task", "sim", "load-run", "episodes"):
        parser.add_argument(f"--{name}")
    arguments, _ = parser.parse_known_args()
    if os.environ["FAKE_EPISODES"] == "fail":
        print("eval: the policy is missing", file=sys.stderr)
        return 1
    run = Path(arguments.load_run)
    content = content_of(run, next(run.glob("model_*.pt")), json.loads(os.environ["FAKE_EPISODES"]))
    (run / "eval.json").write_text(json.dumps(content))
    return 0


if __name__ == "__main__":
    sys.exit(main())
