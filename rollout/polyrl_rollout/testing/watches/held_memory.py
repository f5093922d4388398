"""What a manager holds and what its links carry, in bytes: linear in tokens, whatever its peers repeat (I11).

    state        what lives: so much per sample, group, engine and request, and per token its id and logprob
    journal      what came: so much per message and decision, and the tokens that were taken, once
    to agents    answers: so much per message and decision, and the text of an assignment once where it is placed; once
                 more where its engine lacks it, but not again for a lease
    to trainer   the same, and of each sample what came since it was last seen; all of it where it is asked for

Bytes are compared with an allowance that grows with what comes and with what is decided. A repeated message brings a
fixed sum, so that what answers it at length shows, however seldom it does.
"""

from __future__ import annotations

from collections import Counter
from math import inf
from typing import Any, Final

from polyrl import wire
from polyrl.ledger import Effects, events as f
from polyrl.ledger.journal import encode_events, encode_state
from polyrl.ledger.state import LedgerState, SampleState, group_tokens
from polyrl.sample import Purpose

MESSAGE_BYTES: Final = 300
"""A message that carries no text, or what the journal keeps of it: twice the longest on average."""

NAME_BYTES: Final = 64
"""A sample or an assignment, as a greeting and its answers name it."""

ID_BYTES: Final = 4

JOURNAL_TOKEN_BYTES: Final = 12
"""Id and logprob, and what a row of many tokens takes of its own."""

STATE_TOKEN_BYTES: Final = 8

STATE_BYTES: Final = 8192
"""An empty ledger: measures, counters."""

ENGINE_BYTES: Final = 1200
PART_BYTES: Final = 200
"""Bytes in the state: of an engine with its measurements; of a living sample, group, assignment, step or request."""

SPAN_BYTES: Final = 48

MEMORY_BYTES: Final = 120
"""Bytes for each thing that has ended: a digest, a number, a time."""

STATE_EVERY: Final = 101
"""Events between two looks at all that is held."""


