"""A trainer with its user code, in virtual time: submits, judges, asks for batches, trains, acknowledges.

It insists on whole steps: a dropped group is replaced, and a step ends only when its mini-batches are full to the
sample.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any, Final

import msgspec

from polyrl.sample import DiscardReason, Group, Purpose, SamplingParams
from polyrl.wire import (
    SUPERSEDED,
    Accepted,
    Acknowledge,
    Batch,
    BatchRequest,
    Covered,
    Declined,
    EndStep,
    Extend,
    Fenced,
    FinishRun,
    GroupDropped,
    Late,
    NoticesTaken,
    PublishVersion,
    Reject,
    SampleTexts,
    Score,
    Submit,
    ToTrainer,
    TrainerHeartbeat,
    TrainerHello,
    TrainerWelcome,
    TurnDone,
    VersionServed,
)
from polyrl_rollout.testing.simulation.invariants import Violation
from polyrl_rollout.testing.simulation.model import STOP_TOKEN, receipt_of
from polyrl_rollout.testing.simulation.world import Link, World

CHECKPOINT_SHARE: Final = 0.7
"""Share of the steps that begin with a checkpoint."""
PROMPTS_FIRST_SHARE: Final = 0.5
"""Share of the steps whose prompts are submitted before their version is published."""
REPLACEMENTS: Final = 30
"""Groups replaced in one step before the trainer takes what it has: filters may leave nothing to find."""


class SimulatedTrainer:
    """One trainer process; its state survives broken connections, as a client library's does."""

    def __init__(self, world: World) -> None:
        self.world, self.schedule = world, world.schedule
        self.rng = Random(world.schedule.seed + 2)
        self._alone_rng = Random(f"alone/{world.schedule.seed + 2}")
        self.done = False
        self.acknowledged = -1
        self.lose_next: type[Accepted | Batch] | None = None
        """The connection breaks with the next such message under way."""
        self._link: Link | None = None
        self._life = self._run = 0
        """Processes so far; and checkpoints from which one began."""
        self._request = 0
        self._unanswered: dict[int, Any] = {}
        self._then: dict[int, Callable[[Any], None]] = {}
        self._judging: set[tuple[str, int]] = set()
        self._texts = self._no_texts()
        self._scores: dict[int, int] = {}
        self._dropped: set[int] = set()
        self._next_group = 0
        self._accepted = self._greeted = self._next_batch = 0
        """Groups below it are known to have been accepted, and were when it greeted last; batches below it came."""
        self._journal = ""
        self._open: dict[int, tuple[int, Purpose]] = {}
        """Step and purpose of each group that was submitted, and came in no batch, nor was dropped, nor cancelled."""
        self._plan = [(step, Purpose.TRAIN) for step in range(self.schedule.steps)]
        if self.schedule.evaluate:
            self._plan.insert(1, (0, Purpose.EVAL))
        self._step, self._purpose = -1, Purpose.TRAIN
        self._missing = 0
        self._to_boundary = 0
        self._replaced = self._optimized = 0
        self._gave_up = False
        """The filters left too little; a user would be notified."""
        self._unacknowledged = 0
        self._ahead: Counter[tuple[int, Purpose]] = Counter()
        """Groups of a step that were submitted before it began, and have not been dropped."""
        self._carried = -1
        """Step whose surplus the next one trains, or the one that trains now; -1: none."""
        self._trained: set[int] = set()
        """Batches that this trainer's state contains."""
        self._checkpoint = self._saved()
        world.to_trainer = self._send_back
        world.partition_trainer = self.partition
        self._connect()
        self._next_step()

    # --- connection ---------------------------------------------------------------------------------------------------

    def partition(self) -> None:
        """The connection breaks; a little later the trainer dials again."""
        if self._link is not None:
            self._link.up = False
            self._link = None
            self.world.after(self.rng.uniform(0.05, 1.0), self._connect)

    def kill(self) -> None:
        """kill -9: another process goes on from a checkpoint that has each batch which this one trained. Verdicts under
        way are forgotten, what else had no answer is asked for again under other numbers."""
        if self.schedule.covers:
            self.roll_back()
            return
        self.partition()
        self._life += 1
        self.world.devices.learns_alone = False
        self._judging.clear()
        self._texts = self._no_texts()
        unanswered, self._unanswered = self._unanswered, {}
        for number, message in unanswered.items():
            then = self._then.pop(number)
            if not isinstance(message, Score | Extend | Reject):
                self._request += 1
                self._unanswered[self._request] = msgspec.structs.replace(message, request=self._request)
                self._then[self._request] = then

    def roll_back(self) -> None:
        """kill -9: another process goes on from the newest checkpoint, written when a step began; what this one trained
        since, it has not."""
        if any(isinstance(message, FinishRun) for message in self._unanswered.values()) or self.done:
            return
        self.partition()
        self._life += 1
        self.world.devices.learns_alone = False
        self._run += 1
        self._judging.clear()
        self._texts = self._no_texts()
        # The weights of a checkpoint are published again, as the newest were.
        asked = list(self._unanswered.values())
        self._unanswered = {one.request: one for one in asked if isinstance(one, PublishVersion)}
        self._unacknowledged = 0
        self._plan, trained = list(self._checkpoint[0]), self._checkpoint[1]
        self._trained, self._step = set(trained), -1
        forgotten = {group.id for message in asked if isinstance(message, Submit) for group in message.groups}
        self._open.clear()
        self._ahead.clear()
        self.world.watcher.rolled_back(set(trained), forgotten)
        if self._carried >= 0:
            self._ask(partial(EndStep, step=self._carried, purpose=Purpose.TRAIN))
            self._carried = -1
        self._next_step()

    def wake_predecessor(self) -> None:
        """The process before this one was only stopped: it greets again, and must learn that it was replaced."""
        predecessor = f"trainer-{self._life - 1}"
        if predecessor in self.world.manager.ledger.state.replaced and not self.world.is_manager_away:
            self.world.from_trainer(self._hello(predecessor))

    def _saved(self) -> tuple[tuple[tuple[int, Purpose], ...], frozenset[int]]:
        return tuple(self._plan), frozenset(self._trained)

    def _hello(self, name: str) -> TrainerHello:
        covers = self.schedule.covers
        acknowledged = tuple((number, number + 1) for number in sorted(self._trained)) if covers else ()
        below = -1 if covers else self.acknowledged
        return TrainerHello(
            1,
            below,
            trainer=name,
            next_group=self._accepted,
            next_batch=self._next_batch,
            acknowledged_above=acknowledged,
            covers=covers,
        )

    def _unless_replaced(self, action: Callable[[], None]) -> Callable[[], None]:
        run = self._run
        return lambda: action() if run == self._run else None

    def _no_texts(self) -> SampleTexts:
        return SampleTexts(self._send, lambda sample, turn: (sample, turn) in self._judging)

    def _connect(self) -> None:
        self._texts.reconnect()
        self._link = Link(self.world)
        self._greeted = self._accepted
        self._send(self._hello(f"trainer-{self._life}"))
        for message in self._unanswered.values():
            self._send(message)

    def _send_back(self, message: ToTrainer) -> None:
        if self.lose_next is not None and isinstance(message, self.lose_next):
            self.lose_next = None
            self.partition()
        if self._link is not None:
            self._link.carry(1, lambda: self._receive(message))

    def _send(self, message: Any) -> None:
        if self._link is not None:
            self._link.carry(0, lambda: self.world.from_trainer(message))

    def _ask(self, make: Callable[[int], Any], then: Callable[[Any], None] = lambda answer: None) -> None:
        self._request += 1
        message = make(self._request)
        self._unanswered[self._request] = message
        self._then[self._request] = then
        self._send(message)
        if self.rng.random() < 0.02:
            self._send(message)

    def _receive(self, message: ToTrainer) -> None:
        for whole in self._texts.receive(message):
            self._receive_whole(whole)

    def _receive_whole(self, message: ToTrainer) -> None:
        if isinstance(message, TurnDone):
            self._score_later(message)
        elif isinstance(message, GroupDropped):
            self._send(NoticesTaken((message.group,)))
            self._replace(message)
        elif isinstance(message, Declined):
            asked = self._unanswered.get(message.request)
            raise Violation(self.world.now, "refused", f"{asked}: {message.reason}")
        elif isinstance(message, Accepted | Batch | Late):
            if self._unanswered.pop(message.request, None) is not None:
                self._then.pop(message.request)(message)
        elif isinstance(message, Fenced) and message.reason == SUPERSEDED and self.schedule.covers:
            pass  # a predecessor's; were it ours, the run would not get on
        elif isinstance(message, Fenced):
            raise Violation(self.world.now, "fenced", message.reason)
        elif isinstance(message, TrainerWelcome):
            known, self._journal = self._journal, message.journal
            if known not in ("", message.journal):
                self._submit_again()
        else:
            assert isinstance(message, TrainerHeartbeat | VersionServed)

    # --- verdicts -----------------------------------------------------------------------------------------------------

    def _score_later(self, turn: TurnDone) -> None:
        key = (turn.response.sample, turn.response.turn)
        self._accepted = max(self._accepted, turn.group + 1)  # whatever became of the answer to its submission
        self.world.watcher.turn_done(turn, self.world.now)
        if key in self._judging or turn.group in self._dropped:
            return
        self._judging.add(key)
        if self.rng.random() < 0.02:
            # The user code forgets one: the ledger asks again.
            self.world.after(1.0, lambda: self._judging.discard(key))
            return
        life = self._life
        self.world.after(self.rng.choice((0.001, 0.05, 0.5)), lambda: self._judge(turn, life))

    def _judge(self, turn: TurnDone, life: int) -> None:
        if life != self._life:
            return
        response, model = turn.response, self.world.model
        sample, number = response.sample, response.turn
        luck = Random(f"{self.schedule.seed}/{sample}/{number}").random()
        length = len(response.ids) // 4
        stopped = length and int.from_bytes(response.ids[-4:], "little") == STOP_TOKEN
        if luck < self.schedule.reject_share:
            self._ask(lambda r: Reject(r, sample, reason=DiscardReason.REWARD_RAISED, detail="KeyError"))
        elif stopped and number + 1 < self.schedule.max_turns and luck < 0.6:
            ids = model.environment(sample, length, 1 + int(luck * 5))
            self._texts.extend(sample, number, ids)
            self._ask(lambda r: Extend(r, sample, turn=number, ids=ids))
        elif self.schedule.group_filter == "custom" and luck > 0.97:
            self._ask(lambda r: Reject(r, sample, reason=DiscardReason.FILTERED, detail="by filterFunction"))
        else:
            self._ask(lambda r: Score(r, sample, turn=number, reward=float(luck > 0.5), metrics={"luck": luck}))

    # --- steps --------------------------------------------------------------------------------------------------------

    def _next_step(self) -> None:
        if not self._plan and self._unacknowledged:
            self.world.after(0.05, self._unless_replaced(self._next_step))
            return
        if not self._plan:
            self._ask(lambda r: FinishRun(r, True, message="trained"), self._end)
            return
        if self.schedule.covers and self.rng.random() < CHECKPOINT_SHARE:
            self._checkpoint = self._saved()
            self._send(Covered(0, tuple((number, number + 1) for number in sorted(self._trained))))
        step, self._purpose = self._plan.pop(0)
        groups = self.schedule.groups
        fresh = step != self._step
        self._step, self._replaced, self._optimized, self._gave_up = step, 0, 0, False
        self._missing = groups * self.schedule.n
        self._mini = self._to_boundary = self._missing // self.schedule.mini_batches
        if fresh and Random(f"{self.schedule.seed}/publish/{step}").random() < PROMPTS_FIRST_SHARE:
            # Prompts first, and the version that they want while the engines go on with what they have.
            self.world.after(self.rng.uniform(0.0, 1.0), self._unless_replaced(lambda: self._publish(step)))
        elif fresh:
            self._publish(step)
        if self.rng.random() < 0.1:
            self.world.after(self.rng.uniform(0.1, 2.0), self._unless_replaced(lambda: self._publish(step + 1)))
        wanted = groups + self.schedule.over_sampling
        there = self._ahead.pop((step, self._purpose), 0) + self._carried_groups()
        self._submit(max(0, wanted - there), step, self._purpose)
        later_ones = groups if self.schedule.carries else wanted
        for later in self._plan[: self.schedule.ahead]:
            if later not in self._ahead:
                self._ahead[later] = later_ones
                self._submit(later_ones, *later)
        self._ask_batch()

    def _carried_groups(self) -> int:
        """How many groups of the step before this one trains."""
        if self._purpose is not Purpose.TRAIN or self._carried < 0:
            return 0
        return sum(of == (self._carried, Purpose.TRAIN) for of in self._open.values())

    def _publish(self, version: int) -> None:
        """A learner ahead of its rollouts publishes before the step has ended: what runs may become too old."""
        if version > self.world.watcher.published:
            self.world.watcher.published = version
            self._ask(
                lambda r: PublishVersion(
                    r,
                    version,
                    endpoint="tcp://publisher",
                    public_key="key",
                    manifest_hash=b"hash",
                    receipt=receipt_of(version),
                )
            )

    def _submit(self, count: int, step: int, purpose: Purpose) -> None:
        groups = []
        for number in range(self._next_group, self._next_group + count):
            sampling = SamplingParams(self.schedule.max_new_tokens, stop_token_ids=(STOP_TOKEN,))
            high = max(step + self.schedule.carries, self.world.watcher.published)
            low = max(0, high - self.schedule.staleness)
            priority, prompt = self.rng.choice((0, 0, 1)), self.world.model.prompt(number)
            n = self.schedule.n
            groups.append(
                Group(
                    number,
                    step,
                    purpose=purpose,
                    prompt_ids=prompt,
                    n=n,
                    sampling=sampling,
                    min_version=low,
                    max_version=high,
                    priority=priority,
                )
            )
        self._next_group += count
        self._open.update({group.id: (step, purpose) for group in groups})
        if groups:
            self._ask(lambda r: Submit(r, tuple(groups)), lambda _: self._accept(groups))

    def _accept(self, groups: list[Group]) -> None:
        self._accepted = max(self._accepted, *(group.id + 1 for group in groups))

    def _submit_again(self) -> None:
        """The manager has lost its journal: what is open is submitted under other numbers, and the newest weights are
        announced again. Submissions without an answer are repeated like any request, and one whose answer came before
        the welcome was answered by this very manager: it has them, and nothing of them is lost."""
        lost = {number: of for number, of in self._open.items() if number < self._greeted}
        for number, of in lost.items():
            del self._open[number]
            self._dropped.add(number)
            self._submit(1, *of)
        version, self.world.watcher.published = self.world.watcher.published, -1
        self._publish(version)

    def _replace(self, dropped: GroupDropped) -> None:
        """Another prompt in its place, unless the step has all that it wants."""
        self._open.pop(dropped.group, None)
        of = (dropped.step, dropped.purpose)
        if of in self._ahead and dropped.group not in self._dropped:
            self._dropped.add(dropped.group)
            self._ahead[of] -= 1
        ours = of == (self._step, self._purpose)
        ours = ours or (self._purpose is Purpose.TRAIN and of == (self._carried, Purpose.TRAIN))
        if dropped.group in self._dropped or not ours or not self._missing:
            return
        self._dropped.add(dropped.group)
        self._replaced += 1
        if self._replaced <= REPLACEMENTS and not self.done:
            self._submit(1, self._step, self._purpose)

    def _ask_batch(self) -> None:
        step, most = self._next_source()
        least = min(most, self.rng.choice((1, self.schedule.n, 2 * self.schedule.n)))
        purpose, tokens = self._purpose, self.schedule.max_tokens
        alone = purpose is Purpose.TRAIN and self._alone_rng.random() < self.schedule.alone_share
        self._ask(
            lambda r: BatchRequest(
                r,
                step,
                purpose=purpose,
                min_samples=least,
                max_samples=most,
                max_tokens=tokens,
                deadline_s=self.schedule.next_s,
                alone=alone,
            ),
            self._take_alone if alone else self._take,
        )

    def _next_source(self) -> tuple[int, int]:
        """Step and most samples: what is carried has its places, and what else there is takes the others."""
        carried = self._carried_groups() * self.schedule.n
        others = self._missing - carried
        if carried and (others <= 0 or self.rng.random() < 0.5):
            return self._carried, min(self._to_boundary, carried)
        return self._step, min(self._to_boundary, others)

    def _take_alone(self, answer: Batch | Late) -> None:
        """It learns for a while: meanwhile no engine on its devices may be awake."""
        if not (isinstance(answer, Batch) and answer.samples):
            self._take(answer)
            return
        self._train(answer)
        self.world.devices.learns_alone = True
        self.world.after(self._alone_rng.choice((0.0, 0.3, 2.0)), self._unless_replaced(self._end_alone))

    def _end_alone(self) -> None:
        self.world.devices.learns_alone = False
        self._go_on()

    def _take(self, answer: Batch | Late) -> None:
        if isinstance(answer, Batch):
            if answer.samples:
                self._train(answer)
                if self.schedule.learn_s:
                    self.world.after(self.schedule.learn_s, self._unless_replaced(self._go_on))
                    return
            elif answer.last and self._replaced > REPLACEMENTS:
                self._missing, self._gave_up = 0, True
            elif answer.last:
                self.world.after(
                    0.1, self._unless_replaced(self._ask_batch)
                )  # a notice of a dropped group is on its way
                return
        self._go_on()

    def _go_on(self) -> None:
        if self._missing:
            self._ask_batch()
        else:
            if not self._gave_up:
                self.world.watcher.step_ended(self._step, self._purpose, self._optimized, self.world.now)
            self._end_steps()

    def _end_steps(self) -> None:
        """The step that was trained, unless what is left of it is carried; and the one of which all was."""
        trained, over = (self._step, self._purpose), list[tuple[int, Purpose]]()
        if self._purpose is Purpose.TRAIN:
            over += [(self._carried, Purpose.TRAIN)] * (self._carried >= 0)
            trains_on = any(purpose is Purpose.TRAIN for _, purpose in self._plan)
            self._carried = self._step if self.schedule.carries and trains_on and not self._gave_up else -1
        if trained != (self._carried, Purpose.TRAIN):
            over.append(trained)
        self._open = {number: of for number, of in self._open.items() if of not in over}
        for step, purpose in over[:-1]:
            self._ask(partial(EndStep, step=step, purpose=purpose))
        if over:
            step, purpose = over[-1]
            self._ask(partial(EndStep, step=step, purpose=purpose), lambda _: self._next_step())
        else:
            self._next_step()

    def _train(self, batch: Batch) -> None:
        self.world.watcher.trained(batch, self._step, self.world.now)
        self._next_batch = max(self._next_batch, batch.number + 1)
        for scored in batch.samples:
            self._open.pop(scored.group, None)
        self._missing -= len(batch.samples)
        self._to_boundary -= len(batch.samples)
        if self._to_boundary == 0:
            self._to_boundary = self._mini
            self._optimized += 1
        self.acknowledged = batch.number
        self._trained.add(batch.number)
        self._unacknowledged += 1
        acknowledge = self._unless_replaced(lambda: self._acknowledge(batch.number))
        self.world.after(self.schedule.learn_s + self.rng.choice((0.0, 0.1)), acknowledge)

    def _acknowledge(self, batch: int) -> None:
        self._ask(lambda r: Acknowledge(r, batch), self._acknowledged)

    def _acknowledged(self, _: Accepted) -> None:
        self._unacknowledged -= 1

    def _end(self, _: Accepted) -> None:
        self.done = True
