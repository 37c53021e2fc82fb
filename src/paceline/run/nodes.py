"""Several hosts, one launcher on each: who takes part may change while the run goes on.

    paceline train CONFIG --nnodes 1:4 --rdzv HOST:PORT          the same on every host

The launchers meet at HOST:PORT: the launcher on HOST listens there, and at no other address (``rendezvous.py``). All
have one secret, which the first leaves in the run's folder, or the environment has. When a node goes or comes, all
ranks are started again, as many as there are now, from the newest checkpoint. The global batch stays: it is cut among
the ranks there are. A node that is gone is missed at once if its launcher has ended, and after three seconds if nothing
is heard of it; the others then wait ``LAST_CALL_S`` for more. The launcher on HOST must stay: it has the server.

The run's folder is shared. The first launcher has it; the others are guests.
"""

from __future__ import annotations

import os
import re
import socket
from dataclasses import dataclass

import psutil

from paceline.errors import UsageError

_ENDPOINT = re.compile(r"(?P<host>\[[^\]]+\]|[^:\s]+):(?P<port>\d{1,5})")
_COUNTS = re.compile(r"(?P<least>\d+)(:(?P<most>\d+))?")
LAST_CALL_S = 3
HOST = "PACELINE_HOST"  # what this host is called, where several have the same name, as containers may


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """How many hosts take part, where they meet, and the ranks of this one; None: one per GPU.

    ``named_by`` is the option or the variable that named the host where they meet.
    """

    least: int
    most: int
    host: str
    port: int
    ranks: int | None = None
    named_by: str = "--rdzv"

    @property
    def endpoint(self) -> str:
        """Where the launchers meet."""
        return f"{self.host}:{self.port}"

    def own_address(self) -> str:
        """Returns the address under which the others reach this machine. Raises UsageError without one."""
        return address_towards(self.host, self.port, self.named_by)


def parse_nodes(counts: str, endpoint: str, ranks: int | None = None) -> Nodes:
    """Reads ``--nnodes`` (``2`` or ``1:4``) and ``--rdzv`` (``HOST:PORT``). Raises UsageError for what is neither."""
    found = _COUNTS.fullmatch(counts)
    least = int(found["least"]) if found else 0
    most = int(found["most"] or least) if found else 0
    if not 1 <= least <= most:
        raise UsageError(
            f"--nnodes {counts}\n  it is a number of hosts, or the fewest and the most: 1:4\n  try --nnodes 1:2"
        )
    place = _ENDPOINT.fullmatch(endpoint)
    if place is None or not 0 < int(place["port"]) < 2**16:
        raise UsageError(
            f"--rdzv {endpoint}\n  it is the name of one of the hosts, and a port of it: HOST:PORT\n"
            "  try --rdzv $(hostname):29400 on a first host, and the same text on the others"
        )
    return Nodes(least=least, most=most, host=place["host"].strip("[]"), port=int(place["port"]), ranks=ranks)


def address_towards(host: str, port: int, named_by: str = "--rdzv") -> str:
    """Returns the address under which others that reach ``host`` reach this machine. Raises UsageError without one.

    The error names the option or the variable that ``host`` comes from.
    """
    try:
        family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise UsageError(
            f"{named_by}{' ' if named_by.startswith('-') else ' = '}{host}: {error.strerror or error} (port {port})\n"
            "  all launchers must reach that host\n  check its name"
        ) from error


def host_name() -> str:
    """Returns what this host is called in messages."""
    return os.environ.get(HOST) or socket.gethostname()


def interface_of(address: str) -> str | None:
    """Returns the network interface that has an address; None if none has."""
    found = psutil.net_if_addrs().items()
    return next((name for name, entries in found if any(entry.address == address for entry in entries)), None)
