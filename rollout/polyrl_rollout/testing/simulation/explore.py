"""Every order of events in a run of two engines and two samples, with every fault: not drawn, but all of them.

    scene = ledger + journal + peers + what is on the wires      a value; its bytes are its hash
    scene -> every delivery, every step of an engine, a deadline, every fault -> scenes

It begins when two engines have greeted and every sample was given to one. Time moves from deadline to deadline only.
Faults and deadlines are counted off, so the space is finite. A scene in which nothing is left to happen must be done,
or be brought to its end by new connections and time alone (I5).

Scenes that differ only in what no step can read are one: what is counted for people; and, once time stands still, when
the deadlines would have been.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final, NamedTuple

import msgspec

from polyrl.ledger import Effects, Event, Ledger, LedgerConfig, events as f
from polyrl.ledger.apply import apply
from polyrl.ledger.journal import decode_events, decode_state, encode_events, encode_state
from polyrl.ledger.state import Counters, LedgerState
from polyrl.sample import Response
from polyrl.wire import (
    Assign,
    Batch,
    FetchReport,
    Heartbeat,
    Hello,
    ToTrainer,
    TurnDone,
    checksum_of,
    decode_from_agent,
    decode_from_trainer,
    decode_to_agent,
    decode_to_trainer,
    encode,
    pack_ids,
)
from polyrl_rollout.testing.simulation.invariants import Violation
from polyrl_rollout.testing.simulation.manager import lost_by_restart
from polyrl_rollout.testing.simulation.small_peers import EPOCH, LENGTH, PROMPT, STOP, SmallAgent, SmallTrainer, text

CONFIG: Final = LedgerConfig(
    run_epoch=EPOCH, lease_s=3.0, return_s=3.0, progress_deadline_s=6.0, turn_resend_s=6.0, gap_resend_s=0.0
)
"""A lease passes with one deadline, everything else with two."""

ROUNDS: Final = 300
"""In which a scene must come to its end once nothing goes wrong any more."""


PROGRESS_EVERY: Final = 100_000
"""Steps between two signs of life."""


class Bounds(NamedTuple):
    """How far to look."""

    groups: int = 1
    n: int = 2
    """Samples per group."""
    faults: int = 1
    ticks: int = 0
    """Deadlines that may pass while messages are under way; any number pass when nothing else can happen."""


class Explored(NamedTuple):
    """What was seen."""

    scenes: int
    steps: int
    ends: int
    """Scenes in which nothing was left to happen."""


class Scene(msgspec.Struct):
    """Everything at one moment."""

    state: LedgerState
    kept: LedgerState
    """What the journal would give back: the durable events, folded after a journey through bytes."""
    agents: list[SmallAgent]
    trainer: SmallTrainer
    faults: int
    ticks: int
    now: float = 0.0
    processes: int = 0
    last_seen: dict[str, float] = msgspec.field(default_factory=dict)
    """When each engine was last heard, whatever the ledger thinks."""


Step = Callable[[Scene], None]


def explore(bounds: Bounds, report: Callable[[int, int], None] = lambda seen, todo: None) -> Explored:
    """Visits every scene within `bounds`; `report` gets now and then how many were seen and are to do. Raises
    Violation."""
    first = _first_scene(bounds)
    todo, seen = [_encoder.encode(first)], {_digest(first)}
    steps = ends = 0
    while todo:
        origin = todo.pop()
        free = 0
        for is_fault, step in _steps(_decoder.decode(origin)):
            scene = _decoder.decode(origin)
            scene.faults -= is_fault
            step(scene)
            steps += 1
            if steps % PROGRESS_EVERY == 0:
                report(len(seen), len(todo))
            free += not is_fault
            digest = _digest(scene)
            if digest not in seen:
                seen.add(digest)
                todo.append(_encoder.encode(scene))
        if not free:
            ends += 1
            _come_to_an_end(_decoder.decode(origin))
    return Explored(len(seen), steps, ends=ends)


def _first_scene(bounds: Bounds) -> Scene:
    """Both engines have greeted, and the samples are placed: their first messages are on the wires."""
    trainer = SmallTrainer(bounds.groups, bounds.n)
    trainer.begin()
    agents = [SmallAgent("e0"), SmallAgent("e1")]
    for agent in agents:
        agent.connect()
    scene = Scene(
        LedgerState(CONFIG),
        LedgerState(CONFIG),
        agents=agents,
        trainer=trainer,
        faults=bounds.faults,
        ticks=bounds.ticks,
        processes=2,
    )
    for which in range(len(agents)):
        _agent_speaks(scene, which)
        _agent_receives(scene, which)
    while trainer.outbox:
        _trainer_speaks(scene)
    while trainer.inbox:
        _trainer_receives(scene)
    return scene


# --- what can happen --------------------------------------------------------------------------------------------------


def _steps(scene: Scene) -> Iterator[tuple[bool, Step]]:
    """Everything that can happen next, faults marked."""
    alone = None if scene.faults else _commutes(scene)
    return iter([(False, alone)]) if alone else _all_steps(scene)


def _commutes(scene: Scene) -> Step | None:
    """A step whose order among the others makes no difference once nothing can be lost: a peer that does nothing of
    its own accord hears a message. What it says to it waits on the wire as well as the message would have."""
    if scene.trainer.inbox:
        return _trainer_receives
    for which, agent in enumerate(scene.agents):
        if agent.inbox and agent.welcomed and not agent.frozen and not agent.has_work():
            return partial(_agent_receives, which=which)
    return None


def _all_steps(scene: Scene) -> Iterator[tuple[bool, Step]]:
    for which in range(len(scene.agents)):
        yield from _agent_steps(scene.agents[which], which)
        if scene.faults:
            for fault in (_kill, _break, _freeze, _drain):
                yield True, partial(fault, which=which)
            yield from _queue_faults(scene.agents[which].inbox, partial(_agent_queue, which=which, inward=True))
            yield from _queue_faults(scene.agents[which].outbox, partial(_agent_queue, which=which, inward=False))
    if scene.trainer.outbox:
        yield False, _trainer_speaks
    if scene.trainer.inbox:
        yield False, _trainer_receives
    if scene.ticks and not scene.trainer.done:
        yield False, _tick
    if scene.faults:
        yield True, _restart_manager
        yield True, lambda scene: scene.trainer.connect()
        yield from _queue_faults(scene.trainer.inbox, lambda scene: scene.trainer.inbox)
        yield from _queue_faults(scene.trainer.outbox, lambda scene: scene.trainer.outbox)


def _agent_steps(agent: SmallAgent, which: int) -> Iterator[tuple[bool, Step]]:
    if agent.frozen:
        yield False, partial(_thaw, which=which)
    elif agent.inbox:
        yield False, partial(_agent_receives, which=which)
    if agent.outbox:
        yield False, partial(_agent_speaks, which=which)
    elif agent.leaving:
        yield False, partial(_kill, which=which)
    if agent.has_work():
        yield False, partial(_generate, which=which)


def _queue_faults(queue: list[bytes], of: Callable[[Scene], list[bytes]]) -> Iterator[tuple[bool, Step]]:
    if queue:
        yield True, lambda scene: of(scene).__delitem__(0)
        yield True, lambda scene: of(scene).insert(0, of(scene)[0])
    if len(queue) > 1:
        yield True, lambda scene: of(scene).insert(0, of(scene).pop(1))


def _agent_queue(scene: Scene, which: int, *, inward: bool) -> list[bytes]:
    return scene.agents[which].inbox if inward else scene.agents[which].outbox


def _agent_receives(scene: Scene, which: int) -> None:
    scene.agents[which].receive(decode_to_agent(scene.agents[which].inbox.pop(0)))


def _agent_speaks(scene: Scene, which: int) -> None:
    agent = scene.agents[which]
    message = decode_from_agent(agent.outbox.pop(0))
    agent.dialling = agent.dialling and not isinstance(message, Hello)
    scene.last_seen[agent.name] = scene.now
    _settle(scene, Ledger(CONFIG, scene.state).from_agent(agent.name, message, scene.now))


def _trainer_speaks(scene: Scene) -> None:
    message = decode_from_trainer(scene.trainer.outbox.pop(0))
    assert not isinstance(message, FetchReport), "nothing is fetched here"
    _settle(scene, Ledger(CONFIG, scene.state).from_trainer(message, scene.now))


def _trainer_receives(scene: Scene) -> None:
    scene.trainer.receive(decode_to_trainer(scene.trainer.inbox.pop(0)))
    if len(set(scene.trainer.trained)) != len(scene.trainer.trained):
        raise Violation(scene.now, "I2", f"trained twice: {scene.trainer.trained}")


def _generate(scene: Scene, which: int) -> None:
    scene.agents[which].step()


def _tick(scene: Scene) -> None:
    """Time goes on to the next deadline; who can be heard is heard until then."""
    scene.ticks -= 1
    ledger = Ledger(CONFIG, scene.state)
    scene.now = max(scene.now, ledger.next_due() or scene.now)
    for agent in scene.agents:
        if not agent.dialling and not agent.frozen and agent.name in scene.state.engines:
            scene.last_seen[agent.name] = scene.now
            _settle(scene, ledger.from_agent(agent.name, Heartbeat(len(agent.runs), 0, kv_free_tokens=100), scene.now))
    _settle(scene, ledger.tick(scene.now))


# --- faults -----------------------------------------------------------------------------------------------------------


def _kill(scene: Scene, which: int) -> None:
    """The process ends, another one takes its place."""
    scene.agents[which] = SmallAgent(f"e{scene.processes}")
    scene.processes += 1
    scene.agents[which].connect()


def _break(scene: Scene, which: int) -> None:
    scene.agents[which].connect()


def _freeze(scene: Scene, which: int) -> None:
    scene.agents[which].frozen = True


def _thaw(scene: Scene, which: int) -> None:
    scene.agents[which].frozen = False


def _drain(scene: Scene, which: int) -> None:
    ledger = Ledger(CONFIG, scene.state)
    _settle(scene, ledger.drain(scene.agents[which].name, 1.0, "drained by a test", scene.now))


def _restart_manager(scene: Scene) -> None:
    """kill -9: every connection breaks; another process begins with what was kept."""
    lost = lost_by_restart(scene.state, scene.kept)
    if lost:
        raise Violation(scene.now, "I10", f"the restarted manager has other {', '.join(lost)} than the killed one")
    scene.state = decode_state(encode_state(scene.kept))
    _connect_all(scene)
    scene.last_seen = dict.fromkeys(scene.state.engines, scene.now)
    _settle(scene, Ledger(CONFIG, scene.state).resume(scene.now))


def _connect_all(scene: Scene) -> None:
    for agent in scene.agents:
        agent.connect()
    scene.trainer.connect()


# --- after each event -------------------------------------------------------------------------------------------------


def _settle(scene: Scene, outcome: Effects) -> None:
    """The journal keeps the events, then messages leave; both are looked at."""
    body = encode_events(outcome.events)
    for event in decode_events(body) if body else ():
        apply(scene.kept, event)
    for event in outcome.events:
        _check_fact(scene, event)
    names = {agent.name: agent for agent in scene.agents}
    for name, message in outcome.to_agents:
        if isinstance(message, Assign):
            _check_assign(message, scene.now)
        if name in names:
            names[name].inbox.append(encode(message))
    for answer in outcome.to_trainer:
        _check_answer(answer, scene.now)
        scene.trainer.inbox.append(encode(answer))


def _check_fact(scene: Scene, event: Event) -> None:
    if isinstance(event, f.GroupDiscarded):
        raise Violation(scene.now, "I1", f"group {event.group} is discarded, although nothing speaks against it")
    if isinstance(event, f.BatchAcknowledged) and event.batch not in scene.trainer.batches:
        raise Violation(scene.now, "I1", f"batch {event.batch} is acknowledged, but the trainer never took it")
    if isinstance(event, f.EngineGone) and event.cause != "bye":
        silence = scene.now - scene.last_seen.get(event.engine, scene.now)
        if silence < CONFIG.gone_s:
            raise Violation(scene.now, "I7", f"{event.engine} is given up after {silence:.1f} s of silence")


def _check_assign(assign: Assign, now: float) -> None:
    so_far = text(assign.sample)[: 4 * assign.offset]
    if assign.input_ids != PROMPT + so_far or assign.max_new_tokens != LENGTH - assign.offset:
        raise Violation(now, "I4", f"{assign.sample} is assigned with other tokens than were generated")
    if so_far.endswith(pack_ids([STOP])) or assign.offset >= LENGTH:
        raise Violation(now, "I4", f"{assign.sample} is assigned although it has ended")


def _check_answer(answer: ToTrainer, now: float) -> None:
    checks: list[tuple[Response, int]] = []
    if isinstance(answer, TurnDone):
        checks = [(answer.response, checksum_of(answer.response.ids))]
    elif isinstance(answer, Batch):
        checks = list(zip((scored.response for scored in answer.samples), answer.checks, strict=True))
    for response, check in checks:
        ids = text(response.sample)
        ends_by = "stop" if ids.endswith(pack_ids([STOP])) else "length"
        if check != checksum_of(ids) or response.finish != ends_by:
            raise Violation(now, "I4", f"{response.sample} has other tokens than its engines gave")


def _come_to_an_end(scene: Scene) -> None:
    """No fault any more: everybody dials anew, and time passes when nothing else happens."""
    scene.faults, scene.ticks = 0, ROUNDS
    _connect_all(scene)
    for _ in range(ROUNDS):
        if scene.trainer.done:
            _check_end(scene)
            return
        steps = [step for _, step in _steps(scene)]
        steps[0](scene)
    raise Violation(scene.now, "I5", "the run does not end although nothing goes wrong any more")


def _check_end(scene: Scene) -> None:
    counters, wanted = scene.state.counters, scene.trainer.groups * scene.trainer.n
    if (counters.submitted, counters.acknowledged, len(scene.state.samples)) != (wanted, wanted, 0):
        raise Violation(scene.now, "I1", f"{counters.submitted} submitted, {counters.acknowledged} acknowledged")


def _digest(scene: Scene) -> bytes:
    """A digest of all that any further step could read."""
    alike = _decoder.decode(_encoder.encode(scene))
    for state in (alike.state, alike.kept):
        _forget_history(state)
        if not scene.ticks:
            _forget_deadlines(state)
    if not scene.ticks:
        alike.last_seen = {}
    return hashlib.blake2b(_encoder.encode(alike), digest_size=16).digest()


def _forget_history(state: LedgerState) -> None:
    """What people read and decides nothing."""
    state.counters = Counters()
    for engine in state.engines.values():
        engine.tokens = 0


def _forget_deadlines(state: LedgerState) -> None:
    """What only a tick reads. Where time has come to stand still, no step differs for it; the way to the end does, and
    is gone once for all scenes that are alike but for this."""
    state.due = state.trainer_at = state.trainer_since = 0.0
    for engine in state.engines.values():
        engine.heard_at = 0.0
    for sample in state.samples.values():
        sample.asks, sample.ask_due = 0, 0.0
    for assignment in state.assignments.values():
        assignment.progress_at = 0.0
    for pending in state.pending.values():
        pending.since = pending.due = 0.0


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Scene)
