"""Do the hosts of a run reach one another? Each round finds out before ranks are started, as ranks would.

Gloo and NCCL listen at ports that the system chooses from its range (``net.ipv4.ip_local_port_range`` on Linux), at the
addresses of the interfaces that ``GLOO_SOCKET_IFNAME`` and ``NCCL_SOCKET_IFNAME`` name. So each host listens at a port
in every quarter of that range, and connects to its partners. Both sides prove the job's secret.

Up to ``_ALL_PAIRS`` hosts every host connects to every other one, which covers each pair in both directions. Of more
hosts, each connects to the ones before and after it at all ports, and to ``_RANDOM`` others at one port each: so the
connections of a host do not grow with their number. Other rounds draw other partners.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import os
import random
import secrets
import socket
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from paceline.comm.control import wire
from paceline.comm.control.server import ControlServer
from paceline.errors import CommunicationError
from paceline.run.whereami import host_name
from paceline.untrusted import parse_json

ANSWER_S = 5.0
_MEET_S = 15.0  # for the slowest host, beyond what a connection may take
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_NUM_PORTS = 4
_TRIES = 8  # for a port that nobody uses
_ALL_PAIRS, _RANDOM = 32, 6
_AT_ONCE = 256
_TOLD = 12  # pairs


class HostPorts(NamedTuple):
    """Where a host listens: ports of each of its addresses, of the ``range`` from which its ranks will get theirs."""

    host: str
    ports: dict[str, list[int]]
    range: Sequence[int]


class BlockedLink(NamedTuple):
    """A direction in which a host cannot reach another: ``places`` are those of both in the round."""

    places: Sequence[int]
    source: str
    target: str
    address: str
    ports: Sequence[int]
    why: str
    range: Sequence[int]

    def __str__(self) -> str:
        ports = f"port{'s' if len(self.ports) > 1 else ''} {', '.join(map(str, self.ports))}"
        return f"{self.source} -> {self.target} ({self.address}) {ports}: {self.why}"


def data_addresses(own: str) -> list[str]:
    """Returns the addresses at which this host's ranks will listen; ``own``, where no variable names an interface."""
    wanted = ",".join(os.environ.get(name, "") for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"))
    names = [each.removeprefix("=") for each in wanted.split(",") if each and not each.startswith("^")]
    family = socket.AF_INET if ipaddress.ip_address(own).version == 4 else socket.AF_INET6
    found = [
        entry.address
        for wanted_name in names
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if name.startswith(wanted_name) and entry.family == family and "%" not in entry.address
    ]
    return list(dict.fromkeys(found)) or [own]


def partners_of(place: int, size: int, seed: int) -> dict[int, int | None]:
    """Returns to which places of a round a host connects, and at how many ports; None: at all of them."""
    if size <= _ALL_PAIRS:
        return dict.fromkeys((each for each in range(size) if each != place), None)
    drawn = random.Random(f"{seed} {place}").sample(range(size), _RANDOM + 3)  # nosec B311  # no secret
    ring = dict.fromkeys(((place + 1) % size, (place - 1) % size), None)
    others = [each for each in drawn if each not in (place, *ring)]
    return {**ring, **dict.fromkeys(others[:_RANDOM], 1)}


def check_links(
    store: Any, secret: wire.Secret, addresses: Sequence[str], *, place: int, size: int, seed: int
) -> list[BlockedLink]:
    """Returns the blocked links of a round, alike on all hosts. Raises CommunicationError where one does not come."""
    with contextlib.ExitStack() as stack:
        own, listeners = _listen(stack, addresses)
        stack.enter_context(ControlServer(listeners, secret))
        store.set(str(place), json.dumps(own))
        partners, within = partners_of(place, size, seed), timedelta(seconds=_MEET_S)
        try:
            store.wait([str(each) for each in partners], within)
            texts = store.multi_get([str(each) for each in partners])
            others = {each: HostPorts(*parse_json(text)) for each, text in zip(partners, texts, strict=True)}
            for target, address, ports, why in asyncio.run(_try_all(others, partners, secret())):
                there = others[target]
                told = BlockedLink((place, target), own.host, there.host, address, ports, why, there.range)
                store.append("blocked", json.dumps(told) + "\n")
            store.meet("checked", place, size, within + timedelta(seconds=ANSWER_S))
        except (RuntimeError, TimeoutError) as error:  # torch's error of a store is one
            silent = [each for each in partners if not store.check([str(each)])]
            silent = silent or [each for each in partners if not store.check([f"checked {each}"])]
            raise CommunicationError(f"hosts did not come to the check of links: places {silent[:_TOLD]}") from error
        lines = store.get("blocked").decode().splitlines() if store.check(["blocked"]) else []
    return sorted((BlockedLink(*parse_json(line.encode())) for line in lines), key=lambda each: list(each.places))


def left_out(blocked: Sequence[BlockedLink], size: int, least: int) -> dict[int, str] | None:
    """Returns the hosts without which all links are open, by place: of late comers rather; None: too few are left."""
    names = {place: name for one in blocked for place, name in zip(one.places, (one.source, one.target), strict=True)}
    gone: dict[int, str] = {}
    while rest := [each.places for each in blocked if not gone.keys() & set(each.places)]:
        counts = Counter(place for places in rest for place in places)
        worst = max(counts, key=lambda place: (counts[place], place))
        gone[worst] = names[worst]
    return gone if size - len(gone) >= least else None


def explain(blocked: Sequence[BlockedLink]) -> str:
    """Names pairs, directions and ports, the rule, and the fix."""
    shown = [f"  {each}" for each in blocked[:_TOLD]]
    if len(blocked) > _TOLD:
        shown.append(f"  and {len(blocked) - _TOLD} more")
    low, high = min(each.range[0] for each in blocked), max(each.range[1] for each in blocked)
    return "\n".join(
        [
            "hosts do not reach one another:",
            *shown,
            f"  ranks listen at ports that the system chooses from {low} to {high}, and connect in both directions",
            "  let the firewalls between the hosts pass them, such as on the host behind each arrow:",
            f"    iptables -I INPUT -p tcp -s HOST-BEFORE-THE-ARROW --dport {low}:{high} -j ACCEPT",
            "  or, where the hosts have another network, name its interface on every host: GLOO_SOCKET_IFNAME=..., "
            "NCCL_SOCKET_IFNAME=...",
        ]
    )


def _listen(stack: contextlib.ExitStack, addresses: Sequence[str]) -> tuple[HostPorts, list[socket.socket]]:
    low, high = 49152, 65535  # set aside for this, where the system does not tell
    with contextlib.suppress(OSError, ValueError):
        low, high = map(int, _RANGE.read_text(encoding="ascii").split())
    quarter = (high - low + 1) // _NUM_PORTS
    listeners: list[socket.socket] = []
    for address in addresses:
        for number in range(_NUM_PORTS):
            for attempt in range(_TRIES):
                is_last = attempt == _TRIES - 1
                port = 0 if is_last or not quarter else low + number * quarter + secrets.randbelow(quarter)
                with contextlib.suppress(*(() if is_last else (OSError,))):  # another program has this port
                    listeners.append(stack.enter_context(wire.listen(wire.Address(address, port))))
                    break
    ports: dict[str, list[int]] = {}
    for listener in listeners:
        place = listener.getsockname()
        ports.setdefault(str(place[0]), []).append(int(place[1]))
    return HostPorts(host_name(), ports, (low, high)), listeners


async def _try_all(
    others: Mapping[int, HostPorts], partners: Mapping[int, int | None], secret: bytes
) -> list[tuple[int, str, list[int], str]]:
    """Connects to all ports at once; returns places, addresses and ports that cannot be reached, and why."""
    gate = asyncio.Semaphore(_AT_ONCE)
    ways = [(place, *way) for place, there in others.items() for way in _ways(there, partners[place])]
    answers = await asyncio.gather(*(_reach(gate, address, port, secret) for _, address, port in ways))
    found: dict[tuple[int, str, str], list[int]] = {}
    for (place, address, port), why in zip(ways, answers, strict=True):
        if why:
            found.setdefault((place, address, why), []).append(port)
    return [(place, address, ports, why) for (place, address, why), ports in found.items()]


def _ways(there: HostPorts, most: int | None) -> Iterator[tuple[str, int]]:
    for address, ports in there.ports.items():
        for port in ports if most is None else random.sample(ports, min(most, len(ports))):  # nosec B311  # no secret
            yield address, port


async def _reach(gate: asyncio.Semaphore, address: str, port: int, secret: bytes) -> str:
    """Connects to a host's port and proves the secret there; returns why that does not work, else nothing."""
    writer: asyncio.StreamWriter | None = None
    try:
        async with gate, asyncio.timeout(ANSWER_S):
            reader, writer = await asyncio.open_connection(address, port)
            nonce = secrets.token_bytes(wire.NONCE_BYTES)
            theirs = await reader.readexactly(wire.NONCE_BYTES)
            proof, requests, replies = wire.derive(secret, theirs, nonce)
            writer.write(nonce + proof + requests.close(wire.to_text(["count"])))
            length, mark = wire.read_length(await reader.readexactly(wire.HEAD.size))
            replies.check(mark, await reader.readexactly(length))
            return ""
    except TimeoutError:
        return f"no answer within {ANSWER_S:g} s"
    except (EOFError, CommunicationError):
        return "another program answers there"
    except OSError as error:
        return os.strerror(error.errno).lower() if error.errno else str(error)
    finally:
        if writer is not None:
            writer.close()
