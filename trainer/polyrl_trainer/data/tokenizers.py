"""Text to token ids and back, behind one small protocol with two makers: single characters, and a Hugging Face
folder.

Refuses: text that cannot be represented (an unknown character is InvalidData, never <unk>), and downloads. What chat
templates do to conversations is `chats`.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from polyrl.errors import InvalidData
from polyrl.manifest.recipe import TokenizerSpec
from polyrl_trainer.data.chats import WRITTEN, chat_texts, is_learned, with_read_arguments
from polyrl_trainer.data.hub import SHOWN_REASON
from polyrl_trainer.data.rows import Message

PAD_ID, BOS_ID, EOS_ID = 0, 1, 2
"""Special tokens of the character tokenizer, before the alphabet."""

_GENERATION = "generation_config.json"

Tools = Sequence[dict[str, Any]]
"""JSON schemas."""
MaskedIds = tuple[list[int], list[int]]
"""Ids of a conversation, and a mask of the same length: 1 on what the assistant wrote, but turns of `weight` 0."""


class Tokenizer(Protocol):
    """What data, user code and environments need."""

    eos_id: int
    """Ends a response."""
    end_ids: tuple[int, ...]
    """All that may end one: what tokenizer, chat template and the model's generation config name. Each knows its own: a
    base model's names the end of a document, and after SFT on chats the policy ends with the template's."""
    pad_id: int | None
    bos_id: int | None
    vocabulary: int
    """Number of token ids."""

    def encode_prompt(self, text: str) -> list[int]:
        """The start of a sequence, with whatever the model expects before its first word. Raises InvalidData."""

    def encode_text(self, text: str) -> list[int]:
        """Text in the middle of a sequence. Raises InvalidData."""

    def encode_chats(self, messages: Sequence[Message], tools: Tools = ()) -> list[MaskedIds]:
        """A whole conversation, as one sequence or, where the chat template rewrites earlier turns, as several.
        Raises InvalidData."""

    def encode_chat_prompt(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]:
        """Ids of a conversation up to where the assistant begins. Raises InvalidData."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text without special tokens."""

    def ids_holding(self, text: str) -> list[int]:
        """Tokens whose text, by itself, holds `text`."""

    def save(self, folder: Path) -> None:
        """Writes the files from which transformers' AutoTokenizer makes the same tokenizer."""


def load_tokenizer(spec: TokenizerSpec, model_folder: Path | None, root: Path) -> Tokenizer:
    """`root` is what relative paths are relative to. Raises InvalidData."""
    if spec.type == "characters":
        return CharacterTokenizer(spec.alphabet)
    if spec.path is None and model_folder is None:
        raise InvalidData("recipe.model.tokenizer.path: needed when the model is made from a config")
    folder = root / spec.path if spec.path is not None else model_folder or root
    return HuggingFaceTokenizer(folder, model_folder, template_kwargs=spec.chat_template_kwargs or {})


class CharacterTokenizer:
    """Each character of the alphabet is one token, after <pad>, <bos> and <eos>; a chat is its contents in a row."""

    def __init__(self, alphabet: str) -> None:
        if not alphabet or len(set(alphabet)) != len(alphabet):
            raise InvalidData("recipe.model.tokenizer.alphabet: must hold at least one character, and each once")
        self._alphabet = alphabet
        self._ids = {character: EOS_ID + 1 + index for index, character in enumerate(alphabet)}
        self._characters = {index: character for character, index in self._ids.items()}
        self.pad_id: int | None = PAD_ID
        self.bos_id: int | None = BOS_ID
        self.eos_id = EOS_ID
        self.end_ids: tuple[int, ...] = (EOS_ID,)
        self.vocabulary = EOS_ID + 1 + len(alphabet)

    def encode_prompt(self, text: str) -> list[int]:
        return [BOS_ID, *self.encode_text(text)]

    def encode_text(self, text: str) -> list[int]:
        unknown = next((character for character in text if character not in self._ids), None)
        if unknown is not None:
            raise InvalidData(f"character {unknown!r} is not in recipe.model.tokenizer.alphabet")
        return [self._ids[character] for character in text]

    def encode_chats(self, messages: Sequence[Message], tools: Tools = ()) -> list[MaskedIds]:
        if tools:
            raise InvalidData("recipe.model.tokenizer: of type `characters` shows no `tools`; name those in `messages`")
        ids, mask = [BOS_ID], [0]
        for message in messages:
            written = message["role"] == "assistant"
            turn = self.encode_text(message["content"]) + ([EOS_ID] if written else [])
            ids += turn
            mask += [int(is_learned(message))] * len(turn)
        return [(ids, mask)]

    def encode_chat_prompt(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]:
        return self.encode_chats(messages, tools)[0][0]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self._characters.get(int(token), "") for token in ids)

    def ids_holding(self, text: str) -> list[int]:
        return [self._ids[text]] if text in self._ids else []

    def save(self, folder: Path) -> None:
        # A check reads rows where transformers, which brings the package tokenizers, is not installed.
        from polyrl_trainer.data.character_files import tokenizer_files

        for name, content in tokenizer_files(self._alphabet).items():
            (folder / name).write_text(content, encoding="utf-8")


