"""The server of the live page: what it answers, who gets in, and that it reads nothing but the runs it was given."""

from __future__ import annotations

import asyncio
import http.client
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send
from view_runs import write_run

from paceline.cli.runs import PAGE_TOKEN, given_token
from paceline.errors import UsageError
from paceline.view.gate import Gate, is_loopback
from paceline.view.server import Follower, listen, make_app

Serve = Callable[..., str]


def get(url: str, path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    """Asks as a program would, without help that cleans paths."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    connection.request("GET", path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    found = answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
    connection.close()
    return found


def ask(url: str, path: str) -> Any:
    status, _, body = get(url, path)
    assert status == 200, body
    return json.loads(body)


def test_what_is_answered_of_runs(serve: Serve, tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "one", steps=30)
    url = serve(tmp_path / "runs")
    listed = ask(url, "/api/runs")["list"]
    assert [(run["name"], run["status"], run["step"]) for run in listed] == [("one", "done", 30)]  # at a glance
    run = listed[0]["id"]
    while (found := ask(url, f"/api/runs?ids={run},unknown&points=10&first=11")["runs"])[0]["read"] < 1:
        pass  # a busy machine reads a part at first
    assert [len(each["x"]["step"]) for each in found] == [10]
    assert found[0]["state"]["sentence"] == "done after 30 steps in 5.0 s"
    assert ask(url, f"/api/heat?id={run}&name=step_s")["ranks"] == [0, 1]
    assert ask(url, f"/api/timeline?id={run}&first=29&last=30")["steps"] == [29, 30]
    assert ask(url, f"/api/words?id={run}")["tables"][0]["title"] == "what each rank did"
    assert [get(url, f"/api/heat?id={run}&name=x")[0], get(url, "/api/words?id=x")[0]] == [404, 404]
    for wrong in ("points=many", "first=nan", "points=-5", "points=1e300"):
        assert ask(url, f"/api/runs?ids={run}&{wrong}")["runs"][0]["name"] == "one"


def test_texts_and_notes_stay_in_the_folder_of_a_run(serve: Serve, tmp_path: Path) -> None:
    """Logs and config are read inside the folder, up to a size; notes come as JSON from the page alone."""
    (tmp_path / "secret.log").write_text("secret")
    one = write_run(tmp_path / "runs" / "one", steps=3)
    (one / "logs").mkdir()
    (one / "logs" / "run.log").write_text("x" * 300_000 + "\nlast line\n")
    (one / "logs" / "rank-0.log").symlink_to(tmp_path / "secret.log")
    url = serve(tmp_path / "runs")
    run = ask(url, "/api/runs")["list"][0]["id"]
    found = ask(url, f"/api/text?id={run}&name=run")
    assert (found["text"], found["bytes"], found["is_cut"]) == ("last line\n", 300_011, True)
    assert "steps: 3" in ask(url, f"/api/text?id={run}&name=config")["text"]
    for name in ("rank-0", "rank-1", "../config", "..%2F..%2Fsecret", "run.log", ""):
        assert get(url, f"/api/text?id={run}&name={name}")[0] == 404
    (row,) = ask(url, "/api/rows")
    assert [row[key] for key in ("status", "step", "strategy", "eval_accuracy", "tags")] == ["done", 3, "ddp", 0.9, ""]

    def keep(value: object, kind: str = "application/json", **headers: str) -> int:
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
        connection.request("POST", "/api/note", json.dumps(value), {"content-type": kind, **headers})
        status = connection.getresponse().status
        connection.close()
        return status

    note = {"id": run, "tags": "a, b", "note": "<b>best</b>"}
    assert [keep(note), keep(note, origin=url)] == [200, 200]
    assert {**note, **ask(url, "/api/rows")[0]} == {**ask(url, "/api/rows")[0], **note}
    assert [keep(note, kind="text/plain"), keep(note, origin="http://attacker.example")] == [403, 403]
    assert [keep(note | {"note": 3}), keep(note | {"tags": "x" * 201}), keep([]), keep(note | {"id": "x"})] == [
        *(400, 400, 400, 404)
    ]
    assert keep(note | {"note": "x" * 20_000}) == 413
    assert get(url, "/api/note")[0] == 405


def test_events_tell_of_changes(serve: Serve, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "runs" / "one", steps=5, is_done=False)
    url = serve(tmp_path / "runs")
    run = ask(url, "/api/runs")["list"][0]["id"]
    ask(url, f"/api/runs?ids={run}")
    stream = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    stream.request("GET", "/api/events")
    answer = stream.getresponse()
    assert answer.getheader("content-type", "").startswith("text/event-stream")

    def next_state() -> dict[str, Any]:
        while not (line := answer.readline()).startswith(b"data: "):
            assert line
        state: dict[str, Any] = json.loads(line.removeprefix(b"data: "))[0]
        return state

    assert (next_state()["status"], next_step := 5) == ("running", 5)
    whole = write_run(tmp_path / "other", steps=9)
    for rank in (0, 1):
        grown = (whole / "records" / f"rank-{rank}.jsonl").read_bytes()
        path = folder / "records" / f"rank-{rank}.jsonl"
        with path.open("ab") as records:  # as a run does: a file written anew is empty for a moment
            records.write(grown[grown.index(b'"step":6,') - len('{"type":"step","schema":1,') :])
    while (state := next_state())["status"] == "running":
        assert state["step"] >= next_step
    assert (state["status"], state["step"]) == ("done", 9)
    stream.close()


def test_no_path_leads_to_files_and_no_foreign_name_gets_in(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("secret")
    url = serve(write_run(tmp_path / "runs" / "one", steps=3))
    for path in ("/../secret.txt", "/%2e%2e/secret.txt", "/api/../../secret.txt", "/static/secret.txt", "/page.js"):
        status, _, body = get(url, path)
        assert (status, b"secret" in body) == (404, False)
    assert get(url, "/api/words?id=../../secret.txt")[0] == 404
    assert get(url, "/", Host="attacker.example")[0] == 403
    assert get(url, "/api/runs", Host="attacker.example:6070")[0] == 403
    assert get(url, "/", Host="localhost:6070")[0] == 200
    assert get(url, "/metrics")[0] in (200, 501)
    policy = get(url, "/")[1]["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


def test_a_token_is_needed_and_given_once(serve: Serve, tmp_path: Path) -> None:
    url = serve(write_run(tmp_path / "one", steps=3), token="right")
    for path, headers in (("/", {}), ("/api/runs", {}), ("/?token=wrong", {}), ("/api/runs?token=right", {})):
        assert get(url, path, **headers)[0] == 401
    assert get(url, "/api/runs", Authorization="Bearer wrong")[0] == 401
    assert get(url, "/api/runs", Authorization="Bearer right")[0] == 200
    status, headers, _ = get(url, "/?token=right")
    assert (status, headers["location"]) == (303, "/")  # the token leaves the address
    assert "HttpOnly" in headers["set-cookie"]
    assert "SameSite=strict" in headers["set-cookie"]
    assert get(url, "/", Cookie=headers["set-cookie"].partition(";")[0])[0] == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *(("127.0.0.1", 200), ("LocalHost:6070", 200), ("[::1]:6070", 200), ("localhost:", 200)),
        *(("attacker.example", 403), ("127.0.0.1.attacker.example:80", 403), ("", 403)),
        *(("localhost:1@attacker.example", 400), ("user@localhost", 400), ("localhost/:1", 400), ("a b", 400)),
    ],
)
def test_a_host_header_is_a_name_or_an_address_with_a_port(host: str, status: int) -> None:
    async def seen(scope: Scope, receive: Receive, send: Send) -> None:
        await PlainTextResponse("in")(scope, receive, send)

    answers: list[Any] = []

    async def keep(message: Any) -> None:
        answers.append(message)

    scope = {"type": "http", "path": "/", "query_string": b"", "headers": [(b"host", host.encode())]}
    asyncio.run(Gate(seen, token="")(scope, keep, keep))  # type: ignore[arg-type]
    assert answers[0]["status"] == status


def test_probes_need_no_token_and_tell_nothing(serve: Serve, tmp_path: Path) -> None:
    url = serve(write_run(tmp_path / "one", steps=3), token="right")
    while (ready := get(url, "/readyz"))[0] == 503:  # the server answers before its thread runs
        pass
    assert [ready[0], ready[2]] == [200, b"ok\n"]
    assert get(url, "/healthz", Host="10.1.2.3:6070")[2] == b"ok\n"  # as a kubelet asks
    app = make_app(Follower([tmp_path]))
    (probe,) = [route.endpoint for route in app.routes if route.path == "/readyz"]  # type: ignore[attr-defined]
    asked = Request({"type": "http", "path": "/readyz", "headers": [], "query_string": b"", "server": ("x", 1)})
    assert asyncio.run(probe(asked)).status_code == 503  # nobody follows the runs


@pytest.mark.parametrize("sent", [b"", b"GET /api/runs HT", b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n"])
def test_half_a_request_is_closed(serve: Serve, tmp_path: Path, sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.view.gate._REQUEST_S", 0.2)
    url = urlsplit(serve(write_run(tmp_path / "one", steps=3)))
    with socket.create_connection((url.hostname, url.port or 0), timeout=60) as half:
        half.sendall(sent)
        assert half.recv(1) == b""
    with socket.create_connection((url.hostname, url.port or 0), timeout=60) as drips:  # each byte is no new chance
        try:
            for byte in b"GET / HTTP/1.1\r\n" + 10_000 * b"a: b\r\n":
                drips.sendall(bytes([byte]))
                time.sleep(0.01)
        except OSError:
            return
    pytest.fail("the connection stayed open")


def test_a_token_comes_from_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_text("0123456789abcdef\n")
    (tmp_path / "short").write_text("secret\n")
    monkeypatch.delenv(PAGE_TOKEN, raising=False)
    assert given_token(None) == ""
    monkeypatch.setenv(PAGE_TOKEN, "of-the-environment")
    assert [given_token(None), given_token(tmp_path / "token")] == ["of-the-environment", "0123456789abcdef"]
    with pytest.raises(UsageError, match=r"short has 6 characters\n  it takes 16 at least(.|\n)*openssl"):
        given_token(tmp_path / "short")
    with pytest.raises(UsageError, match=r"cannot be read: .*none: No such file"):
        given_token(tmp_path / "none")
    monkeypatch.setenv(PAGE_TOKEN, "one of many words")
    with pytest.raises(UsageError, match="letters, digits"):
        given_token(None)


def test_a_port_in_use_is_told_or_the_next_is_taken() -> None:
    with listen("127.0.0.1", None) as first, listen("127.0.0.1", None) as second:
        port = first.getsockname()[1]
        assert second.getsockname()[1] != port
        with pytest.raises(
            UsageError, match=rf"cannot listen on 127.0.0.1:{port}: Address already in use(.|\n)*--port"
        ):
            listen("127.0.0.1", port)
    with pytest.raises(UsageError, match=r"cannot listen on 192\.0\.2\.1"):
        listen("192.0.2.1", 6070)
    assert [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "10.0.0.1", "127.x.com")] == [
        *(True, True, True, False, False, False)
    ]


@pytest.mark.exhaustive
def test_the_command_serves_a_page_and_prints_its_token(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "one", steps=3)
    command = [sys.executable, "-m", "paceline", "watch", "--no-open", "--host", "0.0.0.0"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as served:
        assert served.stdout is not None
        line = served.stdout.readline()
        address, _, token = line.removeprefix("the page is at ").strip().partition("/?token=")
        assert len(token) >= 32
        port = urlsplit(address).port
        assert port is not None
        url = f"http://{socket.gethostbyname('localhost')}:{port}"
        assert [get(url, "/")[0], get(url, "/api/runs", Authorization=f"Bearer {token}")[0]] == [401, 200]
        assert urlsplit(address).hostname == socket.gethostname().lower()  # which another machine can open
        served.send_signal(signal.SIGINT)
        assert served.wait(30) == 130
    (tmp_path / "token").write_text("0123456789abcdef")
    command += ["--token-file", "token"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as served:
        assert served.stdout is not None
        address, told = served.stdout.readline(), served.stdout.readline()
        assert "token" not in address  # it is the reader's own, and not for a log
        assert "the token of token" in told
        url = f"http://127.0.0.1:{urlsplit(address.split()[-1]).port}"
        assert get(url, "/metrics", Authorization="Bearer 0123456789abcdef")[0] in (200, 501)
        assert [get(url, "/metrics")[0], get(url, "/healthz")[0]] == [401, 200]
        served.send_signal(signal.SIGINT)
        assert served.wait(30) == 130
