"""What a config's model and loss need of the data: which tokens, images and classes, and what samples may hold.

The folder of a Hugging Face model says how its data are made (``config/hf_folder.py``): a pretrained one knows nothing
else.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.config import Config
from paceline.config.data_sections import IMAGE_SIZE
from paceline.config.hf_folder import PREPROCESSOR, ImageSettings, image_size, read_class_names, read_image_settings
from paceline.config.sections import HFModelConfig
from paceline.data.checked import SampleRules
from paceline.data.datasets import DataShape
from paceline.data.images import MEAN, STD
from paceline.data.tokenizers import Tokenizer, has_tokenizer, open_tokenizer
from paceline.errors import DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelNeeds:
    """What the rest of a config says of the samples that its model reads. None: nothing.

    ``folder`` is that of a Hugging Face model; ``is_pretrained`` with its weights, ``keeps_head`` with its classes too.
    ``has_own_loss``: the user's loss says what targets are.
    """

    folder: Path | None = None
    is_pretrained: bool = False
    keeps_head: bool = False
    vocab_size: int | None = None
    classes: int | None = None
    has_features: bool = False
    has_own_loss: bool = False

    def rules(self, shape: DataShape) -> SampleRules:
        """Returns what samples of a shape may hold."""
        has_tokens = shape.kind == "tokens" or (shape.kind == "custom" and self.vocab_size is not None)
        vocab_size = (shape.vocab_size or self.vocab_size) if has_tokens else None
        return SampleRules(
            vocab_size=vocab_size,
            classes=vocab_size if has_tokens else shape.classes or self.classes,
            has_classes=not self.has_own_loss,
            has_features=self.has_features,
        )

    def tokenizer(self) -> Tokenizer | None:
        """Opens the tokenizer of the model's folder, if there is one."""
        return open_tokenizer(self.folder) if self.folder is not None and has_tokenizer(self.folder) else None

    def images(self, asked: int | None) -> ImageSettings:
        """Returns how images are made; ``asked`` is the config's size. Warns where ImageNet's colours are taken."""
        size, settings = None, None
        if self.folder is not None:
            size, settings = image_size(self.folder), read_image_settings(self.folder)
        if settings is None and self.is_pretrained:
            warnings.warn(
                f"{self.folder} has no {PREPROCESSOR}: images get the mean and the deviation of ImageNet", stacklevel=2
            )
        settings = settings or ImageSettings(size=None, mean=MEAN, std=STD)
        return replace(settings, size=asked or size or IMAGE_SIZE)

    def labels(self, names: Sequence[str], what: str) -> tuple[tuple[str, ...], list[int]]:
        """Returns the names of the model's classes, and the number that it has for each of the data's.

        A model that keeps its head has learned what its numbers stand for; another one takes the data's order.
        """
        known = read_class_names(self.folder) if self.folder is not None and self.keeps_head else None
        if known is None:
            return tuple(names), list(range(len(names)))
        missing = [name for name in names if name not in known]
        if missing:
            raise DataError(
                f"{what} are {', '.join(names)}, and {missing[0]!r} is no class of the model in {self.folder}\n"
                f"  a pretrained head knows its own classes: {', '.join(known[:8])}{' ...' if len(known) > 8 else ''}\n"
                "  name them as the model does, or name the head in model.fresh, such as [classifier], to begin it anew"
            )
        return known, [known.index(name) for name in names]


NO_NEEDS = ModelNeeds()


def needs_of(config: Config) -> ModelNeeds:
    """Returns what a config's model and loss need of the data."""
    model = config.model
    known = ModelNeeds(
        vocab_size=getattr(model, "vocab_size", None),
        classes=getattr(model, "num_classes", None),
        has_features=model.kind in ("mlp", "resnet"),
        has_own_loss=config.train.loss != "auto",
    )
    if not isinstance(model, HFModelConfig):
        return known
    keeps_head = model.pretrained and not model.fresh
    return replace(known, folder=Path(model.path), is_pretrained=model.pretrained, keeps_head=keeps_head)
