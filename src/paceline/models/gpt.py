"""Decoder-only transformers, from a tenth of a million to seven billion parameters.

    tokens -> embedding -> [x + attention(norm(x)), x + mlp(norm(x))] x layers -> norm -> output layer -> logits

One model covers two families by its config: the classic (LayerNorm, GELU, learned positions, tied output layer) and the
current one (RMSNorm, SwiGLU, rotary positions, grouped-query attention). There are no biases. A block maps one tensor
to one tensor of the same shape, so that it can be compiled, checkpointed, sharded or sent to another stage alone.

For L layers of width W, h heads of which k for keys and values, MLP width M, vocabulary V, the parameters are about

    L * (2 W W (1 + k / h) + 3 W M) + 2 V W        (SwiGLU, untied; with GELU 2 W M; tied V W)
"""

from __future__ import annotations

import difflib
import math
from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.config.expert_rules import expert_problems
from paceline.config.sections import GPT_DIMENSIONS, GPT_SIZES, GPTModelConfig, gpt_shape, head_problems
from paceline.errors import ConfigError, Problem, UsageError
from paceline.models.attention import attention, current_part, positions
from paceline.models.dropout import Dropout
from paceline.models.experts import Mixture
from paceline.models.head_loss import OutputLayer, head_loss
from paceline.models.layers import PipelineLayer
from paceline.plan.model_shape import ModelShape

INIT_STD = 0.02


def gpt_config(size: str | None = None, **overrides: Any) -> ModelShape:
    """Returns the shape of a named size with some fields replaced; an override of None counts as not given.

    ``kv_heads`` and ``mlp_width`` keep the size's proportion to ``heads`` and ``width`` unless given. Without a size,
    layers, heads, width, context and vocab_size must be given, and the rest follows the current family.
    Raises UsageError for an unknown size or field, ConfigError for fields that are missing or do not fit together.
    """
    if size is not None and size not in SIZES:
        raise UsageError(f"there is no GPT size {size!r}; {_offer(size, list(SIZES))}")
    for name in overrides:
        if name not in GPT_DIMENSIONS:
            raise UsageError(f"a GPT has no field {name!r}; {_offer(name, list(GPT_DIMENSIONS))}")
    given = {name: value for name, value in overrides.items() if value is not None}
    if size is None:
        needed = ("layers", "heads", "width", "context", "vocab_size")
        if missing := [f"model.{name}" for name in needed if name not in given]:
            what = f"a GPT without model.size lacks {', '.join(missing)}"
            fix = f"set them, or model.size to one of {', '.join(SIZES)}"
            raise ConfigError([Problem(what=what, rule=f"it needs {', '.join(needed)}", fix=fix)], source="model")
    else:
        given.setdefault("vocab_size", SIZES[size].vocab_size)
    # The rules are those of the config room. Not validated there: all problems are reported at once.
    shape = cast("ModelShape", gpt_shape(GPTModelConfig.model_construct(kind="gpt", size=size, **given)))
    _check_gpt(shape)
    return shape


