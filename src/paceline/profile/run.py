"""Runs a config on real ranks for a few steps under torch's profiler, as ``paceline train`` runs it.

The run has a hook more (``hook.py``), no checkpoints and no evaluation, and leaves nothing but the profile.
"""

from __future__ import annotations

from pathlib import Path

from paceline.config import Config
from paceline.config.train_checks import short_run
from paceline.errors import UsageError
from paceline.profile.hook import WARM_UP
from paceline.profile.merge import RankProfile, RankSpans, place_rank
from paceline.run.location import RunOptions
from paceline.run.train import train
from paceline.untrusted import parse_json, read_regular

HOOK = "paceline.profile.hook:StepProfiler"
_MOST_BYTES = 2**31


def profiled_config(config: Config, steps: int, folder: Path) -> Config:
    """Returns the config of the run that is profiled. Raises UsageError for one without processes of its own."""
    if config.comm.backend == "virtual":
        raise UsageError(
            "comm.backend = virtual\n  virtual ranks share one process, and torch profiles processes\n"
            "  take paceline simulate CONFIG --trace simulated.json, or comm.backend = auto"
        )
    config = short_run(config, WARM_UP + steps).with_values("train", hooks=(*config.train.hooks, HOOK))
    quiet = {"folder": str(folder), "console": False, "tensorboard": False, "trackers": (), "trace": False}
    return config.with_values("monitor", **quiet).model_copy(update={"name": "profiled"})


def profile_run(config: Config, steps: int, folder: Path) -> list[RankProfile]:
    """Profiles so many steps after the warm-up; ``folder``, which ranks know of, has what they leave.

    Raises what ``train`` raises.
    """
    train(profiled_config(config, steps, folder / "runs"), options=RunOptions(is_quiet=True))
    paths = sorted(
        folder.glob("rank-*.torch.json"), key=lambda path: int(path.name.split(".")[0].removeprefix("rank-"))
    )
    if not paths:
        raise UsageError(
            f"the run ended before the profile began\n  {WARM_UP} steps are warm-up, and {steps} are profiled\n"
            "  give the run more data, or fewer --steps"
        )
    return [_read(path) for path in paths]


def _read(path: Path) -> RankProfile:
    spans = RankSpans.from_json(parse_json(read_regular(path.with_name(path.name.replace(".torch", "")), _MOST_BYTES)))
    return place_rank(spans, parse_json(read_regular(path, _MOST_BYTES), _MOST_BYTES))
