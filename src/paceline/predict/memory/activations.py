"""Parameters and activations of the reference models by formula, from the dimensions in a config.

Elements that a block of a GPT leaves for backward, per token, for width W, MLP width M and h heads:

    two norms          2 W inputs, 2 W outputs, a few statistics     (+ 2 W where RMSNorm is not one kernel: on a CPU)
    attention          3 W query, key, value + W output + h          (+ W where the output must be made contiguous;
                       fewer keys and values than heads: repeated to W each, but for 16 bits on a GPU)
    MLP                4 M (SwiGLU; 3 M compiled on a GPU, which makes silu again) or 2 M (GELU)

so 8 W + 4 M, times the bytes of an element. Under autocast the residual stream stays in the model's dtype, and every
matrix product reads a low-precision copy of its own: the outputs of norms count 5 (3 + 2) times, in 2 bytes, and the
weights are copied too. Dropout adds masks; in attention a CPU then has no fused kernel, and 3 h T numbers a token for T
tokens stay. Outside of blocks: the last norm, and for a vocabulary of V the log-probabilities, 4 V bytes a token. A
loss that is fused with the output layer keeps none of them, and W numbers a token in their place.

A convolution leaves its input, a norm its input, a ReLU its output, which is the next convolution's input. Max pooling
leaves its input, and 8 bytes a number that say where it was; compiled on a GPU a byte, and its input is made again
where one graph holds the whole model.

Known error: within 1 % of what autograd saves, on a CPU (tests/predict/test_estimate_activations.py) and on a GPU.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from paceline.config import Config
from paceline.config.data_sections import SyntheticImagesDataConfig, known_shape
from paceline.config.sections import GPTModelConfig, MLPModelConfig, ResNetModelConfig, gpt_shape
from paceline.plan.layout import WITH_MASTERS
from paceline.plan.model_shape import ModelShape
from paceline.predict.memory.facts import GRADIENTS, BlockFacts, LossFacts, MlpFacts, ModelFacts

ASSUMED_VOCABULARY = 256  # of a text by characters, which is counted when it is read
_RESNET_STAGES = {18: (2, 2, 2, 2), 50: (3, 4, 6, 3)}
_INDEX_BYTES = 8
_OPERATIONS_PER_NUMBER = 64.0  # of 4 bytes that is written, as in ``engines/stages/costs.py``


class Widths(NamedTuple):
    """Bytes of an element: of the stream between blocks, and of what matrix products read."""

    stream: int
    compute: int
    is_autocast: bool
    device: str
    is_compiled: bool
    is_one_graph: bool


def describe_model(config: Config, device: str) -> ModelFacts | None:
    """Returns what is known of a config's model on ``cpu`` or ``cuda``; None where only its own code can tell."""
    model, shape = config.model, known_shape(config.data)
    precision = config.train.precision_on(config.parallel.device)
    is_compiled = device == "cuda" and model.compile not in (False, "none")
    # Autocast computes in 2 bytes, masters keep all of the model in 2.
    is_autocast = precision in ("bf16", "fp16")
    stream = 2 if precision in WITH_MASTERS else 8 if config.train.dtype == "float64" else 4
    widths = Widths(
        stream=stream,
        compute=2 if is_autocast else stream,
        is_autocast=is_autocast,
        device=device,
        is_compiled=is_compiled,
        # As Layout.for_ranks decides ``auto``; where the ranks are not known yet, blocks, which keep more.
        is_one_graph=is_compiled
        and (model.compile == "whole" or (model.compile != "blocks" and config.parallel.ranks == 1)),
    )
    if (known := known_gpt(config)) is not None:
        return describe_gpt(*known, widths)
    if isinstance(model, ResNetModelConfig) and isinstance(config.data, SyntheticImagesDataConfig):
        channels = model.in_channels or config.data.channels
        return describe_resnet(model, channels, model.num_classes or config.data.classes, config.data.size, widths)
    if isinstance(model, MLPModelConfig):
        features, classes = model.input_dim or shape.features, model.num_classes or shape.classes
        return describe_mlp(model, features, classes, widths) if features and classes else None
    return None


