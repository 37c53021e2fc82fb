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

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from paceline.config.sections import GPT_SIZES
from paceline.errors import UsageError
from paceline.learn.play import NUMBERS, PlayInputs, answer_for, choices
from paceline.view.html import as_json, security_policy
from paceline.view.server import HEADERS, Gate, as_response

_MOST_QUERY = 1000  # letters


def make_play_app() -> Starlette:
    """Returns the application, which answers requests to names of this machine alone."""
    app = Starlette(routes=[Route("/", _page), Route("/api/answer", _answer)])
    app.add_middleware(Gate, token="")  # nosec B106  # none is needed on the loopback
    answer_for(PlayInputs())  # the first one reads the catalog and the constants
    return app


@cache
def play_page() -> tuple[str, str]:
    """Returns the page and its content security policy."""
    text = resources.files("paceline.learn").joinpath("play.html").read_text(encoding="utf-8")
    style, script = (text.partition(f"<{tag}>")[2].partition(f"</{tag}>")[0] for tag in ("style", "script"))
    policy = security_policy(style, script, connect="'self'")
    return text.replace("@DATA@", as_json(_data())), policy + "; frame-ancestors 'none'"


def _data() -> dict[str, Any]:
    """Returns what the page is made of: its choices, the bounds of its sliders, the sizes of models."""
    usual = PlayInputs()
    return {
        "choices": choices(),
        "numbers": NUMBERS,
        "usual": {name: getattr(usual, name) for name in PlayInputs.__slots__},
        "sizes": {
            # The width grows so that heads stay as wide, and heads of keys and values whole.
            name: {
                "layers": size.layers,
                "width": size.width,
                "context": size.context,
                "step": size.width // size.kv_heads,
            }
            for name, size in GPT_SIZES.items()
        },
    }


async def _page(_: Request) -> Response:
    text, policy = play_page()
    return Response(text, media_type="text/html", headers=HEADERS | {"content-security-policy": policy})


async def _answer(request: Request) -> Response:
    if len(request.url.query) > _MOST_QUERY:
        return as_response({"problems": ["the request is too long"]}, status=414)
    try:
        inputs = PlayInputs.of(dict(request.query_params))
    except UsageError as error:
        return as_response({"problems": [str(error)]}, status=400)
    return as_response(await asyncio.to_thread(answer_for, inputs))
