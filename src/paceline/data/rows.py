"""Rows of JSON lines, CSV, parquet and data sets that Hugging Face's ``datasets`` has saved to disk; images.

    inputs    numbers or lists of them: features of a model; or text, with a tokenizer: a language model's
    targets   a class, or numbers; without: a language model's, the inputs one token later

Text of a row is one sample: cut to ``context`` tokens, or padded, where the padding does not count. JSON lines are
found by the places of their ends, and read when they are asked for. Arrow files are mapped; parquet, CSV and what is
compressed (.gz, .zst) are in memory. Texts with a class each: ``labelled_texts.py``.

Images are in folders, one for each class: ``path/cat/1.jpg``. One becomes bytes (channels, size, size), which the
device normalises: its shorter side is scaled to ``size`` and the middle cut out. ``crop_flip`` takes a random part of 8
to 100 % of the area, and mirrors every second one; what is drawn is a pure function of (seed, epoch, index).
"""

from __future__ import annotations

import csv
import gzip
import importlib
import io
import re
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import default_collate

from paceline.config.data_sections import OnBad
from paceline.data.checked import SampleRules, find_bad, refuse_sample
from paceline.data.datasets import IGNORED, EpochDataset, Pair
from paceline.data.order import Indices, random_words
from paceline.data.tokenizers import Tokenizer
from paceline.errors import DataError
from paceline.untrusted import file_inside, open_regular, parse_json_object, read_regular, reason_of

_BLOCK = 2**22
COMPRESSED = (".gz", ".zst")
_NUMBER = re.compile(r"[+-]?([0-9]{1,300}\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,3})?")


