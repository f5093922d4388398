"""What all manifest models share: how they are read, and the few field types that recur.

Types are strict, because the API server's are: "8" is no integer in either world, so one file means one thing. A key
with no value (`sampling:`) means "left out", as the API server prunes such nulls before it fills in defaults.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel

INT32_MAX: Final = 2**31 - 1
"""Upper bound of counts and durations, as in Kubernetes' own API; anything larger is a slip of the hand."""

CLUSTER_ONLY_KEY: Final = "x-cluster-only"
CLUSTER_ONLY: Final[Any] = Field(json_schema_extra={CLUSTER_ONLY_KEY: True})
"""Marks a field that means nothing on a laptop: a local run notes it once, and the reference page says so."""

BY_VALUE: Final[Any] = Field(strict=False)
"""Marks enums and tuples, which YAML and JSON can only write as their values and as lists."""

Count = Annotated[int, Field(ge=0, le=INT32_MAX)]
Positive = Annotated[int, Field(ge=1, le=INT32_MAX)]
Percent = Annotated[int, Field(ge=0, le=100)]
Name = Annotated[str, Field(min_length=1, max_length=253)]
"""Name of a Kubernetes object or of a key in one."""
PathText = Annotated[str, Field(min_length=1, max_length=1024)]
HOST: Final = r"[^\s?#@:/]"
"""A character of what stands before the path of a URI: without user, password and port."""
BELOW: Final = r"/[^\s?#:]*(:[^\s?#:/][^\s?#:]*)*"
"""The path of a URI: no query, no fragment, and no `::`, by which fsspec chains one place to another."""
Place = Annotated[
    str,
    Field(
        min_length=1, max_length=1024, pattern=rf"^([^:]*(:[^:/][^:]*)*|[A-Za-z][A-Za-z0-9+.-]*://{HOST}*({BELOW})?)$"
    ),
]
"""A path, or a URI without credentials: the manifest's texts are seen in the object, in arguments of processes and in
logs. A query may hold one as well (a signature, a token)."""
FunctionName = Annotated[
    str, Field(max_length=256, pattern=r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*:[A-Za-z_][A-Za-z0-9_]*$")
]
"""`module:function`; dots separate packages."""


class ManifestModel(BaseModel):
    """A frozen part of the manifest: camelCase outside, snake_case inside, unknown fields refused."""

    model_config = ConfigDict(
        frozen=True,
        strict=True,
        extra="forbid",
        allow_inf_nan=False,
        alias_generator=to_camel,
        populate_by_name=True,
        use_attribute_docstrings=True,
    )

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        known = cls.model_fields.keys() | {field.alias for field in cls.model_fields.values()}
        return {key: value for key, value in given.items() if value is not None or key not in known}
