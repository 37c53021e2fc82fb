"""Who gets in to a page that this machine serves, and for how long a half-sent request is waited for.

On a loopback address requests must name a loopback host, so that no page of the web can have its own name resolve to
here. On any other address a token is needed: once in the address, then in a cookie that scripts cannot read, or as
``Authorization: Bearer``. Probes need nothing: their answers are one word. A Host header that is no host and port is
refused, whatever it begins with (``localhost:1@attacker.example``).
"""

from __future__ import annotations

import asyncio
import hmac
import re
from collections.abc import Awaitable, Callable
from http.cookies import SimpleCookie
from ipaddress import ip_address
from urllib.parse import parse_qs

import h11
from starlette.responses import PlainTextResponse, RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

PROBES = ("/healthz", "/readyz")
HEADERS = {"cache-control": "no-store", "x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}
HEADERS["cross-origin-resource-policy"] = "same-origin"

_COOKIE = "paceline_token"
_REQUEST_S = 10.0  # in which a request is there, from the connection or its first byte on
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[\w.~!$&'()*+,;=%-]*)(:\d*)?", re.ASCII | re.IGNORECASE)  # RFC 3986: no user


def is_loopback(host: str) -> bool:
    """Says whether only this machine can reach an address."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


class Gate:
    """Lets requests in as the module says."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app, self._token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refuse(scope) if scope["type"] == "http" else None
        await (self._app if refusal is None else refusal)(scope, receive, send)

    def _refuse(self, scope: Scope) -> Callable[[Scope, Receive, Send], Awaitable[None]] | None:
        if scope["path"] in PROBES:
            return None
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        if (host := _HOST.fullmatch(headers.get("host", ""))) is None:
            return PlainTextResponse("the Host header is no name or address with a port\n", status_code=400)
        if not self._token:
            if not is_loopback(host[1].strip("[]").lower()):
                return PlainTextResponse("this page answers to names of this machine alone\n", status_code=403)
            return None
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        if scope["path"] == "/" and self._is_right(given):
            answer = RedirectResponse("/", status_code=303, headers=HEADERS)
            answer.set_cookie(_COOKIE, given, httponly=True, samesite="strict")
            return answer
        cookie = SimpleCookie(headers.get("cookie", "")).get(_COOKIE)
        bearer = headers.get("authorization", "").removeprefix("Bearer ")
        if self._is_right(bearer) or (cookie is not None and self._is_right(cookie.value)):
            return None
        words = "a token is needed: that of the address that paceline watch has printed, or that it was given\n"
        return PlainTextResponse(words, status_code=401, headers=HEADERS | {"www-authenticate": "Bearer"})

    def _is_right(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self._token.encode())


class Protocol(H11Protocol):
    """Closes a connection whose next request is not there within seconds: who sends half of one holds nothing here."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_request()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._expect_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_deadline()
        super().connection_lost(exc)

    def _expect_request(self) -> None:
        if self.conn.their_state is not h11.IDLE:
            self._forget_deadline()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(_REQUEST_S, self.timeout_keep_alive_handler)

    def _forget_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
