"""When a rank counts as frozen, in virtual time."""

from __future__ import annotations

from polyrl_trainer.backends.fsdp.heartbeat import LastCounts


def test_a_count_that_stands_still_is_silence() -> None:
    counts = LastCounts([1, 2], began=0.0, silent_s=10.0)
    for now in range(1, 21):
        counts.note(1, str(now).encode(), now)
        counts.note(2, str(min(now, 9)).encode(), now)
        assert counts.silent(now) == (2 if now > 19 else None)


def test_one_that_never_came_is_silent_since_the_beginning() -> None:
    counts = LastCounts([1], began=5.0, silent_s=10.0)
    assert counts.silent(15.0) is None
    assert counts.silent(15.1) == 1
