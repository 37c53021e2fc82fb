"""Who a rank talks to: every group of ranks, by the question that it answers. The only place that makes them.

    batch              who reads other samples than I do?                replicate x shard
    gradients          over whom is a parameter's gradient averaged?     replicate x shard x context
    shard              who holds other slices of my parameters?          shard, with context where they are cut so
    replicate          who holds the same slices?                        those of gradients that are not in shard
    context            who has other tokens of my samples?               context
    pipeline, tensor   who has other layers, other parts of my layers?   pipeline, tensor
    expert             who holds other experts?                          neighbours among gradients
    expert_gradients   over whom is an expert's gradient averaged?       those of gradients that hold the same experts
    expert_shard       who holds other slices of my experts?             those of shard that hold the same experts
    expert_replicate   who holds the same slices of my experts?          those of replicate that hold the same experts

Experts have no axis of their own: they are laid over the ranks of ``gradients``, which are data-parallel for the dense
layers. A new axis of the mesh gets its place in ``Layout.mesh``, and its questions a line here.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from paceline.plan.layout import Layout

Ranks = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroups:
    """The groups of one rank, each in the order of the ranks, with the rank itself among them."""

    world: Ranks
    batch: Ranks
    gradients: Ranks
    shard: Ranks
    replicate: Ranks
    context: Ranks
    pipeline: Ranks
    tensor: Ranks
    expert: Ranks
    expert_gradients: Ranks
    expert_shard: Ranks
    expert_replicate: Ranks

    def names(self) -> dict[Ranks, str]:
        """Returns what records call the groups of several ranks: the whole world, then axes, then ``data``."""
        found = {self.world: "world"}
        for name in ("pipeline", "replicate", "shard", "context", "tensor"):
            ranks: Ranks = getattr(self, name)
            if len(ranks) > 1:
                found.setdefault(ranks, name)
        if len(self.gradients) > 1:
            found.setdefault(self.gradients, "data")
        return found


GROUP_NAMES = tuple(field.name for field in fields(RankGroups))


def groups_of(layout: Layout, rank: int) -> RankGroups:
    """Returns the groups of a rank; the layout says how many ranks there are (``Layout.for_ranks``)."""
    mesh = layout.mesh
    gradients = mesh.group(rank, "replicate", "shard", "context")
    shard = mesh.group(rank, *(("shard", "context") if layout.shards_over_context else ("shard",)))
    replicate = mesh.group(rank, *(("replicate",) if layout.shards_over_context else ("replicate", "context")))
    place = gradients.index(rank)
    first = place - place % layout.expert
    same_experts = gradients[place % layout.expert :: layout.expert]
    return RankGroups(
        world=tuple(range(mesh.size)),
        batch=mesh.group(rank, "replicate", "shard"),
        gradients=gradients,
        shard=shard,
        replicate=replicate,
        context=mesh.group(rank, "context"),
        pipeline=mesh.group(rank, "pipeline"),
        tensor=mesh.group(rank, "tensor"),
        expert=gradients[first : first + layout.expert],
        expert_gradients=same_experts,
        expert_shard=tuple(each for each in shard if each in same_experts),
        expert_replicate=tuple(each for each in replicate if each in same_experts),
    )
