"""Every bad row is refused with a sentence that names file and line, says what is wrong, and holds no traceback."""

from __future__ import annotations

import gzip
import json

import pyarrow
import pyarrow.parquet
import pytest
from structlog.testing import capture_logs

from polyrl.errors import InvalidData
from polyrl_trainer.data.examples import prepare_conversations, prepare_finished_groups, prepare_prompts
from polyrl_trainer.data.rows import DataRow, read_rows
from polyrl_trainer.data.tokenizers import CharacterTokenizer

TOKENIZER = CharacterTokenizer("0123456789=")
MAX_TOKENS = 12

PREPARE = {"rl": prepare_prompts, "sft": prepare_conversations, "offline": prepare_finished_groups}
GOOD = {
    "rl": {"prompt": "12="},
    "sft": {"prompt": "12=", "response": "12"},
    "offline": {"prompt": "1=", "response": "1", "reward": 1.0, "group": "a"},
}


def finished(**changes):
    return {**GOOD["offline"], **changes}


BAD = [
    # (stage, second line of the file, what the sentence says)
    ("rl", b'{"prompt": "1"', "not valid JSON: Expecting ',' delimiter at column"),
    ("rl", b'{"prompt": "\xff\xfe"}', "not UTF-8 at byte 12"),
    ("rl", b'["1="]', "a row must be an object with fields, got a list"),
    ("rl", b'{"prompt": "1=", "answer": %s}' % (b"9" * 5000), "holds a number of too many digits"),
    ("rl", b'{"prompt": "1=", "prompt": "2="}', "holds the field 'prompt' twice in one object"),
    ("rl", b'{"prompt": "1=", "a": [{"b": 1, "c": 2, "b": 1}]}', "holds the field 'b' twice in one object"),
    ("rl", rb'{"prompt": "1\ud800="}', "holds half of a surrogate pair"),
    ("rl", b"7", "a row must be an object with fields, got a number"),
    ("rl", {"question": "1="}, "field `prompt` is missing; the row has `question`"),
    ("rl", {}, "field `prompt` is missing; the row has no fields"),
    ("rl", {"prompt": None}, "field `prompt` must be text, got null"),
    ("rl", {"prompt": 12}, "field `prompt` must be text, got a number"),
    ("rl", {"prompt": ["1"]}, "field `prompt` must be text, got a list"),
    ("rl", {"prompt": ""}, "field `prompt` is empty"),
    ("rl", {"prompt": "12+"}, r"field `prompt`: character '\+' is not in recipe.model.tokenizer.alphabet"),
    ("rl", {"prompt": "1" * 12}, "the prompt has 13 tokens; at most 12 leave room"),
    ("rl", {"messages": []}, "field `messages` must be a list with at least one message, got an empty list"),
    ("rl", {"messages": "1="}, "field `messages` must be a list with at least one message, got text"),
    ("rl", {"messages": ["1="]}, r"messages\[0\] must be an object with role and content, got text"),
    ("rl", {"messages": [{"role": "boss", "content": "1"}]}, r"messages\[0\].role must be one of system, user"),
    ("rl", {"messages": [{"role": "user", "content": 1}]}, r"messages\[0\].content must be text, got a number"),
    ("rl", {"messages": [{"role": "assistant", "content": "1"}]}, "must end before the assistant's turn"),
    ("sft", {"prompt": "1="}, "field `response` is missing; the row has `prompt`"),
    ("sft", {"prompt": "1=", "response": False}, "field `response` must be text, got a truth value"),
    ("sft", {"prompt": "1=", "response": "x"}, "character 'x' is not in"),
    ("sft", {"prompt": "1=", "response": "1" * 20}, "the row has 24 tokens; rollout.engine.maxContext allows 12"),
    ("sft", {"messages": [{"role": "user", "content": "1="}]}, "has no assistant turn to learn from"),
    ("offline", finished(reward="1"), "field `reward` must be a finite number, .*got '1'"),
    ("offline", finished(reward=None), "field `reward` must be a finite number, .*got None"),
    ("offline", b'{"prompt": "1=", "response": "1", "reward": NaN, "group": "a"}', "finite number, .*got nan"),
    ("offline", finished(reward=True), "field `reward` must be a finite number, .*got True"),
    ("offline", finished(reward=10**400), "field `reward` must be a finite number, .*got 1000"),
    ("offline", finished(reward=1e300), "finite number, at most 1e\\+12 from 0, got 1e\\+300"),
    ("offline", finished(group=None), "field `group` must be text or a whole number"),
    ("offline", finished(group="b"), "group 'b' has one sample only"),
    ("offline", finished(prompt="2="), "field `group`: 'a' is that of another prompt at .*:1$"),
    ("offline", finished(response=""), "field `response` is empty"),
    ("offline", finished(tokens=[1, "2"]), "field `tokens` must be a list of token ids"),
    ("offline", finished(tokens=[1, 14], prompt_length=1), "field `tokens`: 14 is no token; the tokenizer has 14"),
    ("offline", finished(tokens=[1, 2**70], prompt_length=1), "field `tokens`: 1180591620717411303424 is no token"),
    ("offline", finished(tokens=[1, 2]), "field `prompt_length` must be between 1 and 1"),
    ("offline", finished(tokens=[1, 2], prompt_length=2), "field `prompt_length` must be between 1 and 1"),
    ("offline", finished(rollout_log_probs=[-1.0]), "must be a list of 2 numbers, one per response token"),
    ("offline", finished(rollout_log_probs=[-1.0, 0.5]), "finite numbers that are at most 0"),
    ("offline", finished(rollout_log_probs=[-1.0, -(10**400)]), "finite numbers that are at most 0"),
    ("offline", finished(rollout_log_probs=[-1.0, -1e300]), "finite numbers that are at most 0"),
]


