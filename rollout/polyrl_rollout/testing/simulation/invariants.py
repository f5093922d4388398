"""What must hold after every event, kept in books of its own: nothing here asks the ledger whether the ledger is right.

    I1   every submitted sample ends acknowledged or discarded, once
    I2   a step trains exactly the samples it asked for, in whole groups, none twice
    I3   a step takes exactly its optimizer steps: no batch reaches beyond the mini-batch that it was asked for
    I4   every response is the model's, token for token: none doubled, missing, foreign, past a stop or over the budget
    I5   a run gets on: nothing waits for ever (looked at by `world`)
    I6   every token's version was verified by the engine that made it, and may be used by the sample
    I7   an engine leaves the pool by Deregister or by silence for its lease, and by nothing else
    I8   a silent engine leaves within one lease
    I10  events fold to the live state, at any cut, also after a journey through bytes; a restart loses nothing accepted
    I11  bytes are linear in tokens

Refuses to hold: what peers do. Read next: `run`.
"""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any, Final

import msgspec
import numpy as np

from polyrl.ledger import Effects, Event, Ledger
from polyrl.ledger import events as f
from polyrl.ledger.apply.apply import apply
from polyrl.ledger.journal.codec import decode_state, encode_state
from polyrl.ledger.state import LedgerState
from polyrl.sample import Group, Purpose, Response, Scored, sample_id
from polyrl.wire import (
    Assign,
    Batch,
    BatchRequest,
    Deltas,
    Deregister,
    FromAgent,
    FromTrainer,
    Hello,
    Submit,
    TurnDone,
    WeightsLoaded,
)
from polyrl_rollout.testing.simulation.model import ENVIRONMENT_BASE, STOP_TOKEN, Model, logprobs_of
from polyrl_rollout.testing.simulation.restarts import lost_by_restart
from polyrl_rollout.testing.simulation.schedule import Schedule

SLACK_S: Final = 0.11
"""Deadlines closer together than the ledger's tick resolution are handled together."""

CUT_EVERY: Final = 61
"""Events between two comparisons of the folded with the live state; a prime, to meet every phase of a run."""

MAX_BYTES_PER_TOKEN: Final = 19
"""A row of one token: 11 + 4 + 4."""

_facts = msgspec.msgpack.Decoder(Event)


class Violation(AssertionError):
    """An invariant is broken."""

    def __init__(self, now: float, invariant: str, text: str) -> None:
        super().__init__(f"at {now:.3f} s: {invariant}: {text}")
        self.invariant = invariant


