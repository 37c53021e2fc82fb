"""What one block of a transformer, and its two ends, take on one rank: device time, host time, tensor-parallel waits.

For t tokens of a microbatch on a rank, width h, MLP width f, tensor degree T:

    products     (t, h) by (h, (q + kv)/T), (t, q/T) by (q/T, h), and the MLP's by f/T; backward two of each
    attention    4 t s q / T FLOPs, half of them where it is causal; backward 2.5 times that where fused, else twice
    memory       passes x t x (h or f/T) x bytes: norms, residuals, activation functions; unfused scores too
    experts      of E with k active on N ranks: (N t k / E + 64, h) by (h, 2 f/T) for each of a rank's E/N, in one
                 kernel; t k h elements there and back, (N-1)/N of them to other ranks (uneven: formulas/uneven.py)
    waits        two all-reduces of t h elements forward, two backward, and two more for each recomputed forward
    head         (t, h) by (h, V/T), and passes over the logits: ``logits`` bytes for each, forward and backward
                 together; T > 1 sums t h elements twice more: what the embedding's parts hold, and the gradient of the
                 head's input

Logits of Megatron are converted to fp32 (6 bytes), and their maximum (4), difference (8), exponential (8), sum (4) and
quotient (8) are kernels of their own, as are the gradient's scale (8) and its way back to 16 bits (6): 52 bytes, and 60
in its first versions, which copy them before (tensor_parallel/cross_entropy.py); 56 here. Scores of unfused attention
go through memory 4.5 times where mask, scale and softmax are one kernel, dropout included, and 8.5 times where they are
not; 6 here. Both were chosen between these counts on rows of the split dev. A fused loss
reads and writes them once each way. With sequence parallelism the passes over h are cut by T as well. Blocks of shapes
that published runs measured take what they took there (predict/formulas/constants.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.cluster.devices import Cluster
from paceline.cluster.kernels import (
    ATTENTION_BACKWARD,
    TILE,
    attention_rate,
    attention_seconds,
    long_attention_seconds,
    matmul_rate,
    matmul_seconds,
    memory_seconds,
    todays_attention_seconds,
)
from paceline.cluster.sequence_costs import AttentionWork, sequence_split, sequence_waits, share_of_pairs
from paceline.cluster.wires import Collective, Group, collective_seconds, group_of, wire_cost
from paceline.plan.layout import groups_of
from paceline.plan.workload import Compute, Framework, Workload
from paceline.predict.formulas.constants import Constants, Factors, shape_of
from paceline.predict.formulas.uneven import busiest_share
from paceline.schedule.ring import SequenceSplit


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPasses:
    """How often a block's forward reads or writes an element, by how much a framework fuses; and its kernels.

    ``optimizer_bytes``: of a parameter, in a step of Adam: 28 in fp32, and Megatron's converts gradient and weights, 8.
    """

    hidden: float
    ffn: float
    gate: float
    scores: float
    logits: float
    kernels: int
    optimizer_bytes: float


PASSES: dict[Framework, MemoryPasses] = {
    "eager": MemoryPasses(hidden=16, ffn=4, gate=3, scores=8, logits=26, kernels=30, optimizer_bytes=48),
    "compiled": MemoryPasses(hidden=9, ffn=2, gate=1, scores=4, logits=18, kernels=12, optimizer_bytes=36),
    "megatron": MemoryPasses(hidden=12, ffn=2, gate=1, scores=6, logits=56, kernels=26, optimizer_bytes=36),
}
BACKWARD_PASSES = 1.6
MASKED = 0.15
FUSED_LOGITS = 16
SOFTNESS = 4.0  # of the larger of device and host time: infinite would be the larger one alone
_ATTENTION = ("attention", "attention_backward")
# Passes over experts' rows where they have a bias. Megatron clamps the halves of a gate one by one, and adds the bias
# times a row's weight in fp32 (transformer/moe/experts.py): 8 and 14 passes of 2 bytes, all in kernels of torch.
EXPERT_BIAS = 22
_MERGED = 10  # bytes: a number in bf16, and a sum in fp32 that is read and written
EXPERT_KERNELS = 60  # more in a block with experts: router, permutations, grouped products; graphs of layers lack them
# Of a collective, until it moves bytes, beside the latency that NCCL counts itself (cluster/wires.py): all-reduces of
# nccl-tests on A100 take 46 us (2 GPUs) to 81 us (8) before bytes count, 31 to 25 us more than that.
CALL_S = 28e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCost:
    """Seconds of one direction: on the device, on the host, and waiting for tensor-parallel and expert ranks."""

    device: float
    host: float
    wait: float = 0.0

    @property
    def seconds(self) -> float:
        """The longer of device and host and a little of the other: some kernels outlast their launch, some do not."""
        device = self.device + self.wait
        return float((device**SOFTNESS + self.host**SOFTNESS) ** (1 / SOFTNESS))

    def __add__(self, other: BlockCost) -> BlockCost:
        return BlockCost(device=self.device + other.device, host=self.host + other.host, wait=self.wait + other.wait)

    def times(self, factor: float) -> BlockCost:
        return BlockCost(device=self.device * factor, host=self.host * factor, wait=self.wait * factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCosts:
    forward: BlockCost
    backward: BlockCost
    embed: BlockCost
    head_forward: BlockCost
    head_backward: BlockCost


class BlockModel:
    def __init__(self, workload: Workload, cluster: Cluster, constants: Constants, *, is_ours: bool = False) -> None:
        """``is_ours``: run by the engines here, with the kernels that were measured on this device, if they were."""
        self.workload, self.model, self.is_ours = workload, workload.model, is_ours
        self.as_measured = is_ours and bool(cluster.device.shapes) and not cluster.device.is_cpu
        self.layout, self.run = workload.layout, workload.run
        self.cluster, self.constants, self.device = cluster, constants, cluster.device
        self.passes = PASSES[self.run.framework]
        self.tokens = workload.tokens
        self.width = 4 if self.run.is_wide else 2
        self.linear: Compute = self.run.compute
        self.other: Compute = "bf16" if self.linear in ("fp8", "fp4") else self.linear

    def costs(self) -> BlockCosts:
        (matmul_f, matmul_b, (up, down)), (attention_f, attention_b) = self._matmuls(), self._attention()
        memory_f = self._memory()
        sent = self._sent(matmul_f + matmul_b + attention_f + attention_b + (1 + BACKWARD_PASSES) * memory_f)
        wait, back_wait = (each + sent for each in self._waits(attention_f))
        kernels = EXPERT_KERNELS * self.model.sparse_share
        kernels += 0 if self.run.graphs == "layers" else self.passes.kernels + 2 * (self.layout.tensor > 1)
        launch = 0.0 if self.run.graphs == "step" else self.constants.launch_us * 1e-6
        forward = BlockCost(device=matmul_f + attention_f + memory_f, host=kernels * launch, wait=wait)
        backward = BlockCost(
            device=matmul_b + attention_b + BACKWARD_PASSES * memory_f, host=2 * kernels * launch, wait=back_wait
        )
        again = self._recomputed(forward, matmul_f, attention_f, memory_f, down).times(self.workload.recomputed_blocks)
        if self.layout.mlp_tiles != 1:  # which run again in backward, and not in a block's second run
            alone = 1 - self.workload.recomputed_blocks * (self.workload.recompute == "full")
            again += BlockCost(device=down + alone * (up + self._memory(mlp_alone=True)), host=0.0)
        head_f, head_b = self._head()
        known = Factors() if self.as_measured else self.constants.blocks.get(shape_of(self.workload) or (), Factors())
        return BlockCosts(
            forward=forward.times(known.block),
            backward=(backward + again).times(known.block),
            embed=BlockCost(
                device=self._memory_seconds(6 * self.tokens * self.model.width * self.width), host=4 * launch
            ),
            head_forward=head_f.times(known.head * (1 + self.model.ahead)),
            head_backward=head_b.times(known.head * (1 + self.model.ahead)),
        )

    def _recomputed(self, forward: BlockCost, matmul: float, attention: float, memory: float, down: float) -> BlockCost:
        match self.workload.recompute:
            case "full":
                # torch stops when all that backward needs is there: the last product's result is not.
                return forward if self.run.framework == "megatron" else forward + BlockCost(device=-down, host=0.0)
            case "attention":
                return BlockCost(device=attention, host=forward.host / 5)
            case "selective" if self.is_ours:  # which keep what all products and attention make
                return BlockCost(device=memory, host=forward.host)
            case "selective":
                return BlockCost(device=matmul / 2 + memory, host=forward.host / 2)
            case _:
                return BlockCost(device=0.0, host=0.0)

    def _product(self, m: float, n: float, k: float, dtype: Compute, copies: float = 1.0) -> tuple[float, float]:
        """Forward, and backward: the gradients of the input and of the weights. ``copies``: products in one kernel."""
        forward = self._matmul_seconds(m, n, k, dtype, "nt", copies)
        backward = self._matmul_seconds(m, k, n, dtype, "nn", copies)
        backward += self._matmul_seconds(n, k, m, dtype, "tn", copies)
        if dtype in ("fp8", "fp4"):
            forward, backward = forward / self.constants.eight_bit, backward / self.constants.eight_bit
            # Megatron's layers write eight-bit copies in the kernel before.
            scaled = (1.6 if self.run.scaling == "row" else 1.0) * (1 if self.run.framework == "megatron" else 3)
            forward += self._memory_seconds(scaled * copies * (m * k + n * k))
            backward += self._memory_seconds(scaled * 2 * copies * m * n)
        return forward, backward

    def _matmul_seconds(self, m: float, n: float, k: float, dtype: Compute, layout: str, copies: float) -> float:
        """Returns what ``copies`` products of (m, k) by (k, n) take."""
        if (
            self.as_measured
            and m > 0
            # A kernel of many products is as full as one with the rows of all.
            and (rate := matmul_rate(self.device, (round(m * copies), round(k), round(n)), dtype, layout))
        ):
            moved = 2 * copies * (m * k + k * n + m * n)
            return max(2.0 * copies * m * n * k / rate, self._memory_seconds(moved))
        together = copies if self.is_ours else 1.0  # Megatron's grouped products are one kernel for each expert
        return copies / together * matmul_seconds(self.device, self.constants, m, n, k, dtype, together)

    def _matmuls(self) -> tuple[float, float, tuple[float, float]]:
        """Forward, backward, and of the forward the MLP's products: up (with the gate), and down."""
        model, tensor, tokens, sparse = self.model, self.layout.tensor, self.tokens, self.model.sparse_share
        pairs = [
            self._product(tokens, (model.query_width + model.kv_width) / tensor, model.width, self.linear),
            self._product(tokens, model.width, model.query_width / tensor, self.linear),
        ]
        mlps = [(1 - sparse, tokens, model.mlp_width, 1.0)]  # the share of layers, rows, hidden features, products
        if sparse:
            rows, copies = self._expert_rows()
            mlps += [(sparse, rows, model.inner_width, copies)]
            mlps += [(sparse, tokens, model.shared_experts * model.inner_width, 1.0)]
            router = self._product(tokens, model.experts, model.width, "fp32" if self.is_ours else self.other)
            pairs.append((sparse * router[0], sparse * router[1]))
        up = down = (0.0, 0.0)
        for share, rows, inner, copies in mlps:
            first = self._product(rows, (model.matrices - 1) * inner / tensor, model.width, self.linear, copies)
            last = self._product(rows, model.width, inner / tensor, self.linear, copies)
            up = up[0] + share * first[0], up[1] + share * first[1]
            down = down[0] + share * last[0], down[1] + share * last[1]
        pairs += [up, down]
        return sum(pair[0] for pair in pairs), sum(pair[1] for pair in pairs), (up[0], down[0])

    def _expert_rows(self) -> tuple[float, float]:
        """Returns the rows of an expert on the busiest rank, with those that pad its last tile, and the rank's experts.

        Kernels multiply tiles of rows, and of each expert's last tile half is empty on average.
        """
        model, expert = self.model, self.layout.expert
        rows = self.tokens * expert * model.active / model.experts * self._busiest()
        return rows + (0 if self.device.is_cpu else TILE / 2), max(1.0, model.experts / expert)

    def _sent(self, computing: float) -> float:
        """Returns how long a block waits, in each direction, for rows on their way to experts and back."""
        layout, model = self.layout, self.model
        if layout.expert == 1:
            return 0.0
        # Experts of published runs are whole: tensor-parallel ranks hold different ones.
        ranks, stride = (layout.expert, layout.tensor) if self.is_ours else (layout.expert * layout.tensor, 1)
        group = group_of(self.cluster, ranks, stride)
        row = self.tokens / layout.tensor * model.width * self.width * self._busiest()
        sent = [(group, row * model.active)]
        if not (self.is_ours or self.run.sends_copies):
            # Once to each node, and there once to each rank, that has some of its experts, which are chosen evenly.
            near, far = (row * places * (1 - (1 - 1 / places) ** model.active) for places in (ranks, group.nodes))
            sent = [(Group(round(group.node_ranks)), near), (group, far)]
        moved = max(collective_seconds("all_to_all", num_bytes, over, self.cluster) for over, num_bytes in sent)
        each = (moved + CALL_S) * self.constants.slowdown
        if self.run.hides_dispatch:  # behind the blocks of another microbatch, which goes the other way
            both = 2 * each * model.sparse_share
            return both - (1 - self.constants.contention) * min(both, computing / 2)
        # Tokens pass the shared experts while their rows are on the way there.
        inner = model.matrices * model.shared_experts * model.inner_width / layout.tensor
        shared = self._product(self.tokens, inner, model.width, self.linear)[0]
        return (max(0.0, each - shared) + each) * model.sparse_share

    def _busiest(self) -> float:
        """Returns the rows of the busiest expert rank over the mean. Published runs are timed with even routing."""
        return busiest_share(self.model, self.layout.expert) if self.is_ours else 1.0

    def _attention(self) -> tuple[float, float]:
        model, tokens = self.model, self.tokens
        width = model.score_width / self.layout.tensor
        flops = 4.0 * tokens * self.run.seq_len * width
        if self.run.fused_attention:
            flops /= 2 if model.causal else 1
            samples, heads = math.ceil(self.workload.micro_batch), max(1, model.heads // self.layout.tensor)
            sizes = (samples, heads, self.run.seq_len, model.head_width)
            ahead, back = (attention_rate(self.device, sizes, kind, self.other) for kind in _ATTENTION)
            if self.as_measured and ahead and back:
                return flops / ahead, ATTENTION_BACKWARD * flops / back
            is_new = self.run.attends_as_today and self.device.generation == "hopper"
            own = (self.device, self.constants, flops, self.run.seq_len, self.other)
            if not (self.is_ours or is_new):
                return attention_seconds(*own), ATTENTION_BACKWARD * attention_seconds(*own)
            timed = long_attention_seconds if self.is_ours else todays_attention_seconds
            return timed(*own, is_back=False), ATTENTION_BACKWARD * timed(*own, is_back=True)
        head = model.query_width // model.heads
        batch = max(1, round(self.workload.micro_batch * model.heads / self.layout.tensor))
        length = self.run.seq_len
        products = matmul_seconds(self.device, self.constants, length, length, head, self.other, batch)
        products += matmul_seconds(self.device, self.constants, length, head, length, self.other, batch)
        width = 4 if self.run.autocast else self.width  # autocast computes the softmax in fp32
        scores = self._memory_seconds(self.passes.scores * batch * length * length * width)
        return products + scores, 2 * products + BACKWARD_PASSES * scores

    def _memory(self, *, mlp_alone: bool = False) -> float:
        model, tensor = self.model, self.layout.tensor
        across = tensor if self.layout.sequence_parallel else 1
        hidden = self.passes.hidden * model.width / across
        gate = self.passes.gate if model.gated else 0.0
        wide = (self.passes.ffn + gate) * model.hidden_width / tensor
        rows = 6 + (EXPERT_BIAS if model.expert_bias else 0)
        wide += rows * model.sparse_share * model.active * model.width
        return self._memory_seconds(self.width * self.tokens * (wide if mlp_alone else hidden + wide))

    def _head(self) -> tuple[BlockCost, BlockCost]:
        model, tensor = self.model, self.layout.tensor
        # An encoder predicts the masked tokens alone.
        tokens = self.tokens * (1.0 if model.causal else MASKED)
        forward, backward = self._product(tokens, model.vocab_size / tensor, model.width, self.other)
        logits = FUSED_LOGITS if self.run.fused_loss else self.passes.logits
        loss = self._memory_seconds(logits * tokens * model.vocab_size / tensor)
        launch, wait = self.constants.launch_us * 1e-6, self._tensor_wait() / 2
        return (
            BlockCost(device=forward + loss / 2, host=10 * launch, wait=wait),
            BlockCost(device=backward + loss / 2, host=20 * launch, wait=wait),
        )

    def _memory_seconds(self, num_bytes: float) -> float:
        return memory_seconds(self.device, self.constants, num_bytes * self.constants.traffic)

    def _tensor_wait(self) -> float:
        """Of one direction: two all-reduces, or their two halves where sequences are cut."""
        tensor = self.layout.tensor
        if tensor == 1:
            return 0.0
        group = group_of(self.cluster, tensor)
        num_bytes = self.tokens * self.model.width * self.width
        halves: tuple[Collective, ...] = ("all_gather", "reduce_scatter")
        kinds = halves if self.layout.sequence_parallel else ("all_reduce",)
        # Ranks wait for each, so that no computation is in its way.
        each = sum(collective_seconds(kind, num_bytes, group, self.cluster) + CALL_S for kind in kinds)
        return 2 * each * (0.5 if self.run.overlaps_tensor else 1.0)

    def _waits(self, attention: float) -> tuple[float, float]:
        """In forward and in backward: for tensor-parallel ranks; for tokens on their way to experts; for the keys and
        values of ranks that share each sequence."""
        layout, model, waits = self.layout, self.model, self._tensor_wait()
        if layout.context_ranks == 1:
            return waits, waits
        if not self.is_ours:  # a gather of all keys and values behind attention on those that are there
            group = group_of(self.cluster, layout.context_ranks, layout.tensor)
            num_bytes = self.tokens * layout.context_ranks * model.kv_width / layout.tensor * self.width
            moved = collective_seconds("all_gather", num_bytes, group, self.cluster)
            waits += max(0.0, moved - attention) + layout.context_ranks * CALL_S
            return waits, waits
        tensor, (split, forward, backward) = layout.tensor, self.sequence_split()
        # What each step of a ring adds to the sums in fp32: the output; the gradients of queries, keys and values.
        merged = self._memory_seconds(_MERGED * self.tokens * model.query_width / tensor)
        added = merged + self._memory_seconds(_MERGED * self.tokens * model.kv_width / tensor)
        steps = split.ring if split.method in ("ring", "both") else 0
        return waits + forward + steps * merged, waits + backward + steps * added

    def sequence_split(self, documents: tuple[int, ...] = (0,)) -> tuple[SequenceSplit, float, float]:
        """Returns how ranks share each sequence, and how long they wait for one another, forward and backward.

        ``documents``: where they begin in a row, if attention stays inside them.
        """
        layout, model = self.layout, self.model
        ranks, wires = groups_of(layout, 0).context, wire_cost(self.cluster, layout.ranks)
        work = AttentionWork(
            batch=math.ceil(self.workload.micro_batch),
            tokens=self.run.seq_len,
            heads=max(1, model.heads // layout.tensor),
            kv_heads=max(1, model.kv_heads // layout.tensor),
            width=model.head_width,
            itemsize=self.width,
            compute_s=self._attention()[0] * share_of_pairs(self.run.seq_len, documents),
            is_causal=model.causal,
            documents=documents,
        )

        def cost(kind: str, num_bytes: int, ranks: tuple[int, ...]) -> float:
            return (wires(kind, num_bytes, ranks) + CALL_S) * self.constants.slowdown

        split = sequence_split(work, layout, ranks, cost)
        return split, *sequence_waits(work, split, ranks, cost)