class HuggingFaceTokenizer:
    """A folder with tokenizer.json and, for chats, a chat template."""

    def __init__(
        self, folder: Path, model_folder: Path | None = None, *, template_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """`model_folder`: the one whose generation config counts; default: the same. `template_kwargs`: are set in the
        chat template itself, so that whoever uses the saved model gets the prompts that it learned."""
        self._tokenizer = _load_folder(folder)
        self._trimming = _trimming_steps(self._tokenizer)
        self._trim(False)
        if template_kwargs and self._tokenizer.chat_template:
            self._tokenizer.chat_template = _setting(template_kwargs, self._tokenizer.chat_template)
        if self._tokenizer.eos_token_id is None:
            raise InvalidData(f"{folder}: the tokenizer has no end-of-sequence token")
        self.pad_id: int | None = self._tokenizer.pad_token_id
        self.bos_id: int | None = self._tokenizer.bos_token_id
        self.eos_id = int(self._tokenizer.eos_token_id)
        self.vocabulary = len(self._tokenizer)
        self._holding: dict[str, list[int]] = {}
        named = _generation_ends(model_folder or folder)
        self.end_ids: tuple[int, ...] = tuple(sorted({self.eos_id, *self._template_ends(), *named}))

    def encode_prompt(self, text: str) -> list[int]:
        return self._encode(text, special=True)

    def encode_text(self, text: str) -> list[int]:
        return self._encode(text, special=False)

    def encode_chats(self, messages: Sequence[Message], tools: Tools = ()) -> list[MaskedIds]:
        texts = chat_texts(messages, lambda part, asks: self._render(part, tools, generation_prompt=asks))
        chats = [self._masked(one.text, one.learned) for one in texts]
        return [(self._known(ids), mask) for ids, mask in chats]

    def _masked(self, text: str, learned: Sequence[tuple[int, int]]) -> MaskedIds:
        """A token never spans what was asked and what is learned: to the policy the prompt's tokens are there already
        (two line ends, one of each, may else be a single token)."""
        starts, cuts = [start for start, _ in learned], {0}
        while True:
            ids, places = self._pieces(text, sorted(cuts))
            begun = [bisect_right(starts, first) for first, _ in places]  # turns, of each token
            following = [*starts, len(text)]
            spanned = {
                following[turns] for turns, (_, last) in zip(begun, places, strict=True) if following[turns] < last
            }
            if not spanned:
                ends = [0, *(end for _, end in learned)]
                return ids, [int(first < ends[turns]) for turns, (first, _) in zip(begun, places, strict=True)]
            cuts |= spanned

    def _pieces(self, text: str, cuts: Sequence[int]) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids of the text, each piece between cuts by itself, and their places in the whole."""
        ids: list[int] = []
        places: list[tuple[int, int]] = []
        for begin, end in pairwise([*cuts, len(text)]):
            encoded = self._tokenizer(text[begin:end], add_special_tokens=False, return_offsets_mapping=True)
            ids += encoded["input_ids"]
            places += [(first + begin, last + begin) for first, last in encoded["offset_mapping"]]
        return ids, places

    def encode_chat_prompt(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]:
        return self._encode(self._render(messages, tools, generation_prompt=True), special=False)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def ids_holding(self, text: str) -> list[int]:
        if text not in self._holding:
            words = self._tokenizer.batch_decode([[token] for token in range(self.vocabulary)])
            self._holding[text] = [token for token, word in enumerate(words) if text in word]
        return self._holding[text]

    def save(self, folder: Path) -> None:
        self._trim(True)
        self._tokenizer.save_pretrained(folder)
        self._trim(False)

    def _trim(self, as_loaded: bool) -> None:
        for step in self._trimming:
            step.trim_offsets = as_loaded

    def _encode(self, text: str, *, special: bool) -> list[int]:
        encoded = self._tokenizer(text, add_special_tokens=special, return_special_tokens_mask=True)
        ids, added = list(encoded["input_ids"]), encoded["special_tokens_mask"]
        while ids and special and added[len(ids) - 1]:
            ids.pop()  # an end of sequence: the policy goes on from here
        return self._known(ids)

    def _known(self, ids: list[int]) -> list[int]:
        unknown = self._tokenizer.unk_token_id
        # Where the same token begins or ends texts, bytes are tokens and none is unknown.
        if unknown not in (None, self.bos_id, self.eos_id) and unknown in ids:
            raise InvalidData("the text holds characters that the tokenizer does not know")
        return ids

    def _template_ends(self) -> list[int]:
        """The special token that the chat template puts after what the assistant wrote."""
        if not self._tokenizer.chat_template:
            return []
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": WRITTEN}]
        try:
            _, written, after = self._render(messages, (), generation_prompt=False).rpartition(WRITTEN)
        except InvalidData:
            return []
        ids = self._tokenizer(after.strip(), add_special_tokens=False)["input_ids"] if written else []
        return [ids[0]] if ids and ids[0] in self._tokenizer.added_tokens_decoder else []

    def _render(self, messages: Sequence[Message], tools: Tools, *, generation_prompt: bool) -> str:
        import jinja2

        if not self._tokenizer.chat_template:
            raise InvalidData("no chat template, as messages, `chat` and `systemPrompt` need; give `prompt` as text")
        render = partial(
            self._tokenizer.apply_chat_template,
            tools=list(tools) or None,
            tokenize=False,
            add_generation_prompt=generation_prompt,
        )
        try:
            try:
                return str(render(with_read_arguments(messages)))
            except TypeError:
                return str(render(list(messages)))  # DeepSeek's puts arguments together as texts
        except (jinja2.TemplateError, TypeError) as error:
            raise InvalidData(f"the chat template refuses the conversation: {error}") from error


def _trimming_steps(tokenizer: Any) -> list[Any]:
    """Steps that say of a token that begins with a space that it begins behind it, so it would not be seen to span a
    prompt that ends with one."""
    from tokenizers import processors

    after: Any = tokenizer.backend_tokenizer.post_processor if tokenizer.is_fast else None
    steps: Any = after if isinstance(after, processors.Sequence) else [after]
    return [step for step in steps if getattr(step, "trim_offsets", False)]


def _setting(values: Mapping[str, Any], template: str | Mapping[str, str]) -> str | dict[str, str]:
    """The template, or each of several by name, with these set. Raises InvalidData."""
    for name in values:
        if not name.isidentifier():
            raise InvalidData(
                f"recipe.model.tokenizer.chatTemplateKwargs: {name!r} is no name that a template can read"
            )
    # A template reads Python's literals.
    head = "".join(f"{{% set {name} = {value!r} %}}" for name, value in values.items())
    return head + template if isinstance(template, str) else {name: head + one for name, one in template.items()}


def _generation_ends(folder: Path) -> list[int]:
    """Raises InvalidData for a file that is no JSON object."""
    path = folder / _GENERATION
    try:
        named = json.loads(path.read_bytes()).get("eos_token_id")
    except FileNotFoundError:
        return []
    except (ValueError, AttributeError) as error:
        raise InvalidData(f"{path}: not a generation config: {error}") from error
    return [named] if isinstance(named, int) else list(named or [])


def _load_folder(folder: Path) -> Any:
    from transformers import AutoTokenizer

    if not folder.is_dir():
        raise InvalidData(f"{folder}: no such folder; recipe.model.tokenizer.path must be a Hugging Face folder")
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())[:SHOWN_REASON] or type(error).__name__
        raise InvalidData(f"{folder}: not a Hugging Face tokenizer: {reason}") from error
