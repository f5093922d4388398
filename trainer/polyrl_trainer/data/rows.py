"""Reads JSONL (gzipped or not) and parquet into rows that know file and line; what cannot be read is never skipped."""

from __future__ import annotations

import codecs
import gzip
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polyrl.errors import InvalidData
from polyrl.manifest.parts.sources import ROWS_SUFFIXES

CHAT_FIELDS = ("messages", "prompt", "chosen", "rejected", "tools")
"""Whose objects a chat template shows, beside those of messages in columns of other names."""
HALF_PAIR = re.compile(rb"\\u[dD][89a-fA-F]")
"""An escape that may be half of a pair; most rows hold none, and are not looked at again."""


@dataclass(frozen=True)
class DataRow:
    """One row of a data file."""

    place: str
    """`FILE:LINE`; for parquet the 1-based number of the row."""
    fields: dict[str, Any]
    unread: dict[str, Any] | None = None
    """What the file holds, where the manifest names the prompt's column; else what `fields` hold besides the prompt."""
    columns: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The file's own columns, by the field that is made of them; the others have their field's name."""

    def called(self, name: str) -> str:
        """A field as faults name it, by the file's columns."""
        columns = self.columns.get(name, (name,))
        return f"field{'s' * (len(columns) > 1)} {' and '.join(f'`{column}`' for column in columns)}"

    def refuse(self, fault: str) -> InvalidData:
        """The error that names this row."""
        return InvalidData(f"{self.place}: {fault}")

    @contextmanager
    def named_in(self, prefix: str = "") -> Iterator[None]:
        """InvalidData raised inside names this row, and `prefix`."""
        try:
            yield
        except InvalidData as error:
            raise self.refuse(f"{prefix}{error}") from error


def read_rows(path: Path) -> list[DataRow]:
    """All rows of a file, at least one. Raises InvalidData."""
    rows: list[DataRow] = []
    for row in rows_or_faults(path):
        if isinstance(row, InvalidData):
            raise row
        rows.append(row)
    if not rows:
        raise InvalidData(f"{path}: holds no rows")
    return rows


def rows_or_faults(path: Path) -> Iterator[DataRow | InvalidData]:
    """Each row, or what is wrong with its line. Raises InvalidData for what is wrong with the whole file."""
    if not path.is_file():
        raise InvalidData(f"{path}: no such file")
    if not path.name.endswith(ROWS_SUFFIXES):
        raise InvalidData(f"{path}: unknown kind of data file; must end in {', '.join(ROWS_SUFFIXES)}")
    yield from _parquet_rows(path) if path.suffix == ".parquet" else _jsonl_rows(path)


def _jsonl_rows(path: Path) -> Iterator[DataRow | InvalidData]:
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        for number, line in enumerate(_lines(file, path), start=1):
            if line.strip():
                try:
                    # Editors on Windows put the mark before the first line.
                    yield _parse_line(line.removeprefix(codecs.BOM_UTF8) if number == 1 else line, f"{path}:{number}")
                except InvalidData as fault:
                    yield fault


def _lines(file: Iterable[bytes], path: Path) -> Iterator[bytes]:
    try:
        yield from file
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise InvalidData(f"{path}: not a whole gzip file: {error}") from error


def _parse_line(line: bytes, place: str) -> DataRow:
    try:
        fields = json.loads(line.decode("utf-8"), object_pairs_hook=_without_doubles)
    except InvalidData as fault:
        raise InvalidData(f"{place}: {fault}") from fault
    except UnicodeDecodeError as error:
        raise InvalidData(f"{place}: not UTF-8 at byte {error.start} of the line") from error
    except json.JSONDecodeError as error:
        raise InvalidData(f"{place}: not valid JSON: {error.msg} at column {error.colno}") from error
    except RecursionError as error:
        raise InvalidData(f"{place}: JSON is nested too deeply") from error
    except ValueError as error:  # Python's own limit of digits
        raise InvalidData(f"{place}: holds a number of too many digits") from error
    if HALF_PAIR.search(line) and not is_whole(fields):
        raise InvalidData(f"{place}: holds half of a surrogate pair, which is no character")
    if not isinstance(fields, dict):
        raise InvalidData(f"{place}: a row must be an object with fields, got {_kind(fields)}")
    return DataRow(place, fields)


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Raises InvalidData for a name that stands twice: which of the two is meant, nobody knows."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        double = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise InvalidData(f"holds the field {double[:80]!r} twice in one object; leave one of the two out")
    return fields


