"""Of what the schemas of this program's JSON are made: parts with keys, each with its description and unit."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

Number = float | None  # None where it is not finite: JSON has neither NaN nor infinity


def key(about: str, unit: str | None = None, **more: Any) -> Any:
    """A key that is always there, with its description and unit."""
    return Field(description=about, json_schema_extra={"unit": unit} if unit else None, **more)


def maybe(about: str, unit: str | None = None) -> Any:
    """A key that may be absent; the description says when."""
    return key(about, unit, default=None)


class Part(BaseModel):
    """Base of all parts: frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_by_name=True, validate_by_alias=True)

    def as_dict(self) -> dict[str, Any]:
        """As it is written: without the keys that were not given."""
        return self.model_dump(by_alias=True, exclude_unset=True)