class GPT(nn.Module):
    """Maps tokens (batch, length) to logits, which see tokens up to theirs; with an ``end_token`` of their document."""

    def __init__(self, config: ModelShape, end_token: int | None = None) -> None:
        super().__init__()
        _check_gpt(config)
        self.config, self.end_token = config, end_token
        self.token_embedding = Embedding(config.vocab_size, config.width)
        self.position_embedding = Embedding(config.context, config.width) if config.positions == "learned" else None
        self.dropout = Dropout(config.dropout)
        self.layers = nn.ModuleList(
            Block(config, has_experts=i >= config.layers - config.num_sparse) for i in range(config.layers)
        )
        self.norm = _make_norm(config)
        self.head = None if config.tied else Head(config.width, config.vocab_size)

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None, *, counts: bool = False, cache: KeyValues | None = None
    ) -> Any:
        """Returns the logits of the token that follows each position; with ``targets`` the summed loss instead.

        That never holds the logits of all tokens; with ``counts``, it is a pair with the number of right answers. With
        a ``cache``, the tokens follow those that were read with it before; documents are not kept apart then.
        """
        if cache is not None:
            return self._read_on(tokens, cache)
        x, documents = self.embed(tokens), self.documents(tokens)
        known = () if documents is None else (documents,)
        for block in self.layers:
            x = block(x, *known)
        return self.unembed(x, targets, counts=counts)

    def _read_on(self, tokens: Tensor, cache: KeyValues) -> Any:
        x = self.embed(tokens, cache.length)
        cache.begin(tokens)
        for block in self.layers:
            x = block(x, None, cache)
        cache.length += tokens.shape[1]
        return self.unembed(x)

    def documents(self, tokens: Tensor) -> Tensor | None:
        """Returns for each token (batch, length) where in its row its document begins; None: a row is one."""
        if self.end_token is None:
            return None
        part = current_part()  # which knows whole rows
        return document_starts(tokens, self.end_token) if part is None else part.documents()

    def loss_vocabulary(self) -> int:
        return self.config.vocab_size

    def embed(self, tokens: Tensor, first: int = 0) -> Tensor:
        """Returns the stream (batch, length, width) before the first block; ``first`` is the first token's place."""
        part = current_part()
        length = first + tokens.shape[1] if part is None else part.length(tokens.shape[1])
        if length > self.config.context:
            fix = f"cut them, or set model.context to {length} or more"
            raise UsageError(f"the tokens are {length} long, but the model's context is {self.config.context}; {fix}")
        x = self.token_embedding(tokens)
        if self.position_embedding is not None:
            places = positions(tokens.shape[1], tokens.device, first)
            documents = self.documents(tokens)
            x = x + self.position_embedding(places if documents is None else places - documents)
        return cast("Tensor", self.dropout(x))

    def unembed(self, x: Tensor, targets: Tensor | None = None, *, counts: bool = False) -> Any:
        """Returns the logits of the stream after the last block, or the loss, as ``forward`` does."""
        x = self.norm(x)
        # Tied: see [Note: initialisation] in models/__init__.py.
        project = self.token_embedding.project if self.head is None else self.head
        return project(x) if targets is None else project(x, targets, counts=counts)

    def pipeline_layers(self) -> list[PipelineLayer]:
        """Returns the embedding, the blocks, and the norm with the output layer: where a pipeline may cut."""
        if self.end_token is not None:
            what = "a pipeline's stages cannot keep documents apart: they are handed the stream alone"
            raise UsageError(f"{what}\n  set data.documents = joined, or parallel.pipeline = 1")
        entry = [self.token_embedding, self.position_embedding, self.dropout]
        exit_ = [self.norm, self.token_embedding if self.head is None else self.head]
        return [
            PipelineLayer(name="token_embedding", run=self.embed, modules=tuple(m for m in entry if m is not None)),
            *(PipelineLayer(name=f"layers.{i}", run=block, modules=(block,)) for i, block in enumerate(self.layers)),
            PipelineLayer(name="norm", run=self.unembed, modules=tuple(exit_)),
        ]

    def example_inputs(self) -> tuple[Tensor]:
        return (torch.empty(1, self.config.context, dtype=torch.int64, device="meta"),)

    def blocks(self) -> list[nn.Module]:
        return list(self.layers)

    def ends(self) -> list[nn.Module]:
        """Returns the layers before and after the blocks, if they are called one by one: a tied head is not."""
        return [] if self.head is None else [self.token_embedding, self.head]

    def apart(self) -> list[nn.Module]:
        """Returns the modules whose weights are read apart from their calls: the embedding's, by a tied head."""
        return [self.token_embedding] if self.head is None else []


class Block(nn.Module):
    """Attention, then an MLP; each reads the normed stream and adds to it."""

    def __init__(self, config: ModelShape, *, has_experts: bool = False) -> None:
        super().__init__()
        self.attention_norm = _make_norm(config)
        self.attention = Attention(config)
        self.mlp_norm = _make_norm(config)
        self.mlp = _make_mixture(config) if has_experts else _make_mlp(config)
        self.dropout = Dropout(config.dropout)

    def parts(self) -> list[nn.Module]:
        """Returns what is called one after another: none of a mixture, whose experts ranks may share."""
        return [] if isinstance(self.mlp, Mixture) else [self.attention, self.mlp]

    def forward(self, x: Tensor, documents: Tensor | None = None, cache: KeyValues | None = None) -> Tensor:
        """Returns the stream (batch, length, width) after this block; ``documents`` are those of the model."""
        inner = self.attention_norm(x)
        if cache is not None:
            x = x + self.attention(inner, None, cache)
        else:
            x = x + self.dropout(self.attention(inner) if documents is None else self.attention(inner, documents))
        return cast("Tensor", x + self.dropout(self.mlp(self.mlp_norm(x))))


