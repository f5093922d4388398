"""When a rank counts as frozen, in virtual time."""

from __future__ import annotations

from polyrl_trainer.backends.fsdp.heartbeat import LastHeard


def test_one_that_is_not_heard_any_more_is_silent() -> None:
    heard = LastHeard([1, 2], began=0.0, silent_s=10.0)
    for now in range(1, 21):
        heard.note(1, now)
        if now <= 9:
            heard.note(2, now)
        assert heard.silent(now) == (2 if now > 19 else None)


def test_one_that_never_came_is_silent_since_the_beginning() -> None:
    heard = LastHeard([1], began=5.0, silent_s=10.0)
    assert heard.silent(15.0) is None
    assert heard.silent(15.1) == 1
