"""Results in a notebook: short as text, tables and charts as HTML, and a real kernel that trains from a cell."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import paceline
from paceline.errors import UsageError
from paceline.imports import import_from_path
from paceline.notebook import Shown, cell_display, curve, new_figure, show_bar, table

_CONFIG = {
    "name": "cell",
    "model": {"kind": "mlp", "hidden_dim": 16},
    "data": {"kind": "synthetic_classification", "samples": 64, "features": 8},
    "train": {"steps": 8, "global_batch": 16},
    "parallel": {"ranks": 1, "device": "cpu"},
}


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Result(Shown):
    """A result with more in it than anybody wants to read."""

    loss: float
    everything: tuple[int, ...]

    def facts(self) -> dict[str, object]:
        return {"loss": self.loss, "run": "<b>mine</b>", "accuracy": None}


def test_dir_is_the_public_names() -> None:
    assert dir(paceline) == sorted(paceline.__all__)


def test_completion_knows_names_that_are_not_loaded() -> None:
    script = "import paceline, sys; assert 'Muon' in dir(paceline); assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_a_result_is_one_short_line_and_a_table() -> None:
    result = Result(loss=0.123456789, everything=tuple(range(10_000)))
    assert repr(result) == "<Result: loss 0.1235, run <b>mine</b>>"
    assert len(repr([result] * 10)) < 500
    page = result._repr_html_()
    assert "<table>" in page
    assert "&lt;b&gt;mine&lt;/b&gt;" in page
    assert "accuracy" not in page


def test_a_curve_is_a_small_picture_whatever_its_length() -> None:
    long = curve("loss <1>", [1 / (step + 1) for step in range(100_000)])
    assert long.startswith("<figure")
    assert "loss &lt;1&gt;: 1 to 1e-05" in long
    assert len(long) < 10_000
    assert curve("loss", [1.0, None, float("nan"), 0.5]).count("polyline") == 1
    assert curve("loss", [1.0]) == curve("loss", []) == ""
    assert "nan" not in curve("flat", [2.0, 2.0])


def test_a_table_aligns_numbers_and_escapes() -> None:
    assert table(("a", "b"), [("<x>", 1.0)]).count("&lt;x&gt;") == 1


def test_a_figure_shows_itself() -> None:
    pytest.importorskip("matplotlib")
    figure: Any = new_figure(figsize=(1, 1))
    assert "<svg" in figure._repr_svg_()


def test_a_bar_is_html_and_text() -> None:
    class Cell:
        content: Any = None

        def update(self, content: Any, *, raw: bool) -> None:
            assert raw
            self.content = content

    cell = Cell()
    show_bar(cell, 1.5, "step <3>")
    assert cell.content["text/plain"] == "step <3>"
    assert 'value="1.0000"' in cell.content["text/html"]
    assert "&lt;3&gt;" in cell.content["text/html"]
    assert cell_display() is None  # no kernel here


@pytest.mark.exhaustive
def test_a_simulation_is_short(tmp_path: Path) -> None:
    del tmp_path
    from paceline.config import config_from_dict

    trainer = paceline.SimulatedTrainer(config_from_dict(_CONFIG))
    metrics = trainer.train()
    assert len(repr(trainer.simulation)) < 500
    assert "polyline" in trainer.simulation._repr_html_()  # type: ignore[union-attr]
    assert "<table>" in metrics._repr_html_()
    report = paceline.DistributedTrainingAnalyzer(metrics).generate_performance_report()
    assert "bottleneck" in report._repr_html_()


def test_a_config_cannot_name_what_a_cell_defines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))  # a kernel's has no file
    with pytest.raises(UsageError, match=r"model\.factory = '__main__:Net'(.|\n)*paceline\.run_ranks"):
        import_from_path("__main__:Net", "model.factory")


@pytest.mark.exhaustive
def test_a_kernel_trains_from_a_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real kernel: completion, a run with its bar in the cell, its result as a table, a picture without a magic."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    cells = [
        "import paceline; from paceline.config import config_from_dict",
        "from IPython.core.completer import provisionalcompleter\n"
        "with provisionalcompleter():\n"
        "    found = [each.text for each in get_ipython().Completer.completions('paceline.tr', 11)]\n"
        "found",
        f"result = paceline.train(config_from_dict({_CONFIG!r})); result",
        "[result] * 3",
        "paceline.DistributedTrainingAnalyzer(result.folder).plot_training_metrics()",
        "import torch\n"
        "class Net(torch.nn.Linear):\n    pass\n"
        "def train(comm):\n"
        "    engine = paceline.parallelize(Net(4, 1), comm)\n"
        "    engine(torch.ones(2, 4)).mean().backward()\n"
        "    comm.print('on', comm.size, 'ranks')\n"
        "    return engine.module, engine.module.weight.grad.tolist()",
        "[(type(module) is Net, found) for module, found in paceline.run_ranks(train, 2)]",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in cells])
    client = nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}})
    with monkeypatch.context() as patch:
        patch.delenv("PYTEST_CURRENT_TEST")  # a kernel of a test leaves the output of processes alone
        client.execute()
    outputs = [cell["outputs"] for cell in notebook["cells"]]
    assert "train" in outputs[1][0]["data"]["text/plain"]
    bar, shown = (each for each in outputs[2] if each["output_type"] in ("display_data", "execute_result"))
    assert "<progress" in bar["data"]["text/html"]
    assert "step 8/8" in bar["data"]["text/plain"]
    assert "training loss" in shown["data"]["text/html"]
    assert len(outputs[3][0]["data"]["text/plain"]) < 2000
    assert "<svg" in outputs[4][-1]["data"]["image/svg+xml"]
    assert outputs[6][0]["text"] == "on 2 ranks\n"
    assert outputs[6][-1]["data"]["text/plain"] == str([(True, [[1.0] * 4])] * 2)
