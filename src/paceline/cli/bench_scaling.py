"""``paceline bench scaling``: how a config scales, measured, simulated and predicted."""

from __future__ import annotations

from pathlib import Path

import typer

from paceline.cli.bench_options import AsJson, Output, chosen_of, numbers_of, show_record, tell
from paceline.cli.destination import check_picture
from paceline.cli.options import ConfigPath, Overrides, load_and_tell
from paceline.errors import UsageError


def scaling(
    config: ConfigPath,
    overrides: Overrides = None,
    ranks: str = typer.Option("1,2,4", help="Comma-separated numbers of ranks."),
    strategies: str = typer.Option(
        None, help="Comma-separated: ddp, zero1, zero2, fsdp, pipeline. Without it, that of the config."
    ),
    batch_sizes: str = typer.Option("64", help="Comma-separated: global batch (strong), samples of a rank (weak)."),
    modes: str = typer.Option("strong,weak", help="strong: the batch stays; weak: the samples of a rank stay."),
    steps: int = typer.Option(20, min=6, help="Steps of each run."),
    predict_to: int = typer.Option(0, min=0, help="Also predict for 1, 2, 4, ... up to so many ranks of --cluster."),
    cluster: str = typer.Option("dgx-h100", help="Whose devices and links predictions have."),
    plot: Path = typer.Option(
        None, callback=check_picture, metavar="FILE", help="Draw speed-up; .svg and .pdf go too."
    ),
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """See how a config scales with ranks, each row labelled.

    Measured on real ranks where this machine has a core or a GPU for each, simulated beyond, and predicted for a
    cluster. Efficiency is speed-up / ranks, among rows of the same kind. Each row also has the share of a step in which
    ranks wait for communication or other ranks, and the memory of a rank.

    Examples:

      paceline bench scaling configs/digits.yaml --ranks 1,2,4 --strategies ddp,fsdp --batch-sizes 32,64

      paceline bench scaling configs/gpt_pydoc.yaml --ranks 1,2 --strategies ddp,pipeline --modes strong

      paceline bench scaling configs/gpt_124m.yaml --ranks 1 --predict-to 256 --plot scaling.svg
    """
    import torch

    from paceline.bench.scaling import MODES, STRATEGIES, bench_scaling, cases, draw_rows, own_strategy
    from paceline.cluster.devices import load_cluster

    loaded = load_and_tell(config, overrides).config
    counts, batches = numbers_of("--ranks", ranks), numbers_of("--batch-sizes", batch_sizes)
    if not counts or not batches or 0 in counts + batches:
        raise UsageError("--ranks and --batch-sizes\n  they are numbers from 1 on\n  try --ranks 1,2 --batch-sizes 64")
    spread = chosen_of("--strategies", strategies or own_strategy(loaded), STRATEGIES)
    gpus = 0 if loaded.parallel.device == "cpu" else torch.cuda.device_count()
    todo = cases(counts, spread, batches, chosen_of("--modes", modes, MODES), gpus=gpus, to=predict_to)
    where = load_cluster(f"1x {cluster}") if predict_to else None
    settings = {"config": str(config), "overrides": overrides or [], "steps": steps, "cluster": cluster}
    rows = bench_scaling(loaded, todo, steps, where, tell)
    show_record("scaling", settings, [rows], output, as_json=as_json)
    if plot is not None:
        draw_rows(rows, plot, f"{loaded.name}: speed-up over ranks")
