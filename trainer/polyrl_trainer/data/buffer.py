"""`DataBuffer`: an endless, weighted, shuffled stream over finite sources whose place fits in a few numbers.

The order depends on the seed and on how much was drawn alone: each source's epoch has its own permutation, and the next
draw is from the source furthest behind its share (ties: the first), so shares are exact and need no random state.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from polyrl.errors import InvalidData

Item = TypeVar("Item")


@dataclass(frozen=True)
class DrawnItem(Generic[Item]):
    """One drawn item, and where it lies, so that it can be put back."""

    source: int
    index: int
    item: Item


class DataBuffer(Generic[Item]):
    """Draws items for ever."""

    def __init__(
        self,
        sources: Sequence[Sequence[Item]],
        weights: Sequence[float],
        *,
        seed: int,
        shuffle: bool = True,
        files: Sequence[tuple[str, str]] = (),
    ) -> None:
        """`files`: of each source a name, and what tells its rows from others, such as a hash. Raises InvalidData when
        no source has rows and weight."""
        self._sources = [list(source) for source in sources]
        usable = [weight if source else 0.0 for source, weight in zip(self._sources, weights, strict=True)]
        if sum(usable) <= 0:
            raise InvalidData("no data file with a weight above 0 has rows")
        self._shares = [weight / sum(usable) for weight in usable]
        self._seed = seed
        self._files = [name for name, _ in files]
        self._contents = [content for _, content in files]
        self._shuffle = shuffle
        self._drawn = [0] * len(self._sources)
        self._returned: deque[tuple[int, int]] = deque()
        self._orders: dict[int, tuple[int, npt.NDArray[np.int64]]] = {}

    def get(self, count: int) -> list[DrawnItem[Item]]:
        """The next `count` items."""
        return [self._next() for _ in range(count)]

    def put(self, draws: Iterable[DrawnItem[Item]]) -> None:
        """Gives back items that were drawn and not used; they come first, in the order given."""
        self._returned.extendleft(reversed([(draw.source, draw.index) for draw in draws]))

    def epochs(self, unused: Iterable[DrawnItem[Item]] = ()) -> float:
        """Passes over the data so far, as the mean over drawn sources weighted by share; what was given back, or is
        `unused` yet, does not count."""
        waiting = Counter([source for source, _ in self._returned] + [draw.source for draw in unused])
        passes = zip(self._shares, self._drawn, self._sources, strict=True)
        return sum(
            share * (drawn - waiting[number]) / len(source)
            for number, (share, drawn, source) in enumerate(passes)
            if source
        )

    def state(self, unused: Iterable[DrawnItem[Item]] = ()) -> dict[str, Any]:
        """The place in the stream, as JSON values; from there on `unused`, which were drawn, come first."""
        returned = [*((draw.source, draw.index) for draw in unused), *self._returned]
        return {**self._identity(), "drawn": list(self._drawn), "returned": [list(place) for place in returned]}

    def restore(self, state: dict[str, Any]) -> None:
        """Goes to the place that `state` names. Raises InvalidData when it was saved over other data."""
        for name, value in self._identity().items():
            if state.get(name) != value:
                fault = (
                    self._changed_files(state)
                    or f"the checkpoint's data cursor has {name} {state.get(name)}, this run's data has {value}"
                )
                raise InvalidData(f"{fault}; resume needs the same data files, weights, seed and shuffle")
        self._drawn = [int(count) for count in state["drawn"]]
        self._returned = deque((int(source), int(index)) for source, index in state["returned"])

    def _changed_files(self, saved: dict[str, Any]) -> str:
        """Those whose rows are not the checkpoint's; empty where they are no more, no fewer and the same."""
        identity = self._identity()
        if len(self._files) != len(saved["rows"]):
            return ""
        columns = (of[name] for name in ("contents", "rows") for of in (identity, saved))
        return ", ".join(
            f"{file}: its {rows} rows are not the {before} that the checkpoint was saved over"
            for file, content, was, rows, before in zip(self._files, *columns, strict=True)
            if content != was
        )

    def _identity(self) -> dict[str, Any]:
        return {
            "contents": self._contents,
            "rows": [len(source) for source in self._sources],
            "shares": self._shares,
            "seed": self._seed,
            "shuffle": self._shuffle,
        }

    def _next(self) -> DrawnItem[Item]:
        source, index = self._returned.popleft() if self._returned else self._advance()
        return DrawnItem(source, index, item=self._sources[source][index])

    def _advance(self) -> tuple[int, int]:
        source = self._furthest_behind()
        epoch, position = divmod(self._drawn[source], len(self._sources[source]))
        self._drawn[source] += 1
        return source, int(self._order(source, epoch)[position])

    def _furthest_behind(self) -> int:
        total = sum(self._drawn) + 1
        behind = [share * total - drawn for share, drawn in zip(self._shares, self._drawn, strict=True)]
        return max((index for index, share in enumerate(self._shares) if share > 0), key=lambda index: behind[index])

    def _order(self, source: int, epoch: int) -> npt.NDArray[np.int64]:
        if self._orders.get(source, (-1,))[0] != epoch:
            size = len(self._sources[source])
            generator = np.random.default_rng([self._seed, source, epoch])
            self._orders[source] = epoch, generator.permutation(size) if self._shuffle else np.arange(size)
        return self._orders[source][1]
