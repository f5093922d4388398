"""What one step trains on: all that the step before it left over, and the first complete groups of its own.

    over-sampled step s:  promptsPerStep groups train, the rest goes on ──carried──> all of it trains in step s + 1

So no prompt is cancelled for its long answers, and none waits for longer than a step. What is carried and complete
goes first, since it waits already; then come the step's own, in order of completion, up to the places that what is
carried needs; then what is carried and was not complete.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from polyrl_trainer.data.examples import Prompt
from polyrl_trainer.generation.supply import StepGroups


@dataclass(frozen=True)
class TrainingGroups:
    """The groups from which a step takes `prompts` of them."""

    prompts: int
    own: StepGroups
    carried: StepGroups | None
    """Groups of the step before."""
    version: int
    """The newest when the step began."""
    carries_on: bool = False
    """What is left of its own trains in the next step."""

    @property
    def sources(self) -> tuple[StepGroups, ...]:
        """Its own, and what was carried."""
        return (self.own,) if self.carried is None else (self.own, self.carried)

    @property
    def used(self) -> list[int]:
        """Groups that were taken."""
        return [number for source in self.sources for number in source.used]

    @property
    def samples_per_group(self) -> int:
        """How many samples each group has."""
        return self.own.plan.samples_per_group

    @property
    def oldest_version(self) -> int:
        """The first that may have generated a token of it."""
        return min(source.plan.min_version for source in self.sources)

    @property
    def enough(self) -> bool:
        """Whether the step can do without another prompt."""
        return sum(len(source.live) + len(source.used) for source in self.sources) >= self.prompts

    def next_source(self) -> tuple[StepGroups, int]:
        """Which groups to ask for, and at most how many. Only while some are missing."""
        if self.carried is None:
            return self.own, self.prompts - len(self.used)
        complete = self.carried.scored()
        of_own = self.prompts - len(self.used) - len(self.carried.live)
        if complete or of_own <= 0:
            return self.carried, complete or len(self.carried.live)
        return self.own, of_own

    def prompt_of(self, group: int) -> Prompt:
        """Raises ProtocolError for a group that this step does not wait for."""
        return self._source_of(group).prompt_of(group)

    def use(self, groups: Sequence[int]) -> None:
        """These groups are trained: they will not be delivered again."""
        for group in groups:
            self._source_of(group).use([group])

    def give_back(self, groups: Sequence[int]) -> None:
        """These were taken, and nothing was learned of them."""
        for source in self.sources:
            source.give_back(groups)

    @property
    def dropped(self) -> Counter[str]:
        """Groups, by reason."""
        return sum((source.dropped for source in self.sources), Counter[str]())

    @property
    def filtered_rewards(self) -> list[list[float]]:
        """Rewards of each filtered group where they are known."""
        return [rewards for source in self.sources for rewards in source.filtered_rewards]

    @property
    def untrained_share(self) -> float:
        """Prompts of the step that train neither in it nor in the next."""
        kept = len(self.own.live) if self.carries_on else 0
        return 1.0 - (len(self.used) + kept) / sum(source.submitted for source in self.sources)

    def reasons(self) -> str:
        """Counts and first messages of what was dropped, for people."""
        return "; ".join(filter(None, (source.reasons() for source in self.sources)))

    def _source_of(self, group: int) -> StepGroups:
        return next((source for source in self.sources if group in source.live), self.own)