class HeldMemory:
    """Watches what one run holds in memory."""

    def __init__(self) -> None:
        self._allowed: Counter[str] = Counter()
        self._spent: Counter[str] = Counter()
        self._texts: dict[tuple[str, int], float] = {}
        """When an engine last got all of an assignment's text beyond its placing."""
        self._gaps: dict[tuple[str, int], int] = {}
        """Tokens that an assignment had when its gap was seen: while there is one, its agent must keep all it has."""
        self._known: set[Any] = set()
        """Engines, groups and versions that ever were: what the state remembers of the past is of them."""
        self._events = self._versions = 0

    def restarted(self) -> None:
        """Another manager remembers no longer what it has sent."""
        self._texts.clear()

    def happened(self, message: Any, outcome: Effects, state: LedgerState, now: float) -> str:
        """The ledger has decided this on a message, or as time passed (None). What is too much, in a sentence."""
        before = self._allowed["trainer"]
        self._allow(message, outcome, state)
        if outcome.events:
            self._spent["journal"] += len(encode_events(outcome.events))
        sends = bool(outcome.to_agents)
        placed = {event.assignment for event in outcome.events if isinstance(event, f.Assigned)} if sends else set()
        for engine, sent in outcome.to_agents:
            wrong = self._sent(engine, sent, placed, state, now)
            if wrong:
                return wrong
        answered = sum(len(wire.encode(answer)) for answer in outcome.to_trainer)
        self._spent["trainer"] += answered
        if isinstance(message, wire.TrainerHello) and answered > self._allowed["trainer"] - before:
            return f"a greeting of the trainer is answered by {answered} bytes, more than names take"
        for whom, spent in self._spent.items():
            if spent > self._allowed[whom]:
                return f"{spent} bytes went to the {whom}, where {self._allowed[whom]} are linear in what came"
        self._events += 1
        return self._kept_gap(state) or self._too_large(state) or self._miscounted(state)

    def _sent(self, engine: str, sent: Any, placed: set[int], state: LedgerState, now: float) -> str:
        self._spent["agents"] += len(wire.encode(sent))
        if isinstance(sent, wire.Resend):
            live = state.assignments.get(sent.assignment)
            if live is not None and sent.offset < live.length:
                return f"{engine} is asked from {sent.offset} on for what is here up to {live.length}"
        if isinstance(sent, wire.Assign) and sent.assignment not in placed:
            since = now - self._texts.get((engine, sent.assignment), -inf)
            self._texts[engine, sent.assignment] = now
            if since < state.config.gone_s:
                return f"{engine} got the text of assignment {sent.assignment} again after {since:.1f} s"
            self._allowed["agents"] += len(sent.input_ids)
        return ""

    # --- allowances ---------------------------------------------------------------------------------------------------

    def _allow(self, message: Any, outcome: Effects, state: LedgerState) -> None:
        size = len(wire.encode(message)) if message is not None else 0
        carried = size if isinstance(message, wire.Submit | wire.Extend | wire.Score | wire.PublishVersion) else 0
        decided = sum([event.durable or type(event) is f.RecallSent for event in outcome.events])
        every = MESSAGE_BYTES * ((message is not None) + decided)
        self._allowed["journal"] += every + carried
        self._allowed["agents"] += every + NAME_BYTES * self._named(message, state)
        if isinstance(message, wire.PublishVersion | wire.FinishRun) or message is None:
            self._allowed["agents"] += MESSAGE_BYTES * len(state.engines)
        self._allow_answers(message, outcome, state)
        for event in outcome.events:
            self._allow_event(event, state)

    def _allow_answers(self, message: Any, outcome: Effects, state: LedgerState) -> None:
        kinds = [type(event) for event in outcome.events]
        names = kinds.count(f.VerdictRequested)
        answers = sum(kind in _ANSWERED for kind in kinds) + bool(names)
        samples = sum(len(one.samples) for one in outcome.to_trainer if isinstance(one, wire.Batch))
        if isinstance(message, wire.TrainerHello):
            names += len(state.awaiting_verdict)
            answers += 3 + len(state.groups) * message.fresh + sum(len(step.notices) for step in state.steps.values())
        elif isinstance(message, wire.Fetch):
            known = [state.samples[name] for name in message.samples if name in state.samples]
            answers += 1 + len(known)
            self._allowed["trainer"] += sum(_text_bytes(sample, 0) for sample in known)
        elif hasattr(message, "request") or isinstance(message, wire.TrainerHeartbeat):
            answers += 1
        self._allowed["trainer"] += MESSAGE_BYTES * (answers + samples) + NAME_BYTES * names

    @staticmethod
    def _named(message: Any, state: LedgerState) -> int:
        """Assignments that an agent's message may be about: what it names, or what its engine runs."""
        if not isinstance(message, wire.Hello | wire.Deltas):
            return 0
        held = len(message.held) if isinstance(message, wire.Hello) else 0
        return held + max((len(engine.running) for engine in state.engines.values()), default=0)

    def _allow_event(self, event: f.Event, state: LedgerState) -> None:
        if isinstance(event, f.TokensTaken):
            self._allowed["journal"] += JOURNAL_TOKEN_BYTES * (len(event.ids) // ID_BYTES)
        elif isinstance(event, f.GroupSubmitted):
            self._known.add(f"group {event.group.id}")
        elif isinstance(event, f.Assigned):
            sample = state.samples.get(event.sample)
            if sample is not None:
                prompt = len(state.groups[sample.group].group.prompt_ids)
                self._allowed["agents"] += MESSAGE_BYTES + prompt + len(sample.ids)
        elif isinstance(event, f.TurnEnded):
            sample = state.samples.get(event.sample)
            self._allowed["trainer"] += 0 if sample is None else _text_bytes(sample, sample.trainer_has)
        elif isinstance(event, f.EngineGreeted):
            self._known.add(event.engine)
        elif isinstance(event, f.VersionPublished):
            self._known.add(event.weights.version)
            self._versions += 1

    # --- what is held -------------------------------------------------------------------------------------------------

    def _kept_gap(self, state: LedgerState) -> str:
        known, live = self._gaps, state.assignments
        numbers = [
            (engine.name, number) for engine in state.engines.values() for number in engine.gaps if number in live
        ]
        self._gaps = {key: known.get(key, live[key[1]].length) for key in numbers}
        for (name, number), length in self._gaps.items():
            if live[number].length > length:
                return f"the gap of assignment {number} is filled, and {name} must keep what it has for it"
        return ""

    def _too_large(self, state: LedgerState) -> str:
        if self._events % STATE_EVERY:
            return ""
        tokens = sum(sample.length for sample in state.samples.values())
        prompts = sum(len(entry.group.prompt_ids) for entry in state.groups.values())
        parts = len(state.samples) + len(state.groups) + len(state.assignments)
        parts += len(state.pending) + len(state.batches) + len(state.kept)
        parts += sum(1 + len(step.notices) for step in state.steps.values()) + len(state.replaced)
        spans = sum(sample.attempt + sample.turn + self._versions for sample in state.samples.values())
        answered = sum(len(kept) for kept in state.answered.values()) + MEMORY_BYTES * len(state.answered)
        allowed = STATE_BYTES + STATE_TOKEN_BYTES * tokens + prompts + SPAN_BYTES * spans
        allowed += ENGINE_BYTES * len(state.engines) + PART_BYTES * parts + MEMORY_BYTES * len(self._known) + answered
        held = len(encode_state(state))
        return f"{held} bytes are held of {tokens} tokens, {allowed} are linear in them" if held > allowed else ""

    def _miscounted(self, state: LedgerState) -> str:
        """Later steps do not begin while the backlog is large, and what is kept is bounded: both by sums."""
        if self._events % STATE_EVERY:
            return ""
        kept = {number for numbers in state.kept.values() for number in numbers}
        ready = (number for number, one in state.groups.items() if one.ready and one.group.purpose is Purpose.TRAIN)
        backlog = sum(group_tokens(state, number) for number in ready if number not in kept)
        if state.backlog != backlog:
            return f"{state.backlog} tokens count as the backlog, and complete groups have {backlog}"
        tokens = sum(group_tokens(state, number) for number in kept)
        return "" if state.kept_tokens == tokens else f"{state.kept_tokens} tokens count as kept, and {tokens} are"


_ANSWERED: Final = (f.TurnEnded, f.GroupDiscarded, f.RequestDone, f.EngineServing, f.BatchPacked)
"""Decisions of which the trainer hears."""


def _text_bytes(sample: SampleState, start: int) -> int:
    """Ids, logprobs and spans of what came from there on."""
    return JOURNAL_TOKEN_BYTES * (sample.length - start) + NAME_BYTES * len(sample.spans)