class Watcher:
    """The books of one run."""

    def __init__(self, ledger: Ledger, model: Model, schedule: Schedule) -> None:
        self.published = -1
        """Newest version, for engines that look for it."""
        self.progress_at = 0.0
        """When something was last decided that brings the run nearer to its end."""
        self._ledger, self._model, self._schedule = ledger, model, schedule
        self._mirror = LedgerState(ledger.state.config)
        self._groups: dict[int, Group] = {}
        self._ends: dict[int, str] = {}
        self._trained: set[str] = set()
        self._batches: dict[int, Batch] = {}
        self._requests: dict[int, BatchRequest] = {}
        self._samples_trained: Counter[tuple[int, str]] = Counter()
        self._verified: dict[str, set[int]] = {}
        self._heard: dict[str, float] = {}
        self._deaf_until = 0.0
        self._bye: set[str] = set()
        self._numbers = 0
        self._events = 0
        self._tokens_in = self._bytes_in = self._bare_rows = 0
        self._draining: set[str] = set()

    # --- what peers tell ----------------------------------------------------------------------------------------------

    def verified(self, engine: str, version: int) -> None:
        """The engine really serves `version` now."""
        self._verified.setdefault(engine, set()).add(version)

    def deaf_until(self, time: float) -> None:
        """The manager cannot hear until then: nobody's silence counts before."""
        self._deaf_until = max(self._deaf_until, time)

    def poisoned(self, sample: str) -> bool:
        """Whether engines call this sample impossible."""
        share = self._schedule.poison_share
        return share > 0 and Random(f"{self._schedule.seed}/poison/{sample}").random() < share

    def before_agent(self, engine: str, message: FromAgent, now: float) -> None:
        """A message of an agent is about to be heard."""
        if isinstance(message, Hello) or engine in self._ledger.state.engines:
            self._heard[engine] = now
        if isinstance(message, Deregister):
            self._bye.add(engine)
        if isinstance(message, WeightsLoaded) and message.version not in self._verified.get(engine, ()):
            raise Violation(now, "simulation", "an engine says WeightsLoaded before it verified")
        if isinstance(message, Deltas) and engine in self._ledger.state.engines:
            self._tokens_in += len(message.ids) // 4
            self._bytes_in += len(message.ids) + len(message.logprobs) + len(message.rows)
            self._bare_rows += len(message.rows) // 11

    def before_trainer(self, message: FromTrainer) -> None:
        """A message of the trainer is about to be heard."""
        if isinstance(message, Submit):
            for group in message.groups:
                self._groups.setdefault(group.id, group)
        if isinstance(message, BatchRequest):
            self._requests[message.request] = message

    def assigned(self, engine: str, assign: Assign, now: float) -> None:
        """An engine got an Assign: its input must be the prompt and exactly the model's tokens so far."""
        number = int(assign.sample.partition(".")[0])
        group = self._groups[number]
        prompt = self._model.prompt(number)
        response = np.frombuffer(assign.input_ids[len(prompt) :], dtype="<u4")
        if assign.input_ids[: len(prompt)] != prompt or len(response) != assign.offset:
            raise Violation(now, "I4", f"{assign.sample} is assigned with another prompt or offset")
        generated = response[response < ENVIRONMENT_BASE]
        if not np.array_equal(response % ENVIRONMENT_BASE, self._model.text(assign.sample).tokens[: len(response)]):
            raise Violation(now, "I4", f"{assign.sample} is assigned with other tokens than were generated")
        if assign.max_new_tokens != group.sampling.max_new_tokens - len(generated) or assign.max_new_tokens < 1:
            raise Violation(now, "I4", f"{assign.sample} is assigned with budget {assign.max_new_tokens}")
        if len(response) and int(response[-1]) == STOP_TOKEN:
            raise Violation(now, "I4", f"{assign.sample} is assigned although its last token is a stop token")
        if (assign.min_version, assign.max_version) != (group.min_version, group.max_version):
            raise Violation(now, "I6", f"{assign.sample} is assigned with other versions")

    def turn_done(self, turn: TurnDone, now: float) -> None:
        """The trainer got a TurnDone."""
        self._check_response(turn.response, self._groups[turn.group], now)

    def trained(self, batch: Batch, now: float) -> None:
        """The trainer takes a batch, for the first time."""
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
                if scored.response.sample in self._trained:
                    raise Violation(now, "I2", f"sample {scored.response.sample} is trained twice")
                self._trained.add(scored.response.sample)
        if len(batch.samples) > request.max_samples:
            text = f"{len(batch.samples)} samples where {request.max_samples} were missing to a mini-batch"
            raise Violation(now, "I3", text)
        self._samples_trained[(request.step, request.purpose)] += len(batch.samples)

    def step_ended(self, step: int, purpose: Purpose, optimized: int, now: float) -> None:
        """The trainer is through with a step after `optimized` optimizer steps, and did not give up on it."""
        wanted, got = self._schedule.groups * self._schedule.n, self._samples_trained[(step, purpose)]
        if got != wanted:
            raise Violation(now, "I2", f"step {step} ({purpose}) has trained {got} samples, it wanted {wanted}")
        if optimized != self._schedule.mini_batches:
            text = f"step {step} ({purpose}) took {optimized} optimizer steps, not {self._schedule.mini_batches}"
            raise Violation(now, "I3", text)

    # --- after every event --------------------------------------------------------------------------------------------

    def after(self, outcome: Effects, now: float) -> None:
        """The ledger has decided something."""
        for event in outcome.events:
            apply(self._mirror, _facts.decode(msgspec.msgpack.encode(event)))
            if _is_progress(event):
                self.progress_at = now
            check = _CHECKS.get(type(event))
            if check is not None:
                check(self, event, now)
        self._events += 1
        if self._events % CUT_EVERY == 0:
            self._compare(now)
        self._check_leases(now)

    def restarted(self, before: LedgerState, ledger: Ledger, now: float) -> None:
        """The manager has read its journal, and goes on with another ledger; `before` is what the old one knew."""
        lost = lost_by_restart(before, ledger.state)
        if lost:
            raise Violation(now, "I10", f"the restarted manager has other {', '.join(lost)} than the killed one")
        self._ledger = ledger
        self._mirror = decode_state(encode_state(ledger.state))

    def at_end(self, now: float) -> None:
        """The run is over."""
        self._compare(now)
        status = self._ledger.status(now)
        missing = [number for number in self._groups if number not in self._ends]
        if missing or any(status.samples.live.values()):
            raise Violation(now, "I1", f"groups {missing[:5]} have no end; live: {status.samples.live}")
        ended = status.samples.acknowledged + sum(status.samples.discarded.values())
        if ended != status.samples.submitted or ended != sum(group.n for group in self._groups.values()):
            raise Violation(now, "I1", f"{status.samples.submitted} samples were submitted, {ended} ended")
        acknowledged = {n for n, end in self._ends.items() if end == "acknowledged"}
        trained = {sample_id(n, index) for n in acknowledged for index in range(self._groups[n].n)}
        if trained != self._trained:
            raise Violation(now, "I1", f"trained and acknowledged differ in {sorted(trained ^ self._trained)[:5]}")
        if status.delta_bytes > MAX_BYTES_PER_TOKEN * self._tokens_in + 11 * self._bare_rows:
            raise Violation(now, "I11", f"{status.delta_bytes} bytes for {self._tokens_in} tokens")
        tokens = status.tokens
        if tokens.repeated and not self._schedule.faults:
            raise Violation(now, "I11", f"{tokens.repeated} tokens came twice, although nothing was lost")
        if tokens.kept + tokens.regenerated + tokens.repeated != self._tokens_in:
            raise Violation(now, "I11", f"{self._tokens_in} tokens came in, the ledger counts {tokens}")

    def _compare(self, now: float) -> None:
        if msgspec.msgpack.encode(self._mirror) != msgspec.msgpack.encode(self._ledger.state):
            raise Violation(now, "I10", "the events fold to another state than the live one")

    def _check_leases(self, now: float) -> None:
        lease = self._ledger.state.config.lease_s
        for name, engine in self._ledger.state.engines.items():
            if now - max(self._heard.get(name, now), self._deaf_until) > lease + SLACK_S:
                raise Violation(now, "I8", f"{name} was last heard {now - self._heard[name]:.2f} s ago and has a lease")
            if len(engine.running) > engine.max_running:
                raise Violation(now, "credit", f"{name} runs {len(engine.running)} of {engine.max_running}")

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
        if response.finish == "length" and int(mask.sum()) != group.sampling.max_new_tokens:
            raise Violation(now, "I4", f"{response.sample} ends by length after {mask.sum()} tokens")
        self._check_spans(response, group, mask, now)

    def _check_spans(self, response: Response, group: Group, mask: Any, now: float) -> None:
        position = 0
        for span in response.spans:
            written = span.version == -1
            if span.start != position or span.end <= span.start or mask[span.start : span.end].any() == written:
                raise Violation(now, "I6", f"the spans of {response.sample} do not cover its tokens")
            position = span.end
            if not written and span.version not in self._verified.get(span.engine, ()):
                raise Violation(now, "I6", f"{response.sample} has tokens of an unverified version {span.version}")
            if not written and not group.min_version <= span.version <= group.max_version:
                raise Violation(now, "I6", f"{response.sample} has tokens of version {span.version}")
        if position != len(mask):
            raise Violation(now, "I6", f"the spans of {response.sample} do not cover its tokens")

    # --- single events ------------------------------------------------------------------------------------------------

    def _saw_end(self, group: int, end: str, now: float) -> None:
        if group in self._ends:
            raise Violation(now, "I1", f"group {group} ends twice: {self._ends[group]}, then {end}")
        self._ends[group] = end

    def saw_discard(self, event: f.GroupDiscarded, now: float) -> None:
        self._saw_end(event.group, event.reason, now)

    def saw_pack(self, event: f.BatchPacked, now: float) -> None:
        for number in event.groups:
            if number in self._ends:
                raise Violation(now, "I1", f"group {number} is packed after it ended: {self._ends[number]}")
        if event.last:
            left = [
                number
                for number, group in self._groups.items()
                if (group.step, group.purpose) == (event.request.step, event.request.purpose)
                and number in self._ledger.state.groups
                and number not in event.groups
                and self._ledger.state.groups[number].batch < 0
            ]
            if left:
                raise Violation(now, "I2", f"a batch is called the last while groups {left[:5]} are to come")

    def saw_acknowledge(self, event: f.BatchAcknowledged, now: float) -> None:
        if event.batch not in self._batches:
            raise Violation(now, "I1", f"batch {event.batch} is acknowledged, but the trainer never took it")
        for number in {scored.group for scored in self._batches[event.batch].samples}:
            self._saw_end(number, "acknowledged", now)

    def saw_assign(self, event: f.Assigned, now: float) -> None:
        if event.assignment <= self._numbers:
            raise Violation(now, "I4", f"assignment number {event.assignment} is used twice")
        self._numbers = event.assignment
        group = self._groups[int(event.sample.partition(".")[0])]
        engine = self._ledger.state.engines.get(event.engine)
        version = engine.version if engine is not None else -1
        if not group.min_version <= version <= group.max_version:
            raise Violation(now, "I6", f"{event.sample} is placed on {event.engine}, which serves version {version}")
        if version not in self._verified.get(event.engine, ()):
            raise Violation(now, "I6", f"{event.sample} is placed on {event.engine}, which verified nothing")
        if event.engine in self._draining:
            raise Violation(now, "I7", f"{event.sample} is placed on {event.engine}, which drains")

    def saw_drain(self, event: f.EngineDraining, now: float) -> None:
        self._draining.add(event.engine)

    def saw_gone(self, event: f.EngineGone, now: float) -> None:
        silence = now - self._heard.get(event.engine, now)
        if event.engine not in self._bye and silence < self._ledger.state.config.lease_s - 1e-9:
            raise Violation(now, "I7", f"{event.engine} is given up after {silence:.2f} s of silence")
        self._draining.discard(event.engine)


def _is_progress(event: Event) -> bool:
    if isinstance(event, f.TokensTaken):
        return bool(event.ids)
    if isinstance(event, f.BatchPacked):
        return bool(event.groups)
    return isinstance(event, f.TurnEnded | f.SampleScored | f.GroupSubmitted | f.GroupDiscarded | f.BatchAcknowledged)


_CHECKS: Final[dict[type, Any]] = {
    f.GroupDiscarded: Watcher.saw_discard,
    f.BatchPacked: Watcher.saw_pack,
    f.BatchAcknowledged: Watcher.saw_acknowledge,
    f.Assigned: Watcher.saw_assign,
    f.EngineDraining: Watcher.saw_drain,
    f.EngineGone: Watcher.saw_gone,
}
