"""``paceline calibrate``: what is wrong is refused before anything is told or measured."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.cli.app import app
from paceline.errors import UsageError

runner = CliRunner()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--device", "tpu"], "a device is cpu or cuda"),
        (["--ranks", "9999", "--device", "cpu"], "9999 ranks on"),
        (["--name", ""], "--name ''"),
        (["--name", " - "], "letters and digits of its name"),
        (["--output", "m.txt"], "try m.yaml"),
        (["--from", "runs/digits", "--ranks", "2"], "--ranks beside --from runs/digits"),
        (["--from", "runs/digits", "--name", "x", "--noisy"], "leave out --name and --noisy, or --from"),
        (["--cluster", "mine.yaml"], "--cluster without --from"),
        (["--from", "runs/digits", "--for", "digits"], "--from beside --for"),
        (["--for", "digits", "--noisy"], "--noisy beside --for digits\n  the config says what is measured"),
        (["train.steps=3"], "train.steps=3 without a config"),
    ],
)
def test_options_are_looked_at_first(options: list[str], told: str) -> None:
    found = runner.invoke(app, ["calibrate", *options])
    assert isinstance(found.exception, UsageError)
    assert told in str(found.exception)
    assert "measuring" not in found.output


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    found = runner.invoke(app, ["calibrate", "--from", str(tmp_path)])
    assert isinstance(found.exception, UsageError)
    assert "is no run: it has no config.yaml" in str(found.exception)
