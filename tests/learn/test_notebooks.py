"""The notebooks of the course: each is what its page says, its code runs, and it prints what the page shows."""

from __future__ import annotations

import json
import re
import sys
import types
from pathlib import Path
from typing import Any

import nbformat
import pytest
from loaded_script import load_script

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "make_notebooks.py"
NOTEBOOKS = sorted((ROOT / "notebooks").glob("learn-*.ipynb"))
QUICK = {"learn-1-ranks", "learn-2-collectives", "learn-10-sequences"}  # a second or two of one core
SOME = [path if path.stem in QUICK else pytest.param(path, marks=pytest.mark.exhaustive) for path in NOTEBOOKS]


script = load_script(SCRIPT)


def cells_of(path: Path) -> list[dict[str, Any]]:
    cells: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return cells


def text_of(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def expected_after(cells: list[dict[str, Any]], place: int) -> str | None:
    """Returns what a cell of code prints, by the cell behind it; None where nothing is said."""
    after = cells[place + 1] if place + 1 < len(cells) else None
    if after is None or script.EXPECTED_TAG not in after["metadata"].get("tags", []):
        return None
    found = re.search(r"^```text\n(.*?)^```", text_of(after), re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


def test_the_notebooks_are_those_of_the_pages() -> None:
    assert not script.stale(), "run: python scripts/make_notebooks.py"


@pytest.mark.parametrize("path", SOME, ids=lambda path: path.stem)
def test_a_notebook_runs_and_prints_what_it_shows(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    module = types.ModuleType(path.stem.replace("-", "_"))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    cells = cells_of(path)
    for place, cell in enumerate(cells):
        if cell["cell_type"] != "code":
            continue
        exec(compile(text_of(cell), f"{path.name}:{cell['id']}", "exec"), vars(module))
        printed = capsys.readouterr().out
        expected = expected_after(cells, place)
        if expected is not None:
            assert printed == expected, cell["id"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")  # of the kernel's own packages
def test_a_real_kernel_runs_a_notebook(path: Path, tmp_path: Path) -> None:
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    book = nbformat.read(path, as_version=4)
    nbformat.validate(book)
    nbclient.NotebookClient(
        book, timeout=150, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    for place, cell in enumerate(book.cells):
        expected = expected_after(book.cells, place) if cell.cell_type == "code" else None
        if expected is not None:
            printed = "".join(each.text for each in cell.outputs if each.output_type == "stream")
            assert printed == expected, cell.id


# How pages become cells.

PAGE = """# Lesson 1: a page

See [the next](2-more.md#part), [a guide](../fsdp.md), [all](README.md),
[web](https://example.org/x.md) and [here](#try-it).

![A picture](../images/learn/ring.svg)

```python
print(1)
```

```text
1
```

Some shell:

```bash
ls
```

```text
not an output
```

## Exercises

**1.1** Write `halve`.

    paceline learn check 1.1 FILE.py

In Python: `learn.check("1.1", halve)`.

<details><summary>Hints</summary>

Try `paceline learn check 1.2 ANSWER`.

</details>

**1.3** Which? Run `paceline learn check 1.3 ANSWER`.
"""


def test_a_page_becomes_cells() -> None:
    cells = script.cells_of(PAGE)
    kinds = [("expected" if cell.is_expected else cell.kind) for cell in cells]
    assert kinds == ["markdown", "code", "expected", "markdown", "code", "markdown", "code", "markdown", "code"]
    assert cells[1].text == "print(1)"
    assert cells[2].text == "It prints:\n\n```text\n1\n```"
    assert "```bash\nls\n```" in cells[3].text
    assert "```text\nnot an output\n```" in cells[3].text
    assert cells[3].text.endswith("**1.1** Write `halve`.")  # the commands became the next cell
    assert cells[4].text.endswith('answer = ...  # the function halve that you wrote\nlearn.check("1.1", answer)')
    assert cells[5].text.endswith("</details>")  # a folded part stays whole
    assert cells[6].text.endswith('answer = ...  # your answer\nlearn.check("1.2", answer)')
    assert "paceline learn check 1.3" in cells[7].text


def test_links_lead_to_the_same_places() -> None:
    first = script.cells_of(PAGE)[0].text
    assert "[the next](learn-2-more.ipynb#part)" in first
    assert "[a guide](../docs/fsdp.md)" in first
    assert "[all](../docs/learn/README.md)" in first
    assert "[web](https://example.org/x.md)" in first
    assert "[here](#try-it)" in first
    assert "![A picture](../docs/images/learn/ring.svg)" in first


def test_an_exercise_that_the_code_of_the_page_checks_gets_no_second_cell() -> None:
    page = 'Do 1.1:\n\n    paceline learn check 1.1 ANSWER\n\n```python\nlearn.check("1.1", 3)\n```\n'
    assert [cell.text for cell in script.cells_of(page)] == ["Do 1.1:", 'learn.check("1.1", 3)']


def test_what_is_not_current_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "pages").mkdir()
    (tmp_path / "pages" / "1-a.md").write_text(PAGE)
    monkeypatch.setattr(script, "PAGES", tmp_path / "pages")
    monkeypatch.setattr(script, "NOTEBOOKS", tmp_path / "books")
    monkeypatch.setattr(sys, "argv", ["make_notebooks.py"])
    assert script.stale() == ["learn-1-a.ipynb"]
    assert script.main() == 0
    assert script.stale() == []
    nbformat.validate(nbformat.read(tmp_path / "books" / "learn-1-a.ipynb", as_version=4))
    (tmp_path / "books" / "learn-2-gone.ipynb").write_text("{}")
    (tmp_path / "books" / "learn-1-a.ipynb").write_text("{}")
    monkeypatch.setattr(sys, "argv", ["make_notebooks.py", "--check"])
    assert script.main() == 1
    assert capsys.readouterr().out.count("is not current") == 2
    monkeypatch.setattr(sys, "argv", ["make_notebooks.py"])
    assert script.main() == 0
    assert [path.name for path in (tmp_path / "books").iterdir()] == ["learn-1-a.ipynb"]


def test_the_same_page_gives_the_same_bytes() -> None:
    assert list(script.notebooks()) == list(script.notebooks())
