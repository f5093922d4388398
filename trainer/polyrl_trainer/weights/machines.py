"""The learner's machines as the publisher has them: all do the same at once, each with its share of a copy."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any, Final

import msgspec
import structlog

from polyrl.errors import PolyRLError
from polyrl.wire.serving import Content
from polyrl_trainer.backend import OtherMachines
from polyrl_trainer.weights.share import WeightShare
from polyrl_trainer.weights.share_commands import GiveChunk, Given, ShareCommand, decode_answer

SHARE_ANSWER_S: Final = 600.0
"""For a machine to hash or encode its share, which takes seconds. One that is gone or frozen ends the group before."""
RELAY_S: Final = 5.0
"""For a chunk that another machine has: as long as a receiver waits for one."""
RELAYED_CHUNKS: Final = 32
"""128 MiB of those that were passed on last: receivers that reach this machine alone ask for the same at about the same
time."""
RELAYS: Final = 4
"""Relays from one machine at once, each on a thread and a connection to its pod."""

log = structlog.get_logger()


class Machines:
    """This one, which is the first, and the others."""

    def __init__(self, own: WeightShare, others: OtherMachines | None) -> None:
        self.own, self._others = own, others
        self.number = 1 if others is None else 1 + others.number
        # A copy is prepared while another is published.
        self._threads = ThreadPoolExecutor(2 * self.number, thread_name_prefix="weight-machines")
        self._relays = [ThreadPoolExecutor(RELAYS, "weight-relays") for _ in range(1, self.number)]
        self._relayed = OrderedDict[bytes, Future[Content | None]]()
        self._relaying = threading.Lock()

    def endpoints(self) -> tuple[str, ...]:
        """Endpoints of the other machines. Raises the run's error when one is lost."""
        if self._others is None:
            return ()
        try:
            return self._others.endpoints()
        except OSError as error:
            raise self._others.lost(error) from error

    def all(self, command: ShareCommand) -> list[Any]:
        """Sends every machine the same command; their answers, in their order. Raises as `each` does."""
        return self.each([command] * self.number)

    def each(self, commands: Sequence[ShareCommand]) -> list[Any]:
        """Sends each machine its own command; their answers, in their order. Raises RunFailed when one cannot do it,
        and the run's error (`OtherMachines.lost`) when one does not answer."""
        asked = [self._threads.submit(self._ask, place, one, SHARE_ANSWER_S) for place, one in enumerate(commands[1:])]
        answers = [self.own.do(commands[0])]
        try:
            return answers + [one.result() for one in asked]
        except OSError as error:
            assert self._others is not None, "who else would not answer"
            raise self._others.lost(error) from error

    def relay(self, machine: int, version: int, hash_: bytes) -> Future[Content | None]:
        """A chunk of another machine, for a receiver that does not reach it; called by serving threads. Nobody asks for
        it twice at once."""
        with self._relaying:
            known = self._relayed.get(hash_)
            if known is None or (known.done() and known.result() is None):
                known = self._relays[machine - 1].submit(self._given, machine, version, hash_)
            self._relayed[hash_] = known
            self._relayed.move_to_end(hash_)
            over = len(self._relayed) - RELAYED_CHUNKS
            for old in [one for one, relayed in self._relayed.items() if relayed.done()][: max(0, over)]:
                del self._relayed[old]
        return known

    def _given(self, machine: int, version: int, hash_: bytes) -> Content | None:
        try:
            given: Given = self._ask(machine - 1, GiveChunk(version, hash_), RELAY_S)
        except (OSError, PolyRLError, msgspec.MsgspecError) as error:
            log.warning("a chunk of another machine cannot be passed on", machine=machine, reason=str(error))
            return None
        return Content(memoryview(given.chunk), nullcontext) if given.chunk else None

    def close(self) -> None:
        """Ends threads; idempotent."""
        for threads in (self._threads, *self._relays):
            threads.shutdown()
        self.own.close()

    def _ask(self, place: int, command: ShareCommand, within_s: float) -> Any:
        assert self._others is not None, "there are no others"
        return decode_answer(command, self._others.ask(place, msgspec.msgpack.encode(command), within_s))
