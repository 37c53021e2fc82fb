"""The page in a real browser: charts have the data, it follows a run, runs are compared, and it asks nobody else."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from made_records import END, RUN
from mixture_runs import mixture_config, prefer, train_mixture
from view_runs import steps_of, write_run

from paceline.records.records import EventRecord, to_line
from paceline.records.samples import samples_of
from paceline.view.html import write_report
from paceline.view.runs import read_runs

if TYPE_CHECKING:
    from browser import Browser, Page

Serve = Callable[..., str]
DRAWN = "document.body.dataset.drawn && page.timeline.found && page.heat.found && page.words.get(page.focus)?.told"
LAST_LOSS = "page.charts.get('loss').plot.data[2].filter((each) => each != null).at(-1)"  # the raw curve


def assert_no_overflow(page: Page) -> None:
    """Nothing is wider than the window, and no two charts lie over one another."""
    assert page.ask("document.documentElement.scrollWidth <= innerWidth")
    boxes = page.ask("[...document.querySelectorAll('.chart')].map((each) => each.getBoundingClientRect().toJSON())")
    for place, one in enumerate(boxes):
        for other in boxes[place + 1 :]:
            is_beside = one["right"] <= other["left"] + 1 or other["right"] <= one["left"] + 1
            assert is_beside or one["bottom"] <= other["top"] + 1 or other["bottom"] <= one["top"] + 1


def test_the_experts_of_a_run_in_a_browser(browser: Browser, serve: Serve, tmp_path: Path) -> None:
    """A router that sends all tokens to two experts is two bright rows, live and in the report, wide and narrow."""
    folder = tmp_path / "mixture"
    changes: dict[str, dict[str, float]] = {"optim": {"lr": 1e-12}, "train": {"steps": 40}}
    train_mixture(folder, mixture_config(**changes), force=prefer(2, 5, layer=1))
    write_report(read_runs([folder]), tmp_path / "report.html")
    for address in (serve(folder), (tmp_path / "report.html").as_uri()):
        with browser.page(address) as page:
            page.wait(f"{DRAWN} && page.experts.found")
            assert page.ask("page.experts.all") == ["layers.0.mlp", "layers.1.mlp"]
            page.ask("page.experts.picker.value = 'layers.1.mlp', 0")
            page.ask("page.experts.picker.dispatchEvent(new Event('change'))")
            page.wait("page.experts.found.name === 'layers.1.mlp'")
            assert page.ask("page.experts.found.steps") == list(range(2, 41, 2))
            loads = np.array(page.ask("[...page.experts.values]")).reshape(8, 20)
            assert loads[[2, 5]].tolist() == [[4.0] * 20] * 2
            assert loads.sum() == 8 * 20
            page.ask("document.querySelector('[data-chart=experts]').scrollIntoView(), 0")
            box = page.box("[data-chart=experts] canvas:not(.tools canvas)")
            page.move(box["left"] + 200, box["top"] + 6 + 5.5 * page.ask("page.experts.box.tall"))
            page.wait("!document.getElementById('tip').hidden")
            told = page.ask("document.getElementById('tip').textContent")
            assert re.fullmatch(r"expert 5, step [0-9]+\nlayers\.1\.mlp 4\.00 x", told), told
            notes = page.ask("document.querySelector('.notes').textContent")
            assert notes.count("he router of layers.1.mlp sends nearly all tokens to experts 2, 5") == 1
            assert "Experts" in page.ask("document.querySelector('.tabs').textContent")
            assert_no_overflow(page)
            assert page.errors == []
        with browser.page(address, width=390) as page:
            page.wait(f"{DRAWN} && page.experts.found")
            assert_no_overflow(page)


def test_a_report_in_a_browser(browser: Browser, tmp_path: Path) -> None:
    """Charts, the map, the timeline, zoom, keys and the dark theme of a report, without a server."""
    folder = write_run(tmp_path / "<b>run<img src=x>", ranks=4, steps=200, slow=1.9)
    write_report(read_runs([folder]), tmp_path / "report.html")
    with browser.page((tmp_path / "report.html").as_uri()) as page:
        page.wait(DRAWN)
        assert page.ask("document.querySelector('h1').textContent") == "<b>run<img src=x>"  # shown, and not run
        assert page.ask("page.charts.get('loss').plot.data[1].length") == 200
        assert page.ask(LAST_LOSS) == pytest.approx(1 / 200)
        assert "done after 200 steps" in page.ask("document.querySelector('#verdict').textContent")
        told = page.ask("document.querySelector('.notes').textContent")
        assert told.count("rank 1 is the last") == 1
        assert {"phases", "step_s", "lr", "memory_bytes"} <= set(page.ask("[...page.charts.keys()]"))
        # The slow rank's row of the map is brighter where it computes, and the pointer says which it is.
        assert page.ask("page.heat.found.name") == "late_s"
        box = page.box("[data-chart=heat] canvas:not(.tools canvas)")
        page.move(box["left"] + 200, box["top"] + 6 + 1.5 * page.ask("page.heat.box.tall"))
        page.wait("!document.getElementById('tip').hidden")
        assert page.ask("document.getElementById('tip').textContent").startswith("rank 1, step ")
        assert page.ask("page.heat.values[page.heat.found.steps.length]") == pytest.approx(0.018, abs=1e-6)
        assert page.ask("page.timeline.spans.length") >= 4 * 8 * 5
        # Dragging over one chart zooms all of them.
        box = page.box("[data-chart=loss] .u-over")
        middle = box["top"] + box["height"] / 2
        page.press(box["left"] + 0.25 * box["width"], middle, (box["left"] + 0.5 * box["width"], middle))
        page.wait("page.view.zoom")
        page.move(1, 1)  # away from the charts
        page.wait("document.querySelector('[data-chart=lr] .at').textContent.startsWith('last: step ')")
        at = page.ask("document.querySelector('[data-chart=lr] .at').textContent")
        assert int(at.removeprefix("last: step ")) == pytest.approx(page.ask("page.view.zoom[1]"), abs=1.0)
        scales = page.ask("[...page.charts.values()].map((each) => each.plot.scales.x.min)")
        assert max(scales) == pytest.approx(min(scales))
        assert scales[0] == pytest.approx(51, abs=3)
        for key in "0lxds":
            page.key(key)
        page.wait(
            "!page.view.zoom && page.view.isLog && page.view.x === 'time' && isDark() && page.view.smooth === 0.9"
        )
        page.wait("page.charts.get('loss').plot.scales.y.distr === 3")
        assert_no_overflow(page)
        page.ask(
            "addEventListener('beforeprint', () => { window.printed = [isDark(), page.grids.learning.clientWidth]; })"
        )
        page.call("Page.printToPDF")
        assert page.ask("printed") == [False, 710]  # on paper it is light, and as wide as a page
        assert page.ask("isDark() && page.grids.learning.clientWidth > 710")
        assert page.errors == []
        assert [url for url in page.requests if not url.startswith(("file:", "data:"))] == []


def append(folder: Path, first: int, last: int) -> None:
    for rank in (0, 1):
        with (folder / "records" / f"rank-{rank}.jsonl").open("a") as file:
            file.write("".join(map(to_line, steps_of(rank, first, last))))


def test_the_page_follows_a_run_and_compares_it(browser: Browser, serve: Serve, tmp_path: Path) -> None:
    """New steps, a failure, a restart and a second run show without a reload."""
    folder = write_run(tmp_path / "runs" / "one", steps=10, is_done=False)
    url = serve(tmp_path / "runs")
    with browser.page(f"{url}/") as page:
        page.wait(DRAWN)
        assert page.ask("document.querySelector('.pill').textContent") == "running"
        append(folder, 11, 25)
        page.wait("page.charts.get('loss').plot.data[0].length === 25")
        assert page.ask(LAST_LOSS) == pytest.approx(1 / 25)
        page.wait("page.timeline.found.steps.at(-1) === 25")
        with (folder / "records" / "rank-0.jsonl").open("a") as file:
            file.write(to_line(replace(END, status="failed", step=25, message="rank 1 was killed by SIGKILL")))
        page.wait("document.querySelector('.pill').textContent === 'failed'")
        assert "rank 1 was killed by SIGKILL" in page.ask("document.querySelector('.sentence').textContent")
        for rank in (0, 1):
            again = replace(RUN, rank=rank, total_steps=40, host="elsewhere", time=RUN.time + 9)
            with (folder / "records" / f"rank-{rank}.jsonl").open("a") as file:
                file.write(to_line(again))
        append(folder, 21, 22)
        page.wait("document.querySelector('.pill').textContent === 'running'")
        page.wait("document.querySelector('[data-block=events]').textContent.includes('attempt 2 of this run')")
        assert "loss 0.5000, accuracy 90.0 %" in page.ask("document.querySelector('[data-block=events]').textContent")
        two = write_run(tmp_path / "runs" / "two", steps=30)
        for path in two.glob("records/*.jsonl"):
            path.write_text(path.read_text().replace('"unit":"samples"', '"unit":"tokens"'))
        page.wait("document.querySelectorAll('.run').length === 2")
        page.ask("[...document.querySelectorAll('.run input')].find((each) => !each.checked).click()")
        page.wait("document.querySelector('[data-block=differences]')?.textContent.includes('train.steps')")
        page.wait("page.charts.get('loss').lines.length === 4")  # training and evaluation of both
        assert "\u2013" not in page.ask("document.querySelector('[data-chart=loss] .legend').textContent")
        compared = page.ask("document.querySelector('[data-block=compare]').textContent")
        assert "640 samples/s" in compared  # of two ranks
        assert "640 tokens/s" in compared
        assert page.errors == []
        assert {request.startswith(url) for request in page.requests} == {True}


@pytest.mark.exhaustive
def test_a_page_without_runs_shows_the_first_one(browser: Browser, serve: Serve, tmp_path: Path) -> None:
    url = serve(tmp_path)
    with browser.page(f"{url}/", width=390, height=800, dark=True) as page:
        page.wait("document.querySelector('.empty') !== null")
        write_run(tmp_path / "first", steps=10)
        page.wait(DRAWN)
        assert page.ask("document.querySelector('h1').textContent") == "first"
        assert_no_overflow(page)
        write_run(tmp_path / "second", steps=10)
        page.wait("document.querySelector('h1').textContent === 'second'")  # nobody has chosen the first, which is over
        page.key("j")
        page.wait("document.querySelector('h1').textContent === 'first'")
        write_run(tmp_path / "third", steps=10)
        page.wait("document.querySelectorAll('.run').length === 3")
        assert page.ask("page.run().name") == "first"
        assert page.errors == []


def test_the_loss_is_above_the_fold_and_everything_has_an_address(
    browser: Browser, serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed run with its traceback and log, the table of runs, a chart of one's own, the menu of a phone."""
    monkeypatch.setattr("paceline.view.server._ask_words", lambda *_: {})  # a process for each run; not looked at here
    folder = write_run(tmp_path / "runs" / "good", steps=30, is_done=False)
    bad = write_run(tmp_path / "runs" / "bad", steps=20, is_done=False)
    detail = samples_of(["<b>seven</b>"], np.eye(8)[None])
    for rank in (0, 1):
        with (bad / "records" / f"rank-{rank}.jsonl").open("a") as file:
            file.write(to_line(EventRecord(name="samples", step=20, detail=detail, time=RUN.time + 2)))
            file.write(to_line(replace(END, status="failed", step=20, message="rank 1 failed: ValueError: <b>no</b>")))
    (bad / "logs").mkdir()
    (bad / "logs" / "rank-1.log").write_text("first line\nValueError: <b>no</b>\n")
    failure = {"rank": 1, "kind": "error", "message": "ValueError", "traceback": "in <b>mine.py</b>", "time": 9.0}
    (bad / "logs" / "rank-1.error.json").write_text(json.dumps(failure))
    url = serve(tmp_path / "runs")
    with browser.page(f"{url}/#run=bad&log=", width=1400, height=1000) as page:
        page.wait("document.body.dataset.drawn && page.view.isLog")
        assert page.ask("document.querySelector('[data-chart=loss]').getBoundingClientRect().bottom <= innerHeight")
        assert page.ask("document.querySelector('.notes-card pre').textContent") == "in <b>mine.py</b>"
        page.wait("document.querySelector('.samples img').naturalWidth === 8")
        assert page.ask("document.querySelector('.samples').textContent") == "<b>seven</b>"
        page.ask("document.querySelector('.notes-card .more').click()")
        page.wait("page.texts.pre.log.textContent === 'first line\\nValueError: <b>no</b>\\n'")
        assert page.ask("location.hash").endswith("&part=log")
        # The list of runs keeps what has the focus while a run goes on.
        page.ask("[...document.querySelectorAll('.run')].find((each) => each.title === 'good').focus()")
        page.ask("window.focused = document.activeElement; focused.click()")
        page.wait("page.run()?.name === 'good'")
        append(folder, 31, 35)
        page.wait("document.activeElement.textContent.includes('step 35')")
        assert page.ask("document.activeElement === focused")
        page.ask(
            "page._addChart(); document.querySelectorAll('.series input').forEach((e, i) => { e.checked = i < 2; })"
        )
        page.ask("document.getElementById('add-chart').click()")
        assert page.ask("[...page.charts.keys()].filter((each) => each.startsWith('mine-')).length") == 1
        # Tags stay in the folder, and the address leads back to the table as it was.
        page.key("a")
        page.wait("document.querySelectorAll('.all-runs tbody tr').length === 2")
        page.ask("page.table.find.value = 'bad'; page.table.find.dispatchEvent(new Event('input'))")
        page.ask("page.table.heads[0].firstChild.click()")
        assert page.ask("page.table.body.textContent").count("failed") == 1
        page.ask("(() => { const input = document.querySelector('.all-runs input.tags'); input.value = 'lr-test'; "
                 "input.dispatchEvent(new Event('change')); })()")  # fmt: skip
        page.wait("page.table.told.textContent === 'kept in the folder of the run'")
        assert json.loads((bad / "note.json").read_text()) == {"tags": "lr-test", "note": ""}
        address = page.ask("location.hash")
        page.ask("history.back()")
        page.wait("!page.isInTable && document.querySelector('h1').textContent === 'good'")
        assert page.errors == []
    with browser.page(f"{url}/{address}", width=390, height=844) as page:
        page.wait("document.querySelector('.all-runs input.tags')?.value === 'lr-test'")
        assert page.ask("document.querySelectorAll('.all-runs tbody tr').length") == 1
        page.ask("document.querySelector('.all-runs td a').click()")
        page.wait("document.body.dataset.drawn")
        assert page.ask("[...page.charts.keys()].filter((each) => each.startsWith('mine-')).length") == 1
        assert page.ask("document.querySelector('[data-chart=loss]').getBoundingClientRect().bottom <= innerHeight")
        assert page.ask("document.getElementById('controls').checkVisibility()") is False
        page.ask("document.getElementById('menu').click()")
        assert page.ask("document.getElementById('controls').checkVisibility()")
        assert_no_overflow(page)
        assert page.errors == []
