# SPDX-License-Identifier: Apache-2.0
"""Building blocks of everything in a policy file: strict, bounded numbers, and documents without unknown fields.

Every number has a bound, so that an untrusted file cannot demand unlimited work or memory.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, Strict, model_validator

MOST = 2**31 - 1  # limit on counts of tokens or blocks, since positions within a layout are int32
MAX_TOTAL = 2**53 - 1  # limit on sums over requests and on lengths; exact in every JSON reader
MAX_LISTED = 65_536  # limit on the values in one list

Int = Annotated[int, Strict(), Field(ge=-(2**63), le=2**63 - 1)]
Count = Annotated[int, Strict(), Field(ge=0, le=MOST)]
Positive = Annotated[int, Strict(), Field(ge=1, le=MOST)]
Total = Annotated[int, Strict(), Field(ge=0, le=MAX_TOTAL)]
Share = Annotated[float, Strict(), Field(ge=0, le=1)]
NotNegative = Annotated[float, Strict(), Field(ge=0)]
Flag = Annotated[bool, Strict()]
Counts = Annotated[tuple[Count, ...], Field(max_length=MAX_LISTED)]
Indices = Literal["all"] | Annotated[tuple[Count, ...], Field(min_length=1, max_length=MAX_LISTED)]


class Document(BaseModel):
    """Base of everything in a policy file: immutable, no unknown fields, no infinities."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, validate_default=True)
    former_names: ClassVar[dict[str, str]] = {}  # of fields in files of 0.1

    @model_validator(mode="before")
    @classmethod
    def _take_former_names(cls, fields: Any) -> Any:
        if not cls.former_names or not isinstance(fields, dict):
            return fields
        return {cls.former_names.get(name, name): value for name, value in fields.items()}
