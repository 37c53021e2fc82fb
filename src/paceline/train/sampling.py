"""Text from a language model: a checkpoint made into a model on one device or on several ranks, and its next token.

Each token is drawn from the logits of the last position: the ``top_k`` most likely ones alone, divided by the
temperature; at temperature 0 the most likely one. The model keeps the keys and values of what it has read, so that a
token costs a forward pass of one token. It sees at most its context: beyond that the window moves, every token in it
has another place, and the model reads it whole for every token.
"""

from __future__ import annotations

import contextlib
import inspect
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from paceline.checkpoint.manifest import MODEL
from paceline.checkpoint.read import HUGGING_FACE, TOKENIZER, Checkpoint, open_checkpoint, read_files, write_files
from paceline.checkpoint.tools.outgoing import saved_adapters
from paceline.comm.base import Communicator
from paceline.config import Config, config_from_dict
from paceline.data.datasets import DataShape
from paceline.data.tokenizers import Tokenizer, has_tokenizer, open_tokenizer
from paceline.engines.apply import parallelize
from paceline.engines.engine import Engine
from paceline.errors import CheckpointError, PacelineError, UsageError
from paceline.models.gpt import GPT, KeyValues
from paceline.models.hugging_face import allocate_unfilled, mark_unfilled, parameters_on_meta
from paceline.models.lora import A
from paceline.models.registry import build_model
from paceline.shards import Shard, whole_region
from paceline.train.loss import logits_of
from paceline.untrusted import is_count

Spread: TypeAlias = Literal["fsdp", "tensor"]
_EMBEDDING = "token_embedding.weight"  # of the package's GPT


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOptions:
    """How many tokens are drawn, and how. ``top_k`` 0: of all."""

    tokens: int = 200
    temperature: float = 0.8
    top_k: int = 0
    seed: int = 0
    uses_cache: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageModel:
    """A model with what its tokens stand for. ``context``: the most tokens that it reads."""

    model: nn.Module
    tokenizer: Tokenizer
    context: int
    device: torch.device
    engine: Engine | None = None  # of a model that is spread over ranks


def write_together(
    comm: Communicator, path: Path, prompt: str, options: SampleOptions, spread: Spread
) -> tuple[list[int], str]:
    """Returns the tokens that follow a prompt, and their text. All ranks call it, each with its part of the model."""
    language = open_language_model(open_checkpoint(path), comm.device, comm, spread)
    tokens = sample(language, prompt, options)
    return tokens, language.tokenizer.decode(tokens)


def open_language_model(
    checkpoint: Checkpoint, device: torch.device, comm: Communicator | None = None, spread: Spread = "fsdp"
) -> LanguageModel:
    """Builds a checkpoint's model, each rank its part (``spread``). Raises UsageError where it writes no text."""
    is_spread = comm is not None and comm.size > 1
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer = _tokenizer(checkpoint, folder)
        config = _config(checkpoint, folder)
        embedding = checkpoint.manifest.tensors.get(MODEL + _EMBEDDING)
        vocabulary = None if embedding is None else embedding.shape[0]
        shape = DataShape(kind="custom", vocab_size=vocabulary, context=_data_context(checkpoint))
        with parameters_on_meta() if is_spread and config.model.kind != "hf" else contextlib.nullcontext():
            model = build_model(config.model, shape, is_unfilled=True)
        if tokenizer is None:
            what = f"{checkpoint.path} does not say what its tokens stand for"
            rule = "a run keeps the vocabulary of its text, or the tokenizer of its Hugging Face folder"
            raise UsageError(f"{what}\n  {rule}\n  sample from a run on text, or of a folder with tokenizer.json")
    if not is_spread:
        allocate_unfilled([model], torch.device("cpu"))
    model.to(getattr(torch, config.train.dtype))
    wholes = _wholes(model)
    if lacking := [each.name for each in wholes if MODEL + each.name not in checkpoint.manifest.tensors]:
        raise CheckpointError(f"{checkpoint.path} has no {lacking[0]}\n  the model has {len(lacking)} such tensors")
    engine: Engine | None = None
    if comm is not None and is_spread:
        mark_unfilled(parameter for parameter in model.parameters() if parameter.is_meta)
        how: dict[str, Any] = {"tensor": comm.size, "gathers_logits": True}
        engine = parallelize(model, comm, "fsdp") if spread == "fsdp" else parallelize(model, comm, **how)
    for shard in wholes if engine is None else engine.shards():
        checkpoint.fill(shard, MODEL + shard.name)
    settings = getattr(model, "config", None)
    context = getattr(settings, "context", None) or getattr(settings, "max_position_embeddings", None)
    context = context if is_count(context) else _data_context(checkpoint)
    if engine is None:
        model.to(device)
    else:
        engine.mark_loaded()
    context = int(context or 1024)
    return LanguageModel(model=model.eval(), tokenizer=tokenizer, context=context, device=device, engine=engine)


