"""What the folder of ``model: {kind: hf}`` says that needs no library, and whether config and data agree with it.

A pretrained model knows its own tokens, images and classes. So data are read by the folder's tokenizer, its
``preprocessor_config.json`` and the names in its ``config.json``; others are refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.config import data_sections as sections
from paceline.config.peft_folder import lora_problems
from paceline.config.schema import Config
from paceline.config.sections import HFModelConfig
from paceline.config.suggest import near_files
from paceline.errors import Problem
from paceline.untrusted import parse_json_object, read_regular

WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
PREPROCESSOR = "preprocessor_config.json"
_TOKENIZERS = ("vocabulary.json", "tokenizer.json")  # Paceline's and Hugging Face's, in the order they are looked for
_OF_NO_MEANING = ("version", "truncation", "padding")  # in tokenizer.json, for what a token stands for
_MOST_BYTES = 2**28
BYTE = 255
_CHANNELS = 3
_TextData = sections.TextDataConfig | sections.RowsDataConfig | sections.TokensDataConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSettings:
    """What a model's images are like: height and width (None: not said), mean and deviation of a channel in bytes."""

    size: int | None
    mean: tuple[float, ...]
    std: tuple[float, ...]


def read_image_settings(folder: Path) -> ImageSettings | None:
    """Reads ``preprocessor_config.json``; None where there is none. Raises ValueError for what cannot be followed."""
    path = folder / PREPROCESSOR
    return parse_image_settings(read_regular(path)) if path.is_file() else None


def parse_image_settings(content: bytes) -> ImageSettings:
    """Reads what Hugging Face's processors of images have saved. Raises ValueError for what cannot be followed."""
    values = parse_json_object(content)
    cropped = values.get("crop_size") if values.get("do_center_crop") else None
    scale = values.get("rescale_factor", 1 / BYTE) if values.get("do_rescale", True) else 1.0
    mean, std = values.get("image_mean"), values.get("image_std")
    if not values.get("do_normalize", True):
        mean, std = [0.0], [1.0]
    size = _side(values.get("size") if cropped is None else cropped)
    means, deviations = _in_bytes("image_mean", mean, scale), _in_bytes("image_std", std, scale)
    found = ImageSettings(size=size, mean=means, std=deviations)
    if len(found.mean) != len(found.std) or len(found.mean) not in (1, _CHANNELS) or min(found.std) <= 0:
        raise ValueError(f"image_mean = {mean} and image_std = {std} are not {_CHANNELS} numbers, or 1, above 0")
    return found


def _side(value: Any) -> int | None:
    if value is None:
        return None
    named = isinstance(value, dict) and set(value) <= {"height", "width", "shortest_edge"}
    sides = list(value.values()) if named else value if isinstance(value, list) else [value]
    if not sides or not all(isinstance(each, int) and each == sides[0] >= 1 for each in sides):
        raise ValueError(f"size = {value} is not that of a square")
    return int(sides[0])


def _in_bytes(name: str, values: Any, scale: Any) -> tuple[float, ...]:
    try:
        found = tuple(float(each) / float(scale) for each in (values if isinstance(values, list) else [values]))
    except (TypeError, ValueError, ArithmeticError):
        found = (math.nan,)
    if not all(map(math.isfinite, found)):
        raise ValueError(f"{name} = {values} and rescale_factor = {scale} are no numbers")
    return found


def read_class_names(folder: Path) -> tuple[str, ...] | None:
    """Returns the names of a model's classes by their numbers; None where ``config.json`` only numbers them."""
    try:
        return parse_class_names(read_regular(folder / "config.json"))
    except (OSError, ValueError):
        return None  # whoever builds the model says what is wrong


def parse_class_names(content: bytes) -> tuple[str, ...] | None:
    found = parse_json_object(content).get("id2label")
    if not isinstance(found, dict):
        return None
    names = tuple(str(found.get(str(number), f"LABEL_{number}")) for number in range(len(found)))
    is_numbered = all(name == f"LABEL_{number}" for number, name in enumerate(names))
    return None if is_numbered else names


