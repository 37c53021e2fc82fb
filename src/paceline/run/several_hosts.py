"""``paceline train --nnodes``: one host's part in a run on several, which may come and go."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from paceline.errors import ConfigError, RunFolderError, UsageError

if TYPE_CHECKING:
    from paceline.config import Config
    from paceline.run.nodes import Nodes
    from paceline.run.warm import WarmRanks


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """What the command line says about hosts."""

    counts: str
    endpoint: str
    ranks: int | None


def launch_node(asked: Config, options: NodeOptions, *, force: bool, resume: str | None, as_json: bool) -> None:
    """Runs this host's ranks until the run is done, with as many other hosts as there are."""
    from paceline.cli.train import Place, find_place
    from paceline.run.nodes import is_in_use, parse_nodes
    from paceline.run.supervision import rank_modules, rank_threads
    from paceline.run.warm import warm_ranks

    if resume not in (None, "auto"):
        raise UsageError(
            f"--resume {resume} with --nnodes\n  hosts that come and go start from the run's newest checkpoint\n"
            "  use --resume auto"
        )
    folder = Path(asked.monitor.folder) / asked.name
    nodes = parse_nodes(options.counts, options.endpoint, run_id=asked.name, max_restarts=asked.recovery.max_restarts)
    is_guest = is_in_use(folder)
    place = Place(folder=folder) if is_guest else find_place(asked, force=force, resume=resume)
    threads = rank_threads(asked, options.ranks)
    with warm_ranks(rank_modules(asked), is_wanted=asked.recovery.warm, threads=threads) as warm:
        config, ranks = _resolve(asked, nodes, options.ranks)
        if is_guest:
            _join(config, folder, nodes, ranks, warm)
            return
        try:
            _run_as_first(config, place.folder, nodes, ranks, warm, force=force, as_json=as_json)
        except RunFolderError:
            if not is_in_use(folder):
                raise
            _join(config, folder, nodes, ranks, warm)  # another host's launcher came first, in between


def _resolve(asked: Config, nodes: Nodes, ranks: int | None) -> tuple[Config, int]:
    """Returns the config for the most hosts, and the ranks of this one. Raises ConfigError where any number fails."""
    from paceline.cli.train import check_host, resolve_config, resolve_strategy
    from paceline.config import check_ranks

    if asked.comm.backend == "virtual":
        raise UsageError("comm.backend = virtual with --nnodes\n  virtual ranks take turns in one process")
    own = asked.parallel.model_copy(update={"ranks": ranks or "auto"})
    here = resolve_config(asked.model_copy(update={"parallel": own}))
    per_node = here.parallel.ranks
    assert isinstance(per_node, int)
    everyone = here.parallel.model_copy(update={"ranks": per_node * nodes.most})
    config = asked.model_copy(update={"parallel": everyone})
    problems = {
        problem.what: problem
        for number in range(nodes.least, nodes.most + 1)
        for problem in check_ranks(config, per_node * number, per_node)
    }
    if problems:
        raise ConfigError(list(problems.values()), source="config")
    settled = resolve_strategy(config)[0]
    check_host(settled, per_node)
    return settled, per_node


def _join(config: Config, folder: Path, nodes: Nodes, ranks: int, warm: WarmRanks | None) -> None:
    typer.echo(f"paceline: joining the run in {folder} with {ranks} ranks", err=True)
    _run(config, folder, nodes, ranks, warm)


def _run_as_first(
    config: Config, folder: Path, nodes: Nodes, ranks: int, warm: WarmRanks | None, *, force: bool, as_json: bool
) -> None:
    """Makes the run's folder, runs, and tells what came of it."""
    from paceline.cli.train import Progress, how_to_continue, show_result
    from paceline.config import dump_yaml
    from paceline.run.failure import RunFailedError, RunPreemptedError
    from paceline.run.folder import claim_folder
    from paceline.run.hangs import forget_hangs
    from paceline.run.watch import forget_health

    is_continued = (folder / "config.yaml").is_file() and not force
    with claim_folder(folder, dump_yaml(config), force=force, resume=is_continued) as claimed:
        forget_hangs(folder)
        forget_health(folder, range(ranks * nodes.most))
        try:
            with Progress(folder, is_shown=config.monitor.console and not as_json):
                _run(config, folder, nodes, ranks, warm)
        except UsageError:
            claimed.discard()
            raise
        except RunPreemptedError as error:
            raise RunPreemptedError(f"{error}{how_to_continue(folder)}") from None
        except RunFailedError as error:
            raise RunFailedError(f"{error}{how_to_continue(folder)}", error.cause, error.code) from error
        show_result(folder, config, as_json=as_json)


def _run(config: Config, folder: Path, nodes: Nodes, ranks: int, warm: WarmRanks | None) -> None:
    from paceline.run.hangs import telling_restarts
    from paceline.run.local import launch_local
    from paceline.run.settings import rank_variables
    from paceline.run.supervision import rank_command, restart_policy

    uses_nccl = config.parallel.device == "cuda" and config.comm.backend in ("auto", "nccl")
    with telling_restarts(folder, restart_policy(config), lambda text: typer.echo(f"paceline: {text}", err=True)):
        launch_local(
            rank_command(folder, "auto", None, is_beside=True),
            folder,
            ranks=ranks,
            num_records=ranks * nodes.most,
            threads=config.parallel.threads,
            variables=rank_variables(config, uses_nccl=uses_nccl),
            warm=warm,
            nodes=nodes,
        )
