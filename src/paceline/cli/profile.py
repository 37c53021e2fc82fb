"""``paceline profile``: real ranks under torch's profiler, as one time line."""

from __future__ import annotations

import os
from pathlib import Path

import typer

from paceline.cli.destination import check_file
from paceline.cli.options import ConfigPath, Overrides, load_and_tell, print_json
from paceline.errors import UsageError
from paceline.terminal import echo


def profile(
    config: ConfigPath,
    overrides: Overrides = None,
    steps: int = typer.Option(3, min=1, help="Steps to profile, after a warm-up of three."),
    output: Path = typer.Option(
        Path("trace.json"), callback=check_file, help="File for the time line; compressed if it ends in .gz."
    ),
    beside: list[Path] = typer.Option(
        [], metavar="TRACE", help="A time line of simulate or predict to lay beside it; may be repeated."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print the summary as JSON."),
) -> None:
    """Profile a few steps of real ranks as one time line."""
    if "RANK" in os.environ:
        raise UsageError("paceline profile starts its ranks itself\n  run it without torchrun")
    from paceline.chrome_trace import write_events
    from paceline.profile.merge import beside as lay_beside
    from paceline.profile.merge import merged_events
    from paceline.profile.run import profile_run
    from paceline.profile.summary import summarize_profile
    from paceline.run.scratch import scratch_folder
    from paceline.run.variables import PROFILE

    asked = load_and_tell(config, overrides).config
    for path in beside:
        lay_beside([], path)  # what is no trace is refused before anything runs
    with scratch_folder() as folder:
        os.environ[PROFILE] = str(folder)
        try:
            ranks = profile_run(asked, steps, Path(folder))
        finally:
            del os.environ[PROFILE]
    found = summarize_profile(ranks)
    events = merged_events(ranks)
    for path in beside:
        events = lay_beside(events, path)
    write_events(output, events, {"kind": "measured", "name": asked.name, "step_s": found.step_s})
    if as_json:
        print_json(found.to_json() | {"trace": str(output)})
        return
    for line in [*found.lines(), "", f"The time line is in {output}: open it in ui.perfetto.dev."]:
        echo(line)
