"""What must hold after every event. The audit of `polyrl check` gets each event of the run, and speaks first of all;
besides it here is what no journal can show, since only the peers know it:

    I1   what is acknowledged was taken and trained by the trainer, all of it; what is discarded had its reason: peers
         said or did what that reason needs
    I2   a step trains exactly the samples it asked for, in whole groups, none twice
    I3   a step takes exactly its optimizer steps: no batch reaches beyond the mini-batch that it was asked for
    I4   every response is the model's, token for token: none doubled, missing, foreign, past a stop or over the budget
    I5   a run gets on: nothing waits for ever (looked at by `world`), nor long while a sound engine has room for it
    I6   every token's version was really loaded by the engine that made it
    I8   no engine that says nothing keeps its lease, and one that is to drain is asked to
    I10  events give the live state, at any cut, also after a journey through bytes; a restart loses nothing that was
         committed, a power cut nothing that was synced, and so nothing that anybody was promised
    I11  every token that arrives is counted, as kept, in vain or repeated; see `held_memory`, and for I9 `held_batches`

The audit, and what a restart is compared with, get only what no power cut can take back any more: the rest never was.
"""

from __future__ import annotations

from collections import Counter, deque
from random import Random
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from polyrl.ledger import Effects, Event, Ledger, events as f
from polyrl.ledger.apply import apply
from polyrl.ledger.audit.audit import Audit
from polyrl.ledger.audit.history import HistoryEntry, HistoryProjection, ManagerStarted
from polyrl.ledger.batching import passes
from polyrl.ledger.events import AnyEvent
from polyrl.ledger.journal import decode_state, encode_state
from polyrl.ledger.state import LedgerState
from polyrl.sample import DiscardReason, Group, Purpose, Response, Scored, sample_id
from polyrl.wire import (
    Assign,
    Batch,
    BatchRequest,
    Deltas,
    EndStep,
    FinishRun,
    FromAgent,
    FromTrainer,
    HandBack,
    HandBackReason,
    Hello,
    Reject,
    Score,
    StartDrain,
    Submit,
    TurnDone,
    WeightsLoaded,
    row_columns,
)
from polyrl_rollout.testing.simulation.manager import lost_by_restart
from polyrl_rollout.testing.simulation.model import ENVIRONMENT_BASE, STOP_TOKEN, Model, logprobs_of
from polyrl_rollout.testing.simulation.schedule import Schedule
from polyrl_rollout.testing.watches.leases import overdue_lease
from polyrl_rollout.testing.watches.work_conservation import WorkConservation

SLACK_S: Final = 0.11
"""Deadlines closer together than the ledger's tick resolution are handled together."""

LATE_S: Final = 1.5
"""Silence after which an engine may be passed over: a heartbeat is lost."""

REPLAY_EVERY: Final = 61
"""Events between two comparisons of the folded with the live state; a prime, to meet every phase of a run."""

_decoder = msgspec.msgpack.Decoder(list[AnyEvent])


class Violation(AssertionError):
    """An invariant is broken."""

    def __init__(self, now: float, invariant: str, text: str) -> None:
        super().__init__(f"at {now:.3f} s: {invariant}: {text}")
        self.invariant = invariant


class _Decided(NamedTuple):
    """What a power cut may still take back."""

    events: list[Event]
    history: list[HistoryEntry]
    tokens: int
    """Tokens that came in with the events."""


