"""How long an answer may get before the model is beyond what it has learned, and where it ends before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from polyrl.errors import UserError
from polyrl.history.model_card import ORIGIN, model_origin
from polyrl.manifest.job import PolyRLJob
from polyrl.testing.job_values import raw_job
from polyrl_cli.model.generate import HowToAnswer, context_note, generate_lines, prompt_ids

LETTERS = ["<pad>", "<end>", "<odd>", *"abcdefghijklm"]


def test_an_answer_that_leaves_the_context_is_noted() -> None:
    assert context_note(10, 22, 32) is None
    assert context_note(10, 23, None) is None
    note = context_note(10, 23, 32) or ""
    assert "a prompt of 10 tokens and an answer of up to 23" in note
    assert "context of 32" in note
    assert "--max-tokens 22" in note
    assert "--max-tokens" not in (context_note(40, 1, 32) or "")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `polyrl export` leaves one, of a few thousand parameters."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("exported") / "model"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        sizes: dict[str, Any] = {"vocab_size": len(LETTERS), "n_positions": 64, "n_embd": 16, "n_layer": 1, "n_head": 2}
        GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=1)).save_pretrained(folder)
    letters = Tokenizer(models.WordLevel({letter: number for number, letter in enumerate(LETTERS)}, unk_token="<odd>"))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    letters.decoder = decoders.Fuse()
    special = {"unk_token": "<odd>", "eos_token": "<end>", "pad_token": "<pad>"}
    PreTrainedTokenizerFast(tokenizer_object=letters, **special).save_pretrained(folder)
    return folder


def answers_of(model: Path, sampling: dict[str, Any]) -> list[str]:
    """Three drawn answers of a model whose run had this sampling."""
    raw = raw_job()
    raw["spec"]["recipe"]["sampling"] = sampling
    origin = model_origin(PolyRLJob.model_validate(raw), "rl", step=1, chat=False, version="0")
    (model / ORIGIN).write_bytes(msgspec.json.encode(origin))
    how = HowToAnswer(max_tokens=24, temperature=1.0, seed=3, answers=3)
    return list(generate_lines(model, "abc", how, None, print))


def up_to(answer: str, end: str) -> str:
    before, found, _ = answer.partition(end)
    return before + found


def test_an_answer_ends_where_those_of_the_run_did(model: Path) -> None:
    """It went on behind the run's stop strings and tokens, though it is to answer as the run's evaluation did."""
    whole = answers_of(model, {})
    letter, two = whole[0][4], whole[0][4:6]
    assert answers_of(model, {"stop": [two]}) == [up_to(one, two) for one in whole]
    assert answers_of(model, {"stopTokenIds": [LETTERS.index(letter)]}) == [up_to(one, letter) for one in whole]


def test_what_the_prompt_holds_ends_no_answer(model: Path) -> None:
    whole = answers_of(model, {})
    assert answers_of(model, {"stop": ["c" + whole[0][0]]})[0].startswith(whole[0][:2])


def test_a_prompt_is_read_as_rows_are_without_an_end_of_its_own(model: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    frame = processors.TemplateProcessing(single="<pad> <pad> $A <end>", special_tokens=[("<pad>", 0), ("<end>", 1)])
    tokenizer.backend_tokenizer.post_processor = frame
    assert prompt_ids(tokenizer, "ab", chat=False) == [0, 0, 3, 4]


def test_an_empty_string_that_ends_answers_is_refused(model: Path) -> None:
    """No run names one."""
    answers_of(model, {})
    changed = msgspec.json.decode((model / ORIGIN).read_bytes()) | {"stop": [""]}
    (model / ORIGIN).write_bytes(msgspec.json.encode(changed))
    how = HowToAnswer(max_tokens=4, temperature=0.0, seed=0, answers=1)
    with pytest.raises(UserError, match=r"polyrl\.json: does not say where a model comes from"):
        list(generate_lines(model, "abc", how, None, print))