class Attention(nn.Module):
    """Causal self-attention in which groups of query heads share a head of keys and values."""

    def __init__(self, config: ModelShape) -> None:
        super().__init__()
        self.head_dim = config.head_width
        self.dropout = config.dropout
        self.query = Linear(config.width, config.heads * config.head_width)
        self.key = Linear(config.width, config.kv_heads * config.head_width)
        self.value = Linear(config.width, config.kv_heads * config.head_width)
        self.output = Linear(config.heads * config.head_width, config.width, std=_residual_std(config))
        norms = (QueryKeyNorm(config, heads) for heads in (config.heads, config.kv_heads))
        self.query_norm: QueryKeyNorm | None
        self.key_norm: QueryKeyNorm | None
        self.query_norm, self.key_norm = (None, None) if config.qk_norm == "none" else norms
        sizes = config.context, config.head_width, config.rotary_base
        self.rotary = Rotary(*sizes) if config.positions == "rotary" else None

    def forward(self, x: Tensor, documents: Tensor | None = None, cache: KeyValues | None = None) -> Tensor:
        """Returns for each position the mix of the values at and before it, shape (batch, length, width).

        With ``documents``, of those in the same one; with a ``cache``, the positions follow those that are in it.
        """
        first = 0 if cache is None else cache.length
        # From (batch, length, heads * head_dim) to (batch, heads, length, head_dim).
        query, key, value = (project(x) for project in (self.query, self.key, self.value))
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        query, key, value = (each.unflatten(2, (-1, self.head_dim)).transpose(1, 2) for each in (query, key, value))
        if self.rotary is not None:
            query, key = self.rotary(query, first), self.rotary(key, first)
        mask = None
        if cache is not None:
            mask, (key, value) = cache.mask, cache.add(self, key, value)
        mixed = attention(
            *(query, key, value),
            is_causal=first == 0,
            documents=documents,
            mask=mask,
            dropout=self.dropout if self.training else 0.0,
        )
        return cast("Tensor", self.output(mixed.transpose(1, 2).flatten(2)))


class QueryKeyNorm(nn.RMSNorm):
    """A norm of queries or of keys, of each head or of all together, computed in the dtype of its weight."""

    def __init__(self, config: ModelShape, heads: int) -> None:
        is_whole = config.qk_norm == "whole"
        super().__init__((heads if is_whole else 1) * config.head_width, eps=config.norm_eps)
        self.cuts = {"weight": (0, 1)} if is_whole else {}  # ranks that have some of the heads each have some of it

    def forward(self, x: Tensor) -> Tensor:
        groups = x.to(self.weight.dtype).reshape(*x.shape[:-1], -1, len(self.weight))
        return super().forward(groups).flatten(-2).to(x.dtype)


class Rotary(nn.Module):
    """Rotates pairs of features by an angle that grows with the position, so that q . k depends on distance only.

    Feature i is paired with i + head_dim / 2, and turns by position / base^(2 i / head_dim) (Su et al. 2021). The
    tables are constants: in no checkpoint, and the same on every rank.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, context: int, head_dim: int, base: float = ModelShape.rotary_base) -> None:
        super().__init__()
        self.base = base
        self.register_buffer("cos", torch.empty(context, head_dim // 2), persistent=False)
        self.register_buffer("sin", torch.empty(context, head_dim // 2), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fills the tables, computed on the CPU in float64 so that every device holds the same."""
        if self.cos.is_meta:
            return
        context, half = self.cos.shape
        pairs = torch.arange(half, dtype=torch.float64, device="cpu")
        positions = torch.arange(context, dtype=torch.float64, device="cpu")
        angles = torch.outer(positions, self.base ** (-pairs / half))
        with torch.no_grad():
            self.cos.copy_(angles.cos())
            self.sin.copy_(angles.sin())

    def forward(self, x: Tensor, start: int = 0) -> Tensor:
        """Returns x (batch, heads, length, head_dim) rotated by position from ``start`` on, in the dtype of x."""
        rows: slice | Tensor = slice(start, start + x.shape[2])
        if current_part() is not None:
            rows = positions(x.shape[2], x.device).unsqueeze(-2)  # (1, length), or (batch, 1, length)
        cos, sin = self.cos[rows], self.sin[rows]
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class KeyValues:
    """Keys and values of L tokens that were read: with k heads of width d and batch b, 2 b L k d numbers a layer."""

    def __init__(self) -> None:
        self.length = 0  # the tokens that it has read
        self.mask: Tensor | None = None  # of those that are being read; None where the kernels know it
        self._kept: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def begin(self, tokens: Tensor) -> None:
        """Begins to read tokens (batch, length), which see those before and themselves up to theirs."""
        first, length = self.length, tokens.shape[1]
        is_known = first == 0 or length == 1
        ones = None if is_known else torch.ones(length, first + length, dtype=torch.bool, device=tokens.device)
        self.mask = None if ones is None else ones.tril(first)

    def add(self, layer: nn.Module, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Adds those of new tokens, (batch, heads, length, head_dim), to a layer's; returns all of them."""
        if layer in self._kept:
            before = self._kept[layer]
            key, value = torch.cat((before[0], key), dim=2), torch.cat((before[1], value), dim=2)
        self._kept[layer] = key, value
        return key, value


class SwiGLU(nn.Module):
    """An MLP whose hidden features are gated: ``down(silu(gate(x)) * up(x))``."""

    def __init__(self, config: ModelShape) -> None:
        super().__init__()
        self.gate = Linear(config.width, config.mlp_width)
        self.up = Linear(config.width, config.mlp_width)
        self.down = Linear(config.mlp_width, config.width, std=_residual_std(config))

    def forward(self, x: Tensor) -> Tensor:
        return cast("Tensor", self.down(F.silu(self.gate(x)) * self.up(x)))


class GELU(nn.Module):
    """The classic MLP: ``down(gelu(up(x)))``."""

    def __init__(self, config: ModelShape) -> None:
        super().__init__()
        self.up = Linear(config.width, config.mlp_width)
        self.down = Linear(config.mlp_width, config.width, std=_residual_std(config))

    def forward(self, x: Tensor) -> Tensor:
        return cast("Tensor", self.down(F.gelu(self.up(x), approximate="tanh")))


class Linear(nn.Linear):
    """A linear layer without bias whose weight is drawn from a normal distribution."""

    def __init__(self, in_features: int, out_features: int, std: float = INIT_STD) -> None:
        self.std = std  # before the base constructor, which calls reset_parameters
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)