class Watcher:
    """Looks at one run: at each message that arrives, at each event, and at what the trainer gets."""

    def __init__(self, ledger: Ledger, model: Model, schedule: Schedule) -> None:
        self.published = -1
        """Newest version, for engines that look for it."""
        self.progress_at = 0.0
        """When something was last decided that brings the run nearer to its end."""
        self._model, self._schedule = model, schedule
        self._audit = Audit()
        self._groups: dict[int, Group] = {}
        self._lost: set[int] = set()
        """Groups that a lost journal had."""
        self._trained: set[str] = set()
        self._trained_before: set[str] = set()
        """Samples trained in batches of managers whose journal was lost."""
        self._batches: dict[int, Batch] = {}
        self._trained_in: dict[int, int] = {}
        """By batch: the step of its optimizer steps. What was carried trains in a later one than it was asked for."""
        self._rolled_back: set[int] = set()
        """Batches that no trainer's state contains any more."""
        self._forgotten: set[int] = set()
        """Groups whose submission was not accepted when the trainer died: a power cut may take them back."""
        self._requests: dict[int, BatchRequest] = {}
        self._samples_trained: Counter[tuple[int, str]] = Counter()
        self._loaded: dict[str, set[int]] = {}
        self._contexts: dict[str, int] = {}
        """The context of every engine that ever greeted, in tokens."""
        self._last_seen: dict[str, float] = {}
        self._deaf_until = 0.0
        self._events = 0
        self._tokens_in = 0
        self._assignments: dict[int, tuple[str, str, int]] = {}
        """Engine, sample and attempt of each that an engine got."""
        self._refusals: dict[str, list[tuple[float, str]]] = {}
        """Per sample: when it was called impossible, and by which engine."""
        self._token_at: dict[str, float] = {}
        self._rejections: set[tuple[int, DiscardReason]] = set()
        """Groups, and the trainer's reasons to reject a sample of theirs."""
        self._rewards: dict[str, float] = {}
        self._ended: set[tuple[int, Purpose]] = set()
        """Steps of which the trainer wants nothing more."""
        self._finished = False
        self.work = WorkConservation(schedule.max_turns)
        self._frames: dict[tuple[str, int], dict[int, int]] = {}
        """Per engine and number of a Deltas: the assignments that it ended, and the position after them."""
        self._kept: dict[str, int] = {}
        """Tokens per sample whose agent has forgotten them, since they are safe."""
        self._gathered: list[_Decided] = []
        """In no commit yet."""
        self._committed: deque[tuple[int, _Decided]] = deque()
        """By the number of their commit, which is not synced."""
        self._follow(ledger, 0.0)

    # --- what peers know ----------------------------------------------------------------------------------------------

    def verified(self, engine: str, version: int) -> None:
        """The engine really serves `version` now."""
        self._loaded.setdefault(engine, set()).add(version)

    def deaf_until(self, time: float) -> None:
        """The manager cannot hear until then: nobody's silence counts before."""
        self._deaf_until = max(self._deaf_until, time)

    def poisoned(self, sample: str) -> bool:
        """Whether engines call this sample impossible."""
        share = self._schedule.poison_share
        return share > 0 and Random(f"{self._schedule.seed}/poison/{sample}").random() < share

    def before_agent(self, engine: str, message: FromAgent, now: float) -> int:
        """A message of an agent is about to be heard; returns how many tokens count as having come in."""
        if isinstance(message, Hello) or engine in self._ledger.state.engines:
            self._last_seen[engine] = now
        if isinstance(message, Hello):
            self._contexts[engine] = message.max_context
        if isinstance(message, WeightsLoaded) and message.version not in self._loaded.get(engine, ()):
            raise Violation(now, "simulation", "an engine says WeightsLoaded before it verified")
        if isinstance(message, HandBack) and message.reason == HandBackReason.REJECTED:
            refused = self._ledger.state.assignments.get(message.assignment)
            self._refusals.setdefault(refused.sample if refused else "", []).append((now, engine))
        if isinstance(message, Deltas) and engine in self._ledger.state.engines:
            self._token_at[engine] = now if message.ids else self._token_at.get(engine, -1.0)
            return len(message.ids) // 4
        return 0

    def before_trainer(self, message: FromTrainer) -> None:
        """A message of the trainer is about to be heard."""
        if isinstance(message, Submit):
            lost_below = self._ledger.state.lost_below  # what a lost journal had is submitted under other numbers
            fresh = {one.id: one for one in message.groups if one.id >= lost_below}
            self._groups.update(fresh)
            self._lost.difference_update(fresh)
        if isinstance(message, BatchRequest):
            self._requests[message.request] = message
        if isinstance(message, Score):
            self._rewards[message.sample] = message.reward
        if isinstance(message, Reject):
            self._rejections.add((int(message.sample.partition(".")[0]), message.reason))
        if isinstance(message, EndStep):
            self._ended.add((message.step, message.purpose))
        self._finished |= isinstance(message, FinishRun)

    def assigned(self, engine: str, assign: Assign, now: float) -> None:
        """An engine got an Assign: its input must be the prompt and exactly the model's tokens so far."""
        number, this = int(assign.sample.partition(".")[0]), (engine, assign.sample, assign.attempt)
        # A frozen agent wakes, and finds what a manager sent whose journal is lost: its numbers mean nothing any more.
        meant = this if number in self._lost else self._assignments.setdefault(assign.assignment, this)
        if meant != this:
            raise Violation(now, "I10", f"assignment {assign.assignment} is {assign.sample}, and was {meant}")
        group = self._groups[number]
        prompt = self._model.prompt(number)
        response = np.frombuffer(assign.input_ids[len(prompt) :], dtype="<u4")
        if assign.input_ids[: len(prompt)] != prompt or len(response) != assign.offset:
            raise Violation(now, "I4", f"{assign.sample} is assigned with another prompt or offset")
        generated = response[response < ENVIRONMENT_BASE]
        if not np.array_equal(response % ENVIRONMENT_BASE, self._model.text(assign.sample).tokens[: len(response)]):
            raise Violation(now, "I4", f"{assign.sample} is assigned with other tokens than were generated")
        room = self._contexts[engine] - len(prompt) // 4 - len(response)
        left = min(group.sampling.max_new_tokens - len(generated), room)
        if assign.max_new_tokens != left or left < 1:
            raise Violation(now, "I4", f"{assign.sample} is assigned with budget {assign.max_new_tokens}")
        if len(response) and int(response[-1]) == STOP_TOKEN:
            raise Violation(now, "I4", f"{assign.sample} is assigned although its last token is a stop token")
        if (assign.min_version, assign.max_version) != (group.min_version, group.max_version):
            raise Violation(now, "I6", f"{assign.sample} is assigned with other versions")

    def tokens_kept(self, engine: str, seq: int) -> None:
        """An engine learns that its frames up to this one are safe."""
        for frame in [frame for frame in self._frames if frame[0] == engine and frame[1] <= seq]:
            for assignment, end in self._frames.pop(frame).items():
                _, sample, _ = self._assignments[assignment]
                self._kept[sample] = max(end, self._kept.get(sample, 0))

    def turn_done(self, turn: TurnDone, now: float) -> None:
        """The trainer got a TurnDone."""
        self._check_response(turn.response, self._groups[turn.group], now)

    def trained(self, batch: Batch, step: int, now: float) -> None:
        """The trainer takes a batch, for the first time, and trains it in `step`."""
        if batch.number in self._batches:
            raise Violation(now, "I2", f"batch number {batch.number} names two batches")
        self._batches[batch.number] = batch
        request = self._requests[batch.request]
        by_group: dict[int, list[Scored]] = {}
        for scored in batch.samples:
            by_group.setdefault(scored.group, []).append(scored)
        for number, members in by_group.items():
            group = self._groups[number]
            if [scored.index for scored in members] != list(range(group.n)):
                raise Violation(now, "I2", f"group {number} is packed in part")
            if (group.step, group.purpose) != (request.step, request.purpose):
                raise Violation(now, "I2", f"group {number} of step {group.step} is packed into step {request.step}")
            for scored in members:
                self._check_response(scored.response, group, now)
                if scored.response.sample in self._trained or scored.response.sample in self._trained_before:
                    raise Violation(now, "I2", f"sample {scored.response.sample} is trained twice")
                self._trained.add(scored.response.sample)
            rewards = [scored.reward for scored in members]
            if group.purpose is Purpose.TRAIN and not passes(self._schedule.group_filter, rewards):
                raise Violation(now, "I2", f"group {number} is trained, and does not pass the filter")
        self._check_size(batch, request, len(by_group), now)
        if not step - self._schedule.carries <= request.step <= step:
            raise Violation(now, "I2", f"batch {batch.number} of step {request.step} is trained in step {step}")
        self._trained_in[batch.number] = step
        self._samples_trained[(step, request.purpose)] += len(batch.samples)

    def _check_size(self, batch: Batch, request: BatchRequest, groups: int, now: float) -> None:
        tokens = sum(len(self._groups[scored.group].prompt_ids + scored.response.ids) // 4 for scored in batch.samples)
        if groups > 1 and tokens > request.max_tokens:
            raise Violation(now, "I3", f"{groups} groups have {tokens} tokens, over {request.max_tokens}")
        if len(batch.samples) > request.max_samples:
            text = f"{len(batch.samples)} samples where {request.max_samples} were missing to a mini-batch"
            raise Violation(now, "I3", text)

    def rolled_back(self, covered: set[int], forgotten: set[int]) -> None:
        """Another trainer goes on from a checkpoint that contains these batches: what came after was never trained, and
        of these groups nobody knows whether their submission arrived."""
        self._forgotten |= forgotten
        for number in self._batches.keys() - covered - self._rolled_back:
            batch = self._batches[number]
            request = self._requests[batch.request]
            self._samples_trained[(self._trained_in[number], request.purpose)] -= len(batch.samples)
            self._trained -= {scored.response.sample for scored in batch.samples}
            self._rolled_back.add(number)

    def step_ended(self, step: int, purpose: Purpose, optimized: int, now: float) -> None:
        """The trainer is through with a step after `optimized` optimizer steps, and did not give up on it."""
        wanted, got = self._schedule.groups * self._schedule.n, self._samples_trained[(step, purpose)]
        if got != wanted:
            raise Violation(now, "I2", f"step {step} ({purpose}) has trained {got} samples, it wanted {wanted}")
        if optimized != self._schedule.mini_batches:
            text = f"step {step} ({purpose}) took {optimized} optimizer steps, not {self._schedule.mini_batches}"
            raise Violation(now, "I3", text)

    # --- after every event --------------------------------------------------------------------------------------------

    def after(self, outcome: Effects, now: float, tokens: int) -> None:
        """The ledger has decided something, on a message that brought so many tokens."""
        history: list[HistoryEntry] = []
        asked_to_drain = {name for name, message in outcome.to_agents if isinstance(message, StartDrain)}
        for event in outcome.events:
            if _is_progress(event):
                self.progress_at = now
            if isinstance(event, f.BatchAcknowledged) and event.batch not in self._batches:
                raise Violation(now, "I1", f"batch {event.batch} is acknowledged, but the trainer never took it")
            if isinstance(event, f.GroupDiscarded) and not self._is_discard_due(event, now):
                raise Violation(now, "I1", f"group {event.group} is discarded as {event.reason} without cause")
            if isinstance(event, f.EngineDraining) and event.engine not in asked_to_drain:
                raise Violation(now, "I8", f"engine {event.engine} is to drain, and was not asked to")
            if isinstance(event, f.Reclaimed):
                self._kept[event.sample] = min(event.length, self._kept.get(event.sample, 0))
            if isinstance(event, f.TokensTaken):
                rows = zip(*row_columns(event.rows), strict=True)
                ends = {number: offset + count for number, offset, count, finish in rows if finish}
                self._frames[event.engine, event.seq] = ends
            history += self._projection.project(event)
        self._gathered.append(_Decided(outcome.events, history, tokens=tokens))
        self._events += 1
        if self._events % REPLAY_EVERY == 0:
            self._compare(now)
        self._check_leases(now)
        self._check_work(now)

    def _is_discard_due(self, event: f.GroupDiscarded, now: float) -> bool:
        group = self._groups[event.group]
        if (event.group, event.reason) in self._rejections:
            return True
        match event.reason:
            case DiscardReason.SURPLUS:
                return (group.step, group.purpose) in self._ended
            case DiscardReason.CANCELLED:
                return self._finished
            case DiscardReason.STALE:
                return self.published > group.max_version
            case DiscardReason.ENGINE_REJECTED:
                refusals, state = self._refusals.get(event.culprit), self._ledger.state
                if not refusals:
                    return False
                first, engines = min(refusals)[0], {engine for _, engine in refusals}
                shown = all(self._token_at.get(one, -1.0) > first for one in engines & state.engines.keys())
                often = len(refusals if shown else engines) >= state.config.max_rejections
                return often or now - first >= state.config.refusal_deadline_s
            case DiscardReason.PROMPT_TOO_LONG:
                return len(group.prompt_ids) // 4 >= min(self._contexts.values())
            case DiscardReason.REWARD_TIMED_OUT:
                return now >= self._ledger.state.config.verdict_deadline_s
            case DiscardReason.FILTERED:
                rewards = [self._rewards[sample_id(group.id, index)] for index in range(group.n)]
                return group.purpose is Purpose.TRAIN and not passes(self._schedule.group_filter, rewards)
        return False

    def committed(self, commit: int) -> None:
        """What was decided so far is in the journal, in commits up to this one."""
        self._committed.extend((commit, decided) for decided in self._gathered)
        self._gathered.clear()

    def survived(self, commit: int, now: float) -> None:
        """No power cut takes commits up to this one back."""
        while self._committed and self._committed[0][0] <= commit:
            _, decided = self._committed.popleft()
            _fold(self._mirror, decided.events)
            for entry in decided.history:
                self._audit.take(entry)
            self._tokens_in += decided.tokens
        self._raise_broken(now)

    def restarted(self, ledger: Ledger, now: float, clock: float) -> None:
        """The manager has read its journal, and goes on with another ledger, whose clock shows `clock`. What has not
        survived was lost."""
        self._gathered.clear()
        self._committed.clear()
        lost = lost_by_restart(self._mirror, ledger.state)
        if lost:
            text = f"the restarted manager has other {', '.join(lost)} than the journal was given"
            raise Violation(now, "I10", text)
        for name, sample in ledger.state.samples.items():
            if sample.length < self._kept.get(name, 0):
                text = f"{name} has {sample.length} tokens, an agent forgot {self._kept[name]} as safe"
                raise Violation(now, "I10", text)
        self._frames.clear()
        self._follow(ledger, clock)

    def journal_lost(self, ledger: Ledger, clock: float) -> None:
        """The manager has lost its journal, and goes on with a ledger that knows nothing. What was trained stays
        trained, and no number of a group or batch names another one than before; all else begins anew."""
        self._gathered.clear()
        self._committed.clear()
        self._frames.clear()
        self._kept.clear()
        self._assignments.clear()
        self._trained_before |= self._trained
        self._lost.update(self._groups)
        self._trained, self._forgotten = set(), set()
        self._tokens_in = 0
        self._audit = Audit()
        self._follow(ledger, clock)

    def _follow(self, ledger: Ledger, clock: float) -> None:
        self._ledger = ledger
        self._mirror = decode_state(encode_state(ledger.state))
        self._projection = HistoryProjection(ledger.state)
        self._audit.take(HistoryEntry(clock, ManagerStarted(clock, ledger.state.config)))

    def _raise_broken(self, now: float) -> None:
        broken = self._audit.findings.first_broken()
        if broken is not None:
            raise Violation(now, *broken)

    def at_end(self, now: float) -> frozenset[str]:
        """The run is over. Returns the invariants of which the audit has seen something."""
        self.committed(0)
        self.survived(max((commit for commit, _ in self._committed), default=0), now)
        self._compare(now)
        verdicts = self._audit.conclude(self._ledger.state)
        self._raise_broken(now)
        status = self._ledger.status(now)
        ends = self._audit.samples.ends
        for number in self._forgotten - ends.keys():
            self._groups.pop(number, None)
        kept = {number: group for number, group in self._groups.items() if number not in self._lost}
        missing = [number for number in kept if number not in ends]
        if missing or status.samples.open:
            raise Violation(now, "I1", f"groups {missing[:5]} have no end; open: {status.samples.open}")
        ended = status.samples.acknowledged + sum(status.samples.discarded.values())
        if ended != status.samples.submitted or ended != sum(group.n for group in kept.values()):
            raise Violation(now, "I1", f"{status.samples.submitted} samples were submitted, {ended} ended")
        acknowledged = {number for number, end in ends.items() if end == "acknowledged"}
        trained = {sample_id(n, index) for n in acknowledged for index in range(self._groups[n].n)}
        if trained != self._trained:
            raise Violation(now, "I1", f"trained and acknowledged differ in {sorted(trained ^ self._trained)[:5]}")
        tokens, repeated = status.tokens, self._ledger.state.counters.tokens_repeated
        if repeated and not self._schedule.faults:
            raise Violation(now, "I11", f"{repeated} tokens came twice, although nothing was lost")
        if tokens.kept + tokens.regenerated + repeated != self._tokens_in:
            text = f"the ledger counts {tokens} and {repeated} repeated"
            raise Violation(now, "I11", f"{self._tokens_in} tokens came in, {text}")
        return frozenset(verdict.invariant for verdict in verdicts if verdict.examined)

    def _compare(self, now: float) -> None:
        mirror = decode_state(encode_state(self._mirror))
        for decided in [*(one for _, one in self._committed), *self._gathered]:
            _fold(mirror, decided.events)
        if msgspec.msgpack.encode(mirror) != msgspec.msgpack.encode(self._ledger.state):
            raise Violation(now, "I10", "the events give another state than the live one")

    def _check_leases(self, now: float) -> None:
        wrong = overdue_lease(self._ledger.state, self._last_seen, self._deaf_until, now - SLACK_S)
        if wrong:
            raise Violation(now, "I8", wrong)

    def _check_work(self, now: float) -> None:
        deaf, seen = now < self._deaf_until, self._last_seen
        silent = {name for name in self._ledger.state.engines if deaf or now - seen.get(name, now) > LATE_S}
        idle = self.work.idle(self._ledger.state, silent, now)
        if idle:
            raise Violation(now, "I5", idle)

    def _check_response(self, response: Response, group: Group, now: float) -> None:
        ids = np.frombuffer(response.ids, dtype="<u4")
        mask = np.frombuffer(response.loss_mask, dtype=np.uint8)
        written = np.where(mask == 0, np.uint32(ENVIRONMENT_BASE), 0)
        expected = self._model.text(response.sample).tokens[: len(ids)] + written
        if not np.array_equal(ids, expected) or len(mask) != len(ids):
            raise Violation(now, "I4", f"{response.sample} has other tokens than the model gives")
        logprobs = np.where(mask == 1, np.frombuffer(logprobs_of(ids), dtype="<f4"), 0).astype("<f4")
        if logprobs.tobytes() != response.logprobs:
            raise Violation(now, "I4", f"{response.sample} has logprobs of other tokens")
        if int(mask.sum()) > group.sampling.max_new_tokens:
            raise Violation(now, "I4", f"{response.sample} has {mask.sum()} tokens, over its budget")
        stops = np.flatnonzero((ids == STOP_TOKEN) & (mask == 1))
        if any(stop + 1 < len(ids) and mask[stop + 1] for stop in stops):
            raise Violation(now, "I4", f"{response.sample} goes on after a stop token")
        if (response.finish == "stop") != (len(ids) > 0 and int(ids[-1]) == STOP_TOKEN):
            raise Violation(now, "I4", f"{response.sample} ends by {response.finish}, its last token says otherwise")
        used_up = int(mask.sum()) == group.sampling.max_new_tokens
        # The audit knows which engines were there when the turn ended; here any of the schedule's may be meant.
        full = len(group.prompt_ids) // 4 + len(ids) >= min(self._contexts.values())
        if response.finish == "length" and not (used_up or full):
            raise Violation(now, "I4", f"{response.sample} ends by length after {mask.sum()} tokens")
        self._check_spans(response, group, mask, now)

    def _check_spans(self, response: Response, group: Group, mask: Any, now: float) -> None:
        position = 0
        for span in response.spans:
            written = span.version == -1
            if span.start != position or span.end <= span.start or mask[span.start : span.end].any() == written:
                raise Violation(now, "I6", f"the spans of {response.sample} do not cover its tokens")
            position = span.end
            if not written and span.version not in self._loaded.get(span.engine, ()):
                raise Violation(now, "I6", f"{response.sample} has tokens of an unverified version {span.version}")
            if not written and not group.min_version <= span.version <= group.max_version:
                raise Violation(now, "I6", f"{response.sample} has tokens of version {span.version}")
        if position != len(mask):
            raise Violation(now, "I6", f"the spans of {response.sample} do not cover its tokens")


def _fold(state: LedgerState, events: list[Event]) -> None:
    for event in _decoder.decode(msgspec.msgpack.encode(events)):
        apply(state, event)


def _is_progress(event: Event) -> bool:
    if isinstance(event, f.TokensTaken):
        return bool(event.ids)
    if isinstance(event, f.BatchPacked):
        return bool(event.groups)
    return isinstance(event, f.TurnEnded | f.SampleScored | f.GroupSubmitted | f.GroupDiscarded | f.BatchAcknowledged)
