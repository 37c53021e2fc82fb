"""``paceline learn play``: answers are those of ``paceline plan``, inputs are bounded, and the page shows them."""

from __future__ import annotations

import http.client
import json
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode, urlsplit

import pytest

from paceline.cluster.devices import Cluster, load_cluster
from paceline.config import Config, load_config
from paceline.errors import UsageError
from paceline.learn.play import (
    MEMORY_PARTS,
    NUMBERS,
    STEP_PARTS,
    PlayInputs,
    answer_for,
    choices,
    make_play_app,
    play_page,
)
from paceline.plan.plan import MemoryEstimate
from paceline.predict.formulas.step import Prediction, StepParts
from paceline.search.request import request_for
from paceline.search.result import plan_for
from paceline.view.server import listen, make_server

if TYPE_CHECKING:
    from browser import Browser

ROOT = Path(__file__).parents[2]
CASES = (
    pytest.param(PlayInputs(), marks=pytest.mark.exhaustive),
    PlayInputs(strategy="zero1", tensor=2, pipeline=4, schedule="interleaved", microbatch=2),
    PlayInputs(size="gpt-124m", layers=12, width=768, context=1024, gpus=4, strategy="ddp", precision="bf16"),
    pytest.param(
        PlayInputs(node="dgx-a100", network="ethernet-100g", recompute="full", compile="off", layers=16, width=2048),
        marks=pytest.mark.exhaustive,
    ),
)


