"""What an SGLang server may be ordered to do now, and the calls that do it: state and order in, step or refusal out.

A wrong order kills the server, and no endpoint reports its state, so whoever drives it keeps this one:

    order       allowed                                     a server that gets it otherwise
    serve       awake, with weights of a version            generates with unmapped memory, or with what lies there
    pause       awake, and not paused in the other way      -
    sleep       no requests, or paused by retract           dies of an assertion
    wake        what sleeps; of the rest no call is made     dies of a KeyError
    load        weights awake; no requests, or paused       writes to unmapped memory; waits for all requests
    continue    awake; with requests also weights           generates as under serve
    probe       awake and not paused                        is blocked for 20 s, then counts as unhealthy

Weights that slept are void, whatever they were: they wake as they lie there. Keys and values are thrown away.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final, TypeAlias, assert_never


class Memory(StrEnum):
    """What sleeps and wakes by itself, by SGLang's tags."""

    WEIGHTS = "weights"
    """The model's weights."""
    KEYS_AND_VALUES = "kv_cache"
    """Keys and values of all requests, and what prompts share."""
    GRAPHS = "cuda_graph"
    """What captured kernels read."""


ALL_MEMORY: Final = frozenset({Memory.WEIGHTS, Memory.KEYS_AND_VALUES, Memory.GRAPHS})


class PauseMode(StrEnum):
    """What becomes of requests that run."""

    RETRACT = "retract"
    """They give their keys and values back, and are read again when it goes on."""
    IN_PLACE = "in_place"
    """They keep them."""


@dataclass(frozen=True)
class Serve:
    """Takes a request."""


@dataclass(frozen=True)
class Pause:
    """Stops all requests for a while."""

    mode: PauseMode


@dataclass(frozen=True)
class Continue:
    """Ends a pause."""


@dataclass(frozen=True)
class Sleep:
    """Gives memory back to the device."""

    memory: frozenset[Memory] = ALL_MEMORY


@dataclass(frozen=True)
class Wake:
    """Takes memory again."""

    memory: frozenset[Memory] = ALL_MEMORY


@dataclass(frozen=True)
class LoadVersion:
    """Takes the weights of a version."""


@dataclass(frozen=True)
class Probe:
    """Asks whether it generates."""


ControlOrder: TypeAlias = Serve | Pause | Continue | Sleep | Wake | LoadVersion | Probe


@dataclass(frozen=True)
class ServerState:
    """State of a server; by default of one that has just started: it serves no version yet."""

    requests: bool = False
    """Some are in it, running or waiting."""
    paused: PauseMode | None = None
    asleep: frozenset[Memory] = frozenset()
    void: bool = True
    """Its weights are of no version."""


@dataclass(frozen=True)
class ControlCall:
    """A POST to the server."""

    path: str
    body: dict[str, Any]


@dataclass(frozen=True)
class ControlStep:
    """What is sent, and what the server is when it has answered."""

    call: ControlCall | None
    """None: nothing needs to be sent, or the caller knows what (a request, a folder to load)."""
    after: ServerState


@dataclass(frozen=True)
class ControlRefusal:
    """Why it would harm."""

    why: str


def decide_control(state: ServerState, order: ControlOrder) -> ControlStep | ControlRefusal:
    """The step for this order, or why there is none."""
    match order:
        case Serve():
            why = _asleep(state) or ("it has no weights yet" if state.void else "")
            return _step(why, replace(state, requests=True))
        case Probe():
            return _step(_asleep(state) or ("it is paused" if state.paused else ""), state)
        case Pause(mode):
            return _pause(state, mode)
        case Continue():
            return _continue(state)
        case Sleep(memory):
            return _sleep(state, memory)
        case Wake(memory):
            waking = memory & state.asleep
            return _step("", replace(state, asleep=state.asleep - waking), _tagged("/resume_memory_occupation", waking))
        case LoadVersion():
            why = "its weights sleep" if Memory.WEIGHTS in state.asleep else ""
            why = why or ("requests run" if state.requests and state.paused is None else "")
            return _step(why, replace(state, void=False))
        case _:
            assert_never(order)


def flushes(state: ServerState) -> bool:
    """Whether a load may drop the cache: not one that paused requests go on with."""
    return state.paused is not PauseMode.IN_PLACE


def _pause(state: ServerState, mode: PauseMode) -> ControlStep | ControlRefusal:
    if state.paused is mode:
        return ControlStep(None, state)
    why = _asleep(state) or (f"it is paused by {state.paused}" if state.paused else "")
    return _step(why, replace(state, paused=mode), ControlCall("/pause_generation", {"mode": mode.value}))


def _continue(state: ServerState) -> ControlStep | ControlRefusal:
    if state.paused is None:
        return ControlStep(None, state)
    why = _asleep(state) or ("its requests would go on without weights" if state.void and state.requests else "")
    # By default SGLang empties the device's cache here, each time.
    return _step(why, replace(state, paused=None), ControlCall("/continue_generation", {"torch_empty_cache": False}))


def _sleep(state: ServerState, memory: frozenset[Memory]) -> ControlStep | ControlRefusal:
    going = memory - state.asleep
    why = "requests run" if going and state.requests and state.paused is not PauseMode.RETRACT else ""
    after = replace(state, asleep=state.asleep | going, void=state.void or Memory.WEIGHTS in going)
    return _step(why, after, _tagged("/release_memory_occupation", going))


def _tagged(path: str, memory: frozenset[Memory]) -> ControlCall | None:
    return ControlCall(path, {"tags": sorted(memory)}) if memory else None


def _asleep(state: ServerState) -> str:
    return f"{', '.join(sorted(state.asleep))} of it sleep" if state.asleep else ""


def _step(why: str, after: ServerState, call: ControlCall | None = None) -> ControlStep | ControlRefusal:
    return ControlRefusal(why) if why else ControlStep(call, after)
