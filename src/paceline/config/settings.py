"""Settings of NCCL and Gloo as the environment variables that carry them to the ranks.

Both libraries read variables when a group is made. A config names the ones that matter, each with a key of its own; a
user may have exported some too. Here both are ``Setting``s, so that one list of rules (``setting_rules.py``) finds what
contradicts, whoever said it.

A variable that is exported with another value than the config's is refused: one of the two would lose silently.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.config.schema import CommConfig

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
NCCL_INTERFACE = "NCCL_SOCKET_IFNAME"
# Keys of comm.nccl. A variable that disables says the opposite of its key.
NCCL_VARIABLES = {
    "p2p": "NCCL_P2P_DISABLE",
    "p2p_level": "NCCL_P2P_LEVEL",
    "shared_memory": "NCCL_SHM_DISABLE",
    "min_channels": "NCCL_MIN_NCHANNELS",
    "max_channels": "NCCL_MAX_NCHANNELS",
    "socket_interface": NCCL_INTERFACE,
    "socket_threads": "NCCL_SOCKET_NTHREADS",
    "sockets_per_thread": "NCCL_NSOCKS_PERTHREAD",
    "ib": "NCCL_IB_DISABLE",
    "ib_hca": "NCCL_IB_HCA",
    "ib_gid_index": "NCCL_IB_GID_INDEX",
    "ib_timeout": "NCCL_IB_TIMEOUT",
    "gdr_level": "NCCL_NET_GDR_LEVEL",
    "cross_nic": "NCCL_CROSS_NIC",
    "algorithms": "NCCL_ALGO",
    "protocols": "NCCL_PROTO",
    "debug": "NCCL_DEBUG",
    "debug_subsystems": "NCCL_DEBUG_SUBSYS",
}
# Other names of the same thing, which NCCL reads as well.
ALIASES = {
    "NCCL_MIN_NCHANNELS": ("NCCL_MIN_CTAS", "NCCL_MIN_NRINGS"),
    "NCCL_MAX_NCHANNELS": ("NCCL_MAX_CTAS", "NCCL_MAX_NRINGS"),
    "NCCL_NET_GDR_LEVEL": ("NCCL_IB_GDR_LEVEL",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One variable with its value. ``key`` is that of the config which says so; None: it was exported."""

    variable: str
    value: str
    key: str | None = None
    written: str = ""  # the key's value, as the config has it

    def __str__(self) -> str:
        return f"{self.key} = {self.written}" if self.key else f"{self.variable}={self.value} (exported)"

    @property
    def name(self) -> str:
        """What a reader changes: the key, or the variable."""
        return self.key or self.variable

    @property
    def removal(self) -> str:
        """How to be rid of it."""
        return f"remove {self.key}" if self.key else f"unset {self.variable}"


def config_settings(comm: CommConfig) -> dict[str, Setting]:
    """Returns what a config says, by variable. ``comm.interface`` is for both backends, and exact for both."""
    found: dict[str, Setting] = {}
    if comm.interface is not None:
        shared = {"key": "comm.interface", "written": comm.interface}
        found[GLOO_INTERFACE] = Setting(variable=GLOO_INTERFACE, value=comm.interface, **shared)
        if comm.nccl.socket_interface is None:
            found[NCCL_INTERFACE] = Setting(variable=NCCL_INTERFACE, value=f"={comm.interface}", **shared)
    for key, variable in NCCL_VARIABLES.items():
        given = getattr(comm.nccl, key)
        if given is not None:
            value, written = _value(variable, given), _written(given)
            found[variable] = Setting(variable=variable, value=value, key=f"comm.nccl.{key}", written=written)
    return found


def exported_settings(environment: Mapping[str, str]) -> dict[str, Setting]:
    """Returns what the environment says to NCCL and Gloo, by variable."""
    return {
        name: Setting(variable=name, value=value)
        for name, value in sorted(environment.items())
        if name.startswith(("NCCL_", "GLOO_")) and value
    }


def variables_of(comm: CommConfig, *, uses_nccl: bool) -> dict[str, str]:
    """Returns the variables that ranks need in their environment, before their group is made."""
    settings = config_settings(comm)
    return {name: each.value for name, each in settings.items() if uses_nccl or not name.startswith("NCCL_")}


def same_value(variable: str, one: str, other: str) -> bool:
    """Says whether two values of a variable mean the same: names have no case, and lists of names no order."""
    if variable in ("NCCL_ALGO", "NCCL_PROTO", "NCCL_DEBUG_SUBSYS"):
        return set(one.lower().split(",")) == set(other.lower().split(","))
    return one.strip().lower() == other.strip().lower()


def _value(variable: str, given: Any) -> str:
    if isinstance(given, bool):
        return str(int(given != variable.endswith("_DISABLE")))
    return ",".join(given) if isinstance(given, tuple) else str(given)


def _written(given: Any) -> str:
    if isinstance(given, bool):
        return str(given).lower()
    return f"[{', '.join(given)}]" if isinstance(given, tuple) else str(given)
