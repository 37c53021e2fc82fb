"""Serves the live page: one HTML file, its data as JSON, and a stream of events that says when there is more.

    GET /             the page                      GET /api/events    server-sent events: the states of all runs
    GET /api/runs     curves of chosen runs         GET /api/heat, /api/timeline, /api/words   of one run
    GET /metrics      for Prometheus                GET /api/differences
    GET /api/rows     the table of all runs         GET /api/text      config or log of one run
    POST /api/note    keeps tags and note of a run: the only request that writes, JSON from this page alone
    GET /healthz      this process answers          GET /readyz        and it follows its runs

``gate.py`` says who gets in. Runs are named by ids of the list; no request has a path in it.
"""

from __future__ import annotations

import asyncio
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any

import uvicorn
from pydantic_core import to_json
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from paceline.errors import UsageError
from paceline.untrusted import parse_json_object
from paceline.view.document import Window, describe, heat, timeline
from paceline.view.folder import glance, keep_note, parse_note, row_of, text_of
from paceline.view.gate import HEADERS, PROBES, Gate, Protocol
from paceline.view.html import differences_of, live_page
from paceline.view.runs import ShownRun, find_runs, names_of

_LOOK_S, _IDLE_LOOK_S, _FIND_S = 0.25, 2.0, 1.0
_FIRST_S, _BUDGET_S = 0.02, 0.05  # of reading at a stretch, with the lock held
_WORDS_EVERY_S = 20.0
_MOST_POINTS = 4000
_MOST_NOTE_BYTES = 2**14