@dataclass(eq=False, kw_only=True)
class RowDataset(EpochDataset):
    """Samples of rows by the names of their fields, in the form of the first row that can be used."""

    rows: Rows
    inputs: str
    targets: str | None
    rules: SampleRules
    tokenizer: Tokenizer | None = None
    context: int | None = None
    on_bad: OnBad = "stop"
    labels: Sequence[int] | None = None  # the model's numbers of the targets' classes
    _first: tuple[int, Pair] | None = field(default=None, init=False)

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, indices: Indices, epoch: int) -> Pair:  # noqa: ARG002  # the same in all
        if self._first is None:
            usable = ((index, sample) for index in range(len(self)) if (sample := self._sample(index)) is not None)
            self._first = next(usable, None)
            if self._first is None:
                raise DataError(f"{self.rows.place(0)} and all other rows cannot be used\n  a run needs samples")
        samples = [self._sample(index) for index in indices.tolist()]
        like = self._first[1]
        empty = torch.zeros_like(like[0]), torch.full_like(like[1], IGNORED)
        inputs, targets = default_collate([empty if each is None else each for each in samples])
        names = self.inputs, self.targets or self.inputs
        for row, reason in find_bad((inputs, targets), self.rules, names).items():
            self._refuse(int(indices[row]), reason)
            inputs[row], targets[row] = empty
        if self.labels is not None:
            is_class = targets != IGNORED
            targets[is_class] = torch.tensor(self.labels)[targets[is_class]]
        return inputs, targets

    def _sample(self, index: int) -> Pair | None:
        try:
            row = read_row(self.rows, index, (self.inputs, self.targets))
            if self.targets is None:
                return self._text(row[self.inputs])
            inputs, targets = _tensor(row[self.inputs], self.inputs), _tensor(row[self.targets], self.targets)
            if self.rules.has_features:
                inputs = inputs.float()
            if self.rules.has_classes and targets.is_floating_point():  # 1.0 is a class, 1.5 is none
                if len(wrong := targets[targets != targets.round()]):
                    rule = "a class is a whole number; other targets need a train.loss"
                    raise ValueError(f"{self.targets!r} is {wrong[0]:g}, and {rule}")
                targets = targets.long()
            if self._first is None:
                return inputs, targets
            like = self._first[1]
            return self._formed(inputs, like[0], self.inputs), self._formed(targets, like[1], self.targets)
        except (ValueError, DataError) as error:
            self._refuse(index, reason_of(error), error)
            return None

    def _formed(self, value: torch.Tensor, like: torch.Tensor, name: str) -> torch.Tensor:
        assert self._first is not None
        if value.shape != like.shape:
            forms = [f"{tuple(each.shape)}" if each.ndim != 1 else f"{len(each)} numbers" for each in (value, like)]
            raise ValueError(f"{name!r} has {forms[0]}, and {forms[1]} in {self.rows.place(self._first[0])}")
        if value.is_floating_point() and not like.is_floating_point():
            where = self.rows.place(self._first[0])
            raise ValueError(f"{name!r} has fractions, and whole numbers in {where}: write those as 1.0")
        return value.to(like.dtype)

    def _refuse(self, index: int, reason: str, cause: Exception | None = None) -> None:
        """Raises ``BadSampleError`` with the place of a row, or warns that the run goes on without it."""
        rule = (
            "data.inputs and data.targets name the fields of a sample; all rows have the same form,\n"
            "  numbers that are finite, and tokens and classes that the model has\n  mend the row"
        )
        refuse_sample(f"{self.rows.place(index)} cannot be used: {reason}", rule, self.on_bad, cause)

    def document(self, index: int, end_token: int | None) -> Pair | None:
        """Returns the tokens of a row and the target of each, for ``packing.py``; None for one that cannot be used.

        Of a row with targets, those are its targets. The ``end_token`` is the last one, here and nowhere else.
        """
        try:
            row = read_row(self.rows, index, (self.inputs, self.targets))
            tokens = self._tokens(row[self.inputs])
            targets = tokens[1:] if self.targets is None else _tensor(row[self.targets], self.targets)
            if self.targets is None:
                targets = F.pad(targets, (0, 1), value=IGNORED)
            if targets.shape != tokens.shape:
                rule = f"and {self.inputs!r} has {len(tokens)} tokens, with a target each"
                raise ValueError(f"{self.targets!r} has {targets.numel()} numbers, {rule}")
            counts = targets != IGNORED
            if not (targets[:-1] == tokens[1:])[counts[:-1]].all():
                rule = "and a target is the token that follows: move them by one place"
                if (targets == tokens)[counts].all():
                    raise ValueError(f"{self.targets!r} has the tokens of {self.inputs!r} themselves, {rule}")
                if (targets[:-2] == tokens[2:])[counts[:-2]].all() and not counts[-2:].any():
                    raise ValueError(f"{self.targets!r} has the tokens of {self.inputs!r} two places on, {rule} alone")
            names = self.inputs, self.targets or self.inputs
            for reason in find_bad((tokens[None], targets[None]), self.rules, names).values():
                raise ValueError(reason)
            if end_token is None:
                return tokens, targets
            if tokens[-1] != end_token:
                tokens, targets = F.pad(tokens, (0, 1), value=end_token), F.pad(targets, (0, 1), value=IGNORED)
            if inside := (tokens[:-1] == end_token).nonzero().flatten().tolist():
                what = f"{self.inputs!r}[{inside[0]}] is the end token {end_token}, and documents are told apart by it"
                raise ValueError(f"{what}: set data.end_token to one that none has, such as for padding")
        except (ValueError, DataError) as error:
            self._refuse(index, reason_of(error), error)
            return None
        return tokens, targets

    def _text(self, value: Any) -> Pair:
        assert self.context is not None
        tokens = self._tokens(value)[: self.context + 1]
        inputs = torch.zeros(self.context, dtype=torch.int64)
        targets = torch.full((self.context,), IGNORED)
        inputs[: len(tokens) - 1], targets[: len(tokens) - 1] = tokens[:-1], tokens[1:]
        return inputs, targets

    def _tokens(self, value: Any) -> torch.Tensor:
        if isinstance(value, str):
            if self.tokenizer is None:
                raise ValueError("it is text, and data.tokenizer is not set")
            value = self.tokenizer.encode(value)
            value += [] if self.tokenizer.end_token is None else [self.tokenizer.end_token]
        tokens = _tensor(value, self.inputs)
        if tokens.is_floating_point():
            raise ValueError(f"{self.inputs!r} has {tokens.tolist()[:4]}, and tokens are whole numbers")
        if tokens.ndim != 1 or len(tokens) < 2:
            raise ValueError(f"{self.inputs!r} has {tokens.numel()} tokens, and a sample at least two")
        return tokens


