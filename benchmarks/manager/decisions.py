"""What the ledger's decisions cost in a large fleet: .venv/bin/python benchmarks/manager/decisions.py [--engines 2000]

    tick             seconds of one look at the deadlines, all engines busy
    turns            turns per second of one core: the last tokens of a turn, the trainer's Extend, the next Assign;
                     with the window open, and closed before reserved engines that idle meanwhile
    longest          seconds of the longest such event of them
    placing          the longest time that a step's submission keeps the ledger from its next input, and all of it

One process, no sockets: what is measured is the CPU time of `Ledger` and of the few lines that make its messages.
"""

from __future__ import annotations

import argparse
import json
import time
from random import Random

from polyrl.ledger import Ledger
from polyrl.ledger.fleet import Fleet
from polyrl.sample import Pool, Purpose
from polyrl.wire import pack_ids
from polyrl_rollout.testing.stage import Stage

SLOTS = 16
N = 8
RESERVED = 64


class Steady(Stage):
    """A stage whose state nobody changes by hand."""

    def _current(self) -> Ledger:
        return self.ledger


def fleet(engines: int) -> Stage:
    stage = Steady()
    for index in range(engines):
        stage.engine(f"e{index}", max_running=SLOTS)
    return stage


def until_idle(stage: Stage) -> float:
    """Ticks until nothing is left to place; the longest of them."""
    longest = 0.0
    while stage.ledger.state.queue and (due := stage.ledger.next_due()) is not None and due <= stage.now:
        began = time.process_time()
        stage.pass_time(0.0)
        longest = max(longest, time.process_time() - began)
    return longest


def placing(engines: int, samples: int) -> tuple[float, float]:
    stage = fleet(engines)
    began = time.process_time()
    longest = 0.0
    for _ in range(16):  # as the client sends it, in parts
        at = time.process_time()
        stage.submit(samples // 16 // N, n=N, max_new_tokens=1000)
        longest = max(longest, time.process_time() - at)
    longest = max(longest, until_idle(stage))
    return longest, time.process_time() - began


def busy(engines: int, running: int, reserved: int) -> Stage:
    """So many samples run on engines of differing speed; with `reserved` engines, which idle, the window is closed."""
    stage = Steady()
    for index in range(engines):
        stage.engine(f"e{index}", max_running=SLOTS)
    if reserved:
        learn(stage)
    stage.submit(running // N, n=N, max_new_tokens=3000)
    until_idle(stage)
    for index in range(reserved):
        stage.engine(f"r{index}", Pool.RESERVED, max_running=SLOTS)
    for index, engine in enumerate(stage.ledger.state.engines.values()):
        engine.step_scale = 0.02 * (1 + index % 7 / 10)
    stage.ledger.fleet = Fleet(stage.ledger.state)
    stage.ledger.fleet.refresh()
    return stage


def learn(stage: Stage) -> None:
    """The trainer gets a batch, and learns from it all the time."""
    stage.submit(1)
    stage.finish_all()
    stage.ask(most=1)
    assert not stage.ledger.state.window_open


def turns(stage: Stage, count: int, seed: int) -> tuple[float, float]:
    """Turns per second, and the longest event."""
    draws, samples = Random(seed), list(stage.ledger.state.samples)
    done, longest, began = 0, 0.0, time.process_time()
    while done < count:
        stage.now += 0.0005
        name = draws.choice(samples)
        number = stage.ledger.state.samples[name].assignment
        if number:
            at = time.process_time()
            turn = stage.ledger.state.samples[name].turn
            stage.tokens(stage.ledger.state.assignments[number].engine, number, [5] * 9 + [2], "stop")
            stage.extend(name, [7] * 10, turn)
            longest, done = max(longest, time.process_time() - at), done + 1
    return done / (time.process_time() - began), longest


def tick(engines: int) -> float:
    stage = fleet(engines)
    stage.submit(engines * 4, max_new_tokens=1000, purpose=Purpose.TRAIN, prompt_ids=pack_ids([9] * 40))
    until_idle(stage)
    spent = []
    for _ in range(20):
        stage.now += 0.1
        for index, engine in enumerate(stage.ledger.state.engines.values()):
            engine.heard_at = stage.now - (index % 10) / 10
        began = time.process_time()
        stage.ledger.tick(stage.now)
        spent.append(time.process_time() - began)
    return sorted(spent)[len(spent) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", type=int, default=2000)
    parser.add_argument("--samples", type=int, default=16384, help="that run, or are placed")
    parser.add_argument("--turns", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    placing_longest, whole = placing(256, asked.samples)
    rate, longest = turns(busy(asked.engines, asked.samples, 0), asked.turns, asked.seed)
    closed, closed_longest = turns(busy(asked.engines, asked.samples, RESERVED), asked.turns, asked.seed)
    result = {
        "engines": asked.engines,
        "tickSeconds": round(tick(asked.engines), 5),
        "running": asked.samples,
        "turnsPerSecond": round(rate),
        "turnsPerSecondClosed": round(closed),
        "longestSeconds": round(max(longest, closed_longest), 4),
        "placingLongestSeconds": round(placing_longest, 4),
        "placingSeconds": round(whole, 2),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