def image_size(folder: Path) -> int | None:
    """Returns the side of the images that a folder's model reads; None where it says none."""
    settings = read_image_settings(folder)
    if settings is not None and settings.size is not None:
        return settings.size
    return _side(parse_json_object(read_regular(folder / "config.json")).get("image_size"))


def tokenizer_file(folder: Path) -> Path | None:
    return next((folder / name for name in _TOKENIZERS if (folder / name).is_file()), None)


def check_folder_is_followed(config: Config) -> Iterator[Problem]:
    model = config.model
    if not isinstance(model, HFModelConfig) or not (Path(model.path) / "config.json").is_file():
        return
    folder = Path(model.path)
    for place, source in sections.sources_of(config.data).items():
        if isinstance(source, sections.ImagesDataConfig):
            yield from _image_problems(folder, place, source)
        elif isinstance(source, _TextData) and model.pretrained:
            yield from _token_problems(folder, place, source)


def _image_problems(folder: Path, place: str, source: sections.ImagesDataConfig) -> Iterator[Problem]:
    try:
        size = image_size(folder)
    except (OSError, ValueError) as error:
        rule = f"{PREPROCESSOR} says size, image_mean and image_std of the images that the model reads"
        fix = "mend the file, or make the images in a factory of your own: data: {kind: factory, ...}"
        yield Problem(what=f"model.path = {str(folder)!r}: its images cannot be made: {error}", rule=rule, fix=fix)
        return
    if size is not None and source.size is not None and source.size != size:
        what = f"{place}.size = {source.size}, and the model in model.path reads images of {size}"
        fix = f"leave {place}.size out, or change the size in the folder's {PREPROCESSOR}"
        yield Problem(what=what, rule="the folder says how its model reads images, and is exported with it", fix=fix)


def _token_problems(folder: Path, place: str, source: _TextData) -> Iterator[Problem]:
    own = tokenizer_file(folder)
    given: str | None
    if isinstance(source, sections.TextDataConfig):
        key, given = "tokens", source.tokens
        if own is None and given is None:
            yield Problem(
                what=f"model.path = {str(folder)!r} has no tokenizer, and {place}.tokens is not set",
                rule="a pretrained model knows the tokens of its own tokenizer, in tokenizer.json",
                fix=f"save it there: AutoTokenizer.from_pretrained(...).save_pretrained({str(folder)!r}); "
                f"or set {place}.tokens, if the model was trained on bytes or characters",
            )
    elif isinstance(source, sections.RowsDataConfig):
        key, given = "tokenizer", source.tokenizer
    else:
        key, given = "path", source.path if tokenizer_file(Path(source.path).expanduser()) else None
    if own is None or given is None or _is_same(own, given):
        return
    again = f"paceline data prepare ... --tokenizer {folder}" if key == "path" else f"leave {place}.{key} out"
    what = f"{place}.{key} = {given!r} has other tokens than the tokenizer of the pretrained model in model.path"
    rule = f"a token stands for what the model has learned: {own} says it"
    yield Problem(what=what, rule=rule, fix=f"{again}; or begin with random weights: model.pretrained = false")


def _is_same(own: Path, given: str) -> bool:
    """Says whether tokens of ``given``, bytes, char or a folder, stand for the same as those of a tokenizer's file."""
    other = tokenizer_file(Path(given).expanduser()) if given not in ("bytes", "char") else None
    try:
        content = read_regular(own, _MOST_BYTES)
        if other is None:
            is_ours = given == "bytes" and own.name == _TOKENIZERS[0]
            return is_ours and parse_json_object(content, _MOST_BYTES).get("kind") == "bytes"
        found = read_regular(other, _MOST_BYTES)
        return found == content or _meaning(found) == _meaning(content)
    except (OSError, ValueError):
        return True  # whoever opens it says what is wrong