def _content(path: Path) -> bytes:
    """Reads a whole file, unpacked where it is compressed. Raises OSError, or DataError without a package for it."""
    with open_regular(path) as file:
        packed: bytes = file.read()
    if path.suffix not in COMPRESSED:
        return packed
    try:
        return gzip.decompress(packed) if path.suffix == ".gz" else _unpacked(packed)
    except ImportError as error:
        what = f"data.path = {str(path)!r} needs the package zstandard, which is not installed"
        raise DataError(f"{what}\n  it reads .zst files\n  pip install zstandard, or unpack the file") from error
    except (zlib.error, EOFError) as error:
        raise OSError(f"it is cut short or damaged: {error}") from error


def _unpacked(packed: bytes) -> bytes:
    """Unpacks all frames of a .zst file; several are one behind the other where files or threads were joined."""
    zstandard, found = importlib.import_module("zstandard"), []
    while packed:
        frame = zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj()  # as zstd --long writes them
        try:
            found.append(frame.decompress(packed))
        except zstandard.ZstdError as error:
            raise EOFError(str(error)) from error
        if not frame.eof:
            raise EOFError("its last frame has no end")
        packed = frame.unused_data
    return b"".join(found)


class CsvRows:
    """The rows of a CSV file with a line of names, in memory; whole numbers and fractions are numbers."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            text = io.StringIO(_content(path).decode("utf-8-sig"), newline="")
            self._rows = [{name: _number(value) for name, value in row.items()} for row in csv.DictReader(text)]
        except (OSError, ValueError, csv.Error) as error:
            rule = f"it is a CSV file whose first line names its columns; a relative path starts at {Path.cwd()}"
            raise DataError(f"data.path = {str(path)!r} cannot be read: {error}\n  {rule}\n  check the path") from error

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, indices: Indices) -> list[dict[str, Any]]:
        return [self._rows[index] for index in indices.tolist()]

    def place(self, index: int) -> str:
        return f"{self.path}: row {index + 1}"


def _number(value: Any) -> Any:
    if not isinstance(value, str) or not _NUMBER.fullmatch(value):
        return value
    return int(value) if value.lstrip("+-").isdecimal() else float(value)


class JsonLines:
    """The lines of a file, found by their first bytes: 8 bytes of memory a line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._content: bytes | None = None  # of a file that is compressed
        starts, place = [np.zeros(1, dtype=np.int64)], 0
        try:
            if path.suffix in COMPRESSED:
                self._content = _content(path)
            with self._opened() as file:
                while block := file.read(_BLOCK):
                    starts.append(np.flatnonzero(np.frombuffer(block, dtype=np.uint8) == ord("\n")) + 1 + place)
                    place += len(block)
        except OSError as error:
            rule = f"it is a file of JSON lines; a relative path starts at {Path.cwd()}"
            fix, why = "check the path", getattr(error, "strerror", None) or error
            raise DataError(f"data.path = {str(path)!r} cannot be read: {why}\n  {rule}\n  {fix}") from error
        self._starts = np.unique(np.concatenate([*starts, np.array([place])]))  # the last is the end of the file

    def __len__(self) -> int:
        return len(self._starts) - 1

    def read(self, indices: Indices) -> list[dict[str, Any]]:
        """Returns rows by the names of their fields. Raises ValueError or OSError."""
        rows = []
        with self._opened() as file:
            for index in indices.tolist():
                file.seek(int(self._starts[index]))
                line = file.read(int(self._starts[index + 1] - self._starts[index]))
                rows.append(parse_json_object(line.rstrip()))
        return rows

    def place(self, index: int) -> str:
        return f"{self.path}: line {index + 1}"

    def _opened(self) -> IO[bytes]:
        return open_regular(self.path) if self._content is None else io.BytesIO(self._content)


