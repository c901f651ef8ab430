"""Text to tokens: bytes or a tokenizer file, and the one template that turns a conversation into a sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxacc.experiment.config import DataConfig, UserError

BOUNDARY, BEGIN, END = 256, 257, 258
"""Of byte tokens: before and after every document; before and after every message. 0 to 255 are bytes."""
VOCABULARY = 257
"""Of byte tokens without messages."""
CHAT_VOCABULARY = 259
"""Of byte tokens with messages."""
KNOWN = {
    "boundary": ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>"),
    "begin": ("<|im_start|>", "<start_of_turn>"),
    "end": ("<|im_end|>", "<end_of_turn>", "<|eot_id|>"),
}
"""Special tokens that are taken from a tokenizer file where the config names none, the first that exists."""

Message = tuple[str, str]
"""Role and content."""


class Tokenizer(NamedTuple):
    """Texts to token ids.

    Attributes:
      encode: one array of ids `(n,)` per text.
      vocabulary: ids are below it.
      special: ids of `boundary`, or of `begin` and `end`.
    """

    encode: Callable[[Sequence[str]], list[np.ndarray]]
    vocabulary: int
    special: dict[str, int]

    @property
    def dtype(self) -> type[np.unsignedinteger]:
        """The smallest that holds every id, uint16 at least."""
        return np.uint16 if self.vocabulary <= 2**16 else np.uint32


def open_tokenizer(config: DataConfig, *names: str) -> Tokenizer:
    """The tokenizer of a config with the special tokens `names`: `boundary`, or `begin` and `end`.

    Raises:
      UserError: if the package or the file is missing, or the file has no such token.
    """
    if config.tokenizer:
        return _open_file(config, names)
    special = {"boundary": BOUNDARY, "begin": BEGIN, "end": END}
    return Tokenizer(
        lambda texts: [np.frombuffer(text.encode(), np.uint8) for text in texts],
        VOCABULARY if names == ("boundary",) else CHAT_VOCABULARY,
        {name: special[name] for name in names},
    )


def encode_documents(documents: Sequence[str], tokenizer: Tokenizer) -> list[np.ndarray]:
    """Every document between two boundaries, `(n + 2,)`."""
    boundary = [tokenizer.special["boundary"]]
    return [np.concatenate([boundary, ids, boundary]).astype(tokenizer.dtype) for ids in tokenizer.encode(documents)]


def encode_chats(chats: Sequence[Sequence[Message]], tokenizer: Tokenizer) -> tuple[list[np.ndarray], list[np.ndarray]]:
    r"""Every message as `BEGIN role "\n" content END`; the content and the END of the assistant's are supervised.

    Role and content are encoded apart, so that no token lies across the two.

    Returns:
      The sequences, `(n,)` each, and what of them is supervised, `(n,)` bool each.

    >>> tokenizer = open_tokenizer(DataConfig(source="jsonl"), "begin", "end")
    >>> ids, supervised = encode_chats([[("user", "2+2"), ("assistant", "4")]], tokenizer)
    >>> ids[0][supervised[0]].tolist(), ids[0][:5].tolist()
    ([52, 258], [257, 117, 115, 101, 114])
    """
    messages = [message for chat in chats for message in chat]
    roles = {role: tokenizer.encode([f"{role}\n"])[0] for role in dict.fromkeys(role for role, _ in messages)}
    contents = iter(tokenizer.encode([content for _, content in messages]))
    begin, end = [tokenizer.special["begin"]], [tokenizer.special["end"]]
    sequences, supervised = [], []
    for chat in chats:
        parts, flags = [], []
        for role, _ in chat:
            ids = next(contents)
            parts += [begin, roles[role], ids, end]
            flags += [np.zeros(1 + len(roles[role]), bool), np.full(len(ids) + 1, role == "assistant")]
        sequences.append(np.concatenate(parts).astype(tokenizer.dtype))
        supervised.append(np.concatenate(flags))
    return sequences, supervised


def _open_file(config: DataConfig, names: Sequence[str]) -> Tokenizer:
    """A Hugging Face tokenizers JSON. What it says about truncation, padding and added tokens does not apply here."""
    try:
        import tokenizers  # pyright: ignore[reportMissingImports] (optional)
    except ImportError as error:
        raise UserError("data.tokenizer needs the package tokenizers. Run: pip install 'jaxacc[bpe]'") from error
    path = Path(config.tokenizer)
    try:
        tokenizer = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"data.tokenizer: cannot read {path}: {error.strerror}.") from error
    except Exception as error:  # the package raises nothing narrower
        raise UserError(f"data.tokenizer: {path} is not the JSON file of a Hugging Face tokenizer: {error}.") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True  # a special token that is spelled out in a text stays text

    def encode(texts: Sequence[str]) -> list[np.ndarray]:
        return [np.array(item.ids, np.int64) for item in tokenizer.encode_batch(list(texts), add_special_tokens=False)]

    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    return Tokenizer(encode, max(vocabulary.values()) + 1, {name: _special(config, name, tokenizer) for name in names})


def _special(config: DataConfig, name: str, tokenizer: Any) -> int:
    stated = getattr(config, f"{name}_token")
    candidates = (stated,) if stated else KNOWN[name]
    for token in candidates:
        if (index := tokenizer.token_to_id(token)) is not None:
            return index
    known = [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special]
    raise UserError(
        f"data.tokenizer: {config.tokenizer} has none of {', '.join(candidates)}. State data.{name}_token, one of its "
        f"tokens; its special ones are {', '.join(known) or 'none: add one'}."
    )
