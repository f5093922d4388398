"""Where a recipe's model and its files of rows come from when they do not lie beside the manifest."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+", re.ASCII)
"""OWNER/NAME on a Hub."""

CLAIM_SCHEME: Final = "pvc://"
MODEL_URI: Final = re.compile(r"(hf|s3|gs|file|pvc)://[^\s?#]+", re.ASCII)
"""Where a model is that is no folder beside the manifest."""

ROWS_SUFFIXES: Final = (".jsonl", ".jsonl.gz", ".parquet")
"""By which a file of rows is known."""
ROWS_URI: Final = r"^(hf://datasets/[^/]+/[^/@]+(@refs/[^/]+/[^/]+|@[^/]+)?|(s3|gs)://[^/]+|file://)/"
"""How a file of rows begins that does not lie beside the manifest; read by Python and by CEL, which weighs its length:
an API server refuses a rule that would cost too much over all sets of an evaluation."""

_HUB_SCHEME: Final = "hf://"
_HUB_ROWS: Final = re.compile(r"hf://datasets/([^/]+/[^/@]+)(?:@(refs/[^/]+/[^/]+|[^/]+))?/(.+)")


@dataclass(frozen=True)
class HubPlace:
    """A model on a Hub, or one file of a data set there."""

    name: str
    """OWNER/NAME."""
    revision: str | None
    file: str = ""
    """File of a data set; empty: a model."""


@dataclass(frozen=True)
class Source:
    """What a recipe names: the folder of its model, or one file of rows."""

    field: str
    """Where it is named, such as `recipe.data.rl[0].path`."""
    path: str
    revision: str | None = None
    """Revision of a Hub's model, which may have it in a field of its own."""
    is_rows: bool = False

    @property
    def is_claimed(self) -> bool:
        """On a cluster it is mounted."""
        return self.path.startswith(CLAIM_SCHEME)

    @property
    def is_uri(self) -> bool:
        """It lies elsewhere, whatever is beside the manifest. Rules leave no URI of rows but those of ROWS_URI."""
        return "://" in self.path if self.is_rows else MODEL_URI.match(self.path) is not None

    @property
    def may_be_fetched(self) -> bool:
        """A model's name on a Hub may be that of a folder beside the manifest as well: whoever fetches sees."""
        return not self.is_claimed and (self.is_uri or (not self.is_rows and HUB_ID.fullmatch(self.path) is not None))

    @property
    def hub(self) -> HubPlace | None:
        """Its place on a Hub, of one that may be fetched; None: it is in a store."""
        if self.is_rows:
            found = _HUB_ROWS.fullmatch(self.path)
            return None if found is None else HubPlace(found[1], found[2], file=found[3])
        if self.path.startswith(_HUB_SCHEME):
            name, _, revision = self.path.removeprefix(_HUB_SCHEME).partition("@")
            return HubPlace(name, revision or self.revision)
        return None if self.is_uri else HubPlace(self.path, self.revision)


def no_pattern(path: str) -> str:
    """What to add where there is no file of this name."""
    return "; a name is no pattern (*): list each file as a path of its own" if "*" in path else ""


def summed_up(sources: Sequence[Source]) -> str:
    """All of them in a few words: `s3://models/x and 2 more`. None, where a spec has changed since its pod was made."""
    if not sources:
        return "what its job named"
    first, *more = (one.path for one in sources)
    return f"{first} and {len(more)} more" if more else first