def is_whole(fields: object) -> bool:
    """Without half a surrogate pair, which no text in UTF-8 holds."""
    try:
        json.dumps(fields, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _parquet_rows(path: Path) -> Iterator[DataRow]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise InvalidData(f"{path}: not a readable parquet file: {str(error).splitlines()[0]}") from error
    for number, fields in enumerate(table.to_pylist(), start=1):
        shown = {name: _without_nulls(value) if _is_shown(name, value) else value for name, value in fields.items()}
        yield DataRow(f"{path}:{number}", shown)


def _is_shown(name: str, value: Any) -> bool:
    """Whether a chat template may show a column's value: a manifest names columns as it likes."""
    return name in CHAT_FIELDS or (
        isinstance(value, list) and any(isinstance(one, dict) and "role" in one for one in value)
    )


def _without_nulls(value: Any) -> Any:
    """Parquet gives all objects of a column the fields of all others, so that a call of one tool has the arguments of
    every tool; a template would show them, and the policy learn to write them."""
    if isinstance(value, list):
        return [_without_nulls(one) for one in value]
    if isinstance(value, dict):
        return {name: _without_nulls(one) for name, one in value.items() if one is not None}
    return value


def text_field(row: DataRow, name: str, *, may_be_empty: bool = False) -> str:
    """A field that must be text, with something in it unless it may be empty. Raises InvalidData."""
    if name not in row.fields:
        raise row.refuse(f"field `{name}` is missing; the row has {_names(row)}")
    value = row.fields[name]
    if not isinstance(value, str):
        raise row.refuse(f"field `{name}` must be text, got {_kind(value)}")
    if not value and not may_be_empty:
        raise row.refuse(f"field `{name}` is empty")
    return value


def is_number(value: object, most: float) -> bool:
    """One that is none too large, of either sign; whole numbers of JSON may be beyond all that a float holds."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= most


Message = dict[str, Any]
"""`role` and `content`, and whatever else a chat template reads of it, such as `tool_calls`."""


def messages_field(row: DataRow) -> list[Message]:
    """`messages`. Raises InvalidData."""
    value = row.fields["messages"]
    if not isinstance(value, list) or not value:
        raise row.refuse(f"{row.called('messages')} must be a list with at least one message, got {_kind(value)}")
    return [_message(row, index, message) for index, message in enumerate(value)]


def tools_field(row: DataRow) -> list[dict[str, Any]]:
    """`tools` that the chat template shows, as JSON schemas; none without. Raises InvalidData."""
    tools = row.fields.get("tools")
    if tools is None:
        return []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise row.refuse(f"field `tools` must be a list of objects, each the JSON schema of one, got {tools!r:.80}")
    return tools


ROLES = ("system", "user", "assistant", "tool")


def _message(row: DataRow, index: int, message: object) -> Message:
    place = f"{row.columns.get('messages', ('messages',))[0]}[{index}]"
    if not isinstance(message, dict):
        raise row.refuse(f"{place} must be an object with role and content, got {_kind(message)}")
    given = {name: value for name, value in message.items() if value is not None}  # parquet fills up with null
    role, content, weight = given.get("role"), given.get("content"), given.get("weight", 1)
    if content is None and given.get("tool_calls"):
        content = ""
    if role not in ROLES:
        raise row.refuse(f"{place}.role must be one of {', '.join(ROLES)}, got {role!r}")
    if not isinstance(content, str):
        raise row.refuse(f"{place}.content must be text, got {_kind(content)}")
    if not isinstance(given.get("reasoning_content", ""), str):
        raise row.refuse(f"{place}.reasoning_content must be text, got {_kind(given['reasoning_content'])}")
    if weight not in (0, 1):
        raise row.refuse(f"{place}.weight must be 0 (not learned) or 1, got {weight!r:.80}")
    return given | {"content": content}


def _names(row: DataRow) -> str:
    return ", ".join(f"`{name}`" for name in row.unread or row.fields) or "no fields"


def _kind(value: object) -> str:
    names = {type(None): "null", bool: "a truth value", int: "a number", float: "a number", str: "text"}
    names |= {list: "a list", dict: "an object"}
    return ("an empty list" if value == [] else names.get(type(value))) or type(value).__name__
