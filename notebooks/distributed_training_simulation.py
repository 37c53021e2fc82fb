# %% [markdown]
# # Four GPUs on one device: a simulation of distributed training
#
# This notebook trains a classifier on four GPUs that you do not need to have. Four *virtual ranks* take turns in one
# process, on a CPU or on one GPU. The training is real: data, gradients, all-reduces and losses are those of four
# processes. The time is simulated: every rank has a clock, which moves by what its kernels would take on an H100 and by
# what its messages would take on NVLink.
#
# You will see that four ranks compute what one computes, where the time of a step goes, how training scales with the
# number of GPUs, what one slow GPU costs, and how to start the same training on real GPUs.
#
# It runs in less than a minute on a laptop and leaves its pictures in the current folder. The script of the same name
# has the same cells: `python notebooks/distributed_training_simulation.py`.

# %%
import math

import paceline
from paceline import DistributedConfig, DistributedTrainingAnalyzer, SimulatedTrainer
from paceline.notebook import new_figure

CLUSTER = "4x h100-sxm"  # `paceline cluster ls` shows all that the catalog has


def keep(figure, path):
    """Saves a picture, and returns it so that the cell shows it."""
    if __name__ == "__main__":
        figure.savefig(path)
    return figure


# %% [markdown]
# ## Train on four GPUs
#
# `DistributedConfig` holds the settings. `batch_size` counts the samples of one step over all ranks, so each of the
# four ranks has 16 samples. `compute="modelled"` prices every kernel for the device of the cluster; the figures are
# then the same on every machine. With `compute="measured"` the clocks take what your own machine needs.


# %%
def simulate(ranks, batch_size=64, *, steps=3, epochs=1, **conditions):
    config = DistributedConfig(world_size=ranks, batch_size=batch_size, epochs=epochs, model_dim=128)
    config.learning_rate = 0.004
    config.dataset_size = steps * batch_size * 5 // 4  # a fifth of the samples is kept for evaluation
    trainer = SimulatedTrainer(config, cluster=conditions.pop("cluster", CLUSTER), compute="modelled", **conditions)
    return trainer, trainer.train()


trainer, metrics = simulate(4, steps=4, epochs=3)
for epoch, loss, accuracy in zip(metrics["epoch"], metrics["train_loss"], metrics["accuracy"], strict=True):
    print(f"epoch {epoch}: training loss {loss:.4f}, test accuracy {accuracy:.1%}")

# %% [markdown]
# ## Is it the same training?
#
# A rank computes the gradient of its own samples, and an all-reduce averages the gradients of all ranks. The average is
# the gradient of the whole batch, so the losses must be those of one rank with the same batch. Dropout is the one
# exception: every rank draws its own numbers. So the two losses of the last line below are near one another, and not
# equal. `paceline.verify` switches dropout off and compares losses, gradients and parameters after every step in
# float64:

# %%
import torch
from torch.nn.functional import cross_entropy


def make_batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(16, 20, generator=generator), torch.randint(4, (16,), generator=generator)


proof = paceline.verify(
    lambda: paceline.MLPClassifier(20, 32, 4), make_batch, cross_entropy, strategy="ddp", ranks=4, steps=2
)
print("four ranks compute what one process computes:", proof.passed)

_, alone = simulate(1, steps=4, epochs=3)
print(f"loss of the last epoch: {metrics['train_loss'][-1]:.3f} on four ranks, {alone['train_loss'][-1]:.3f} on one")

# %% [markdown]
# ## Where the time goes
#
# The picture is the last step. Each rank has two bars: the lower one is what it computes, and the upper one is its
# messages. A gap in the lower bar is time in which the rank waits.

# %%
COLOURS = {"data": "#999999", "forward": "#4c78a8", "backward": "#f58518", "optimizer": "#54a24b"}


def draw_step(trainer):
    clocks, steps = trainer.simulation.clocks, trainer.simulation.steps
    start, end = min(own[-1].start_s for own in steps), max(own[-1].end_s for own in steps)
    figure = new_figure(figsize=(10, 3.2), layout="constrained")
    axes = figure.subplots()
    for clock in clocks:
        for span in clock.spans:
            if span.end_s <= start or span.start_s >= end:
                continue
            bar = [(1e6 * (span.start_s - start), 1e6 * (span.end_s - span.start_s))]
            if span.row == "compute":
                axes.broken_barh(bar, (clock.rank - 0.1, 0.4), color=COLOURS.get(span.name, "#dddddd"))
            elif span.row == "communication":
                axes.broken_barh(bar, (clock.rank - 0.4, 0.25), color="#e45756")
    for name, colour in {**COLOURS, "all-reduce": "#e45756"}.items():
        axes.plot([], [], color=colour, linewidth=6, label=name)
    axes.set(xlabel="microseconds of the step", yticks=range(len(clocks)), title="one step, by rank")
    axes.set_yticklabels([f"rank {clock.rank}" for clock in clocks])
    axes.invert_yaxis()
    axes.legend(ncols=5, loc="upper center", bbox_to_anchor=(0.5, -0.2))
    return figure


keep(draw_step(trainer), "simulation-step.png")

# %% [markdown]
# The report adds all steps up and names the bottleneck. Speed-up and efficiency need the same training on one rank as a
# baseline: without it nobody knows how long one rank would take.

# %%
analyzer = DistributedTrainingAnalyzer(metrics, baseline=alone)
report = analyzer.generate_performance_report()
print(report)