@pytest.mark.parametrize("inputs", CASES, ids=lambda case: f"{case.size}-{case.strategy}-{case.node}")
def test_an_answer_is_that_of_the_command(inputs: PlayInputs, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command of the page, read as the command line reads it, gives the same step and the same memory."""
    monkeypatch.chdir(ROOT)
    program, verb, file, *words, option, cluster_text = shlex.split(inputs.command("plan"))
    assert (program, verb, option) == ("paceline", "plan", "--cluster")
    cluster = load_cluster(cluster_text)
    planned = as_written(load_config(file, words), cluster)
    answer = answer_for(inputs)
    assert answer["problems"] == []
    assert answer["step"]["seconds"] == planned.seconds
    assert answer["memory"]["needs"] == planned.memory_bytes
    assert answer["step"]["mfu"] == planned.mfu
    assert answer["about"]["global_batch"] == planned.workload.global_batch


def as_written(config: Config, cluster: Cluster) -> Prediction:
    """Returns what ``paceline plan`` says of the config itself."""
    found = plan_for(request_for(config, cluster)).as_written
    assert found is not None
    return found


def test_parts_add_up() -> None:
    answer = answer_for(PlayInputs(strategy="zero1", tensor=2, pipeline=4))
    assert sum(answer["step"]["parts"].values()) == pytest.approx(answer["step"]["seconds"])
    assert sum(answer["memory"]["parts"].values()) == answer["memory"]["total"]
    assert answer["step"]["parts"]["bubble"] > 0
    named = [name for names in STEP_PARTS.values() for name in names]
    assert sorted([*named, "hidden"]) == sorted(StepParts.__slots__)
    assert {*(name for names in MEMORY_PARTS.values() for name in names), "host"} == set(MemoryEstimate.__slots__)


def test_what_does_not_fit_is_said_with_sizes_and_ways_out() -> None:
    memory = answer_for(PlayInputs(strategy="ddp", microbatch=2))["memory"]
    assert not memory["fits"]
    assert memory["words"].startswith("It does not fit: a rank needs 1")
    assert memory["ways"] == (
        "Less memory: a smaller microbatch, recompute: full, strategy: fsdp, more GPUs, a larger device."
    )
    assert answer_for(PlayInputs(strategy="fsdp"))["memory"]["fits"]


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        (PlayInputs(tensor=3), "parallel.tensor = 3 does not divide parallel.ranks = 32"),
        (PlayInputs(pipeline=4, schedule="zb-h1"), "it runs backward in two parts"),
        (PlayInputs(node="h200-measured", gpus=8), "no network is known between them"),
        (PlayInputs(size="gpt-3b", width=3200), "not a multiple of model.kv_heads"),
        (PlayInputs(layers=2, pipeline=8), "stage"),
    ],
)
def test_a_rule_that_refuses_is_named(inputs: PlayInputs, words: str) -> None:
    answer = answer_for(inputs)
    assert words in "\n".join(answer["problems"])
    assert "step" not in answer
    assert answer["commands"]["predict"].startswith("paceline predict gpt_7b ")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"gpus": "0"}, "gpus = '0'\n  it is a whole number\n  give one from 1 to 4096"),
        ({"gpus": "99999999999999999999"}, "give one from 1 to 4096"),
        ({"layers": "-1"}, "give one from 1 to 96"),
        ({"width": "1e9"}, "whole number"),
        ({"node": "../../etc/passwd"}, "the page has no such choice"),
        ({"network": "x" * 500}, f"network = '{'x' * 40}'\n"),
        ({"file": "a.yaml"}, "'file' is no input of the page"),
    ],
)
def test_inputs_are_bounded(values: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError) as raised:
        PlayInputs.of(values)
    assert words in str(raised.value)


def test_every_choice_is_answered() -> None:
    """Each word of each list gives numbers or a rule; none of them raises."""
    for name, words in choices().items():
        for word in words:
            answer = answer_for(PlayInputs.of({name: word}))
            assert answer["problems"] or answer["step"]["seconds"] > 0
    for name, ends in NUMBERS.items():
        for end in ends:
            assert answer_for(PlayInputs.of({name: str(end)}))["commands"]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server of the page."""
    found = listen("127.0.0.1", None)
    server = make_server(make_play_app())
    thread = threading.Thread(target=server.run, kwargs={"sockets": [found]})
    thread.start()
    yield f"http://127.0.0.1:{found.getsockname()[1]}"
    server.should_exit = True
    thread.join()


def get(url: str, path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    found = answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
    connection.close()
    return found


def test_the_server_answers_to_this_machine_alone(url: str) -> None:
    status, headers, body = get(url, "/")
    assert status == 200
    assert b"@DATA@" not in body
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert play_page()[1] == policy
    assert get(url, "/", Host="attacker.example")[0] == 403
    assert get(url, "/api/answer", Host="attacker.example:6070")[0] == 403
    for path in ("/play.html", "/../play.py", "/%2e%2e/play.py"):
        assert get(url, path)[0] == 404


def test_requests_get_numbers_or_words(url: str) -> None:
    def ask(**values: str) -> tuple[int, dict[str, Any]]:
        status, _, body = get(url, f"/api/answer?{urlencode(values)}")
        return status, json.loads(body)

    status, answer = ask(strategy="zero2", gpus="64")
    assert (status, answer["problems"]) == (200, [])
    assert answer["step"] == answer_for(PlayInputs(strategy="zero2", gpus=64))["step"]
    status, answer = ask(gpus="many")
    assert status == 400
    assert "whole number" in answer["problems"][0]
    assert ask(size="x" * 2000)[0] == 414


@pytest.mark.exhaustive
def test_no_torch_is_needed() -> None:
    code = "import sys, paceline.learn.play as s; s.make_play_app(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A Chromium; the test is skipped where there is none."""
    found = pytest.importorskip("browser", reason="websockets is not installed")
    if found.find_browser() is None:
        pytest.skip(found.MISSING)
    with found.Browser() as started:
        yield started


def test_the_page_follows_its_sliders(browser: Browser, url: str) -> None:
    with browser.page(f"{url}/", width=1200, height=1000) as page:
        page.wait("document.body.dataset.shown === '1'")
        usual = answer_for(PlayInputs())
        assert page.ask("byId('memory-words').textContent").strip() == usual["memory"]["words"]
        assert page.ask("document.querySelector('.command code').textContent") == usual["commands"]["plan"]
        # The bar of the activations is as wide as their share of the device.
        memory = usual["memory"]
        share = memory["parts"]["activations"] / (1.02 * memory["device"])
        part, bar = (page.box(each) for each in ("[data-part=activations]", "#memory-bar"))
        assert part["width"] / bar["width"] == pytest.approx(share, abs=0.01)
        # A key moves a slider, and a choice changes a list.
        page.ask("byId('gpus').focus()")
        page.call("Input.dispatchKeyEvent", type="keyDown", key="ArrowRight", windowsVirtualKeyCode=39)
        page.wait("page.answer.about.gpus === 64 && document.body.dataset.shown === '2'")
        page.ask("byId('strategy').value = 'ddp', byId('strategy').dispatchEvent(new Event('input'))")
        page.wait("byId('memory-words').classList.contains('bad')")
        assert "It does not fit" in page.ask("byId('memory-words').textContent")
        page.ask("byId('tensor').value = 6, byId('tensor').dispatchEvent(new Event('input'))")  # 64 of 32 heads
        page.wait("!byId('refused').hidden")
        assert "parallel.tensor = 64" in page.ask("byId('problems').textContent")
        assert page.ask("byId('step').hidden")
        assert page.errors == []
        assert {request.startswith(url) for request in page.requests} == {True}


@pytest.mark.exhaustive
def test_the_page_is_readable_on_a_small_screen(browser: Browser, url: str) -> None:
    with browser.page(f"{url}/", width=390, height=800, dark=True) as page:
        page.wait("document.body.dataset.shown")
        assert page.ask("document.documentElement.scrollWidth <= innerWidth")
        assert page.errors == []
