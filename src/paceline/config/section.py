"""What every section of the schema is made of: its base, and the kinds of values."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

Count: TypeAlias = Annotated[int, Field(ge=1)]
Seed: TypeAlias = Annotated[int, Field(ge=0, lt=2**63)]
Probability: TypeAlias = Annotated[float, Field(ge=0, lt=1)]
Positive: TypeAlias = Annotated[float, Field(gt=0)]
NotNegative: TypeAlias = Annotated[float, Field(ge=0)]
ImportPath: TypeAlias = Annotated[str, Field(pattern=r"^[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*$")]


class Section(BaseModel):
    """Base of every section: frozen, strict, and closed to unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
