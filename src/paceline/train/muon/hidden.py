"""Which parameters are matrices of hidden layers: those that Muon updates. AdamW updates all others.

Not of a hidden layer are embeddings and the output layer, which are known by their names. In a model that has no such
names the first and the last matrix are the input and the output layer.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase

from paceline.errors import UsageError

_END = re.compile(r"(^|\.)([^.]*emb[^.]*|wte|wpe|[^.]*heads?|score|classifier|shared)(\.|$)")


def hidden_matrices(
    shapes: Mapping[str, tuple[int, ...]], patterns: Sequence[str] | None = None, others: Collection[str] = ()
) -> set[str]:
    """Returns the names of the matrices of hidden layers among parameters, given in the model's order.

    ``patterns`` (as of file names) are the names that AdamW updates, in place of the rule. ``others`` are names of the
    same model's parameters on other ranks. Raises UsageError if there are none, or if the rule cannot tell.
    """
    matrices = [name for name, shape in shapes.items() if len(shape) == 2]
    if patterns is not None:
        found = {name for name in matrices if not any(fnmatchcase(name, pattern) for pattern in patterns)}
    elif any(_END.search(name) for name in (*shapes, *others)):
        found = {name for name in matrices if not _END.search(name)}
    elif set(others) - set(shapes):
        raise UsageError(
            "optim.kind = muon cannot tell the input and the output layer of a model whose layers lie on other ranks\n"
            "  AdamW updates them, and none has the name of an embedding or a head\n"
            "  name them in optim.muon.adamw_for, as patterns such as ['layers.0.*', 'layers.7.*']"
        )
    else:
        found = set(matrices[1:-1])
    if not found and not others:
        raise UsageError(
            f"optim.kind = muon has nothing to do: none of {len(shapes)} parameters is a matrix of a hidden layer\n"
            "  Muon updates 2-d weights other than embeddings and the layers at both ends of a model\n"
            "  set optim.kind = adamw, or say with optim.muon.adamw_for which names AdamW updates"
        )
    return found
