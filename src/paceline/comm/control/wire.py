"""What goes over a control connection: proof of a shared secret first, then sealed messages of bounded JSON.

    server -> client    32 random bytes
    client -> server    32 random bytes, and their HMAC together with the server's under the job's secret
    both, from then on  length, HMAC of number and text, text

Until the proof is right the server parses nothing; one that is wrong it answers with zeros. The keys of the seals come
from the secret and both random parts, one for each direction, and messages are numbered: none can be forged, repeated,
left out or sent back, and a client knows from the first reply that the server has the secret too. Nothing is encrypted.
"""

from __future__ import annotations

import base64
import hmac
import json
import os
import secrets
import socket
import stat
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import CommunicationError
from paceline.untrusted import parse_json

NONCE_BYTES = 32
PROOF_BYTES = 32
LONGEST_MESSAGE = 2**22
DEEPEST_MESSAGE = 8
FEWEST_SECRET_BYTES = 16
LONGEST_UNIX_PATH = 100  # Linux takes 107 bytes, macOS 103
HEAD = struct.Struct("!I32s")
WRONG_PROOF = bytes(HEAD.size)  # in the place of a reply
_BYTES = b"\0"
CUT_S = 6.0  # until a connection that carries nothing any more is given up

SECRET, SECRET_FILE = "PACELINE_SECRET", "PACELINE_SECRET_FILE"  # in the environment

Secret = Callable[[], bytes]  # asked for each connection: a run that begins anew has a new one


class RefusedError(CommunicationError):
    """A message or a connection that is not what the other side of a job would send."""


class NothingYetError(TimeoutError):
    """The server has waited for as long as it was asked to, and lives."""


class SilentServerError(CommunicationError):
    """Somebody listens at the address, and does not greet as a control server does."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a control server listens: a path of a unix socket, or a host and a port."""

    host: str
    port: int = 0

    @classmethod
    def parse(cls, text: str) -> Address | None:
        """Reads ``unix:/path`` or ``tcp:host:port``; None for anything else, such as another launcher's host name."""
        kind, _, rest = text.partition(":")
        if kind == "unix" and rest.startswith("/"):
            return cls(rest)
        host, _, port = rest.rpartition(":")
        if kind == "tcp" and host and port.isdecimal():
            return cls(host, int(port))
        return None

    @property
    def is_path(self) -> bool:
        return self.host.startswith("/")

    def __str__(self) -> str:
        return f"unix:{self.host}" if self.is_path else f"tcp:{self.host}:{self.port}"


@dataclass(slots=True)
class Seal:
    """Seals the messages of one direction of a connection, or checks them."""

    _key: bytes
    _number: int = 0

    def close(self, text: bytes) -> bytes:
        return HEAD.pack(_check_length(len(text)), self._mark(text)) + text

    def check(self, mark: bytes, text: bytes) -> bytes:
        """Returns the text. Raises RefusedError if the mark is not that of the next message from the other side."""
        if not hmac.compare_digest(mark, self._mark(text)):
            raise RefusedError("a control message has a wrong seal")
        return text

    def _mark(self, text: bytes) -> bytes:
        self._number += 1
        return hmac.digest(self._key, self._number.to_bytes(8, "big") + text, "sha256")


def derive(secret: bytes, server_nonce: bytes, client_nonce: bytes) -> tuple[bytes, Seal, Seal]:
    proof, requests, replies = (
        hmac.digest(secret, label + server_nonce + client_nonce, "sha256")
        for label in (b"paceline proof", b"paceline requests", b"paceline replies")
    )
    return proof, Seal(requests), Seal(replies)


def read_length(head: bytes) -> tuple[int, bytes]:
    """Returns the length of a message and its mark. Raises RefusedError for one that is too long."""
    length, mark = HEAD.unpack(head)
    return _check_length(length), mark


def _check_length(length: int) -> int:
    if length > LONGEST_MESSAGE:
        raise RefusedError(f"a control message of {length} bytes: {LONGEST_MESSAGE} is the limit")
    return length


def encode(value: str | bytes) -> str:
    return base64.b64encode(value.encode() if isinstance(value, str) else bytes(value)).decode()


def to_text(message: list[Any]) -> bytes:
    """Returns a message as JSON; an answer that is bytes goes as it is, behind a zero, which no JSON begins with."""
    if isinstance(message[-1], bytes):
        return _BYTES + message[-1]
    return json.dumps(message, separators=(",", ":")).encode()


def from_text(text: bytes) -> list[Any]:
    """Reads a message. Raises RefusedError for what is no list in JSON, or nests too deeply."""
    if text.startswith(_BYTES):
        return ["answer", text[len(_BYTES) :]]
    try:
        message = parse_json(text, LONGEST_MESSAGE, DEEPEST_MESSAGE)
    except ValueError as error:
        raise RefusedError(f"a control message is no JSON within bounds: {error}") from error
    if not isinstance(message, list):
        raise RefusedError("a control message is no list")
    return message


