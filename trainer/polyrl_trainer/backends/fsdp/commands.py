"""What the leader tells the other ranks, as msgpack: no pickle, and of the user's data nothing but tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from polyrl_trainer.backend import BufferPlace
from polyrl_trainer.backends.configs import (
    AdapterConfig,
    EngineConfig,
    Head,
    ModelConfig,
    OptimizerConfig,
    SpecialTokens,
)
from polyrl_trainer.backends.fsdp.rounds import Round
from polyrl_trainer.sample import Sample


class CreateCommand(msgspec.Struct, frozen=True, tag="create"):
    """Makes model `number`; without an optimizer it only scores."""

    number: int
    folder: str
    """Empty: a fresh model of `config`."""
    config: dict[str, Any]
    seed: int
    dtype: str
    special_tokens: SpecialTokens
    vocabulary: int | None
    head: str
    adapter: AdapterConfig | None
    engine: EngineConfig
    optimizer: OptimizerConfig | None

    @classmethod
    def of(
        cls, number: int, model: ModelConfig, engine: EngineConfig, optimizer: OptimizerConfig | None
    ) -> CreateCommand:
        """For every rank the same."""
        source = model.source
        return cls(
            number=number,
            folder=str(source) if isinstance(source, Path) else "",
            config=dict(source) if isinstance(source, Mapping) else {},
            seed=model.seed,
            dtype=model.dtype,
            special_tokens=model.special_tokens,
            vocabulary=model.vocabulary,
            head=model.head,
            adapter=model.adapter,
            engine=engine,
            optimizer=optimizer,
        )

    def model(self) -> ModelConfig:
        """Inverse of `of`."""
        head: Head = self.head  # type: ignore[assignment]
        return ModelConfig(
            Path(self.folder) if self.folder else self.config,
            self.seed,
            dtype=self.dtype,  # type: ignore[arg-type]
            special_tokens=self.special_tokens,
            vocabulary=self.vocabulary,
            head=head,
            adapter=self.adapter,
        )


class Work(msgspec.Struct, frozen=True):
    """Samples, of which only what a forward pass needs, and who computes which of them when."""

    tokens: bytes
    """int32, of all samples one after the other."""
    learned: bytes
    """uint8, 1 where a token is learned."""
    lengths: list[int]
    rounds: list[Round]

    @classmethod
    def of(cls, samples: Sequence[Sample], rounds: list[Round]) -> Work:
        """Raises ValueError for a token that no vocabulary has."""
        tokens = np.concatenate([sample.tokens for sample in samples])
        if tokens.min() < 0 or tokens.max() > np.iinfo(np.int32).max:
            raise ValueError("a token's number is outside of every vocabulary")
        learned = np.concatenate([sample.loss_mask != 0 for sample in samples])
        return cls(
            tokens=tokens.astype(np.int32).tobytes(),
            learned=learned.astype(np.uint8).tobytes(),
            lengths=[sample.length for sample in samples],
            rounds=rounds,
        )

    def samples(self) -> list[Sample]:
        """With what `of` kept of them."""
        tokens = np.frombuffer(self.tokens, dtype=np.int32).astype(np.int64)
        learned = np.frombuffer(self.learned, dtype=np.uint8).astype(np.float32)
        cuts = np.cumsum(self.lengths)[:-1]
        return [
            Sample(ids, mask, prompt_length=0)
            for ids, mask in zip(np.split(tokens, cuts), np.split(learned, cuts), strict=True)
        ]


class LearnCommand(msgspec.Struct, frozen=True, tag="learn"):
    """Forward and backward; the gradient by each output comes from the leader."""

    number: int
    work: Work
    temperature: float
    entropy_gradient: bool


class ScoreCommand(msgspec.Struct, frozen=True, tag="score"):
    """Forward only; `values` asks the value head instead of the vocabulary's, `below` the model that the adapters stand
    on."""

    number: int
    work: Work
    temperature: float
    values: bool
    below: bool = False


class StepCommand(msgspec.Struct, frozen=True, tag="step"):
    """The optimizer's; `normalizer` divides the gradient."""

    number: int
    normalizer: float


class DiscardCommand(msgspec.Struct, frozen=True, tag="discard"):
    """Forgets the gradient."""

    number: int


class ExportCommand(msgspec.Struct, frozen=True, tag="export"):
    """Each rank its own rows into the images of a version, one on each machine."""

    number: int
    buffers: tuple[BufferPlace, ...]


class SaveCommand(msgspec.Struct, frozen=True, tag="save"):
    """Each rank its part of the files of a folder."""

    number: int
    folder: str
    copied: bool


class LoadCommand(msgspec.Struct, frozen=True, tag="load"):
    """Inverse of `SaveCommand`."""

    number: int
    folder: str


class DropCommand(msgspec.Struct, frozen=True, tag="drop"):
    """Model `number` is not needed any more."""

    number: int


class EndCommand(msgspec.Struct, frozen=True, tag="end"):
    """The run is over for this rank."""


RankCommand = (
    CreateCommand
    | LearnCommand
    | ScoreCommand
    | StepCommand
    | DiscardCommand
    | ExportCommand
    | SaveCommand
    | LoadCommand
    | DropCommand
    | EndCommand
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[RankCommand] = msgspec.msgpack.Decoder(RankCommand)


def to_bytes(command: RankCommand) -> bytes:
    """For every rank the same."""
    return _encoder.encode(command)


def from_bytes(data: bytes) -> RankCommand:
    """Raises msgspec.MsgspecError for what the leader never sends."""
    return _decoder.decode(data)
