"""A few samples of each evaluation for people to look at: pictures and texts, their targets, and the model's answers.

They are the first samples of the first batch that the evaluation reads anyway, with the answers that its accuracy
counts: no pass of the model, no random number and no message more. One rank keeps copies of them, and encodes them
after the evaluation. Of a language model, each answer is the likeliest token after the true text so far.

A run of many evaluations keeps those of all up to the 31st, then of 16 in each doubling of their number, and of the
last: the records stay small.
"""

from __future__ import annotations

from typing import Any

import torch

from paceline.data.datasets import IGNORED, DataShape
from paceline.data.registry import DataSplits
from paceline.data.tokenizers import Tokenizer
from paceline.engines.engine import Engine
from paceline.errors import PacelineError
from paceline.records.samples import MOST_SAMPLES, samples_of
from paceline.train.loss import LossValue

_MOST_TOKENS, _MOST_TEXT, _MOST_PIXELS = 128, 300, 64  # of a row, a text and a side of a picture
_OCTAVE = 5  # bits: 16 evaluations in each doubling
_ROWS, _PICTURE, _CHANNELS = 2, 3, (1, 3)  # dims


class ShownSamples:
    """What one rank keeps of the evaluation under way; ``count`` samples at most, and none of kinds it cannot show."""

    def __init__(self, data: DataSplits, count: int) -> None:
        self._shape, self._tokenizer, self._make_pictures = data.shape, data.tokenizer, data.pictures
        self._count = min(count, MOST_SAMPLES)
        self._kept: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | None = None
        self._evaluations = 0

    def begin(self, *, is_last: bool) -> None:
        self._kept, self._evaluations = None, self._evaluations + 1
        apart = 1 << max(0, self._evaluations.bit_length() - _OCTAVE)
        self._is_wanted = is_last or self._evaluations % apart == 0

    def see(self, engine: Engine, batch: Any, value: LossValue) -> None:
        """Keeps copies of the first samples that are scored; nothing on other ranks that have them too."""
        groups, is_pair = engine.groups, isinstance(batch, tuple | list) and len(batch) == 2
        is_first = groups.batch.rank == 0 and groups.tensor.rank == 0 and groups.context.rank == 0
        if self._kept is not None or not (self._is_wanted and self._count and is_first and is_pair):
            return
        inputs, targets = batch
        if isinstance(inputs, torch.Tensor) and isinstance(targets, torch.Tensor) and not targets.is_floating_point():
            few, answers = slice(self._count), None if value.answers is None else value.answers[: self._count].clone()
            self._kept = inputs[few].clone(), targets[few].clone(), answers

    def detail(self) -> dict[str, Any] | None:
        """Returns the detail of an event of the records; None where there is nothing that can be shown."""
        if self._kept is None:
            return None
        (inputs, targets, answers), self._kept = self._kept, None
        inputs, targets, answers = inputs.cpu(), targets.cpu(), None if answers is None else answers.cpu()
        try:
            if self._tokenizer is not None and targets.ndim == _ROWS and targets.shape == inputs.shape:
                return samples_of(_continued(self._tokenizer, inputs, targets, answers))
            if targets.ndim != 1:
                return None
            words = _judged(self._shape, targets, answers)
            if self._tokenizer is not None and not inputs.is_floating_point() and inputs.ndim in (_ROWS, _ROWS + 1):
                return samples_of([f"{text}\n{word}" for text, word in zip(self._texts(inputs), words, strict=True)])
            pictures = self._pictures(inputs)
            return None if pictures is None else samples_of(words, pictures)
        except (PacelineError, ValueError, RuntimeError, ImportError):  # of data that is not what it looks like
            return None

    def _texts(self, inputs: torch.Tensor) -> list[str]:
        assert self._tokenizer is not None
        rows = inputs[:, 0] if inputs.ndim > _ROWS else inputs  # of pairs, the second row says which text a token is of
        return [_text(self._tokenizer, row[row != self._shape.pad_token])[:_MOST_TEXT] for row in rows]

    def _pictures(self, inputs: torch.Tensor) -> torch.Tensor | None:
        """Returns small pictures of bytes, or of floats from 0 to 1; None of what are no pictures."""
        if self._make_pictures is not None:
            inputs = self._make_pictures(inputs)
        is_picture = inputs.ndim == _PICTURE + 1 and inputs.shape[1] in _CHANNELS
        if not is_picture and not (inputs.ndim == _PICTURE and inputs.is_floating_point()):
            return None
        step = -(-max(inputs.shape[-2:]) // _MOST_PIXELS)
        small = inputs[..., ::step, ::step]
        if not small.is_floating_point():
            return small
        flat = small.float().flatten(1)
        low, high = flat.min(1).values, flat.max(1).values
        if low.min() >= 0 and high.max() <= 1:
            return small.float()
        scaled = (flat - low[:, None]) / (high - low).clamp_min(1e-12)[:, None]
        return scaled.view(small.shape)


def _judged(shape: DataShape, targets: torch.Tensor, answers: torch.Tensor | None) -> list[str]:
    """Returns the target of each sample, and the answer where it is another one."""

    def name(number: int) -> str:
        names = shape.class_names
        return str(names[number]) if names is not None and 0 <= number < len(names) else str(number)

    found = []
    for row, target in enumerate(targets.tolist()):
        given = None if answers is None or answers.ndim != 1 else int(answers[row])
        told = "" if given is None else ", right" if given == target else f", taken for {name(given)}"
        found.append("no target" if target == IGNORED else name(target) + told)
    return found


def _continued(
    tokenizer: Tokenizer, inputs: torch.Tensor, targets: torch.Tensor, answers: torch.Tensor | None
) -> list[str]:
    """Returns the start of each row, how it goes on, and what the model answers at each place of that."""
    found = []
    for row in range(len(inputs)):
        middle = min(inputs.shape[1], _MOST_TOKENS) // 2
        there = targets[row, middle - 1 : 2 * middle] != IGNORED
        parts = {"text": inputs[row, :middle], "goes on": targets[row, middle - 1 : 2 * middle][there]}
        if answers is not None and answers.shape == targets.shape:
            parts["answers"] = answers[row, middle - 1 : 2 * middle][there]
        found.append("\n".join(f"{name:7} {_text(tokenizer, part)[:_MOST_TEXT]!r}" for name, part in parts.items()))
    return found


def _text(tokenizer: Tokenizer, tokens: torch.Tensor) -> str:
    """Decodes tokens; a model may answer with one that the tokenizer does not have."""
    return tokenizer.decode([token for token in tokens.tolist() if 0 <= token < tokenizer.vocab_size])
