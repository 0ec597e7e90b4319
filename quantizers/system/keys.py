"""The base of this program's results, which are printed and written as JSON: parts with keys, each with its description
and unit.
"""

from __future__ import annotations

from typing import Any, Self, dataclass_transform

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer

Number = float | None  # None where it is not finite: JSON has neither NaN nor infinity


def key(about: str, unit: str | None = None, *, default: Any = ..., written: str | None = None) -> Any:
    """A key that is always there, with its description and unit; `written` is its name in JSON, if that is another."""
    extra: dict[str, Any] | None = {"unit": unit} if unit else None
    return Field(default, description=about, json_schema_extra=extra, alias=written)


def maybe(about: str, unit: str | None = None) -> Any:
    """A key that may be absent, which None stands for; the description says when."""
    return key(about, unit, default=None)


@dataclass_transform(kw_only_default=True, field_specifiers=(key,))  # so mypy knows what has none
class Part(BaseModel):
    """Base of all parts: frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_by_name=True, validate_by_alias=True)

    @model_serializer(mode="wrap")
    def _without_absent(self, written: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Serialize the part without keys that may be absent and are None."""
        fields, data = type(self).model_fields, written(self)
        return {
            name: value
            for name, value in data.items()
            if value is not None or name not in fields or fields[name].is_required()
        }

    def as_dict(self) -> dict[str, Any]:
        """The part as it is written: without the keys that were not given, and those that are absent."""
        return self.model_dump(by_alias=True, exclude_unset=True)

    def given(self) -> dict[str, Any]:
        """The keys that were given, with the parts that they hold."""
        return {name: value for name, value in self if name in self.model_fields_set}

    def changed(self, **keys: Any) -> Self:
        """The part with other values of some keys, which are checked as all are."""
        return type(self)(**(self.given() | keys))
