"""What everything in a policy file is made of: strict numbers, and documents without unknown fields."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, Strict

Int = Annotated[int, Strict()]
Count = Annotated[int, Strict(), Field(ge=0)]
Positive = Annotated[int, Strict(), Field(ge=1)]
Share = Annotated[float, Strict(), Field(ge=0, le=1)]
NotNegative = Annotated[float, Strict(), Field(ge=0)]
Flag = Annotated[bool, Strict()]
Indices = Literal["all"] | Annotated[tuple[Count, ...], Field(min_length=1)]


class Document(BaseModel):
    """Base of everything in a policy file: immutable, no unknown fields, no infinities."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, validate_default=True)