@torch.no_grad()
def sample(language: LanguageModel, prompt: str, options: SampleOptions) -> list[int]:
    """Returns the tokens that follow a prompt, up to the end of a document. Raises UsageError for an empty prompt."""
    given = language.tokenizer.encode(prompt)
    if not given:
        raise UsageError("the prompt has no tokens\n  the model goes on from them\n  give --prompt a text")
    generator = torch.Generator().manual_seed(options.seed)
    tokens: list[int] = []
    reader = _TokenReader(language, uses_cache=options.uses_cache)
    for _ in range(options.tokens):
        logits = reader.read([*given, *tokens])[0, -1].float().cpu()
        token = _draw(logits[: language.tokenizer.vocab_size], options, generator)
        if language.engine is not None:  # logits may differ in their last bits
            drawn = torch.tensor([token], device=language.device)
            language.engine.world.broadcast(drawn).wait()
            token = int(drawn)
        if token == language.tokenizer.end_token:
            break
        tokens.append(token)
    return tokens


class _TokenReader:
    """Has a model read a growing row of tokens, each of them once where it keeps keys and values."""

    def __init__(self, language: LanguageModel, *, uses_cache: bool) -> None:
        self._language = language
        self._run: Callable[..., Any] = language.engine or language.model
        self._kept: Any = None  # the library's own form for models of Hugging Face
        self._num_read = 0
        is_ours = isinstance(language.model, GPT)
        takes = inspect.signature(language.model.forward).parameters
        self._is_theirs = not is_ours and {"past_key_values", "use_cache"} <= set(takes)
        self._keeps = uses_cache and (is_ours or self._is_theirs)

    def read(self, tokens: list[int]) -> Any:
        """Returns the logits of the last tokens; those of the very last are what follows the row."""
        self._keeps = self._keeps and len(tokens) <= self._language.context
        fresh = tokens[self._num_read :] if self._keeps else tokens[-self._language.context :]
        window = torch.tensor([fresh], device=self._language.device)
        if not self._keeps:
            self._kept = None
            return logits_of(self._run(window))
        self._num_read = len(tokens)
        if not self._is_theirs:
            self._kept = self._kept or KeyValues()
            return logits_of(self._run(window, cache=self._kept))
        output = self._run(window, past_key_values=self._kept, use_cache=True)
        self._kept = getattr(output, "past_key_values", None)
        self._keeps = self._kept is not None
        return logits_of(output)


def _draw(logits: torch.Tensor, options: SampleOptions, generator: torch.Generator) -> int:
    if options.temperature == 0:
        return int(logits.argmax())
    if 0 < options.top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(options.top_k).values[-1], -torch.inf)
    return int(torch.multinomial((logits / options.temperature).softmax(-1), 1, generator=generator))


def _tokenizer(checkpoint: Checkpoint, folder: Path) -> Tokenizer | None:
    places = [folder / TOKENIZER, folder / HUGGING_FACE]
    for place in places:
        place.mkdir()
        write_files(read_files(checkpoint, f"{place.name}/"), place)
    return next((open_tokenizer(place) for place in places if has_tokenizer(place)), None)


def _config(checkpoint: Checkpoint, folder: Path) -> Config:
    """Returns the config of the run; a Hugging Face model is built from what the checkpoint keeps of its folder."""
    kind = checkpoint.manifest.setting("model", "kind")
    if kind in ("mlp", "resnet"):
        raise UsageError(f"{checkpoint.path}: model.kind = {kind} is no language model\n  only these write text")
    model = checkpoint.manifest.setting("model")
    if not isinstance(model, dict):
        what = f"{checkpoint.path} does not say which model it is of"
        raise UsageError(f"{what}\n  checkpoints of paceline train do\n  name the folder of such a run")
    if kind == "hf":
        here: dict[str, Any] = {"path": str(folder / HUGGING_FACE), "task": None, "pretrained": False, "fresh": []}
        model = {**model, **here, "lora": _adapters(checkpoint)}
    dtype = checkpoint.manifest.setting("train", "dtype")
    kept = {} if dtype is None else {"dtype": dtype}
    data = {"kind": "factory", "factory": "no:data"}  # none are made
    try:
        return config_from_dict({"model": model, "data": data, "train": {**kept, "steps": 1}})
    except PacelineError as error:
        raise UsageError(f"{checkpoint.path}: the config of its model cannot be used\n  {error}") from error


def _adapters(checkpoint: Checkpoint) -> dict[str, Any]:
    """Returns the settings of a checkpoint's adapters, as a config has them; a folder of PEFT may be gone."""
    layers = {name: each for name, each in saved_adapters(checkpoint).items() if "is_whole" not in each}
    ranks = [shape[0] for name, shape in checkpoint.shapes(MODEL).items() if name.endswith(f".{A}")]
    scales = [each["scale"] for each in layers.values()]
    return {"rank": ranks[0], "alpha": scales[0] * ranks[0], "targets": list(layers)} if ranks and scales else {}


def _data_context(checkpoint: Checkpoint) -> int | None:
    context = checkpoint.manifest.setting("data", "context")
    return context if is_count(context) else None


def _wholes(model: nn.Module) -> list[Shard]:
    """Returns what a checkpoint has: parameters once each, and buffers that are saved."""
    saved = model.state_dict(keep_vars=True)
    buffers = {name: each for name, each in model.named_buffers() if name in saved}
    pairs = {**dict(model.named_parameters()), **buffers}.items()
    return [Shard(name=name, region=whole_region(tuple(each.shape)), tensor=each) for name, each in pairs]
