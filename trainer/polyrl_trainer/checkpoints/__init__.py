"""Checkpoints: complete or absent, never half.

    checkpoints/rl-step-000040/ model/...       what the backend saves, and what makes it usable: tokenizer, card
                                critic/...      the same of PPO's critic, where there is one
                                state.json      `TrainerState`
                                COMPLETE.json   every file's size and checksum
    checkpoints/rl-step-000040-and-000016-groups/   of a run that was asked to stop within step 41

A step waits for a copy of the learner's state in memory, no longer. The copy is written on a thread beside the next
steps under a temporary name, flushed to the disk, and renamed. What the disk refuses is removed at once, and what a
kill left when a run starts. One is in the making at a time. Others hear only of what is on the disk: the manager then
forgets the samples that are in it.
The newest `keep` stay, parts of a step going first, and the last of each stage besides: a later stage starts from it.
Who starts last is the run's one writer. One that a frozen machine brings back, on a disk that several machines share,
finds another name in .trainer and touches nothing any more.
"""

from polyrl_trainer.checkpoints.folder import (
    CRITIC,
    MODEL,
    Checkpoints,
    checkpoint_name,
    complete_checkpoints,
    latest,
    read_checkpoint,
)
from polyrl_trainer.checkpoints.seals import COMPLETE, append, checksum, disk_refusal, replace_file, sync, writing

__all__ = [
    "COMPLETE",
    "CRITIC",
    "MODEL",
    "Checkpoints",
    "append",
    "checkpoint_name",
    "checksum",
    "complete_checkpoints",
    "disk_refusal",
    "latest",
    "read_checkpoint",
    "replace_file",
    "sync",
    "writing",
]
