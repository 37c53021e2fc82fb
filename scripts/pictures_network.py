"""Pictures of lessons 2 and 9: the network of a cluster, level by level, and where the ranks of a mesh lie in it."""

from __future__ import annotations

from paceline.cluster.costs import Placement, host_link_bytes, sent_bytes
from paceline.cluster.devices import load_cluster
from paceline.cluster.wires import collective_seconds, group_of
from paceline.mesh import Mesh
from pictures_svg import MARGIN, WIDTH, Picture

CLUSTER, NUM_BYTES = "4x dgx-h100", 10**9
_NODES, _SHOWN = 4, 4  # GPUs of a node that are drawn

# The network.


def draw_topology() -> str:
    """Draws topology.svg."""
    cluster = load_cluster(CLUSTER)
    assert cluster.between is not None
    inside, between, devices = cluster.node.inside, cluster.between, cluster.node.devices
    picture = Picture(
        "The network of a cluster, level by level",
        f"Four nodes of {devices} H100, of which four GPUs are drawn. Inside a node a switch joins all GPUs. Each GPU "
        "has a network card; cards with the same number meet at one leaf switch, and spine switches join the leaves.",
        f"the catalog's {CLUSTER}",
    )
    top = picture.top + 10
    room = (WIDTH - 2 * MARGIN) / _NODES
    levels = [top + 4, top + 74, top + 150, top + 204, top + 262]
    centres = [MARGIN + room * (place + 0.5) for place in range(_NODES)]
    for x in centres:
        for other in centres:
            picture.line(x, levels[1], other, levels[0] + 24)
    for number, x in enumerate(centres):
        _switch(picture, x - 58, levels[0], 116, f"spine {number}", "d")
        _switch(picture, x - 58, levels[1], 116, f"leaf {number}", "c")
    for x in centres:
        picture.box(x - room / 2 + 8, levels[2] - 12, room - 16, levels[4] - levels[2] + 44, "panel", rx=8)
    for node, x in enumerate(centres):
        _draw_node(picture, node, x, room, centres, levels)
    y = levels[4] + 52
    ring, hosts = Placement(ranks=_NODES * devices), Placement(ranks=_NODES * devices, hosts=_NODES)
    seconds = collective_seconds("all_reduce", NUM_BYTES, group_of(cluster, _NODES * devices), cluster)
    gb, link = 1e9, host_link_bytes("hierarchical", NUM_BYTES, hosts)
    times = inside.bandwidth / (between.bandwidth / between.cards)
    rows = (
        ("d", "between leaves: nothing, if a ring stays on the cards of one number; else as much as a card"),
        (
            "c",
            f"a card: {between.bandwidth / between.cards / gb:.0f} GB/s, and {link / devices / gb:.2f} GB in an "
            "all-reduce of 1 GB that adds up inside each node first",
        ),
        (
            "a",
            f"a GPU in its node: {inside.bandwidth / gb:.0f} GB/s, {times:.0f} times a card; a ring of all ranks sends "
            f"{sent_bytes('ring', NUM_BYTES, ring, 0) / gb:.2f} GB",
        ),
        ("g", f"the whole all-reduce: {1e3 * seconds:.1f} ms, as NCCL is priced"),
    )
    for kind, words in rows:
        picture.box(MARGIN, y - 10, 13, 12, kind, rx=2)
        y = picture.paragraph(MARGIN + 20, y, words) + 4
    return picture.svg(y + 4)


def _switch(picture: Picture, x: float, y: float, width: float, name: str, kind: str) -> None:
    picture.box(x, y, width, 24, f"{kind} thin", rx=5)
    picture.text(x + width / 2, y + 16, name, "small ink mid")


def _draw_node(picture: Picture, node: int, x: float, room: float, centres: list[float], levels: list[float]) -> None:
    left, step = x - room / 2 + 8, (room - 16) / _SHOWN
    _switch(picture, left + 8, levels[4], room - 32, f"NVSwitch of node {node}", "a")
    for number in range(_SHOWN):
        at = left + step * (number + 0.5)
        if node in (0, _NODES - 1):  # of the others the lines are left out: they would hide the picture
            picture.line(at, levels[2], centres[number], levels[1] + 24, "wire dash" if node else "wire")
        picture.box(at - 17, levels[2], 34, 20, "c thin", rx=4)
        picture.text(at, levels[2] + 14, "card", "tiny ink mid")
        picture.line(at, levels[2] + 20, at, levels[3])
        picture.box(at - 17, levels[3], 34, 24, "a", rx=4)
        picture.text(at, levels[3] + 16, f"{_NODES * 2 * node + number}", "tiny on mid")
        picture.line(at, levels[3] + 24, at, levels[4])


# The mesh.

_DEGREES = {"pipeline": 2, "data": 2, "tensor": 8}
_COLOURS = "abcdefgh"


def draw_placement() -> str:
    """Draws placement.svg."""
    cluster = load_cluster(CLUSTER)
    picture = Picture(
        "Where the ranks of a mesh lie",
        f"32 ranks on four nodes: {', '.join(f'{axis} {size}' for axis, size in _DEGREES.items())}. Boxes of one "
        "colour are one tensor group. Left, ranks are numbered with the tensor axis innermost, as Paceline does, so "
        "that a tensor group is a node. Right, with it outermost: each of its all-reduces goes between the nodes.",
        "paceline.mesh, and the prices of paceline.cluster",
    )
    num_bytes = 2 * 4096 * 4096  # of one sample of gpt-7b between two layers, in bf16
    half, bottom = (WIDTH - 2 * MARGIN) / 2, 0.0
    for place, (name, order) in enumerate((("tensor innermost", 0), ("tensor outermost", 1))):
        sizes = _DEGREES if not order else dict(reversed(_DEGREES.items()))
        groups = Mesh.of(**sizes).groups("tensor")
        colour = {rank: _COLOURS[number] for number, group in enumerate(groups) for rank in group}
        stride = groups[0][1] - groups[0][0]
        seconds = collective_seconds("all_reduce", num_bytes, group_of(cluster, 8, stride), cluster)
        x, y = MARGIN + place * half, picture.top + 12
        picture.text(x, y, name, "name ink")
        for node in range(_NODES):
            top = y + 14 + 44 * node
            picture.box(x, top, half - 16, 36, "panel", rx=6)
            picture.text(x + 8, top + 22, f"node {node}", "small soft")
            for device in range(8):
                rank = 8 * node + device
                at = x + 60 + 36 * device
                picture.box(at, top + 6, 31, 24, colour[rank], rx=4, says=str(Mesh.of(**sizes).coordinates(rank)))
                picture.text(at + 15.5, top + 22, str(rank), "tiny on mid")
        words = f"an all-reduce of a tensor group, {num_bytes / 1e6:.0f} MB, four times in each block"
        words = f"{words}: {1e3 * seconds:.2f} ms, as NCCL is priced"
        bottom = picture.paragraph(x, y + 208, words, half - 20)
    return picture.svg(bottom + 10)
