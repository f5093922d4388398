"""`python -m polyrl_trainer.backends.fsdp`: any rank but the first; torchrun's variables say which.

It does what the leader says until the run is over. What fails on all ranks alike (a folder that holds no model, a disk
that is full) the leader reports, and the rank waits for the next command. Anything else leaves the ranks at odds with
each other: this process ends, with its reason in the log, and with it the group.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from functools import partial
from pathlib import Path

from polyrl import interpreter, parent_death_signal

with interpreter.loading():
    import torch

    from polyrl.errors import PolyRLError
    from polyrl_trainer.backend import TrainFuture
    from polyrl_trainer.backends.fsdp import commands
    from polyrl_trainer.backends.fsdp.commands import (
        CreateCommand,
        DropCommand,
        EndCommand,
        LearnCommand,
        RankCommand,
        ScoreCommand,
    )
    from polyrl_trainer.backends.fsdp.heartbeat import SEND_EVERY_S, RankHeartbeat, RankLink
    from polyrl_trainer.backends.fsdp.processes import DEVICE, END_S, LOST_EXIT, SILENCE, rank_device
    from polyrl_trainer.backends.fsdp.rank_model import RankModel
    from polyrl_trainer.backends.fsdp.ranks import RankPlace, Ranks


def main() -> None:
    """Until the leader ends the run."""
    parent_death_signal.hold()
    for number in (signal.SIGINT, signal.SIGTERM):
        # The leader is asked to stop, and says when.
        signal.signal(number, signal.SIG_IGN)
    place = RankPlace.from_environment()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    device = rank_device(os.environ[DEVICE], place.local_rank)
    try:
        _run(place, device)
    except BaseException:  # noqa: BLE001 - printed whole
        traceback.print_exc()
        _lost(f"rank {place.rank} of the learner failed")
    # What torch leaves behind at exit waits for peers that are gone.
    sys.stderr.flush()
    os._exit(0)


def _run(place: RankPlace, device: torch.device) -> None:
    # Before all have met: who freezes until then is awaited by the others.
    heartbeat = RankHeartbeat(float(os.environ[SILENCE]))
    link = RankLink.to_parent()
    heartbeat.add("the process that started this rank", link, partial(_lost_parent, link))
    follow_leader(Ranks(place, device))
    heartbeat.close()


def follow_leader(ranks: Ranks) -> None:
    """Returns when the leader says that the run is over. Raises what leaves the ranks at odds."""
    models: dict[int, RankModel] = {}
    while not isinstance(command := commands.from_bytes(ranks.receive()), EndCommand):
        if isinstance(command, DropCommand):
            models.pop(command.number, None)
        elif isinstance(command, LearnCommand):
            models[command.number].learn(command)
        elif isinstance(command, ScoreCommand):
            models[command.number].score(command)
        else:
            try:
                _alike(command, models, ranks)
            except (PolyRLError, OSError, ValueError):
                # Raised on the leader too: by the same rule on the same numbers, or as reasons were exchanged.
                continue


def _alike(command: RankCommand, models: dict[int, RankModel], ranks: Ranks) -> None:
    """What succeeds or fails on all ranks alike."""
    match command:
        case CreateCommand():
            models[command.number] = RankModel(command, ranks)
        case commands.StepCommand():
            models[command.number].step(command.normalizer)
        case commands.DiscardCommand():
            models[command.number].updating().drop_gradients()
        case commands.ExportCommand():
            models[command.number].export(command)
        case commands.SaveCommand():
            written = models[command.number].save(Path(command.folder), copied=command.copied)
            written.add_done_callback(_end_if_at_odds)
        case commands.LoadCommand():
            models[command.number].load(Path(command.folder))


def _end_if_at_odds(written: TrainFuture[None]) -> None:
    """What a disk refuses, the leader hears as well."""
    error = written.exception()
    if error is not None and not isinstance(error, PolyRLError | OSError):
        _lost(f"this rank of the learner could not save: {type(error).__name__}: {error}")


def _lost_parent(link: RankLink, reason: str) -> None:
    """One that lives sees this rank's end; one that is frozen would stay, and nobody would start the group again."""
    print(reason, file=sys.stderr, flush=True)
    until = time.monotonic() + END_S
    while not link.heard() and time.monotonic() < until:
        time.sleep(SEND_EVERY_S)
    if time.monotonic() >= until:
        parent_death_signal.end_parent()
    os._exit(LOST_EXIT)


def _lost(reason: str) -> None:
    print(reason, file=sys.stderr, flush=True)
    # The main thread may be in a collective that nobody ends.
    os._exit(LOST_EXIT)


if __name__ == "__main__":
    main()
