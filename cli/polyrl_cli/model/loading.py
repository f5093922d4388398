"""A model's folder, which may be anybody's, to what answers: ordinary files alone, safetensors, the policy as it is.

What its configs ask for beside that is left out or refused: code, pickles, kernels of a hub, ways to generate
that change the policy.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from polyrl import interpreter
from polyrl.errors import UserError

SHOWN_REASON: Final = 200
"""Characters of a foreign error."""


def refuse_odd_files(folder: Path) -> None:
    """Raises UserError for what no model has and would be read without an end. Links are followed, since a Hub's cache
    is made of them."""
    for file in sorted(folder.iterdir()):
        if not file.exists() or stat.S_IFMT(file.stat().st_mode) not in (stat.S_IFREG, stat.S_IFDIR):
            raise UserError(f"{file}: a pipe, a device or a link to nothing, which no model has")


def answering_tokenizer(folder: Path) -> Any:
    """Raises UserError when the folder holds none."""
    with interpreter.loading():
        from transformers import AutoTokenizer

    with in_a_sentence(folder, "cannot be loaded, and code of a model's folder is not run"):
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def answering_model(folder: Path) -> Any:
    """A language model that generates by its policy alone, and ends where its folder says. Raises UserError."""
    with interpreter.loading():
        from transformers import AutoModelForCausalLM, GenerationConfig

    with in_a_sentence(folder, "cannot be loaded, and code of a model's folder is not run"):
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="sdpa", local_files_only=True, trust_remote_code=False, use_safetensors=True
        )
        ends = {name: getattr(model.generation_config, name) for name in ("eos_token_id", "pad_token_id")}
        # Beams, penalties and the like: samples were drawn from the policy as it is.
        model.generation_config = GenerationConfig(**ends)  # type: ignore[no-untyped-call]
    return model


@contextmanager
def in_a_sentence(folder: Path, what: str) -> Iterator[None]:
    """Turns whatever transformers makes of somebody's files into a UserError."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split())[:SHOWN_REASON]
        raise UserError(f"{folder}: {what}: {reason or type(error).__name__}") from error
