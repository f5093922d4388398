"""examples/gsm8k from raw rows to a trainer that could start: prepare.py, its tokenizer, both manifests, the data."""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from polyrl.testing.started import ran
from polyrl_cli.manifests.load import load_manifest
from polyrl_trainer.backends.models.model_factory import load_model
from polyrl_trainer.data.tokenizers import HuggingFaceTokenizer
from polyrl_trainer.preparation import Prepared, check_vocabulary, model_source, prepare
from polyrl_trainer.user_code.loading import load_function

EXAMPLE = Path(__file__).parents[3] / "examples" / "gsm8k"
DEADLINE_S = 120
VOCABULARY = 400
TINY_MODEL = {
    "model_type": "qwen2",
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
GOOD = {"question": "How many are 6 times 7?", "answer": "6 * 7 = <<6*7=42>>42\n#### 42"}


def run(*argv: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, argv)]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)


def run_prepare(train: Path, test: Path, out: Path, *more: object) -> subprocess.CompletedProcess[str]:
    return run(EXAMPLE / "prepare.py", "--train", train, "--test", test, "--out", out, *more)


def validate(manifest: Path) -> subprocess.CompletedProcess[str]:
    return ran([sys.executable, "-m", "polyrl_cli.app", "validate", str(manifest)], timeout_s=DEADLINE_S)


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the example in which prepare.py was run on the made rows."""
    folder = tmp_path_factory.mktemp("gsm8k") / "gsm8k"
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("prepared", "__pycache__"))
    made, out = folder / "made", folder / "prepared"
    done = run_prepare(made / "train.jsonl", made / "test.jsonl", out, "--vocabulary", VOCABULARY)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def prepared(example: Path) -> Prepared:
    return prepare(load_manifest(example / "laptop.yaml", ()).spec, example)


def read(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_become_prompts_answers_and_finals(example: Path) -> None:
    raw, data = read(example / "made" / "train.jsonl"), example / "prepared" / "data"
    sft, rl, held_out = (read(data / f"{name}.jsonl") for name in ("sft", "rl", "eval"))
    assert [row["response"] for row in sft] == [" " + row["answer"] for row in raw]
    assert [row["prompt"] for row in sft] == [row["prompt"] for row in rl]
    assert all(row["question"] in prompt["prompt"] for row, prompt in zip(raw, rl, strict=True))
    assert [row["final"] for row in rl] == [row["answer"].split()[-1] for row in raw]
    assert len(held_out) == len(read(example / "made" / "test.jsonl"))
    assert not {row["prompt"] for row in held_out} & {row["prompt"] for row in rl}


def test_gzip_and_grouped_thousands(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl.gz"
    with gzip.open(rows, "wt", encoding="utf-8") as file:
        file.write(json.dumps({**GOOD, "answer": "#### -1,234.5"}) + "\n\n")
    assert run_prepare(rows, rows, tmp_path / "out").returncode == 0
    assert [row["final"] for row in read(tmp_path / "out" / "data" / "rl.jsonl")] == ["-1234.5"]
    assert not (tmp_path / "out" / "tokenizer").exists()


BAD = [
    (json.dumps({**GOOD, "answer": "it is 42"}), "answer: must end in a line '#### <number>', and ends in 'it is 42'"),
    (json.dumps({**GOOD, "answer": "#### forty-two"}), "answer: must end in a line '#### <number>'"),
    (json.dumps({**GOOD, "answer": "#### "}), "answer: must end in a line '#### <number>'"),
    (json.dumps({"question": "How many?"}), "answer: must be text"),
    (json.dumps({**GOOD, "question": 7}), "question: must be text"),
    (json.dumps({**GOOD, "question": " "}), "question: must be text"),
    (json.dumps([GOOD]), "question: must be text; a row is an object"),
    ('{"question": ', "is not a line of JSON in UTF-8"),
]


@pytest.mark.parametrize(("line", "words"), BAD)
def test_a_bad_row_is_a_sentence_and_nothing_is_written(tmp_path: Path, line: str, words: str) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps(GOOD) + "\n" + line + "\n")
    refused(run_prepare(rows, rows, tmp_path / "out"), f"prepare.py: {rows}:2: {words}")
    assert not (tmp_path / "out").exists()


def refused(done: subprocess.CompletedProcess[str], beginning: str) -> None:
    assert done.returncode == 1
    assert done.stderr.startswith(beginning), done.stderr
    assert done.stderr.count("\n") == 1, "one sentence, no traceback"


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("rows.jsonl", None, "cannot be read: "),
        ("rows.jsonl", b"\n", "holds no rows"),
        ("rows.jsonl", b'{"question": "\xff"}', "is not a line of JSON in UTF-8"),
        ("rows.jsonl.gz", b"not gzip", "cannot be read: "),
        ("rows.jsonl.gz", gzip.compress(json.dumps(GOOD).encode(), mtime=0)[:-9], "cannot be read: "),
    ],
)
def test_a_bad_file_is_a_sentence(tmp_path: Path, name: str, content: bytes | None, words: str) -> None:
    rows = tmp_path / name
    if content is not None:
        rows.write_bytes(content)
    done = run_prepare(rows, rows, tmp_path / "out")
    refused(done, f"prepare.py: {rows}")
    assert words in done.stderr


def test_a_vocabulary_without_room_for_every_byte_is_refused(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps(GOOD) + "\n")
    refused(run_prepare(rows, rows, tmp_path / "out", "--vocabulary", 100), "prepare.py: --vocabulary: 100 cannot hold")


def test_text_survives_the_tokenizer_and_each_digit_is_a_token(example: Path) -> None:
    tokenizer = HuggingFaceTokenizer(example / "prepared" / "tokenizer")
    texts = [row["prompt"] + row["response"] for row in read(example / "prepared" / "data" / "sft.jsonl")]
    for text in [*texts, "  two  spaces , and ' quotes '\n\n\ttabs", "€ ½ 数 👍", "-1,234.5"]:
        assert tokenizer.decode(tokenizer.encode_text(text)) == text
    assert len(tokenizer.encode_text("31415926")) == len("31415926")
    assert tokenizer.vocabulary <= VOCABULARY
    assert tokenizer.decode([tokenizer.eos_id, tokenizer.pad_id or 0]) == ""


def test_the_data_opens_and_a_prompt_is_the_beginning_of_its_row(prepared: Prepared) -> None:
    assert prepared.conversations is not None
    assert prepared.prompts is not None
    rows = {draw.item.prompt: draw.item for draw in prepared.conversations.get(48)}
    for prompt in (draw.item for draw in prepared.prompts.get(48)):
        row = rows[prompt.text]
        assert tuple(row.tokens[: row.prompt_length]) == prompt.ids
        assert row.tokens[-1] == prepared.tokenizer.eos_id
        assert row.loss_mask.sum() == row.response_length
        assert row.response.endswith(f"#### {prompt.metadata['final']}")
    assert prepared.conversations.epochs() == prepared.prompts.epochs() == 1
    assert [len(one.prompts) for one in prepared.evaluation] == [16]


def test_worked_examples_earn_the_reward(prepared: Prepared) -> None:
    """What SFT teaches is what RL pays for, through tokens and back."""
    score = load_function("reward:score", EXAMPLE)
    assert prepared.conversations is not None
    for row in (draw.item for draw in prepared.conversations.get(48)):
        row.metadata["final"] = row.response.split()[-1]
        assert score(row) == {"reward": 1.0, "exact_match": 1.0, "final_line": 1.0}


def test_the_model_has_room_for_the_tokenizer_and_the_longest_row(example: Path, prepared: Prepared) -> None:
    spec = load_manifest(example / "laptop.yaml", ()).spec
    assert spec.recipe.model.config is not None
    check_vocabulary(prepared.tokenizer, spec.recipe.model.config["vocab_size"])
    assert spec.recipe.model.config["max_position_embeddings"] >= spec.rollout.engine.max_context


def test_the_cluster_manifest_takes_a_hugging_face_folder_and_the_data_sets_own_rows(
    example: Path, tmp_path: Path
) -> None:
    """The volume's content, laid out elsewhere: all that job.yaml reads before a pod could start."""
    model, made = tmp_path / "model", example / "made"
    shutil.copytree(example / "prepared" / "tokenizer", model)
    (model / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    load_model(TINY_MODEL, 0, "float32").save_pretrained(model)
    places = {"data.rl[0]": "train", "data.eval[0]": "test", "evaluation.sets[0].data[0]": "test"}
    sets = [f"spec.recipe.{place}.path={made}/{name}.jsonl" for place, name in places.items()]
    spec = load_manifest(EXAMPLE / "job.yaml", [*sets, f"spec.recipe.model.path={model}"]).spec
    ready = prepare(spec, EXAMPLE)
    assert ready.prompts is not None
    prompt, score = ready.prompts.get(1)[0].item, load_function("reward:score", EXAMPLE)
    asked = ready.tokenizer.decode(list(prompt.ids))
    assert asked == f"<system>Think step by step. End with one line: #### NUMBER\n<user>{prompt.text}\n<assistant>"
    worked = SimpleNamespace(response=prompt.metadata["answer"], metadata=prompt.metadata)
    assert score(worked)["exact_match"] == 1.0
    assert [len(one.prompts) for one in ready.evaluation] == [16, 16]
    folder = model_source(spec.recipe, EXAMPLE)
    assert isinstance(folder, Path)
    check_vocabulary(ready.tokenizer, load_model(folder, 0, "float32").config.vocab_size)


def test_both_manifests_validate(example: Path) -> None:
    laptop, cluster = validate(example / "laptop.yaml"), validate(EXAMPLE / "job.yaml")
    assert laptop.returncode == 0, laptop.stderr
    assert "laptop.yaml is valid: gsm8k-laptop, mode sft+rl" in laptop.stdout
    assert cluster.returncode == 0, cluster.stderr
    assert "job.yaml is valid: gsm8k, mode rl" in cluster.stdout
    assert "not on this machine, so not checked: /volume/data/test.parquet" in cluster.stdout


def test_before_prepare_the_laptop_manifest_names_what_is_missing(tmp_path: Path) -> None:
    for name in ("laptop.yaml", "reward.py"):
        shutil.copy(EXAMPLE / name, tmp_path)
    done = validate(tmp_path / "laptop.yaml")
    assert done.returncode == 2
    missing = ("tokenizer", "data/sft.jsonl", "data/rl.jsonl", "data/eval.jsonl")
    assert [name for name in missing if f"prepared/{name}" not in done.stderr] == []
    assert "Traceback" not in done.stderr
