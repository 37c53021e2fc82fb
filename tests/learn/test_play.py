"""``paceline learn play``: answers are those of ``paceline plan``, inputs are bounded, and the page shows them."""

from __future__ import annotations

import http.client
import importlib
import json
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode, urlsplit

import pytest

from paceline.cluster.devices import Cluster, load_cluster
from paceline.config import Config, load_config
from paceline.errors import UsageError
from paceline.plan.plan import MemoryEstimate
from paceline.predict.formulas.step import Prediction, StepParts
from paceline.search.request import request_for
from paceline.search.result import plan_for
from paceline.units import format_bytes
from paceline.view.server import listen, make_server
from paceline_course.play import (
    CURVES,
    MEMORY_PARTS,
    NUMBERS,
    PRESETS,
    STEP_PARTS,
    PlayInputs,
    answer_for,
    choices,
    curves_for,
    make_play_app,
    play_page,
)

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
    assert answer["about"]["batch"] == planned.workload.global_batch


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
    ways = memory["ways"]
    assert ways.startswith("It fits with one change: strategy zero2 over 32 data-parallel ranks (")
    assert "4 tensor ranks (" in ways
    assert "GPUs" not in ways  # under ddp, more of them share nothing
    assert "strategy zero1" not in ways  # which needs too much, too
    fsdp = answer_for(PlayInputs(strategy="fsdp", microbatch=2))["memory"]["needs"]
    assert f"strategy fsdp over 32 data-parallel ranks ({format_bytes(fsdp)})" in ways
    sharded = answer_for(PlayInputs(strategy="fsdp", gpus=2))["memory"]
    assert "4 GPUs (" in sharded["ways"] or sharded["fits"]
    assert answer_for(PlayInputs(strategy="fsdp"))["memory"]["fits"]


def test_the_global_batch_stays_where_the_mesh_moves() -> None:
    """More stages do the same work: the tokens of a step are those of one stage."""
    one, four = (answer_for(PlayInputs(pipeline=stages)) for stages in (1, 4))
    assert one["about"]["batch"] == four["about"]["batch"] == 256
    steps = [each["step"]["tokens_per_s"] * each["step"]["seconds"] for each in (one, four)]
    assert steps == pytest.approx([256 * 4096] * 2)


def test_curves_are_answers_of_one_slider() -> None:
    inputs = PlayInputs(batch=96, gpus=24)
    curves = curves_for(inputs)
    assert curves.keys() == CURVES.keys()
    for name, points in curves.items():
        values = [point["at"] for point in points]
        assert values == sorted(set(values))
        assert getattr(inputs, name) in values  # which may be no power of two
        middle = points[len(points) // 2]
        answer = answer_for(replace(inputs, **{name: middle["at"]}))
        assert middle["memory"] == answer["memory"]["needs"]
        assert middle["tokens_per_s"] == answer["step"]["tokens_per_s"] / answer["about"]["gpus"]
    assert max(point["at"] for point in curves["gpus"]) == 32  # of 64, the batch of 96 would give a part of a sample
    memory = [point["memory"] for point in curves["context"]]
    assert memory == sorted(memory)


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
    status, _, body = get(url, "/api/curves?gpus=16")
    assert (status, json.loads(body)) == (200, curves_for(PlayInputs(gpus=16)))
    assert get(url, "/api/curves?gpus=many")[0] == 400


@pytest.mark.exhaustive
def test_no_torch_is_needed() -> None:
    code = "import sys, paceline_course.play as s; s.make_play_app(); sys.exit('torch' in sys.modules)"
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
        assert page.ask("getComputedStyle(byId('summary')).position") == "fixed"  # the result stays in view
        assert "tokens/s a GPU" in page.ask("byId('summary').textContent")
        assert page.errors == []


def test_an_address_has_all_settings_and_two_can_be_compared(browser: Browser, url: str) -> None:
    with browser.page(f"{url}/?gpus=24&batch=96&strategy=zero1&no=1&width=x#gpus=8", width=1400, height=1000) as page:
        page.wait("page.curves && page.kept && !byId('compare').hidden && byId('compared').rows.length > 1")
        answer = answer_for(PlayInputs(gpus=24, batch=96, strategy="zero1"))
        assert page.ask("byId('memory-words').textContent").strip() == answer["memory"]["words"]
        rows = page.ask("[...byId('compared').rows].map((row) => [...row.cells].map((cell) => cell.textContent))")
        assert ["gpus", "8", "24"] in rows
        assert ["strategy", "fsdp", "zero1"] in rows
        assert page.ask("document.querySelectorAll('#plots svg').length") == 6
        assert page.ask("document.querySelectorAll('#plots path.kept').length") == 6
        page.ask("change('tensor', 2)")
        assert page.ask("location.search") == "?gpus=24&strategy=zero1&tensor=2&batch=96"
        page.ask("byId('drop').click()")
        assert page.ask("byId('compare').hidden")
        assert page.ask("location.hash") == ""
        # A click on a curve moves its slider.
        page.wait("document.body.dataset.curves === String(page.asked)")
        page.ask("document.querySelector('#plots svg').dispatchEvent(new MouseEvent('click', {clientX: 0}))")
        page.wait("page.answer.about.gpus === 2")
        assert page.errors == []


def test_each_preset_is_answered() -> None:
    lessons = {int(re.match(r"\d+", name)[0]) for name, _ in PRESETS}  # type: ignore[index]
    assert len(lessons) == len(PRESETS)
    for name, values in PRESETS:
        answer = answer_for(PlayInputs.of({key: str(value) for key, value in values.items()}))
        assert answer["problems"] == [], name
        assert answer["memory"]["fits"] is ("does not fit" not in name)


def test_the_page_of_the_book_answers_without_a_server(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two lessons of it, with what the server would say: a slider that moves, another that goes back, a strategy."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    still = importlib.import_module("still_page")
    monkeypatch.setattr(still, "PRESETS", PRESETS[1:3])
    monkeypatch.setattr("paceline_course.play.PRESETS", PRESETS[1:3])
    monkeypatch.setattr("paceline_course.play.CURVES", {"gpus": 32, "context": 8192, "batch": 256})
    (tmp_path / "play.html").write_text(still.still_page(), encoding="utf-8")
    ddp, fsdp = (replace(PlayInputs(), **changes) for _, changes in PRESETS[1:3])
    with browser.page(f"file://{tmp_path}/play.html", width=1400, height=1000) as page:
        page.wait("document.body.dataset.shown === '1'")

        def moved(change: str, number: int) -> str:
            page.ask(change)
            page.wait(f"document.body.dataset.shown === '{number}'")
            return str(page.ask("byId('memory-words').textContent"))

        assert moved("change('gpus', 16)", 2).startswith(answer_for(replace(ddp, gpus=16))["memory"]["words"])
        assert moved("change('batch', 128)", 3).startswith(answer_for(replace(ddp, batch=128))["memory"]["words"])
        assert page.ask("state.gpus") == 8  # one setting moves, and the others go back
        assert moved("change('strategy', 'fsdp')", 4).startswith("It fits")
        page.ask("byId('keep').click()")
        page.wait("!byId('compare').hidden && byId('compared').rows.length > 1")
        page.ask("byId('preset').value = 1")
        assert moved("byId('preset').dispatchEvent(new Event('input'))", 5).startswith("It fits")
        assert page.ask("byId('compare').hidden")
        assert page.ask("page.answer.step.seconds") == answer_for(fsdp)["step"]["seconds"]
        page.wait("document.querySelectorAll('#plots svg').length === 6")
        assert page.ask("byId('width').disabled && !byId('gpus').disabled")
        assert page.errors == []
