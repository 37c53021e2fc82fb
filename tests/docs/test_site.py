"""The book: every page is reached, every link leads somewhere, and the reference has every verb, key and name."""

from __future__ import annotations

import importlib
import inspect
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import pytest
import typer.main
from pydantic import BaseModel

import paceline
from paceline.cli.app import app
from paceline.config import Config

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
_FENCE = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)


@pytest.fixture
def contents(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("contents")


def read(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


# The reference.


def test_the_reference_is_what_the_code_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    stale = importlib.import_module("make_reference").out_of_date()
    names = [path.relative_to(ROOT).as_posix() for path in stale]
    assert not names, f"{names} are out of date: run python scripts/make_reference.py"


def verbs_of(command: Any, words: str) -> Iterator[tuple[str, Any]]:
    inner = getattr(command, "commands", None)
    if inner is None:
        yield words, command
    else:
        for name, each in inner.items():
            yield from verbs_of(each, f"{words} {name}")


def test_every_verb_and_every_option_is_in_the_reference() -> None:
    page = read("reference/cli.md")
    for words, command in verbs_of(typer.main.get_command(app), "paceline"):
        _, heading, rest = page.partition(f"# {words}\n")
        assert heading, f"{words} is missing"
        text = re.split(r"^#+ ", rest, maxsplit=1, flags=re.MULTILINE)[0]
        for option in (
            name
            for each in command.params
            if not getattr(each, "hidden", False)
            for name in each.opts
            if name.startswith("--")
        ):
            assert re.search(rf"{option}\b", text), f"{words} {option} is missing"


def models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for each in get_args(annotation) for model in models_in(each)]


def keys_of(model: type[BaseModel], place: str = "") -> Iterator[str]:
    """Yields every key below a section, by the annotations: unions and sections by name too."""
    for name, field in model.model_fields.items():
        path = f"{place}{name}"
        inner = models_in(field.annotation)
        below = f"{path}.NAME." if "dict" in str(field.annotation) else f"{path}."
        if not inner or below.endswith("NAME."):
            yield path
        if path != "data.sources":  # whose sections are those of data itself
            yield from (key for each in inner for key in keys_of(each, below))


def test_every_key_of_the_config_is_in_the_reference() -> None:
    page = read("reference/config.md")
    keys = set(keys_of(Config))
    assert {"monitor.trace", "comm.nccl.ib_hca", "optim.groups.NAME.lr", "model.lora.rank", "data.eval_samples"} <= keys
    missing = [key for key in sorted(keys) if f"| `{key}` |" not in page and f"`{key}` says which" not in page]
    assert not missing


def test_every_public_name_is_in_the_reference_with_its_parameters() -> None:
    page = read("reference/api.md")
    for name in paceline.__all__:
        value = getattr(paceline, name)
        if not callable(value):
            assert f"paceline.{name}" in page
            continue
        _, heading, rest = page.partition(f"\n## paceline.{'classic.' * (name in dir(paceline.classic))}{name}\n")
        assert heading, f"{name} is missing"
        if inspect.isfunction(value):
            signature = rest.partition("```text\n")[2].partition("```")[0]
            assert all(re.search(rf"\b{each}\b", signature) for each in inspect.signature(value).parameters), name
            assert (inspect.getdoc(value) or "").splitlines()[0].replace("``", "`") in rest


# The order of the pages.


def test_the_parts_of_the_book_come_in_the_order_in_which_they_are_read(contents: ModuleType) -> None:
    captions = [part.caption for part in contents.read_contents(DOCS) if part.caption != "The course"]
    assert captions[0] == "Start"
    assert captions[-3:] == ["Reference", "How it is built", "Figures"]
    assert all(caption.startswith("Guide: ") for caption in captions[1:-3])


def test_every_page_is_in_the_contents_once(contents: ModuleType) -> None:
    listed = [page.path for part in contents.read_contents(DOCS) for page in part.pages]
    assert len(listed) == len(set(listed))
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")} - {"index.md"}
    assert not pages - set(listed), "name them in docs/contents.yaml"


def test_a_pattern_takes_what_no_entry_names_and_a_missing_page_is_left_out(
    contents: ModuleType, tmp_path: Path
) -> None:
    (tmp_path / "learn").mkdir()
    for name in ("learn/2-two.md", "learn/10-ten.md", "first.md", "other.md"):
        (tmp_path / name).write_text(f"# {name}: a title that is longer than the column of the book\n")
    (tmp_path / "contents.yaml").write_text(
        "- {caption: A, pages: {'*.md': , gone.md: never}}\n- {caption: B, pages: {learn/*.md: , first.md: about it}}\n"
    )
    first, second = contents.read_contents(tmp_path)
    assert [page.path for page in first.pages] == ["other.md"]
    assert [page.path for page in second.pages] == ["learn/2-two.md", "learn/10-ten.md", "first.md"]
    assert second.pages[2].about == "about it"
    assert second.pages[2].short_title == "first.md"
    with pytest.raises(ValueError, match="has no lines"):
        contents.with_contents("# No marks", tmp_path)


def test_a_page_without_a_heading_is_refused(contents: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("no heading\n")
    with pytest.raises(ValueError, match=r"page\.md has no heading"):
        contents.title_of(tmp_path / "page.md")


# Links.


def anchors_of(page: Path) -> set[str]:
    """Returns the anchors that a Git host gives the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", _FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", each).replace("\\", "") for each in headings)
    return {re.sub(r"[^\w\- ]", "", each.lower()).strip().replace(" ", "-") for each in plain}


def broken_links(pages: list[Path]) -> Iterator[str]:
    for page in pages:
        for target in re.findall(r"\]\(([^)\s]+)\)", _FENCE.sub("", page.read_text(encoding="utf-8"))):
            path, _, anchor = target.partition("#")
            if "://" in target or target.startswith("mailto:"):
                continue
            found = (page.parent / path).resolve() if path else page
            if not found.exists() or (anchor and found.suffix == ".md" and anchor not in anchors_of(found)):
                yield f"{page.name}: {target}"


def test_every_link_leads_to_a_page_and_a_heading() -> None:
    assert not list(broken_links([*DOCS.rglob("*.md"), *ROOT.glob("*.md")]))


def test_a_link_to_a_heading_that_is_not_there_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("# One\n\n[right](b.md#two-words) [wrong](b.md#three) [gone](c.md)\n")
    (tmp_path / "b.md").write_text("# Two `words`\n")
    assert list(broken_links([tmp_path / "a.md"])) == ["a.md: b.md#three", "a.md: c.md"]


# The built pages.


def build(source: Path, built: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-c", source / "docs", source, built]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("furo", reason="the extra docs is not installed")
    built = tmp_path_factory.mktemp("site")
    done = build(ROOT, built)
    assert done.returncode == 0, done.stderr
    return built


@pytest.mark.exhaustive
def test_the_book_is_built_without_a_warning_and_has_every_page(site: Path) -> None:
    pages = [path.relative_to(ROOT).with_suffix(".html") for path in DOCS.rglob("*.md")]
    assert not [page for page in pages if not (site / page).is_file()]
    assert 'url=docs/index.html"' in (site / "index.html").read_text(encoding="utf-8")
    start = (site / "docs" / "index.html").read_text(encoding="utf-8")
    assert "toctree" not in re.sub(r'class="[^"]*"', "", start)
    assert not [page for page in pages if page.name != "index.html" and page.name not in start]


@pytest.mark.exhaustive
def test_the_book_loads_nothing_from_elsewhere(site: Path) -> None:
    loaded = re.compile(
        r"<(?:script|link|img|iframe|source)\b[^>]*(?:src|href)=\"(https?:)?//|url\(['\"]?https?://|@import"
    )
    files = [path for path in site.rglob("*") if path.suffix in (".html", ".css")]
    assert len(files) > 40
    assert not [path.name for path in files if loaded.search(path.read_text(encoding="utf-8"))]


def shown(address: str) -> str:
    """Returns a page of the site as a browser has it behind its scripts."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("no Chromium (make browser)")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=10000", "--dump-dom"]
    return subprocess.run([browser, *options, address], capture_output=True, text=True, check=True, timeout=120).stdout


def found_by(site: Path, words: str) -> list[str]:
    """Returns the pages that the search of the site finds, the best first."""
    results = shown(f"file://{site}/search.html?q={words}").partition('id="search-results"')[2]
    return re.findall(r'<a href="([^"#]+)[^"]*" data-score', results)


@pytest.mark.exhaustive
def test_the_search_finds_a_key_from_a_file(site: Path) -> None:
    assert "docs/reference/config.html" in found_by(site, "monitor.trace")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("hang", "verdicts"),
        ("gradient+accumulation", "convert"),
        ("checkpoint", "checkpoints"),
        ("straggler", "verdicts"),
        ("memory", "memory"),
    ],
)
def test_the_search_finds_the_page_about_it_first(site: Path, words: str, page: str) -> None:
    assert found_by(site, words)[0] == f"docs/{page}.html"


