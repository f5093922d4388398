"""The rollout agent, unchanged, but each sample is drawn with a seed of its own, made of its prompt and its index.

Then a sample is a function of weights, prompt and index, at temperature 1 as at 0: its siblings differ, so there is an
advantage to learn from, and whoever generates it, in however many attempts, draws the same tokens.
"""

from __future__ import annotations

import zlib
from unittest.mock import patch

import msgspec
import typer

from polyrl.sample import split_sample_id
from polyrl.wire import Assign
from polyrl_rollout.agent import __main__ as agent
from polyrl_rollout.agent.protocol import Stream, TokenBook

ID_BYTES = 4


def seed_of(assign: Assign) -> int:
    """32 bits; the same for every attempt."""
    _, index = split_sample_id(assign.sample)
    prompt = assign.input_ids[: len(assign.input_ids) - ID_BYTES * assign.offset]
    return zlib.crc32(prompt, index)


def main() -> None:
    """The agent's own command line."""
    open_stream = TokenBook.open

    def seeded(self: TokenBook, assign: Assign) -> Stream | None:
        sampling = msgspec.structs.replace(assign.sampling, seed=seed_of(assign))
        return open_stream(self, msgspec.structs.replace(assign, sampling=sampling))

    with patch.object(TokenBook, "open", seeded):
        typer.run(agent.main)


if __name__ == "__main__":
    main()
