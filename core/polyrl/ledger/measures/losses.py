"""How often engines of a pool fall silent, from what this run has seen of them: losses over engine-seconds.

    losses per engine-second = (PRIOR_LOSSES + losses) / (PRIOR_S + engine-seconds)

the mean of a Gamma distribution that begins with a weak prior: a few losses soon outweigh it, and a fleet that lives
long is soon known to. An engine that announces its end (a drain) is not lost, and one that comes back was not.
"""

from __future__ import annotations

from typing import Final

import msgspec

PRIOR_LOSSES: Final = 0.005
PRIOR_S: Final = 60.0
"""One loss in 12,000 s, worth what a single engine shows in a minute."""

HALVED_AT: Final = 32.0
"""Losses after which all that was seen counts half: a fleet that has become another one is known after as many."""


class Losses(msgspec.Struct):
    """One pool's."""

    losses: float = 0.0
    seen_s: float = 0.0
    """Engine-seconds, up to `at`."""
    engines: int = 0
    at: float = 0.0

    def change(self, by: int, at: float) -> None:
        """So many more engines are seen, or fewer."""
        self.seen_s, self.at = self._seen_until(at), max(at, self.at)
        self.engines += by

    def lose(self, noticed_s: float, at: float) -> None:
        """One is lost, and was noticed so late."""
        self.change(-1, at)
        self.losses, self.seen_s = self.losses + 1.0, max(0.0, self.seen_s - noticed_s)
        if self.losses > HALVED_AT:
            self.losses, self.seen_s = self.losses / 2, self.seen_s / 2

    def regain(self, at: float) -> None:
        """One that was lost is back."""
        self.change(1, at)
        self.losses = max(0.0, self.losses - 1.0)

    def rate(self, now: float) -> float:
        """Losses per engine-second."""
        return (PRIOR_LOSSES + self.losses) / (PRIOR_S + self._seen_until(now))

    def _seen_until(self, at: float) -> float:
        return self.seen_s + self.engines * max(0.0, at - self.at)
