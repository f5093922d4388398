"""How long an answer may get before the model is beyond what it has learned."""

from polyrl_cli.model.generate import context_note


def test_an_answer_that_leaves_the_context_is_noted() -> None:
    assert context_note(10, 22, 32) is None
    assert context_note(10, 23, None) is None
    note = context_note(10, 23, 32) or ""
    assert "a prompt of 10 tokens and an answer of up to 23" in note
    assert "context of 32" in note
    assert "--max-tokens 22" in note
    assert "--max-tokens" not in (context_note(40, 1, 32) or "")