class ArrowRows:
    """The rows of parquet, or of Arrow files that ``datasets`` has saved. Each process opens them anew."""

    def __init__(self, path: Path, kind: Literal["parquet", "hf_dataset"], columns: tuple[str, ...]) -> None:
        self.path, self.kind, self.columns = path, kind, columns
        self._table: Any = None
        self._order: Any = None
        table = self._opened()
        self._length = len(table if self._order is None else self._order)

    def __len__(self) -> int:
        return self._length

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_table": None, "_order": None}

    def read(self, indices: Indices) -> list[dict[str, Any]]:
        table = self._opened()
        numbers = indices if self._order is None else self._order[indices]
        rows: list[dict[str, Any]] = table.take(numbers).to_pylist()
        return rows

    def place(self, index: int) -> str:
        return f"{self.path}: row {index}"

    def _opened(self) -> Any:
        if self._table is None:
            try:
                self._table = self._open()
            except ImportError as error:
                what = f"data.kind = {self.kind} needs the package pyarrow, which is not installed"
                raise DataError(f"{what}\n  pip install 'paceline[data]'") from error
            except (OSError, ValueError, KeyError, TypeError) as error:
                what = f"data.path = {str(self.path)!r} cannot be read as {self.kind}: {error}"
                rule = f"it is {_KINDS[self.kind]}; a relative path starts at {Path.cwd()}"
                raise DataError(f"{what}\n  {rule}\n  check the path") from error
        return self._table

    def _open(self) -> Any:
        import pyarrow
        import pyarrow.parquet

        if self.kind == "parquet":
            names = pyarrow.parquet.read_schema(self.path).names if self.path.is_file() else None
            return pyarrow.parquet.read_table(self.path, columns=self._chosen(names))
        state = parse_json_object(read_regular(self.path / "state.json"))
        table = _mapped(self.path, [each["filename"] for each in state["_data_files"]])
        if state.get("_indices_data_files"):
            order = _mapped(self.path, [each["filename"] for each in state["_indices_data_files"]])
            self._order = order.column(0).to_numpy().astype(np.int64)
        return table.select(self._chosen(table.column_names))

    def _chosen(self, names: list[str] | None) -> list[str]:
        missing = [each for each in self.columns if names is not None and each not in names]
        if missing:
            raise ValueError(f"it has no column {missing[0]!r}, but {', '.join(names or ())}")
        return list(self.columns)


Rows: TypeAlias = JsonLines | CsvRows | ArrowRows


def read_row(rows: Rows, index: int, fields: Iterable[str | None]) -> dict[str, Any]:
    """Reads a row. Raises ValueError for one that has nothing in one of the ``fields``."""
    row = rows.read(np.array([index]))[0]
    for name in fields:
        if name is not None and row.get(name) is None:
            raise ValueError(f"it has no {name!r}, of {', '.join(map(repr, row))}")
    return row


_KINDS = {
    "parquet": "a file of parquet, or a folder of them",
    "hf_dataset": "a folder that save_to_disk of a Dataset wrote, with state.json; of a DatasetDict, one split's",
}


def _mapped(folder: Path, names: list[str]) -> Any:
    import pyarrow

    tables = []
    for name in names:
        with pyarrow.ipc.open_stream(pyarrow.memory_map(str(file_inside(folder, name)))) as stream:
            tables.append(stream.read_all())
    return pyarrow.concat_tables(tables)