def _meaning(content: bytes) -> dict[str, Any]:
    values = parse_json_object(content, _MOST_BYTES)
    return {name: value for name, value in values.items() if name not in _OF_NO_MEANING}


def check_shared_sequences(config: Config) -> Iterator[Problem]:
    """Yields what ranks cannot share: samples of no tokens, one class for many, too few heads, windows in a row."""
    asked, model = f"parallel.context = {config.parallel.context}", config.model
    if config.parallel.context == 1:
        return
    for place, source in sections.sources_of(config.data).items():
        told = f"{place}.kind = images" if isinstance(source, sections.ImagesDataConfig) else ""
        if isinstance(source, sections.RowsDataConfig) and (source.classes is not None or source.text_pair is not None):
            told = f"{place} of texts that are classified"
        if told:
            rule = "ranks share the tokens of a sample, of which each has a target"
            yield Problem(what=f"{asked} with {told}", rule=rule, fix="set parallel.context = 1")
    if not isinstance(model, HFModelConfig):
        return
    try:
        settings = parse_json_object(read_regular(Path(model.path) / "config.json"))
    except (OSError, ValueError):
        return  # told by ``check_hf_folder``
    parallel, texts = config.parallel, settings.get("text_config")
    named = {**settings, **texts} if isinstance(texts, dict) else settings
    heads = named.get("num_attention_heads", named.get("n_head"))
    if parallel.context_method == "ulysses" and isinstance(heads, int) and heads // parallel.tensor % parallel.context:
        what = f"{asked} with parallel.context_method = ulysses and {heads} heads in {model.path}/config.json"
        fix = "take fewer ranks for a sequence, or set parallel.context_method = ring, which heads do not limit"
        yield Problem(what=what, rule="ulysses gives every rank whole heads, as many to each", fix=fix)
    kinds = settings.get("layer_types")
    slides = settings.get("use_sliding_window", not isinstance(kinds, list) or "sliding_attention" in kinds)
    window = settings.get("sliding_window") if slides else None
    tokens = sections.known_shape(config.data).context
    if isinstance(window, int) and tokens and window < tokens:
        rule = "ranks that share each sequence compute the attention of every token to all before it"
        fix = f"set data.context = {window}, or parallel.context = 1"
        what = f"{asked} with sliding_window = {window} in {model.path}/config.json, and {tokens} tokens of a sample"
        yield Problem(what=what, rule=rule, fix=fix)


def check_hf_folder(config: Config) -> Iterator[Problem]:
    model = config.model
    if not isinstance(model, HFModelConfig):
        return
    folder = Path(model.path)
    if not (folder / "config.json").is_file():
        fix = "name a folder that save_pretrained wrote, or that was downloaded; nothing is fetched from a network"
        yield Problem(
            what=f"model.path = {model.path!r} {'has no config.json' if folder.is_dir() else 'is no folder'}",
            rule=f"a model of Hugging Face is a local folder with config.json; a relative path starts at {Path.cwd()}",
            fix=fix if folder.is_dir() else near_files(folder, fix),
        )
        return
    try:
        parse_json_object(read_regular(folder / "config.json"))
    except (OSError, ValueError) as error:
        what = f"model.path = {model.path!r}: config.json cannot be read: {error}"
        rule = "it is a JSON object that says which model it is"
        yield Problem(what=what, rule=rule, fix="copy or download the folder again")
    if model.pretrained and not any((folder / name).is_file() for name in WEIGHTS):
        what = f"model.path = {model.path!r} has no weights in safetensors"
        rule = f"a pretrained model has {' or '.join(WEIGHTS)}; pickles (.bin) are not read"
        fix = "save it again with save_pretrained(..., safe_serialization=True), or set model.pretrained = false"
        yield Problem(what=what, rule=rule, fix=fix)
    if model.fresh and not model.pretrained:
        rule = "it names what the folder's weights lack, and without them all values are random"
        yield Problem(what="model.fresh with model.pretrained = false", rule=rule, fix="leave model.fresh out")
    yield from lora_problems(model.lora, is_pretrained=model.pretrained)
