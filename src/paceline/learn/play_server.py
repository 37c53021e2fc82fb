"""Serves the page of ``paceline learn play`` on the loopback address: one HTML file, and answers as JSON.

    GET /              the page                  GET /api/answer?size=gpt-7b&gpus=32    what it shows for these inputs

The page is one file with its style and its script inside. The content security policy allows these by their hashes and
nothing else, and requests must name a loopback host ([Note: who gets in] of ``view/server.py``). Inputs are words of
fixed lists and numbers within bounds; no request names a file.
"""

from __future__ import annotations

import asyncio
from functools import cache
from importlib import resources
from typing import Any

import uvicorn
from pydantic_core import to_json
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from paceline.config.sections import GPT_SIZES
from paceline.errors import UsageError
from paceline.learn.play import NUMBERS, PlayInputs, answer_for, choices
from paceline.view.html import as_json, policy_hash
from paceline.view.server import HEADERS, Gate

_MOST_QUERY = 1000  # letters


def make_play_app() -> Starlette:
    """Returns the application, which answers requests to names of this machine alone."""
    app = Starlette(routes=[Route("/", _page), Route("/api/answer", _answer)])
    app.add_middleware(Gate, token="")  # nosec B106  # none is needed on the loopback
    answer_for(PlayInputs())  # the first one reads the catalog and the constants
    return app


def make_play_server(app: Starlette) -> uvicorn.Server:
    """Returns a server that answers until it is asked to exit; ``run(sockets=[...])`` starts it."""
    options: dict[str, Any] = {"ws": "none", "access_log": False, "log_level": "warning", "server_header": False}
    return uvicorn.Server(uvicorn.Config(app, timeout_graceful_shutdown=1, lifespan="off", **options))


@cache
def play_page() -> tuple[str, str]:
    """Returns the page and its content security policy."""
    text = resources.files("paceline.learn").joinpath("play.html").read_text(encoding="utf-8")
    style, script = (_inside(text, tag) for tag in ("style", "script"))
    policy = (
        f"default-src 'none'; script-src '{policy_hash(script)}'; style-src '{policy_hash(style)}'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'"
    )
    return text.replace("@DATA@", as_json(_data())), policy + "; frame-ancestors 'none'"


def _inside(text: str, tag: str) -> str:
    return text.partition(f"<{tag}>")[2].partition(f"</{tag}>")[0]


def _data() -> dict[str, Any]:
    """Returns what the page is made of: its choices, the bounds of its sliders, the sizes of models."""
    usual = PlayInputs()
    return {
        "choices": choices(),
        "numbers": NUMBERS,
        "usual": {name: getattr(usual, name) for name in PlayInputs.__slots__},
        "sizes": {
            name: {"layers": size.layers, "width": size.width, "context": size.context, "step": _width_step(name)}
            for name, size in GPT_SIZES.items()
        },
    }


def _width_step(name: str) -> int:
    """Returns by how much the width grows so that heads stay as wide, and heads of keys and values whole."""
    size = GPT_SIZES[name]
    return size.width // size.kv_heads


async def _page(_: Request) -> Response:
    text, policy = play_page()
    return Response(text, media_type="text/html", headers=HEADERS | {"content-security-policy": policy})


async def _answer(request: Request) -> Response:
    if len(request.url.query) > _MOST_QUERY:
        return _json({"problems": ["the request is too long"]}, status=414)
    try:
        inputs = PlayInputs.of(dict(request.query_params))
    except UsageError as error:
        return _json({"problems": [str(error)]}, status=400)
    return _json(await asyncio.to_thread(answer_for, inputs))


def _json(value: Any, status: int = 200) -> Response:
    text = to_json(value, inf_nan_mode="null")
    return Response(text, status_code=status, media_type="application/json", headers=HEADERS)