def class_names(path: Path, column: str) -> list[str] | None:
    try:
        feature = parse_json_object(read_regular(path / "dataset_info.json"))["features"][column]
        return [str(each) for each in feature["names"]] if feature.get("_type") == "ClassLabel" else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _tensor(value: Any, name: str) -> torch.Tensor:
    try:
        found = torch.as_tensor(value)
    except (ValueError, TypeError, RuntimeError) as error:
        raise ValueError(f"{name!r} holds no numbers: {error}") from error
    return found.float() if found.is_floating_point() else found.long()


Augment: TypeAlias = Literal["none", "flip", "crop_flip"]
SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".gif", ".tif", ".tiff")
_AREAS, _RATIOS, _TRIALS = (0.08, 1.0), (3 / 4, 4 / 3), 10


class ImageFolder(EpochDataset):
    """The images of class folders, by name. ``on_bad`` skip leaves out, of the loss, what does not decode."""

    def __init__(
        self, folder: Path, size: int, *, augment: Augment = "none", on_bad: OnBad = "stop", seed: int = 0
    ) -> None:
        self.classes = sorted(each.name for each in folder.iterdir() if each.is_dir()) if folder.is_dir() else []
        self.files: list[Path] = []
        targets: list[int] = []
        for number, name in enumerate(self.classes):
            found = sorted(each for each in (folder / name).rglob("*") if each.suffix.lower() in SUFFIXES)
            self.files += found
            targets += [number] * len(found)
        if not self.files:
            rule = "it has a folder of images for each class, such as cats/1.jpg; a relative path starts at"
            raise DataError(f"data.path = {str(folder)!r} has no images\n  {rule} {Path.cwd()}\n  check the path")
        self.targets = np.array(targets, dtype=np.int64)
        self.size, self.augment, self.on_bad, self.seed = size, augment, on_bad, seed

    def __len__(self) -> int:
        return len(self.files)

    def read(self, indices: Indices, epoch: int) -> Pair:
        images = np.zeros((len(indices), 3, self.size, self.size), dtype=np.uint8)
        targets = torch.from_numpy(self.targets[indices])
        words = random_words(indices, self.seed, epoch)
        for row, (index, word) in enumerate(zip(indices.tolist(), words.tolist(), strict=True)):
            try:
                images[row] = self._decode(self.files[index], word)
            except Exception as error:  # pillow has errors of its own for some, such as images that are too large
                what = f"{self.files[index]} (sample {index}) does not decode: {error}"
                rule = "every file with the name of an image is one\n  mend or remove it"
                refuse_sample(what, rule, self.on_bad, error)
                targets[row] = IGNORED
        return torch.from_numpy(images), targets

    def _decode(self, path: Path, word: int) -> np.ndarray[Any, Any]:
        from PIL import Image

        generator = np.random.default_rng(word)
        with Image.open(path) as file:
            image = file.convert("RGB")
        box = _random_box(generator, *image.size) if self.augment == "crop_flip" else _middle_box(*image.size)
        image = image.resize((self.size, self.size), Image.Resampling.BILINEAR, box=box)
        pixels = np.asarray(image).transpose(2, 0, 1)
        return pixels[:, :, ::-1] if self.augment != "none" and generator.random() < 0.5 else pixels


def _middle_box(width: int, height: int) -> tuple[float, float, float, float]:
    side = min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def _random_box(generator: np.random.Generator, width: int, height: int) -> tuple[float, float, float, float]:
    """Draws a part of an image by area and ratio of its sides (Szegedy et al. 2015); the middle where none fits."""
    for _ in range(_TRIALS):
        area = width * height * generator.uniform(*_AREAS)
        ratio = np.exp(generator.uniform(*np.log(_RATIOS)))
        across, down = np.sqrt(area * ratio), np.sqrt(area / ratio)
        if across <= width and down <= height:
            left, top = generator.uniform(0, width - across), generator.uniform(0, height - down)
            return float(left), float(top), float(left + across), float(top + down)
    return _middle_box(width, height)