class Follower:
    """The runs in some folders, read as they grow. ``lock`` guards everything that is read of a run.

    A run is read when somebody has chosen it, every 0.25 s while somebody watches, else, or when it is over, every 2 s.
    """

    def __init__(self, paths: Sequence[Path], notice: Callable[[str], None] = lambda _: None) -> None:
        self.lock = Lock()
        self.runs: list[ShownRun] = []
        self._paths = list(paths)
        self._notice = notice
        self._told: set[str] = set()
        self._wanted: set[str] = set()
        self._behind: set[str] = set()
        self._looked: dict[str, float] = {}
        self.is_stopped, self._wake = Event(), Event()
        self._thread: Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.news: asyncio.Event | None = None
        self._watchers = 0
        self._words: dict[str, tuple[float, str, dict[str, Any]]] = {}
        self._asking: dict[str, asyncio.Task[dict[str, Any]]] = {}
        self._processes: set[subprocess.Popen[bytes]] = set()
        self.find()

    def start(self) -> None:
        """Begins to follow; call it inside the event loop that answers requests."""
        self._loop, self.news = asyncio.get_running_loop(), asyncio.Event()
        self._thread = Thread(target=self._follow, name="follow runs", daemon=True)
        self._thread.start()

    @property
    def is_following(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def stop(self) -> None:
        self.is_stopped.set()
        self._wake.set()
        for process in list(self._processes):
            process.terminate()
        if self.news is not None:
            self.news.set()
        if self._thread is not None:
            self._thread.join(5.0)

    def find_run(self, run_id: str) -> ShownRun | None:
        return next((run for run in self.runs if run.id == run_id), None)

    def want(self, run: ShownRun) -> None:
        """Has a run read from now on; the first of it at once."""
        if run.id not in self._wanted:
            self._wanted.add(run.id)
            if run.look(_FIRST_S):
                self._behind.add(run.id)
            self._wake.set()

    def states(self) -> list[dict[str, Any]]:
        """Returns the list of runs; the state of those that nobody has chosen is a glance at their files."""
        return [
            {"id": run.id, "name": run.name, "version": run.version, "read": run.share_read}
            | (asdict(run.state()) if run.id in self._wanted else glance(run.folder))
            | {"verdict": run.verdict() if run.id in self._wanted else ""}
            for run in self.runs
        ]

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Looks more often while somebody watches."""
        self._watchers += 1
        self._wake.set()
        try:
            yield
        finally:
            self._watchers -= 1

    async def words_of(self, run: ShownRun) -> dict[str, Any]:
        """Returns the words of a run, at most some seconds old; a process of its own reads the records."""
        made, status, words = self._words.get(run.id, (0.0, "", {}))
        with self.lock:
            now = run.state().status
        if status == now and (now != "running" or time.monotonic() - made < _WORDS_EVERY_S):
            return words
        if run.id not in self._asking:
            self._asking[run.id] = asyncio.ensure_future(asyncio.to_thread(_ask_words, run.folder, self._processes))
        try:
            words = await asyncio.shield(self._asking[run.id])
        finally:
            self._asking.pop(run.id, None)
        self._words[run.id] = (time.monotonic(), now, words)
        return words

    def find(self) -> None:
        folders, problems = find_runs(self._paths)
        for problem in problems:
            if problem not in self._told:
                self._told.add(problem)
                self._notice(problem)
        known = {run.folder: run for run in self.runs}
        if list(known) != folders:
            self.runs = [known.get(folder) or ShownRun(folder) for folder in folders]
            for run, name in zip(self.runs, names_of(folders), strict=True):
                run.name = name

    def _follow(self) -> None:
        found_at = time.monotonic()
        while not self.is_stopped.is_set():
            before = [(run.id, run.version) for run in self.runs]
            with self.lock:
                if time.monotonic() - found_at > _FIND_S:
                    found_at = time.monotonic()
                    self.find()
                states = [(run, run.state().status) for run in self.runs if run.id in self._wanted]
                now = time.monotonic()
                for run, status in states:
                    is_due = status in ("running", "starting") or now - self._looked.get(run.id, 0.0) >= _IDLE_LOOK_S
                    if is_due or run.id in self._behind:
                        self._looked[run.id] = now
                        self._behind.discard(run.id)
                        self._behind |= {run.id} if run.look(_BUDGET_S) else set()
                after = [(run.id, run.version) for run in self.runs]
                has_changed = before != after or states != [(run, run.state().status) for run, _ in states]
            if has_changed:
                self._tell()
            if not self._behind:
                self._wake.wait(_LOOK_S if self._watchers > 0 else _IDLE_LOOK_S)
                self._wake.clear()
            time.sleep(0.01)  # lets requests have the lock

    def _tell(self) -> None:
        def wake() -> None:
            assert self.news is not None
            self.news.set()
            self.news = asyncio.Event()

        if self._loop is not None:
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(wake)


def _ask_words(folder: Path, asked: set[subprocess.Popen[bytes]]) -> dict[str, Any]:
    """Has another process sum up a run, at a low priority; it is one of ``asked`` meanwhile."""
    command = [sys.executable, "-m", "paceline.view.html", str(folder.resolve())]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        asked.add(process)
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, process.pid, 10)
        out, err = process.communicate()
        asked.discard(process)
    try:
        return parse_json_object(out)
    except ValueError:
        return {"problem": "the summary of the run could not be made: " + err.decode("utf-8", "replace")[-400:]}


def listen(host: str, port: int | None) -> socket.socket:
    """Returns a socket that listens there; without a port at 6070 or the next that is free. Raises UsageError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    candidates = [port] if port is not None else [*range(6070, 6090), 0]
    while True:
        found = socket.socket(family, socket.SOCK_STREAM)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        candidate = candidates.pop(0)
        try:
            found.bind((host, candidate))
            found.listen(64)
            return found
        except OSError as error:
            found.close()
            if not candidates:
                what = f"cannot listen on {host}:{candidate}: {error.strerror or error}"
                rule = "the page needs a port that no other program has, at an address of this machine"
                raise UsageError(f"{what}\n  {rule}\n  leave --port out to take a free one, or name another") from error


def make_app(follower: Follower, *, token: str = "") -> Starlette:
    """Returns the application; with a ``token``, only who has it gets in."""
    api = _Api(follower)

    @asynccontextmanager
    async def follow(_: Starlette) -> AsyncIterator[None]:
        follower.start()
        try:
            yield
        finally:
            follower.stop()

    answers = (api.runs, api.events, api.heat, api.timeline, api.words, api.differences, api.rows, api.text)
    routes = [Route("/", api.page), Route("/metrics", api.metrics), *(Route(path, api.probe) for path in PROBES)]
    routes += [Route(f"/api/{answer.__name__}", answer) for answer in answers]
    routes += [Route("/api/note", api.note, methods=["POST"])]
    app = Starlette(routes=routes, lifespan=follow)
    app.state.follower = follower
    app.add_middleware(Gate, token=token)
    return app


class _Api:
    """The answers. What reads the columns runs in a thread that holds the follower's lock."""

    def __init__(self, follower: Follower) -> None:
        self._follower = follower

    async def page(self, _: Request) -> Response:
        text, policy = live_page()
        return Response(text, media_type="text/html", headers=HEADERS | {"content-security-policy": policy})

    async def runs(self, request: Request) -> Response:
        window = _window(request)
        wanted = set(request.query_params.get("ids", "").split(","))

        def work() -> dict[str, Any]:
            chosen = [run for run in self._follower.runs if run.id in wanted]
            for run in chosen:
                self._follower.want(run)
            return {"list": self._follower.states(), "runs": [describe(run, window) for run in chosen]}

        return await self._answer(work)

    async def heat(self, request: Request) -> Response:
        name, window = request.query_params.get("name", ""), _window(request)
        return await self._of_run(request, lambda run: heat(run, name, window))

    async def timeline(self, request: Request) -> Response:
        window = _window(request)
        return await self._of_run(request, lambda run: timeline(run, window.first, window.last))

    async def words(self, request: Request) -> Response:
        run = self._follower.find_run(request.query_params.get("id", ""))
        return _not_found() if run is None else as_response(await self._follower.words_of(run))

    async def differences(self, request: Request) -> Response:
        wanted = request.query_params.get("ids", "").split(",")
        runs = [run for each in wanted if (run := self._follower.find_run(each)) is not None]
        return await self._answer(lambda: differences_of(runs))

    async def rows(self, _: Request) -> Response:

        def work() -> list[dict[str, Any]]:
            runs = zip(self._follower.runs, self._follower.states(), strict=True)
            return [row_of(run.folder) | state for run, state in runs]

        return await self._answer(work)

    async def text(self, request: Request) -> Response:
        name = request.query_params.get("name", "")
        return await self._of_run(request, lambda run: text_of(run.folder, name))

    async def note(self, request: Request) -> Response:
        """Keeps tags and note of a run. A page of the web can send no JSON here: its browser asks first, in vain."""
        origin, host = request.headers.get("origin", ""), request.headers.get("host", "")
        if request.headers.get("content-type") != "application/json" or origin.partition("://")[2] not in ("", host):
            return as_response({"error": "notes are JSON, from this page alone"}, 403)
        size = request.headers.get("content-length", "")
        if not size.isdecimal() or len(size) > 9 or int(size) > _MOST_NOTE_BYTES:
            return as_response({"error": f"a note has at most {_MOST_NOTE_BYTES:,} bytes"}, 413)
        content = await request.body()
        try:
            run = self._follower.find_run(str(parse_json_object(content).get("id")))
            if run is None:
                return _not_found()
            await asyncio.to_thread(keep_note, run.folder, parse_note(content))
        except (OSError, ValueError) as error:
            return as_response({"error": f"the note is not kept: {getattr(error, 'strerror', None) or error}"}, 400)
        return as_response({})

    async def events(self, request: Request) -> Response:

        async def stream() -> AsyncIterator[bytes]:
            seen = b""
            with self._follower.watched():
                while (news := self._follower.news) is not None and not self._follower.is_stopped.is_set():
                    states = await asyncio.to_thread(self._locked, self._follower.states)
                    told = to_json(states, inf_nan_mode="null")
                    yield b"data: " + told + b"\n\n" if told != seen else b": still here\n\n"
                    seen = told
                    with suppress(TimeoutError):  # the news were taken before the states were read
                        await asyncio.wait_for(news.wait(), 10.0)
                    if await request.is_disconnected():
                        return

        return StreamingResponse(stream(), media_type="text/event-stream", headers=HEADERS)

    async def metrics(self, _: Request) -> Response:
        try:
            from paceline.records.prometheus import metrics_text
        except ImportError:
            words = "metrics for Prometheus need prometheus-client: pip install 'paceline[watch]'\n"
            return PlainTextResponse(words, status_code=501, headers=HEADERS)
        folders = [run.folder for run in self._follower.runs]
        return PlainTextResponse(await asyncio.to_thread(metrics_text, folders), headers=HEADERS)

    async def probe(self, request: Request) -> Response:
        is_well = request.url.path == PROBES[0] or self._follower.is_following
        return PlainTextResponse("ok\n" if is_well else "not ready\n", 200 if is_well else 503, headers=HEADERS)

    async def _of_run(self, request: Request, work: Callable[[ShownRun], Any]) -> Response:
        run = self._follower.find_run(request.query_params.get("id", ""))
        with suppress(KeyError):
            if run is not None:
                return await self._answer(lambda: work(run))
        return _not_found()

    async def _answer(self, work: Callable[[], Any]) -> Response:
        return as_response(await asyncio.to_thread(self._locked, work))

    def _locked(self, work: Callable[[], Any]) -> Any:
        with self._follower.lock:
            return work()


def _window(request: Request) -> Window:
    def number(name: str, otherwise: float) -> float:
        try:
            value = float(request.query_params.get(name, otherwise))
        except ValueError:
            return otherwise
        return otherwise if math.isnan(value) else value

    points = int(min(max(number("points", 1000), 1), _MOST_POINTS))
    return Window(first=number("first", -math.inf), last=number("last", math.inf), points=points)


def as_response(value: Any, status: int = 200) -> Response:
    """Returns plain values as JSON; what is not finite is null."""
    text = to_json(value, inf_nan_mode="null")
    return Response(text, status_code=status, media_type="application/json", headers=HEADERS)


def _not_found() -> Response:
    return as_response({"error": "there is no such run or field"}, 404)


class _Server(uvicorn.Server):
    """Ends the streams of events first: a browser keeps them open, and a server waits for all it has open."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        follower = getattr(self.config.app.state, "follower", None)  # type: ignore[union-attr]
        if follower is not None:
            follower.stop()
        await super().shutdown(sockets)


def make_server(app: Starlette) -> uvicorn.Server:
    """Returns a server that answers until it is asked to exit; ``run(sockets=[...])`` starts it."""
    options: dict[str, Any] = {"ws": "none", "access_log": False, "log_level": "warning", "server_header": False}
    return _Server(uvicorn.Config(app, http=Protocol, timeout_graceful_shutdown=1, **options))