@pytest.mark.parametrize(("stage", "line", "sentence"), BAD, ids=[f"{s}-{t[:40]}" for s, _, t in BAD])
def test_bad_row_is_refused_at_its_place(tmp_path, stage, line, sentence):
    path = tmp_path / "rows.jsonl"
    raw = line if isinstance(line, bytes) else json.dumps(line).encode()
    path.write_bytes(json.dumps(GOOD[stage]).encode() + b"\n" + raw + b"\n" + json.dumps(GOOD[stage]).encode())
    with pytest.raises(InvalidData, match=sentence) as refusal:
        PREPARE[stage](read_rows(path), TOKENIZER, MAX_TOKENS)
    assert str(refusal.value).startswith(f"{path}:2: ")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("none.jsonl", None, "no such file"),
        ("empty.jsonl", b"", "holds no rows"),
        ("blank.jsonl", b"\n  \n", "holds no rows"),
        ("rows.csv", b"prompt\n1=", "unknown kind of data file; must end in .jsonl, .jsonl.gz, .parquet"),
        ("rows.gz", b"", "unknown kind of data file"),
        ("rows.jsonl.gz", b'{"prompt": "1="}\n', "rows.jsonl.gz: not a whole gzip file: Not a gzipped file"),
        ("rows.jsonl.gz", gzip.compress(b'{"prompt": "1="}\n')[:-4], "rows.jsonl.gz: not a whole gzip file"),
        ("rows.jsonl.gz", gzip.compress(b"[]\n"), ":1: a row must be an object"),
        ("rows.parquet", b"PAR1 not really", "not a readable parquet file"),
    ],
    ids=[
        "no file", "empty", "blank lines", "csv", "gz alone", "not gzip", "gzip torn", "gzip of a list", "not parquet",
    ],
)  # fmt: skip
def test_bad_file_is_refused(tmp_path, name, content, sentence):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InvalidData, match=sentence) as refusal:
        read_rows(path)
    assert str(refusal.value).startswith(f"{path}:")


