"""A server in a thread, and one browser for all tests of the page."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from paceline.view.server import Follower, listen, make_app, make_server

if TYPE_CHECKING:
    from browser import Browser

Serve = Callable[..., str]


@pytest.fixture
def serve(logged: list[logging.LogRecord]) -> Iterator[Serve]:
    """Serves the page of some folders; returns its address."""
    running: list[tuple[object, threading.Thread]] = []

    def start(*folders: Path, token: str = "") -> str:
        found = listen("127.0.0.1", None)
        server = make_server(make_app(Follower(folders), token=token))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [found]})
        thread.start()
        running.append((server, thread))
        return f"http://127.0.0.1:{found.getsockname()[1]}"

    yield start
    logged.clear()
    for server, thread in running:
        server.should_exit = True  # type: ignore[attr-defined]
        thread.join()
    assert not logged  # open streams of events end by themselves


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """One Chromium for all tests; they are skipped where there is none."""
    browser = pytest.importorskip("browser", reason="websockets is not installed")
    if browser.find_browser() is None:
        pytest.skip(browser.MISSING)
    with browser.Browser() as started:
        yield started