def known_gpt(config: Config) -> tuple[ModelShape, int] | None:
    """Returns the shape of a config's GPT with its vocabulary, and the tokens of a sample; None where one is open."""
    if not isinstance(config.model, GPTModelConfig):
        return None
    shape, data = gpt_shape(config.model), known_shape(config.data)
    if shape is None or not (tokens := data.context or shape.context):
        return None
    return replace(shape, vocab_size=shape.vocab_size or data.vocab_size or ASSUMED_VOCABULARY), tokens


def describe_gpt(shape: ModelShape, tokens: int, widths: Widths) -> ModelFacts:
    block = _gpt_block(shape, tokens, widths)
    sparse = _mixture_block(shape, tokens, widths) if shape.experts else block
    blocks = (block,) * (shape.layers - shape.num_sparse) + (sparse,) * shape.num_sparse
    last, width, length = _gpt_head(shape, tokens, widths), shape.width, shape.context or tokens
    embedded = shape.vocab_size * width
    learned = length * width if shape.positions == "learned" else 0
    masks = tokens * _dropout_bytes(shape.dropout, width, widths.stream, widths)
    first = BlockFacts(
        parameters=embedded + learned,
        saved_bytes=tokens * _INDEX_BYTES + masks,
        largest_parameter=max(embedded, learned),
        columns=width + (width if learned else 0),
        operations=_OPERATIONS_PER_NUMBER * length * (3 if learned else 1) * width,
        split_parameters=embedded,
        stream_bytes=masks,
    )
    tied = embedded if shape.tied else 0
    root = BlockFacts.together((first, last), tied=tied, tied_columns=width if shape.tied else 0)
    loss = LossFacts(
        vocabulary=shape.vocab_size,
        width=width,
        tokens=tokens,
        element_bytes=widths.compute,
        kept_bytes=last.split_bytes,
    )
    return ModelFacts(
        blocks=blocks,
        root=root,
        buffer_bytes=sum(each.buffer_bytes for each in blocks),
        temporary_bytes=last.temporary_bytes,
        entry=(first,),
        exit=(last,),
        tied_parameters=tied,
        loss=loss,
    )