class WireLink:
    def __init__(self, address: Address, secret: bytes, timeout_s: float) -> None:
        """Connects. Raises OSError where nobody listens, SilentServerError where no control server does."""
        self._address = address
        self._is_proven = True  # what the server thinks of this side's secret; nothing so far
        self._socket = _connect(address, timeout_s)
        try:
            client_nonce = secrets.token_bytes(NONCE_BYTES)
            proof, self._requests, self._replies = derive(secret, self._receive(NONCE_BYTES), client_nonce)
            self._socket.sendall(client_nonce + proof)
        except BaseException as error:
            self._socket.close()
            if not isinstance(error, TimeoutError):
                raise
            what = f"who listens at {self._address} sent nothing within {timeout_s:g} s: it is no launcher of this job"
            fix = "another program has this port: end it, or meet at another port"
            raise SilentServerError(f"{what}\n  a launcher greets every connection at once\n  {fix}") from error
        self._is_proven = False

    def ask(self, operation: str, *details: Any, timeout_s: float) -> Any:
        """Returns the answer to a request. Raises RefusedError, OSError, or NothingYetError."""
        self._socket.settimeout(timeout_s)
        self._socket.sendall(self._requests.close(to_text([operation, *details])))
        head = self._receive(HEAD.size)
        if head == WRONG_PROOF and not self._is_proven:
            raise RefusedError(
                f"the control server at {self._address} refused the connection: the secrets differ\n"
                "  all processes of a job have one secret: of PACELINE_SECRET, PACELINE_SECRET_FILE, or the run's "
                "folder\n  give all hosts the same, and see that no other job has this port"
            )
        length, mark = read_length(head)
        answer = from_text(self._replies.check(mark, self._receive(length)))
        self._is_proven = True
        match answer:
            case ["answer", value]:
                return value
            case ["timeout"]:
                raise NothingYetError
            case ["refused", str() as why]:
                raise RefusedError(why)
        raise RefusedError("a control server gave an answer that is none")

    def close(self) -> None:
        self._socket.close()

    def _receive(self, length: int) -> bytes:
        content = bytearray()
        while len(content) < length:
            piece = self._socket.recv(min(length - len(content), 2**16))
            if not piece:
                raise ConnectionResetError(f"the control server at {self._address} is gone")
            content += piece
        return bytes(content)


def _connect(address: Address, timeout_s: float) -> socket.socket:
    if not address.is_path:
        link = socket.create_connection((address.host, address.port), timeout=timeout_s)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # ends it if the other side does not even acknowledge: slow ones do
            link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * CUT_S))
        return link
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        link.settimeout(timeout_s)
        link.connect(address.host)
    except BaseException:
        link.close()
        raise
    return link


def listen(address: Address) -> socket.socket:
    """Returns a socket that listens at an address, and nowhere else. Raises OSError where it cannot."""
    if address.is_path:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        target: Any = address.host
    else:
        family, _, _, _, target = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(target)
        listener.listen(4096)  # connections of 1,000 launchers that come at once; the system may allow fewer
    except BaseException:
        listener.close()
        raise
    return listener


def write_secret(path: Path, secret: bytes | None = None) -> None:
    """Writes a secret, or makes one, into a file that its owner alone can read; it is whole or not there."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns()}")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(secrets.token_hex(32).encode() if secret is None else secret)
    partial.replace(path)


def read_secret(path: Path) -> bytes:
    """Reads a secret. Raises CommunicationError where others could read it too, or it is none."""
    try:
        with path.open("rb") as file:
            mode, content = os.fstat(file.fileno()).st_mode, file.read(4096).strip()
    except OSError as error:
        raise CommunicationError(f"the job's secret cannot be read: {path}: {error.strerror or error}") from error
    if stat.S_IMODE(mode) & 0o077:
        what = f"the job's secret {path} has mode {stat.S_IMODE(mode):04o}: others can read it"
        raise CommunicationError(f"{what}\n  chmod 600 {path}, and make a new one if it was there for long")
    return check_secret(content, str(path))


def secret_of(environment: Mapping[str, str]) -> bytes:
    if SECRET_FILE in environment:
        return read_secret(Path(environment[SECRET_FILE]))
    if SECRET not in environment:
        raise CommunicationError(f"this job has no secret: neither {SECRET_FILE} nor {SECRET} is set")
    return check_secret(environment[SECRET].encode(), SECRET)


def check_secret(secret: bytes, source: str) -> bytes:
    """Returns a secret that is long enough. Raises CommunicationError for one that is not."""
    if len(secret) < FEWEST_SECRET_BYTES:
        what = f"the job's secret in {source} has {len(secret)} characters"
        rule = f"it takes {FEWEST_SECRET_BYTES} at least, which nobody can guess"
        raise CommunicationError(f"{what}\n  {rule}\n  make one with: openssl rand -hex 32")
    return secret
