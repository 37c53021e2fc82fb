"""The notebook of four emulated GPUs: it has the cells of its script, and they run."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from make_simulation_notebook import NOTEBOOK, SCRIPT, cells_of, is_current, notebook_of  # noqa: E402


def test_the_notebook_has_the_cells_of_its_script() -> None:
    assert is_current(), "run python scripts/make_simulation_notebook.py"
    text = NOTEBOOK.read_text(encoding="utf-8")
    assert text == notebook_of(SCRIPT.read_text(encoding="utf-8"))
    kinds = [cell["cell_type"] for cell in json.loads(text)["cells"]]
    assert kinds.count("code") >= 8
    assert kinds[0] == "markdown"


def test_cells_are_those_between_the_marks() -> None:
    script = "# %% [markdown]\n# # Title\n#\n# text\n\n# %%\na = 1\n\n# %%\nprint(a)\n"
    assert list(cells_of(script)) == [("markdown", "# Title\n\ntext"), ("code", "a = 1"), ("code", "print(a)")]
    with pytest.raises(ValueError, match="begins with a line"):
        list(cells_of("a = 1\n# %%\n"))
    with pytest.raises(ValueError, match="each of its lines"):
        list(cells_of("# %% [markdown]\nno comment\n"))


def test_the_notebook_is_a_valid_one() -> None:
    nbformat = pytest.importorskip("nbformat")
    text = NOTEBOOK.read_text(encoding="utf-8")
    nbformat.validate(nbformat.reads(text, as_version=4))
    broken = json.loads(text)
    del broken["cells"][0]["cell_type"]
    with pytest.raises(nbformat.ValidationError):
        nbformat.validate(broken)


@pytest.mark.exhaustive
def test_its_cells_run_and_show_what_they_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    module = types.ModuleType("simulation_notebook")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for kind, content in cells_of(SCRIPT.read_text(encoding="utf-8")):
        if kind == "code":
            exec(compile(content, str(SCRIPT), "exec"), vars(module))
    found: Any = module
    assert "four ranks compute what one process computes: True" in capsys.readouterr().out
    losses = found.metrics["train_loss"]
    assert losses[-1] < losses[0]
    assert found.report.bottleneck.startswith("host")
    strong, weak = found.speed_ups["strong"], found.speed_ups["weak"]
    assert strong[-1] < 1.0 < 3.0 < weak[-1] < 4.0
    assert all(planned[-1] > 3.0 for name, planned in found.speed_ups.items() if "GPT" in name)
    assert found.slow.samples_per_s < 0.6 * found.even
    assert len(found.draw_scaling().axes) == 2
    assert len(found.draw_step(found.trainer).axes[0].collections) >= 4 * 4


@pytest.mark.exhaustive
def test_it_runs_in_a_kernel(tmp_path: Path) -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    notebook = nbformat.reads(NOTEBOOK.read_text(encoding="utf-8"), as_version=4)
    nbclient.NotebookClient(notebook, timeout=170, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    pictures = [output for output in outputs if "image/svg+xml" in output.get("data", {})]
    assert len(pictures) == 3
    assert sorted(path.name for path in tmp_path.glob("*.png")) == [
        "simulation-metrics.png",
        "simulation-scaling.png",
        "simulation-step.png",
    ]
