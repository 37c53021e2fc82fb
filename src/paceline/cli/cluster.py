"""``paceline cluster``: what machines are known, what one of them is made of, and what this one is."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from paceline.cli.options import print_json
from paceline.terminal import echo
from paceline.units import format_bytes

if TYPE_CHECKING:
    from paceline.cluster.detect import Detected
    from paceline.cluster.devices import Cluster

app = typer.Typer(no_args_is_help=True, help="List known machines, and show what one is made of.")


@app.command("ls")
def list_known(as_json: bool = typer.Option(False, "--json", help="Print the names as JSON.")) -> None:
    """List the devices, nodes and networks of the catalog."""
    from paceline.cluster.devices import Catalog
    from paceline.cluster.entries import shipped

    known = shipped()
    if as_json:
        names = {kind: list(getattr(known, kind)) for kind in ("devices", "nodes", "networks", "links")}
        print_json(names)
        return
    echo(f"{'device':<20} {'memory':>10} {'bandwidth':>11} {'most':>18}  generation")
    for name in known.devices:
        device = Catalog().device(name)
        dtype = "fp32" if device.is_cpu else "bf16" if "bf16" in device.peak_flops else "fp16"
        rate = f"{device.ceiling(dtype) / 1e12:.4g} TFLOP/s"
        echo(
            f"{name:<20} {device.memory_bytes / 2**30:6.4g} GiB {device.memory_bandwidth / 1e9:6.4g} GB/s "
            f"{rate:>13} {dtype}  {device.generation}"
        )
    echo(f"\n{'node':<20} devices")
    for name, entry in known.nodes.items():
        node = Catalog().node(name)
        echo(f"{name:<20} {node.devices}x {node.device.name}, {node.inside.name}; {entry.network or 'no network'}")
    echo(f"\n{'network':<29} one way, a node")
    for name in known.networks:
        echo(f"{name:<29} {Catalog().network(name).bandwidth / 1e9:7.4g} GB/s")


@app.command()
def show(
    name: str | None = typer.Argument(
        None, metavar="NAME", help="Such as dgx-h100, 32x h100-sxm, or a file of calibrate; none: this machine."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print it as JSON."),
) -> None:
    """Show a cluster: its devices, links and network. Without a name: this machine."""
    from paceline.cluster.detect import detect_cluster, detect_machine
    from paceline.cluster.devices import load_cluster

    detected = detect_cluster(detect_machine()) if name is None else None
    cluster = detected.cluster if detected is not None else load_cluster(str(name))
    if as_json:
        found: dict[str, Any] = {} if cluster is None else {**asdict(cluster), "devices": cluster.devices}
        if detected is not None:
            found |= {"machine": asdict(detected.machine), "assumed": list(detected.assumed)}
        print_json(found)
        return
    if detected is not None:
        _show_machine(detected)
    if cluster is not None:
        _show(cluster)


def _show_machine(detected: Detected) -> None:
    machine = detected.machine
    gpus = ", ".join(machine.gpus) or "no GPU"
    echo(f"this machine: {machine.processor}, {machine.cores} cores, {format_bytes(machine.memory_bytes)}, {gpus}")
    for line in detected.assumed:
        echo(f"  assumed: {line}")


def _show(cluster: Cluster) -> None:
    device, inside, between = cluster.device, cluster.node.inside, cluster.between
    echo(f"{cluster.name}: {cluster.devices} devices, {cluster.nodes} x {cluster.node.devices} ({cluster.node.name})")
    echo(f"  device   {device.name}, {device.vendor} {device.generation}, {device.memory_bytes / 2**30:.4g} GiB")
    echo(f"  memory   {device.memory_bandwidth / 1e9:.4g} GB/s, of which kernels reach {device.memory_share:.0%}")
    for dtype, peak in device.peak_flops.items():
        most = (
            f"{device.matmul_ceiling[dtype] / 1e12:.4g} measured" if dtype in device.matmul_ceiling else "not measured"
        )
        echo(f"  {dtype:<8} {peak / 1e12:.4g} TFLOP/s dense, {most}")
    echo(f"  launch   {device.launch_s * 1e6:.3g} us eager, {device.compiled_launch_s * 1e6:.3g} us compiled")
    ring = inside.ring_bandwidth(cluster.node.devices)
    echo(
        f"  inside   {inside.name} ({inside.kind}): {inside.bandwidth / 1e9:.4g} GB/s one way, a ring reaches "
        f"{ring / 1e9:.4g}"
    )
    if between is not None:
        echo(f"  between  {between.name}: {between.bandwidth / 1e9:.4g} GB/s one way per node")
