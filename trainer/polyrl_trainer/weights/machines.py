"""The learner's machines as the publisher has them: all do the same at once, each with its share of a copy."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
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

log = structlog.get_logger()


class Machines:
    """This one, which is the first, and the others."""

    def __init__(self, own: WeightShare, others: OtherMachines | None) -> None:
        self.own, self._others = own, others
        self.number = 1 if others is None else 1 + others.number
        # A copy is prepared while another is published.
        self._threads = ThreadPoolExecutor(2 * self.number, thread_name_prefix="weight-machines")
        self._relayed = OrderedDict[bytes, Content]()
        self._relaying = threading.Lock()

    def endpoints(self) -> tuple[str, ...]:
        """Of the others. Raises what their loss is to the run."""
        if self._others is None:
            return ()
        try:
            return self._others.endpoints()
        except OSError as error:
            raise self._others.lost(error) from error

    def all(self, command: ShareCommand) -> list[Any]:
        """Every machine's answer to the same, in their order. Raises as `each` does."""
        return self.each([command] * self.number)

    def each(self, commands: Sequence[ShareCommand]) -> list[Any]:
        """Every machine's answer to its own command. Raises RunFailed when one cannot, and what its loss is to the run
        when it does not answer."""
        asked = [self._threads.submit(self._ask, place, one, SHARE_ANSWER_S) for place, one in enumerate(commands[1:])]
        answers = [self.own.do(commands[0])]
        try:
            return answers + [one.result() for one in asked]
        except OSError as error:
            assert self._others is not None, "who else would not answer"
            raise self._others.lost(error) from error

    def relay(self, machine: int, version: int, hash_: bytes) -> Content | None:
        """A chunk of another machine, for a receiver that does not reach it; called by serving threads, which wait."""
        with self._relaying:
            if (known := self._relayed.get(hash_)) is not None:
                self._relayed.move_to_end(hash_)
                return known
        try:
            given: Given = self._ask(machine - 1, GiveChunk(version, hash_), RELAY_S)
        except (OSError, PolyRLError) as error:
            log.warning("a chunk of another machine cannot be passed on", machine=machine, reason=str(error))
            return None
        if not given.chunk:
            return None
        content = Content(memoryview(given.chunk), nullcontext)
        with self._relaying:
            self._relayed[hash_] = content
            while len(self._relayed) > RELAYED_CHUNKS:
                self._relayed.popitem(last=False)
        return content

    def close(self) -> None:
        """Ends threads; idempotent."""
        self._threads.shutdown()
        self.own.close()

    def _ask(self, place: int, command: ShareCommand, within_s: float) -> Any:
        assert self._others is not None, "there are no others"
        return decode_answer(command, self._others.ask(place, msgspec.msgpack.encode(command), within_s))