def test_packed_rows_are_the_same_rows(tmp_path):
    text = b'{"prompt": "12="}\n\n{"prompt": "21="}\n'
    (tmp_path / "plain.jsonl").write_bytes(text)
    (tmp_path / "packed.jsonl.gz").write_bytes(gzip.compress(text))
    plain, packed = read_rows(tmp_path / "plain.jsonl"), read_rows(tmp_path / "packed.jsonl.gz")
    assert [row.fields for row in packed] == [row.fields for row in plain]
    assert [row.place.rpartition(":")[2] for row in packed] == ["1", "3"]


def test_parquet_rows_are_read_and_a_missing_column_is_named(tmp_path):
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["12=", "21="], "level": [1, 2]}), path)
    prompts = prepare_prompts(read_rows(path), TOKENIZER, MAX_TOKENS)
    assert [(one.text, one.metadata) for one in prompts] == [("12=", {"level": 1}), ("21=", {"level": 2})]
    with pytest.raises(InvalidData, match=f"{path}:1: field `response` is missing; the row has `prompt`, `level`"):
        prepare_conversations(read_rows(path), TOKENIZER, MAX_TOKENS)


@pytest.mark.parametrize("column", ["messages", "response", "completion"])
def test_parquet_teaches_no_null_of_a_tool_that_takes_another_argument(tmp_path, column):
    """Its columns have one type for all rows, so every call and every schema has the arguments of all tools."""

    def function(**fields):
        return {"type": "function", "function": fields}

    calls = [function(name="add", arguments={"x": 1}), function(name="look", arguments={"city": "Rome"})]
    tools = [
        function(name="add", parameters={"x": {"type": "number"}}),
        function(name="look", parameters={"city": {"type": "text"}}),
    ]
    messages = [{"role": "assistant", "content": "", "tool_calls": [call]} for call in calls]
    fields = {column: messages, "tools": tools, "extra": [{"a": 1, "b": None}]}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([fields]), tmp_path / "rows.parquet")
    (row,) = read_rows(tmp_path / "rows.parquet")
    assert row.fields[column] == messages
    assert [one["function"]["parameters"].keys() for one in row.fields["tools"]] == [{"x"}, {"city"}]
    assert row.fields["extra"] == fields["extra"]


def test_a_mark_before_the_first_line_is_no_part_of_it_and_a_whole_pair_is_a_character(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"prompt": "1="}\r\n{"prompt": "\\ud83d\\ude00"}\r\n')
    assert [row.fields["prompt"] for row in read_rows(file)] == ["1=", "\U0001f600"]


@pytest.mark.parametrize(
    ("long", "share", "refused"),
    [
        pytest.param(1, 0.05, "", id="one-of-twenty"),
        pytest.param(2, 0.05, "f:1: .* has 13 tokens; at most 12 .*; so have 1 others of 20 rows", id="two-of-twenty"),
        pytest.param(1, 0.0, "f:1: .* has 13 tokens; at most 12 leave room", id="none-may-be"),
        pytest.param(19, 1.0, "", id="all-but-one"),
        pytest.param(20, 1.0, "f:1: .*; so have 19 others of 20 rows", id="all"),
    ],
)
def test_a_small_share_of_prompts_that_are_too_long_is_skipped_and_counted(long, share, refused):
    rows = [DataRow(f"f:{line}", {"prompt": "1" * (12 if line <= long else 5)}) for line in range(1, 21)]
    with capture_logs() as logged:
        if refused:
            with pytest.raises(InvalidData, match=refused):
                prepare_prompts(rows, TOKENIZER, 12, max_skipped=share)
            return
        kept = prepare_prompts(rows, TOKENIZER, 12, max_skipped=share)
    assert [one.place for one in kept] == [f"f:{line}" for line in range(long + 1, 21)]
    assert [(one["skipped"], one["rows"], one["first"]) for one in logged] == [(long, 20, "f:1")]