def _gpt_block(shape: ModelShape, tokens: int, widths: Widths) -> BlockFacts:
    width, queries = shape.width, shape.query_width
    matrices = shape.attention_params + shape.matrices * width * shape.mlp_width
    inside = _gpt_inner_bytes(shape, tokens, widths)
    norms = [_norm_bytes(shape, widths, readers=each) for each in (3, 2 if shape.gated else 1)]
    between = sum(kept for kept, _ in norms) + 2 * _dropout_bytes(shape.dropout, width, widths.compute, widths)
    normed_heads = {"none": 0, "head": 2 * shape.head_width, "whole": queries + shape.kv_width // 2}
    # Products, attention over all tokens, and what is written: every product twice, scores about four times.
    length, wide = shape.context or tokens, shape.mlp_width * (2 if shape.gated else 1)
    products = 2 * queries + shape.kv_width + wide + 2 * width
    turned = 5 * queries if shape.positions == "rotary" else 0
    normed = (6 if shape.norm == "rms" else 2) * width
    written = 2 * (products - width) + 4.5 * shape.heads * length + wide + normed + 2 * width + turned
    operations = length * (2 * matrices + 4 * length * queries + _OPERATIONS_PER_NUMBER * written)
    rotary = 2 * 4 * (shape.context or tokens) * (shape.head_width // 2) if shape.positions == "rotary" else 0
    # Gradients of the stream, of the next block's too, of attention's output, query, key and value. Kernels of 16 bits
    # add up the query's in fp32, and make those of keys and values that heads share for each head.
    moving = 2 * width * widths.stream + (2 * queries + shape.kv_width) * widths.compute
    if widths.device == "cuda" and widths.compute == 2:
        moving += 4 * queries + (2 * queries * widths.compute if shape.kv_heads < shape.heads else 0)
    return BlockFacts(
        parameters=matrices + 2 * width + normed_heads[shape.qk_norm],
        saved_bytes=tokens * (inside + between + sum(outputs for _, outputs in norms)),
        input_bytes=tokens * width * widths.stream,
        product_bytes=tokens * widths.compute * products,
        cast_bytes=2 * matrices if widths.is_autocast else 0,
        largest_parameter=width * max(queries, shape.mlp_width),
        columns=(6 if shape.gated else 5) * width + shape.mlp_width,
        buffer_bytes=rotary,
        # Gradients of the MLP's hidden features, of the stream, and of what the norm has made of it.
        temporary_bytes=tokens * (GRADIENTS * shape.mlp_width + 2 * width) * widths.compute,
        mlp=MlpFacts(
            tokens, shape.mlp_width * widths.compute, _kept_hidden(shape, widths), tokens * (moving - sum(norms[1]))
        ),
        kv_bytes=tokens * shape.kv_width * widths.compute,
        operations=operations,
        split_parameters=matrices,
        split_bytes=tokens * inside,
        stream_bytes=tokens * between,
        split_products=tokens * widths.compute * (products - 2 * width),  # sums over the ranks are whole
    )


def _mixture_block(shape: ModelShape, tokens: int, widths: Widths) -> BlockFacts:
    """Of a block with experts: what one has whose MLP is as wide as all that a token passes, and what comes and goes.

    Beside it a token keeps its logits and scores, and for each of its experts the row that the expert reads, the row
    that it made, two weights and three places. The router reads the stream in float32, shared experts as an MLP does.
    """
    width, wide, digits = shape.width, 2 if shape.gated else 1, max(4, widths.stream)
    passed = shape.active + shape.shared_experts
    block = _gpt_block(replace(shape, mlp_width=passed * shape.inner_width), tokens, widths)
    routed, router = shape.experts * shape.expert_params, shape.experts * width
    more = routed - shape.active * shape.expert_params
    _, of_mlp = _norm_bytes(shape, widths, readers=wide)
    is_again = shape.shared_experts and (widths.is_autocast or widths.stream < digits)
    read = width * digits - (0 if is_again else of_mlp)
    rows = shape.active * (2 * width * widths.compute + 2 * digits + 3 * _INDEX_BYTES) + digits
    products = widths.compute * width * (shape.active - (not shape.shared_experts)) + digits * shape.experts
    casts = (2 * more if widths.is_autocast else 0) + (digits * router if widths.stream < digits else 0)
    counts = 3 * (_INDEX_BYTES * shape.experts + 4) + (4 * shape.experts if shape.router.balance == "bias" else 0)
    return replace(
        block,
        parameters=block.parameters + more + router,
        expert_parameters=routed,
        saved_bytes=block.saved_bytes + tokens * (rows + read + 2 * digits * shape.experts) + 8 * shape.experts,
        product_bytes=block.product_bytes + tokens * products,
        cast_bytes=block.cast_bytes + casts,
        buffer_bytes=block.buffer_bytes + counts,
        largest_parameter=max(block.largest_parameter, shape.experts * wide * width * shape.inner_width),
        temporary_bytes=block.temporary_bytes + tokens * shape.active * width * widths.compute,
        mlp=None,
        operations=block.operations + (shape.context or tokens) * 2 * router,
        split_parameters=block.split_parameters + more,
    )


def _gpt_head(shape: ModelShape, tokens: int, widths: Widths) -> BlockFacts:
    vocab_size, head = shape.vocab_size, shape.vocab_size * shape.width
    logit_bytes = max(widths.stream, 4)  # the loss wants digits
    inputs, outputs = _norm_bytes(shape, widths, readers=1)
    length = shape.context or tokens
    return BlockFacts(
        parameters=head + shape.width,
        saved_bytes=tokens * (inputs + outputs + vocab_size * logit_bytes + _INDEX_BYTES),
        input_bytes=tokens * shape.width * widths.stream,
        cast_bytes=2 * head if widths.is_autocast else 0,
        largest_parameter=head,
        columns=shape.width,
        # Backward begins with the gradient of the logits beside their log-probabilities.
        temporary_bytes=tokens * vocab_size * (logit_bytes + (widths.compute if widths.compute < logit_bytes else 0)),
        operations=length * (2 * head + _OPERATIONS_PER_NUMBER * (2 * vocab_size + 2 * shape.width)),
        split_parameters=head,
        split_bytes=tokens * vocab_size * logit_bytes,
        stream_bytes=tokens * inputs,
    )


def _gpt_inner_bytes(shape: ModelShape, tokens: int, widths: Widths) -> float:
    """What attention and the MLP save, but for their inputs: what tensor parallelism splits."""
    width = shape.query_width
    if shape.dropout and widths.device == "cpu":
        # Step by step, and in float32 at least: probabilities, the mask, and what it leaves.
        attention: float = (3 * width + 3 * shape.heads * tokens) * max(widths.compute, 4) + width * widths.compute
    else:
        copies = 2 if shape.positions == "rotary" else 1
        # Kernels in 16 bits on a GPU share keys and values among heads; elsewhere they are repeated for each head.
        is_shared = widths.device == "cuda" and widths.compute == 2
        keys = shape.kv_width if is_shared else 2 * width
        attention = ((1 + copies) * width + keys) * widths.compute + 4 * shape.heads
    if shape.qk_norm != "none":  # inputs in the dtype of the norms' weights, and a statistic for each
        digits = 4 if widths.is_autocast else widths.compute
        inputs = 2 * max(digits, 4) if widths.device == "cpu" else digits
        attention += (width + shape.kv_width / 2) * inputs + 4 * (
            shape.heads + shape.kv_heads if shape.qk_norm == "head" else 2
        )
    return attention + _kept_hidden(shape, widths) * shape.mlp_width * widths.compute


def _kept_hidden(shape: ModelShape, widths: Widths) -> int:
    """Returns how often hidden features of the MLP are saved: gate, up, silu of the gate, and their product, which the
    last product reads; of GELU its input and its result.

    A compiler keeps no silu: the backward makes it again from the gate (predict/replay/kernel_costs.py).
    """
    return (3 if widths.is_compiled else 4) if shape.gated else 2


def _norm_bytes(shape: ModelShape, widths: Widths, *, readers: int) -> tuple[float, float]:
    """A norm's input with its statistics, and its output, of which autocast makes a copy for each reader."""
    inputs = 2 * max(widths.stream, 4) if shape.norm == "rms" and widths.device == "cpu" else widths.stream
    outputs = readers * widths.compute if widths.is_autocast else widths.stream
    statistics = 4 if shape.norm == "rms" else 8
    return shape.width * inputs + statistics, shape.width * outputs


def _dropout_bytes(dropout: float, features: int, itemsize: int, widths: Widths) -> float:
    """A mask of bytes in CUDA's fused kernel, of numbers on a CPU."""
    return features * (1 if widths.device == "cuda" else itemsize) if dropout else 0.0


def describe_resnet(model: ResNetModelConfig, in_channels: int, classes: int, image: int, widths: Widths) -> ModelFacts:
    is_basic, width = model.depth == 18, model.width
    is_small = model.stem == "small"
    kernel, size = (3, image) if is_small else (7, _half(image))
    stem = Convolution(in_channels, width, kernel, size)
    stem_saved = in_channels * image**2 + stem.outputs  # the image and the norm's input; what follows is the block's
    index_bytes = 0
    if not is_small:
        size = _half(size)
        # What the pooling reads, and where it found its maximum.
        stem_saved += 0 if widths.is_one_graph else stem.outputs
        index_bytes = width * size**2 * (1 if widths.is_compiled else _INDEX_BYTES)
    has_statistics = model.norm == "batch"
    first = _convolved([stem], widths)
    first = replace(
        first,
        buffer_bytes=first.buffer_bytes if has_statistics else 0,
        saved_bytes=widths.compute * stem_saved + index_bytes,
        temporary_bytes=2 * widths.compute * stem.outputs,
    )
    blocks, channels, convolutions = [], width, [stem]
    for stage, count in enumerate(_RESNET_STAGES[model.depth]):
        for index in range(count):
            before, size = size, _half(size) if stage > 0 and index == 0 else size
            inner = width * 2**stage
            out = inner if is_basic else 4 * inner
            if is_basic:
                layers = [Convolution(channels, inner, 3, size), Convolution(inner, inner, 3, size)]
            else:
                layers = [Convolution(channels, inner, 1, before), Convolution(inner, inner, 3, size)]
                layers.append(Convolution(inner, out, 1, size))
            shortcut = [Convolution(channels, out, 1, size)] if (before, channels) != (size, out) else []
            block = _residual_block(layers, shortcut, channels * before**2, widths)
            blocks.append(block if has_statistics else replace(block, buffer_bytes=0))
            convolutions += [*layers, *shortcut]
            channels = out
    last = BlockFacts(
        parameters=channels * classes + classes,
        saved_bytes=widths.compute * (channels * size**2 + channels) + 4 * classes + _INDEX_BYTES,
        input_bytes=widths.compute * channels * size**2,
        cast_bytes=2 * channels * classes if widths.is_autocast else 0,
        columns=channels,
        operations=2 * channels * classes + _OPERATIONS_PER_NUMBER * (channels + classes),
    )
    root = BlockFacts.together((first, last))
    return ModelFacts(
        blocks=tuple(blocks),
        root=root,
        buffer_bytes=first.buffer_bytes + sum(block.buffer_bytes for block in blocks),
        temporary_bytes=first.temporary_bytes,
        entry=(first,),
        exit=(last,),
        work=ModelShape(
            total_params=float(root.parameters + sum(block.parameters for block in blocks)),
            flops=sum(each.flops for each in convolutions) + 2 * channels * classes,
            activations=sum(each.outputs for each in convolutions) + classes,
            kind="convolution",
            kernels=3 * len(convolutions) + len(blocks) + 4,  # norms and activations; sums; pooling, head and loss
        ),
    )


class Convolution(NamedTuple):
    inputs: int
    channels: int
    kernel: int
    size: int  # of the image that comes out

    @property
    def weights(self) -> int:
        return self.inputs * self.channels * self.kernel**2

    @property
    def outputs(self) -> int:
        return self.channels * self.size**2

    @property
    def flops(self) -> float:
        return 2 * self.weights * self.size**2


def _residual_block(layers: list[Convolution], shortcut: list[Convolution], inputs: int, widths: Widths) -> BlockFacts:
    products = sum(layer.outputs for layer in (*layers, *shortcut))
    between = sum(layer.outputs for layer in layers[:-1])  # ReLUs between the convolutions
    return replace(
        _convolved([*layers, *shortcut], widths),
        saved_bytes=widths.compute * (inputs + products + between),
        input_bytes=widths.compute * inputs,
        product_bytes=widths.compute * products,
        temporary_bytes=2 * widths.compute * max(layer.outputs for layer in layers),
    )


def _convolved(layers: list[Convolution], widths: Widths) -> BlockFacts:
    """Returns what follows from convolutions alone: parameters with the norms' scales and shifts, copies, costs."""
    return BlockFacts(
        parameters=sum(layer.weights + 2 * layer.channels for layer in layers),
        cast_bytes=2 * sum(layer.weights for layer in layers) if widths.is_autocast else 0,
        columns=sum(layer.inputs * layer.kernel**2 for layer in layers),
        buffer_bytes=sum(8 * layer.channels + _INDEX_BYTES for layer in layers),  # running statistics
        # Norm and activation each write the outputs again.
        operations=sum(layer.flops + 3 * _OPERATIONS_PER_NUMBER * layer.outputs for layer in layers),
    )


def _half(size: int) -> int:
    return -(-size // 2)


def describe_mlp(model: MLPModelConfig, features: int, classes: int, widths: Widths) -> ModelFacts:
    sizes = (features, model.hidden_dim, model.hidden_dim // 2, classes)
    layers = tuple(_linear(number, sizes[number : number + 2], model.dropout, widths) for number in range(3))
    root = BlockFacts.together(layers)
    return ModelFacts(
        blocks=(),
        root=root,
        temporary_bytes=2 * widths.compute * model.hidden_dim,
        entry=layers,
        work=ModelShape(
            total_params=float(root.parameters),
            flops=sum(2 * rows * columns for rows, columns in pairwise(sizes)),
            activations=sum(sizes[1:]),
            kernels=3 * len(layers) + 1,
            kind="attention",
        ),
    )


def _linear(number: int, sizes: tuple[int, ...], dropout: float, widths: Widths) -> BlockFacts:
    """Layer 0, 1 or 2 of a perceptron, the last with the loss."""
    inputs, outputs = sizes
    if number == 2:
        after = float(outputs * max(widths.stream, 4) + _INDEX_BYTES)
    else:  # the ReLU's output, and what dropout makes of it
        after = outputs * (2 if dropout else 1) * widths.compute
        after += _dropout_bytes(dropout, outputs, widths.compute, widths)
    return BlockFacts(
        parameters=inputs * outputs + outputs,
        saved_bytes=after + (inputs * widths.compute if number == 0 else 0),
        input_bytes=inputs * widths.compute,
        # The first layer's is not kept: nobody asks for the gradient of the data.
        cast_bytes=2 * inputs * outputs if widths.is_autocast and number else 0,
        columns=inputs,
        temporary_bytes=2 * widths.compute * outputs,
        operations=2 * inputs * outputs + 2 * _OPERATIONS_PER_NUMBER * outputs,
    )