@pytest.mark.exhaustive
def test_each_block_of_code_has_a_button_that_copies_it(site: Path) -> None:
    page = shown(f"file://{site}/docs/start.html")
    assert page.count('class="copy"') == len(re.findall(r'<div class="highlight">', page)) > 10


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("text", "words"),
    [("[gone](gone.md)", "gone.md"), ("[gone](index.md#gone)", "gone"), ("![alt](gone.svg)", "gone.svg")],
)
def test_a_link_that_leads_nowhere_fails_the_build(tmp_path: Path, text: str, words: str) -> None:
    pytest.importorskip("furo", reason="the extra docs is not installed")
    docs = tmp_path / "docs"
    docs.mkdir()
    for name in ("_static", "_root"):
        shutil.copytree(DOCS / name, docs / name)
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "contents.py", tmp_path / "scripts")
    shutil.copy(DOCS / "conf.py", docs)
    (docs / "contents.yaml").write_text("- {caption: A, pages: {a.md: about}}\n")
    (docs / "index.md").write_text("# Index\n")
    (docs / "a.md").write_text("# A\n\n[fine](index.md#index)\n")
    assert build(tmp_path, tmp_path / "built").returncode == 0
    (docs / "a.md").write_text(f"# A\n\n{text}\n")
    done = build(tmp_path, tmp_path / "built")
    assert done.returncode != 0
    assert words in done.stderr
