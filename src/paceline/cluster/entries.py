"""The catalog as it is written: YAML entries of devices, links, nodes and networks, strictly checked, found by name.

A name is looked up as people write it: ``H100-80GB-SXM``, ``H100 SXM5 80GB`` and ``h100_sxm_80gb`` are one. What
sources call a thing otherwise is an alias.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache, lru_cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from paceline.bounded_yaml import MOST_BYTES, load_shipped, load_yaml
from paceline.errors import UsageError
from paceline.untrusted import read_regular

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, le=1)]
Generation = Literal["volta", "turing", "ampere", "ada", "hopper", "blackwell", "cpu"]
LinkKind = Literal["nvlink", "pcie", "network", "shared_memory", "loopback"]
DtypeName = Literal["fp32", "tf32", "fp16", "bf16", "fp8"]

# Words of a name that tell nothing: makers, and what every entry of a kind is.
_NOISE = frozenset({"nvidia", "tesla", "gpu", "aws", "gcp", "google", "geforce", "the"})
_SAME = {"sxm2": "sxm", "sxm4": "sxm", "sxm5": "sxm", "sxm6": "sxm", "hbm2e": "hbm2", "16g": "16gb", "32g": "32gb"}
_SAME |= {"40g": "40gb", "80g": "80gb", "141g": "141gb", "ib": "infiniband", "gbe": "gb-ethernet"}


class _Closed(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class CatalogEntry(_Closed):
    aliases: tuple[str, ...] = ()


class ShapeEntry(_Closed):
    """A measured rate: of a product of (rows x inner) by (inner x columns), or of attention over a sequence."""

    kind: Literal["matmul", "attention", "attention_backward"]
    dtype: DtypeName
    sizes: tuple[int, ...]
    tflops: Positive
    layout: Literal["nn", "nt", "tn"] | None = None


class MeasuredEntry(_Closed):
    time: str
    torch: str
    python: str
    processor: str
    threads: int = Field(gt=0)
    ranks: int = Field(gt=0)
    spread: float = Field(ge=0)
    fitted_to: str | None = None


class DeviceEntry(CatalogEntry):
    """A device: units are in the keys."""

    vendor: str
    generation: Generation
    memory_gib: Positive
    memory_gb_per_s: Positive
    memory_share: Share = 0.85
    peak_tflops: dict[DtypeName, Positive]
    measured_tflops: dict[DtypeName, Positive] = Field(default_factory=dict)
    launch_us: Positive
    compiled_launch_us: Positive | None = None
    multiprocessors: int = Field(gt=0)
    node: str | None = None
    shapes: tuple[ShapeEntry, ...] = ()
    memory_rates: dict[str, dict[int, Positive]] = Field(default_factory=dict)
    operation_us: Positive | None = None
    tensor_us: float = Field(default=0.0, ge=0)
    step_us: float = Field(default=0.0, ge=0)
    loop_us: float | None = Field(default=None, ge=0)
    factor: Positive = 1.0
    kernels_us: dict[str, Positive] = Field(default_factory=dict)
    measured: MeasuredEntry | None = None
    tables_of: str | None = None


class NetworkEntry(CatalogEntry):
    """A network: what a node has of it, one way."""

    kind: str
    gb_per_s: Positive
    latency_us: Positive
    efficiency: Share = 0.9
    cards: int = Field(1, gt=0)


class LinkEntry(NetworkEntry):
    """A link inside a node; the tables are bus bandwidths by the number of devices that take part."""

    kind: LinkKind
    efficiency: Share
    nvls: bool = False
    ring_gb_per_s: dict[int, Positive] = Field(default_factory=dict)
    nvls_gb_per_s: dict[int, Positive] = Field(default_factory=dict)
    all_reduce_us: dict[int, dict[int, Positive]] = Field(default_factory=dict)
    busy: Positive = 1.0


class NodeEntry(CatalogEntry):
    """A node: so many of a device, the link between them, and the network that it is usually on."""

    device: str
    devices: int = Field(gt=0)
    inside: str
    network: str | None = None


class CatalogFile(_Closed):
    """A file of the catalog, or several in one: entries by name in the order of the files."""

    devices: dict[str, DeviceEntry] = Field(default_factory=dict)
    links: dict[str, LinkEntry] = Field(default_factory=dict)
    networks: dict[str, NetworkEntry] = Field(default_factory=dict)
    nodes: dict[str, NodeEntry] = Field(default_factory=dict)

    def with_file(self, found: CatalogFile) -> CatalogFile:
        """Returns these and those of a file, whose own come first where names are the same."""
        kinds: dict[str, Any] = {
            kind: {**getattr(self, kind), **getattr(found, kind)} for kind in type(self).model_fields
        }
        return CatalogFile(**kinds)


AnyEntry = TypeVar("AnyEntry", bound=CatalogEntry)

# pydantic's kinds of errors that need other words.
_PROBLEMS = {
    "extra_forbidden": "there is no such key",
    "missing": "is missing",
    "model_type": "is no section of named values",
    "dict_type": "is no section of named values",
}


@cache
def shipped() -> CatalogFile:
    found = CatalogFile()
    folder = resources.files("paceline.cluster").joinpath("catalog")
    for item in sorted(folder.iterdir(), key=lambda each: each.name):
        if item.name.endswith(".yaml"):
            found = found.with_file(parse_catalog(item.read_text(encoding="utf-8"), item.name, load_shipped))
    return found


def read_catalog(path: Path) -> CatalogFile:
    """Reads a file of entries, as ``paceline calibrate`` writes one. Raises UsageError that names file and field."""
    try:
        text = read_regular(path, 4 * MOST_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        fix = f"write one for this machine: paceline calibrate --output {path.name}"
        raise UsageError(f"{path} cannot be read: {error}\n  a catalog entry is a YAML file\n  {fix}") from error
    return parse_catalog(text, str(path))


@lru_cache(maxsize=4)  # to read a file takes a quarter of a second, and one prediction asks for it several times
def parse_catalog(text: str, source: str, load: Callable[[str], Any] = load_yaml) -> CatalogFile:
    rule = "  a catalog file has devices, links, networks and nodes by name: see docs/clusters.md"
    try:
        content: Any = load(text)
        return CatalogFile.model_validate({} if content is None else content)
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        told = error if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: {problem}"
        raise UsageError(f"{source} is not YAML: {told}\n{rule}") from error
    except ValidationError as error:
        found = [(".".join(map(str, each["loc"])) or "the file", each) for each in error.errors()[:5]]
        places = [f"{place}: {_PROBLEMS.get(each['type'], each['msg'])}" for place, each in found]
        raise UsageError(f"{source} is no catalog file: {'; '.join(places)}\n{rule}") from error


def find_name(word: str, among: Mapping[str, AnyEntry]) -> str | None:
    if word in among:
        return word
    wanted = _key(word)
    for name in among:
        if _key(name) == wanted:
            return name
    return next((name for name, entry in among.items() if wanted in map(_key, entry.aliases)), None)


def near_names(word: str, names: Iterable[str]) -> list[str]:
    plain = {name.lower(): name for name in names}
    wanted = word.lower().strip()
    found = [plain[each] for each in difflib.get_close_matches(wanted, plain, n=3, cutoff=0.55)]
    parts = set(_parts(wanted))
    shared = sorted(plain, key=lambda each: (-len(parts & set(_parts(each))), each))
    found += [plain[each] for each in shared if parts & set(_parts(each))]
    return list(dict.fromkeys(found))[:3]


def _key(word: str) -> tuple[str, ...]:
    return tuple(sorted(_parts(word)))


def _parts(word: str) -> list[str]:
    parts = re.split(r"[^a-z0-9.]+", word.lower())
    return [_SAME.get(part, part) for part in parts if part and part not in _NOISE]
