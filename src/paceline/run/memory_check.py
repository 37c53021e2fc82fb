"""Whether this machine has room for a run, looked at before it starts: ``paceline train`` and ``paceline simulate``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from paceline.config import Config
    from paceline.search.memory_verdict import Need, Verdict

_ANYWAY = "to start it all the same: --no-memory-check"


def check_memory(config: Config, *, is_told: bool = True) -> None:
    """Tells of a run of this host that comes near the limit. Raises UsageError for one that cannot fit.

    Device, ranks and strategy are settled. What is not known beforehand is not judged: a microbatch that ranks find,
    virtual ranks, models of the user's own code. ``is_told``: of several ranks that look, one tells.
    """
    from paceline.search.memory_verdict import needed

    need = needed(config)
    if need is None:
        return
    verdict = _judge(config, need)
    if verdict.kind == "near" and is_told:
        typer.echo(f"paceline: near the limit of memory: {verdict}", err=True)
    if verdict.kind != "too large":
        return
    from paceline.cluster.detect import detect_machine
    from paceline.errors import UsageError
    from paceline.run.foretell import machine_entry
    from paceline.search.memory_verdict import ways_out

    machine = detect_machine(with_gpus=config.parallel.device == "cuda")
    lines = [f"out of memory: {verdict}", *ways_out(config, verdict, machine, machine_entry()), _ANYWAY]
    raise UsageError("\n  ".join(lines))


def check_virtual(config: Config) -> None:
    """Raises UsageError for virtual ranks whose states alone are more than there is; device and ranks are settled."""
    from paceline.errors import UsageError
    from paceline.search.memory_verdict import needed_in_turns

    need = needed_in_turns(config)
    if need is None:
        return
    verdict = _judge(config, need)
    if verdict.kind == "too large":
        raise UsageError(
            f"out of memory: {verdict}\n  virtual ranks share the memory of one process, and each has its own states\n"
            "  take fewer ranks (--ranks) or a smaller model; paceline predict tells time and memory without a run\n"
            f"  {_ANYWAY}"
        )


def _judge(config: Config, need: Need) -> Verdict:
    from paceline.search.memory_verdict import Verdict

    if config.parallel.device == "cuda":
        from paceline.free_memory import measure_room

        has = float(measure_room("cuda", 1, 1).device_bytes)
        return Verdict(need=need, where="the smallest GPU", has_bytes=has, free_bytes=has)
    import psutil

    from paceline.cluster.detect import host_memory

    return Verdict(
        need=need, where="this host", has_bytes=host_memory(), free_bytes=float(psutil.virtual_memory().available)
    )