class Head(OutputLayer, Linear): ...


class Embedding(nn.Embedding):
    """An embedding drawn from a normal distribution, as narrow as that of the linear layers."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=INIT_STD)

    def project(self, x: Tensor, targets: Tensor | None = None, *, counts: bool = False) -> Any:
        """Returns what an output layer that is tied to the embedding does: the logits, or their loss."""
        return F.linear(x, self.weight) if targets is None else head_loss(x, self.weight, targets, counts=counts)


def document_starts(tokens: Tensor, end_token: int) -> Tensor:
    """Returns for each token (batch, length) the place where its document begins; a row begins one in any case.

    More end tokens behind an end are one document: the padding of a row (``data/packing.py``).
    """
    places, is_end = torch.arange(tokens.shape[1], device=tokens.device), tokens == end_token
    is_first = F.pad(is_end[:, :-1], (1, 0), value=True) & ~(is_end & F.pad(is_end[:, :-2], (2, 0)))
    return torch.where(is_first, places, 0).cummax(dim=1).values


def _make_norm(config: ModelShape) -> nn.Module:
    if config.norm == "rms":
        return nn.RMSNorm(config.width, eps=config.norm_eps)
    return nn.LayerNorm(config.width, eps=config.norm_eps, bias=False)


def _make_mlp(config: ModelShape) -> nn.Module:
    return SwiGLU(config) if config.mlp == "swiglu" else GELU(config)


def _make_mixture(config: ModelShape) -> Mixture:
    shared = None
    if config.shared_experts:
        width = config.shared_experts * (config.expert_width or config.mlp_width)
        shared = _make_mlp(replace(config, mlp_width=width))
    return Mixture(config, shared, INIT_STD, _residual_std(config))


def _residual_std(config: ModelShape) -> float:
    # 2 * layers projections add to the stream; scaled so, its variance does not grow with depth (GPT-2).
    return INIT_STD / math.sqrt(2 * config.layers)


def _check_gpt(config: ModelShape) -> None:
    if problems := _value_problems(config) or [*head_problems(config), *expert_problems(config)]:
        raise ConfigError(problems, source="model")


def _offer(name: str, names: list[str]) -> str:
    near = difflib.get_close_matches(name, names, n=1)
    return (f"did you mean {near[0]!r}? " if near else "") + f"there are {', '.join(names)}"


def _value_problems(config: ModelShape) -> list[Problem]:
    problems = [
        Problem(
            what=f"model.{name} = {value} is less than 1", rule="it is a count", fix=f"set model.{name} to 1 or more"
        )
        for name in ("layers", "heads", "kv_heads", "width", "mlp_width", "context", "vocab_size")
        if (value := getattr(config, name)) < 1
    ]
    choices = {"norm": "rms layer", "mlp": "swiglu gelu", "positions": "rotary learned", "qk_norm": "none head whole"}
    for name, words in choices.items():
        if (value := getattr(config, name)) not in (allowed := words.split()):
            problems.append(Problem(what=f"model.{name} = {value!r}", rule=f"it is one of {', '.join(allowed)}"))
    if not 0 <= config.dropout < 1:
        problems.append(Problem(what=f"model.dropout = {config.dropout}", rule="it is a probability below 1"))
    return problems


# Of GPT-2, rounded up to a multiple of 128, and of Llama; the other sizes are for text of bytes or characters.
_VOCABULARIES = {"gpt-124m": 50304, "gpt-350m": 50304, "gpt-1.1b": 32000, "gpt-3b": 32000, "gpt-7b": 32000}

SIZES: dict[str, ModelShape] = {
    name: replace(shape, vocab_size=_VOCABULARIES.get(name, 256)) for name, shape in GPT_SIZES.items()
}
