"""`polyrl generate RUN "prompt"`: the trained model answers, as whoever loads its folder would have it answer.

Tokenizer, chat template and ends are the folder's own; what the rows of the run were decides whether the prompt goes
through the chat template, and an answer ends at what ended the run's samples besides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from polyrl import interpreter
from polyrl.errors import UserError
from polyrl.history.model_card import ORIGIN, REWARD_MODEL, ModelOrigin
from polyrl.manifest.job import read_job
from polyrl.stop_strings import StopReader
from polyrl_cli.local.run_folder import RunFolder, existing_folder
from polyrl_cli.model.bounds import within_bounds
from polyrl_cli.model.export import read_origin
from polyrl_cli.model.loading import answering_model, answering_tokenizer, in_a_sentence, refuse_odd_files
from polyrl_cli.model.sealed import MODEL, find_checkpoint

MOST_TOKENS: Final = 1 << 17
"""Tokens of an answer whose length a model's folder alone names."""


@dataclass(frozen=True, kw_only=True)
class HowToAnswer:
    """How to answer."""

    max_tokens: int | None
    """None: as many as the run's samples had, MOST_TOKENS at most."""
    temperature: float
    """0 takes the likeliest token each time."""
    seed: int
    answers: int


def generate_lines(
    place: Path, prompt: str, wanted: HowToAnswer, step: int | None, note: Callable[[str], None]
) -> Iterator[str]:
    """The answers, one after another. `place` is a run's folder or an exported model's. Raises UserError; `note` gets
    what is worth knowing beside them."""
    if wanted.answers > 1 and wanted.temperature == 0:
        raise UserError(f"--n {wanted.answers}: at temperature 0 all answers are the same; set --temperature")
    folder = weights_folder(place, step)
    refuse_odd_files(folder)
    with interpreter.loading():
        import torch
        from transformers.utils.logging import disable_progress_bar

    origin = read_origin(folder / ORIGIN)
    if origin.stage == REWARD_MODEL:
        raise UserError(
            f"{folder}: a reward model gives a number and writes nothing; its card shows how to score with it"
        )
    disable_progress_bar()  # type: ignore[no-untyped-call]
    with within_bounds(folder):
        tokenizer = answering_tokenizer(folder)
        ids = prompt_ids(tokenizer, prompt, chat=origin.chat, system_prompt=origin.system_prompt)
        model = answering_model(folder)
    torch.manual_seed(wanted.seed)
    how = {"do_sample": True, "temperature": wanted.temperature} if wanted.temperature else {"do_sample": False}
    how |= {"top_k": 0, "top_p": 1.0} if wanted.temperature else {}
    inputs = torch.tensor([ids] * wanted.answers)
    limit = wanted.max_tokens or min(origin.max_new_tokens, MOST_TOKENS)
    remark = context_note(len(ids), limit, _context(place, model.config))
    if remark is not None:
        note(remark)
    decode = partial(tokenizer.decode, skip_special_tokens=True)
    with in_a_sentence(folder, "cannot answer"):
        how |= _ends(model, origin, decode, wanted.answers)
        output = model.generate(inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=limit, **how)
    for answer in output[:, len(ids) :]:
        yield decode(answer)


def _ends(model: Any, origin: ModelOrigin, decode: Callable[[Sequence[int]], str], answers: int) -> dict[str, Any]:
    """Arguments by which each answer ends where those of the run did, which the model's config knows in part."""
    import torch

    known = model.generation_config.eos_token_id
    tokens = [*([known] if isinstance(known, int) else known or ()), *origin.stop_token_ids]
    readers = [StopReader(origin.stop, decode) for _ in range(answers) if origin.stop]

    def stopped(ids: Any, scores: Any, **more: Any) -> Any:
        newest = ids[:, -1].tolist()
        return torch.tensor([reader.completes(token) for reader, token in zip(readers, newest, strict=True)])

    return {"eos_token_id": tokens or None, "stopping_criteria": [stopped] if readers else None}


def _context(place: Path, config: Any) -> int | None:
    """Tokens that the run trained with at most, if `place` is a run; else those that the model can tell apart."""
    job = RunFolder(place).job
    if job.is_file():
        return read_job(job).spec.rollout.engine.max_context
    return getattr(config, "max_position_embeddings", None)


def context_note(prompt: int, limit: int, context: int | None) -> str | None:
    """A sentence where prompt and answer may be longer than the model's context, in tokens; None where they are not, or
    where the model names none."""
    if context is None or prompt + limit <= context:
        return None
    room = context - prompt
    advice = f"; --max-tokens {room} stays within it" if room > 0 else ""
    return (
        f"a prompt of {prompt} tokens and an answer of up to {limit} are more than the context of {context} that the "
        f"model was trained with, beyond which its answers mean little{advice}"
    )


def weights_folder(place: Path, step: int | None) -> Path:
    """Where the weights lie. Raises UserError when there are none."""
    if (place / "config.json").is_file():
        if step is not None:
            raise UserError(f"--step {step}: {place} is one model, not a run")
        return place
    return find_checkpoint(existing_folder(place, str(place)).checkpoints, step) / MODEL


def prompt_ids(tokenizer: Any, prompt: str, *, chat: bool, system_prompt: str = "") -> list[int]:
    """As the run's rows were read. Raises UserError for text that the tokenizer does not know."""
    try:
        if chat:
            system = [{"role": "system", "content": system_prompt}] if system_prompt else []
            messages = [*system, {"role": "user", "content": prompt}]
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        else:
            encoded = tokenizer(prompt, return_special_tokens_mask=True)
            # Behind an end that the tokenizer adds to texts, nothing of the prompt goes on.
            added = next((count for count, one in enumerate(encoded["special_tokens_mask"][::-1]) if not one), 0)
            ids = encoded["input_ids"][: len(encoded["input_ids"]) - added]
    except Exception as error:
        reason = str(error) or type(error).__name__
        raise UserError(f"the prompt cannot be read by the model's tokenizer: {reason}") from error
    known = tokenizer.decode(ids, skip_special_tokens=True)
    lost = sorted(set(prompt) - set(known))
    # Some tokenizers lower the case; what was left out makes the text shorter.
    if not chat and lost and len(known) < len(prompt.strip()):
        raise UserError(f"the prompt holds characters that the model's tokenizer does not know: {' '.join(lost)}")
    return list(ids)
