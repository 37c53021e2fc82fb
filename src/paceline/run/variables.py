"""From a config's settings of NCCL and Gloo to the environment of the ranks.

Both libraries read their variables when a group is made, so that the variables stand in a rank's environment before it
connects. A variable that somebody exported with another value is an error that names both: the config is what a run's
folder keeps, and a run that obeyed something else could not be understood later.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.config import check_exported, check_interfaces, config_settings, exported_settings
from paceline.config.settings import variables_of
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.config import Config


PROFILE = "PACELINE_PROFILE"
"""Names the folder that profiled ranks leave what they saw in."""


def profile_request() -> Path | None:
    """Returns the folder that ``paceline profile`` wants the spans of this rank in; None in every other run."""
    folder = os.environ.get(PROFILE)
    return None if folder is None else Path(folder)


def rank_variables(config: Config, *, uses_nccl: bool) -> dict[str, str]:
    """Returns what ranks on this host need in their environment.

    Raises ConfigError for what is exported otherwise, and for network interfaces that this host has not.
    """
    exported = exported_settings(os.environ)
    settings = {**exported, **config_settings(config.comm)}
    present = [name for _, name in socket.if_nameindex()]
    problems = check_exported(config, os.environ, uses_nccl=uses_nccl)
    problems += check_interfaces(settings, present, uses_nccl=uses_nccl)
    if problems:
        raise ConfigError(problems, source=f"config, on host {socket.gethostname()}")
    return variables_of(config.comm, uses_nccl=uses_nccl)


def set_variables(config: Config, *, uses_nccl: bool) -> None:
    """Puts the variables into this process's environment, for a rank that another launcher has started."""
    os.environ.update(rank_variables(config, uses_nccl=uses_nccl))


def variables_in_effect(config: Config, *, uses_nccl: bool) -> dict[str, str]:
    """Returns what this process's environment says: the config's variables, and all others of NCCL."""
    asked = variables_of(config.comm, uses_nccl=uses_nccl)
    told = {name for name in os.environ if uses_nccl and name.startswith("NCCL_")}
    return {name: os.environ[name] for name in sorted(asked.keys() | told) if name in os.environ}