# %% [markdown]
# Four GPUs are no faster than one here. The report gives the reason: the host needs longer to launch a kernel than the
# kernel of so small a model takes, and a quarter of the batch takes as many launches as the whole batch. The charts
# show the same by epoch:

# %%
keep(analyzer.plot_training_metrics(), "simulation-metrics.png")

# %% [markdown]
# ## How does it scale?
#
# There are two questions. *Strong* scaling keeps the batch, so each rank has less to do: how much sooner is the same
# training done? *Weak* scaling keeps the samples of a rank, so the batch grows: how many more samples pass in a second?
# Efficiency is the speed-up divided by the number of ranks; 100 % is ideal.

# %%
RANKS = (1, 2, 4)
one = simulate(1)[1].samples_per_s
rates = {
    "strong": [one, *(simulate(ranks)[1].samples_per_s for ranks in RANKS[1:])],
    "weak": [one, *(simulate(ranks, 64 * ranks)[1].samples_per_s for ranks in RANKS[1:])],
}
speed_ups = {name: [rate / found[0] for rate in found] for name, found in rates.items()}
print("ranks   strong: speed-up, efficiency   weak: speed-up, efficiency")
for ranks, strong, weak in zip(RANKS, *speed_ups.values(), strict=True):
    print(f"{ranks:5} {strong:12.2f} x {strong / ranks:10.0%} {weak:19.2f} x {weak / ranks:10.0%}")

# %% [markdown]
# Is that the simulation, or the model? A model that is worth four GPUs has enough work for each. The planner predicts
# the same two scalings for a GPT of 124 million parameters, by formulas whose errors on published runs stand in
# [docs/prediction.md](../docs/prediction.md):

# %%
gpt = {
    "model": {"kind": "gpt", "size": "gpt-124m", "vocab_size": 50304},
    "data": {"kind": "synthetic_tokens", "vocab_size": 50304, "context": 1024},
    "train": {"global_batch": 32, "precision": "bf16_master", "steps": 1000},
}
planned = paceline.plan(gpt, CLUSTER, gpus=RANKS)
for name, rows in planned.scaling.items():
    speed_ups[f"GPT-124M, {name}"] = [row.devices * row.efficiency for row in rows]
    print(f"{name:6}", ", ".join(f"{row.efficiency:.0%} on {row.devices}" for row in rows))


# %%
def draw_scaling():
    figure = new_figure(figsize=(10, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, found in speed_ups.items():
        label = name if "GPT" in name else f"classifier, {name}"
        efficiency = [100 * each / ranks for each, ranks in zip(found, RANKS, strict=True)]
        left.plot(RANKS, found, marker="o", label=label)
        right.plot(RANKS, efficiency, marker="o", label=label)
    left.plot(RANKS, RANKS, color="#999999", linestyle="--", label="ideal")
    left.set(xlabel="GPUs", ylabel="speed-up", xticks=RANKS)
    right.set(xlabel="GPUs", ylabel="efficiency, %", xticks=RANKS, ylim=(0, 105))
    left.legend()
    return figure


keep(draw_scaling(), "simulation-scaling.png")

# %% [markdown]
# ## How large is the all-reduce?
#
# A ring all-reduce of M bytes on N ranks sends 2 M (N - 1) / N bytes from every rank. The gradients here have 4 bytes a
# parameter. The engine sends about a hundred bytes more: it pads each tensor to 32 numbers, and adds one number for
# each tensor, which says whether any rank had a gradient for it. The clocks show how long the all-reduce took, and
# NCCL's cost model what such an all-reduce takes alone:

# %%
from paceline.cluster.devices import load_cluster
from paceline.cluster.wires import collective_seconds, group_of

spans = [span for span in trainer.simulation.clocks[0].spans if span.row == "communication"]
largest = max(spans, key=lambda span: span.num_bytes)
num_parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
cluster = load_cluster(CLUSTER)
alone_s = collective_seconds("all_reduce", largest.num_bytes, group_of(cluster, 4), cluster)
print(f"{num_parameters:,} parameters, an all-reduce of {largest.num_bytes:,} bytes")
print(f"{1e6 * (largest.end_s - largest.start_s):.1f} us on the clock, {1e6 * alone_s:.1f} us by the cost model")
assert math.isclose(largest.end_s - largest.start_s, alone_s, rel_tol=1e-6)

# %% [markdown]
# ## What does a slow GPU cost?
#
# All ranks wait for the last one at every all-reduce. So one slow GPU slows down all of them. Here rank 2 computes for
# twice as long:

# %%
slow_trainer, slow = simulate(4, slow={2: 2.0})
even = rates["strong"][RANKS.index(4)]
print(f"throughput falls to {slow.samples_per_s / even:.0%}, as if all four were slow")
for clock in slow_trainer.simulation.clocks:
    print(f"rank {clock.rank} waits {clock.wait_s / clock.now_s:.0%} of the time")

# %% [markdown]
# ## Now on real GPUs
#
# The same engine runs on real devices. On a machine with four GPUs this is one command, and nothing else changes:
#
#     paceline train configs/digits.yaml parallel.ranks=4
#     torchrun --standalone --nproc-per-node 4 -m paceline train configs/digits.yaml name=mine
#
# - [docs/simulation.md](../docs/simulation.md): the rules of the clocks, and what the simulation does not know
# - [docs/learn](../docs/learn/): the course, from one rank to planning a cluster
# - [docs/make-it-fast.md](../docs/make-it-fast.md): the same questions on a real run
