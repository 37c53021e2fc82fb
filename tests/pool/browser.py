"""A headless Chromium, driven over its DevTools protocol: pages are opened, asked and looked at as a person would.

    with Browser() as browser, browser.page("http://127.0.0.1:6070/") as page:
        page.wait("document.querySelectorAll('.chart canvas').length > 3")
        assert page.errors == []

One browser serves all tests of a session; a page has its own storage. Whatever the page asks of other hosts is noted.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from websockets.sync.client import connect

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
MISSING = "no browser is installed: make browser installs Chromium"
_PATIENCE_S = 60.0


def find_browser() -> str | None:
    """Returns the path of a Chromium; None where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One process of Chromium."""

    def __init__(self) -> None:
        path = find_browser()
        assert path is not None, MISSING
        self._folder = tempfile.mkdtemp(prefix="paceline-browser-")
        options = [
            "--headless=new",
            "--disable-gpu",
            "--no-first-run",
            "--disable-background-networking",
            "--no-sandbox",
        ]
        options += ["--disable-extensions", "--disable-component-update", "--mute-audio", "--hide-scrollbars"]
        options += ["--force-device-scale-factor=1", "--remote-debugging-port=0", f"--user-data-dir={self._folder}"]
        self._process = subprocess.Popen(
            [path, *options, "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        port, place = self._where()
        address = f"ws://127.0.0.1:{port}{place}"
        self._stack = ExitStack()
        self.connection = self._stack.enter_context(
            connect(address, max_size=None, open_timeout=_PATIENCE_S, proxy=None)
        )
        self._numbers = itertools.count(1)
        self._pages: dict[str, Page] = {}

    def _where(self) -> tuple[int, str]:
        """Waits for the file in which Chromium writes where it listens."""
        file, until = Path(self._folder) / "DevToolsActivePort", time.monotonic() + _PATIENCE_S
        while time.monotonic() < until:
            if file.exists() and len(lines := file.read_text().splitlines()) == 2:
                return int(lines[0]), lines[1]
            assert self._process.poll() is None, "Chromium ended at once"
            time.sleep(0.05)
        raise AssertionError("Chromium does not say where it listens")

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """Calls a method and waits for its answer; events that come meanwhile go to their page."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params} | ({"sessionId": session} if session else {})
        self.connection.send(json.dumps(message))
        until = time.monotonic() + _PATIENCE_S
        while True:
            answer = json.loads(self.connection.recv(timeout=max(0.1, until - time.monotonic())))
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result
            if (page := self._pages.get(answer.get("sessionId", ""))) is not None:
                page.take(answer)

    def page(self, url: str, width: int = 1280, height: int = 900, dark: bool = False) -> Page:
        """Opens a page in a window of its own."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session, context)
        self._pages[session] = page
        for domain in ("Runtime", "Page", "Network", "Log"):
            page.call(f"{domain}.enable")
        page.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        page.call("Emulation.setEmulatedMedia", features=[scheme])
        page.call("Page.navigate", url=url)
        return page

    def forget(self, session: str, context: str) -> None:
        self._pages.pop(session, None)
        self.call("Target.disposeBrowserContext", browserContextId=context)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


class Page:
    """One window. ``errors``: what the page wrote to its console as an error, raised, or was forbidden."""

    def __init__(self, browser: Browser, session: str, context: str) -> None:
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._browser, self._session, self._context = browser, session, context

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **params)

    def take(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        match event["method"]:
            case "Runtime.exceptionThrown":
                self.errors.append(str(params["exceptionDetails"].get("exception", {}).get("description", params)))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.errors.append(str(params["args"]))
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.errors.append(params["entry"]["text"])
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])

    def ask(self, expression: str) -> Any:
        """Evaluates an expression in the page; waits for a promise."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, expression: str) -> Any:
        """Asks until the answer is true, and returns it."""
        until = time.monotonic() + _PATIENCE_S
        while time.monotonic() < until:
            if found := self.ask(f"(() => {{ try {{ return {expression}; }} catch {{ return false; }} }})()"):
                return found
            time.sleep(0.05)
        raise AssertionError(f"the page never came to {expression}; errors: {self.errors}")

    def move(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def press(self, x: float, y: float, to: tuple[float, float] | None = None) -> None:
        """Clicks, or drags to another place."""
        end = to or (x, y)
        self.move(x, y)
        for kind, place in (("mousePressed", (x, y)), ("mouseMoved", end), ("mouseReleased", end)):
            button = {"button": "left", "buttons": 1, "clickCount": 1}
            self.call("Input.dispatchMouseEvent", type=kind, x=place[0], y=place[1], **button)

    def key(self, text: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=text, text=text if kind == "keyDown" else "")

    def box(self, selector: str) -> dict[str, float]:
        """Returns where an element is in the window, after scrolling to it."""
        found = f"document.querySelector({json.dumps(selector)})"
        self.ask(f"{found}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
        box: dict[str, float] = self.ask(f"{found}.getBoundingClientRect().toJSON()")
        return box

    def picture(self, path: Path, whole: bool = False) -> None:
        """Keeps what the window shows as a PNG."""
        found = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(found["data"]))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._browser.forget(self._session, self._context)
