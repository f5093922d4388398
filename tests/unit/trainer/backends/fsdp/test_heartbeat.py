"""When a rank counts as frozen, in virtual time."""

from __future__ import annotations

from polyrl_trainer.backends.fsdp.heartbeat import LastHeard


def test_one_that_is_not_heard_any_more_is_silent() -> None:
    heard = LastHeard(silent_s=10.0)
    for now in range(1, 21):
        heard.note("rank 1", now)
        if now <= 9:
            heard.note("rank 2", now)
        assert heard.silent(now) == ("rank 2" if now > 19 else None)


def test_one_that_never_came_is_not_silent_yet() -> None:
    heard = LastHeard(silent_s=10.0)
    assert heard.silent(1000.0) is None
    heard.note("rank 1", 5.0)
    assert heard.silent(15.0) is None
    assert heard.silent(15.1) == "rank 1"
