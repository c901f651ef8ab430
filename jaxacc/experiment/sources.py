"""`load`: from `[data]` to rows, for every source: text, conversations, token files, images."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxacc.experiment.config import DataConfig, UserError, check_data
from jaxacc.experiment.images import load_images, load_shapes
from jaxacc.experiment.rows import Corpus as Corpus
from jaxacc.experiment.rows import Examples as Examples
from jaxacc.experiment.rows import Joined, Rows, check_tokens, cut, digest_rows, hold_out, make_rows
from jaxacc.experiment.tokens import Message, Tokenizer, encode_chats, encode_documents, open_tokenizer

WHOLE = 64 * 2**20
"""Bytes up to which a file of tokens is digested as a whole."""
CHECKED = 256 * 2**20
"""Bytes up to which all of its tokens are checked before the run."""
CHUNK = 2**20
BLOCKS = 256
"""Blocks of 64 KiB that are digested of a larger file."""


def load(config: DataConfig) -> Corpus:
    """Read what a config names, and split it into training and held-out rows.

    Raises:
      UserError: for options that do not belong to the source, a package that is missing, and input that is missing, empty
        or not what it should be: with the file, the place in it and the remedy.
    """
    check_data(config)
    return LOADERS[config.source](config)


def _text(config: DataConfig) -> Corpus:
    documents = _read_files(config) if config.paths else help_topics()
    return _from_documents(config, documents, 'Give more files, or documents = "paragraph".')


def _jsonl(config: DataConfig) -> Corpus:
    chats = [chat for path in map(Path, config.paths) for chat in _read_jsonl(path)]
    return _from_chats(config, chats)


def _hf(config: DataConfig) -> Corpus:
    """Columns `messages`, or `prompt` and `response`, or `text`: the first of these that the table has."""
    table, name = _open_table(config), config.paths[0]
    columns = set(table.column_names)
    if "messages" in columns or {"prompt", "response"} <= columns:
        names = ["messages"] if "messages" in columns else ["prompt", "response"]
        rows = table.select_columns(names)
        return _from_chats(config, [_chat(row, f"{name}, row {index}") for index, row in enumerate(rows)])
    if "text" not in columns:
        raise UserError(
            f"{name} has the columns {', '.join(sorted(columns))}. It needs text, or prompt and response, or messages: rename_column "
            "gives them these names."
        )
    documents = list(table["text"])
    for index, text in enumerate(documents):
        _check_text(text, f"{name}, row {index}: text")
    documents = [text for text in documents if text.strip()]
    if not documents:
        raise UserError(f"data.paths: {name} is empty. Name a dataset that contains text.")
    return _from_documents(config, documents, "Name a larger dataset.")


def _from_documents(config: DataConfig, documents: Sequence[str], remedy: str) -> Corpus:
    tokenizer = open_tokenizer(config, "boundary")
    keys = [text.encode() for text in documents]
    single = f"data: one document cannot be split into training and held-out text. {remedy}"
    return _corpus(config, encode_documents(documents, tokenizer), None, keys, tokenizer, "documents", single)


def _from_chats(config: DataConfig, chats: Sequence[tuple[Message, ...]]) -> Corpus:
    """Conversations cut at the context; those with nothing supervised before it are left out."""
    if not chats:
        raise UserError(f"data.paths: {', '.join(config.paths)} is empty. Name files that contain examples.")
    tokenizer, context = open_tokenizer(config, "begin", "end"), config.context
    sequences, supervised = encode_chats(chats, tokenizer)
    kept = [index for index, flags in enumerate(supervised) if flags[1:context].any()]
    cut_short = sum(bool(supervised[index][context:].any()) for index in kept)
    if not kept:
        raise UserError(
            f"data: none of {len(chats)} examples has a response within the first {context} tokens. State a larger data.context."
        )
    notes = []
    if cut_short:
        notes.append(
            f"{cut_short} of {len(chats)} examples were longer than the context of {context} tokens: responses were cut."
        )
    if len(kept) < len(chats):
        notes.append(
            f"{len(chats) - len(kept)} of {len(chats)} examples have no response within the context of {context} tokens and were "
            "left out."
        )
    keys = [json.dumps(chats[index]).encode() for index in kept]
    sequences, supervised = ([array[index][:context] for index in kept] for array in (sequences, supervised))
    single = "data: one example cannot be split into training and held-out examples. Give more examples."
    return _corpus(config, sequences, supervised, keys, tokenizer, "examples", single, notes)


def _corpus(
    config: DataConfig, sequences: Sequence[np.ndarray], supervised: Sequence[np.ndarray] | None, keys: Sequence[bytes],
    tokenizer: Tokenizer, what: str, single: str, notes: Sequence[str] = (),
) -> Corpus:  # fmt: skip
    """Hold out whole sequences, and make rows of both parts."""
    held_out, repeated = hold_out(keys, config.held_out, sizes=list(map(len, keys)), single=single)
    if repeated:
        told = f"{repeated} of {len(keys)} {what} repeat an earlier one; they are kept, on the same side of the split."
        notes = [*notes, told]
    train, held = (
        _rows(config, tokenizer, *(_select(arrays, held_out == part) for arrays in (sequences, supervised)))
        for part in (False, True)
    )
    return Corpus(train, held, digest_rows(train, held), tokenizer.vocabulary, tuple(notes))


def _select(arrays: Sequence[np.ndarray] | None, chosen: np.ndarray) -> list[np.ndarray] | None:
    return None if arrays is None else [arrays[index] for index in np.flatnonzero(chosen)]


def _rows(config: DataConfig, tokenizer: Tokenizer, sequences: Any, supervised: Any) -> Rows:
    starts, lengths = cut(np.array(list(map(len, sequences))), config.context)
    return make_rows(
        np.concatenate(sequences), starts, lengths, context=config.context, vocabulary=tokenizer.vocabulary,
        padding=next(iter(tokenizer.special.values())), packing=config.packing,
        supervised=None if supervised is None else np.concatenate(supervised),
    )  # fmt: skip


def help_topics() -> list[str]:
    """The sections of all help topics; topics repeat each other, so a paragraph is taken where it first occurs."""
    from pydoc_data.topics import topics

    seen: set[str] = set()
    sections = []
    for section in (part for name in sorted(topics) for part in re.split(r"\n{3,}", topics[name])):
        fresh = [part.strip("\n") for part in _paragraphs(section) if part.strip() not in seen]
        seen.update(part.strip() for part in fresh)
        if fresh:
            sections.append("\n\n".join(fresh))
    return sections


def _paragraphs(text: str) -> list[str]:
    return [part for part in re.split(r"\n\s*\n", text) if part.strip()]


def _read_files(config: DataConfig) -> list[str]:
    documents = []
    for path in map(Path, config.paths):
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise UserError(f"data.paths: cannot read {path}: {error.strerror}.") from error
        except UnicodeDecodeError as error:
            raise UserError(f"data.paths: {path} is not UTF-8 text: {error}.") from error
        parts = [text] if config.documents == "file" else _paragraphs(text)
        found = [part.strip() for part in parts if part.strip()]
        if not found:
            raise UserError(f"data.paths: {path} is empty. Name files that contain text.")
        documents += found
    return documents


def _read_jsonl(path: Path) -> Iterator[tuple[Message, ...]]:
    """The examples of a file, one a line; blank lines are none."""
    number = 0
    try:
        with path.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _chat(_parse(line, f"{path}, line {number}"), f"{path}, line {number}")
    except OSError as error:
        raise UserError(f"data.paths: cannot read {path}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise UserError(f"data.paths: {path} is not UTF-8 text after line {number}: {error}.") from error


def _parse(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise UserError(f"{where} is not JSON: {error}. A line holds one object.") from error


def _chat(entry: Any, where: str) -> tuple[Message, ...]:
    """Either `messages`, or `prompt` and `response` as those of a user and the assistant."""
    keys = set(entry) & {"messages", "prompt", "response"} if isinstance(entry, dict) else set()
    if keys == {"prompt", "response"}:
        for key in ("prompt", "response"):
            _check_text(entry[key], f"{where}: {key}")
        return (("user", entry["prompt"]), ("assistant", entry["response"]))
    if keys != {"messages"}:
        found = (
            f"the keys {', '.join(sorted(entry)) or 'of nothing'}" if isinstance(entry, dict) else f"a {type(entry).__name__}"
        )
        raise UserError(f'{where} holds {found}. It must hold either "prompt" and "response", or "messages".')
    messages = entry["messages"]
    if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
        raise UserError(f'{where}: messages must be a list of {{"role": ..., "content": ...}}, one at least.')
    for index, message in enumerate(messages):
        for key in ("role", "content"):
            _check_text(message.get(key), f"{where}: {key} of message {index}")
    return tuple((message["role"], message["content"]) for message in messages)


def _check_text(value: Any, where: str) -> None:
    if not isinstance(value, str):
        raise UserError(f"{where} is {'missing' if value is None else f'a {type(value).__name__}'}. It must be a string.")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{where} holds half of a surrogate pair, which is not text: {error}.") from error


def _open_table(config: DataConfig) -> Any:
    """A split of a Hugging Face dataset: of a folder that `save_to_disk` wrote, or what `load_dataset` finds by the name."""
    try:
        import datasets
    except ImportError as error:
        raise UserError("data.source = \"hf\" needs the package datasets. Run: pip install 'jaxacc[hf]'") from error
    name, folder = config.paths[0], Path(config.paths[0])
    saved = any((folder / file).exists() for file in ("state.json", "dataset_dict.json"))
    try:
        table = datasets.load_from_disk(name) if saved else datasets.load_dataset(name, split=config.split)
    except (OSError, ValueError) as error:
        raise UserError(f"data.paths: cannot load the dataset {name}, split {config.split}: {error}") from error
    if isinstance(table, dict):
        if config.split not in table:
            raise UserError(f"{name} has no split {config.split!r}; it has {', '.join(table)}. State data.split.")
        table = table[config.split]
    return table


def _token_files(config: DataConfig) -> Corpus:
    """Rows of every file, of which the last are held out. Only the rows asked for are read."""
    assert config.vocabulary is not None
    parts: tuple[list[Examples], list[Examples]] = ([], [])
    digest = hashlib.sha256(repr((config.context, config.held_out, config.vocabulary, config.token_dtype)).encode())
    for path in map(Path, config.paths):
        stream = _open_tokens(path, config)
        if stream.nbytes <= CHECKED:
            for begin in range(0, stream.size, CHUNK):
                chunk = stream.reshape(-1)[begin : begin + CHUNK]
                check_tokens(chunk, range(begin, begin + len(chunk)), config.vocabulary, str(path))
        for part, rows in zip(parts, _cut_file(stream, config, str(path)), strict=True):
            part.append(rows)
        digest.update(repr(stream.shape).encode() + _digest_file(path))
    train, held_out = (part[0] if len(part) == 1 else Joined(tuple(part)) for part in parts)
    return Corpus(train, held_out, digest.hexdigest(), config.vocabulary)


def _open_tokens(path: Path, config: DataConfig) -> np.ndarray:
    """A file of tokens, memory-mapped: `(N,)`, or `(N, T)` of an `.npy` with rows."""
    try:
        if path.suffix == ".npy":
            tokens = np.load(path, mmap_mode="r", allow_pickle=False)
        elif path.suffix == ".bin":
            assert config.token_dtype is not None
            dtype = np.dtype(config.token_dtype).newbyteorder("<")
            if path.stat().st_size % dtype.itemsize:
                raise UserError(
                    f"{path} has {path.stat().st_size} bytes, no multiple of {dtype.itemsize}. State its data.token_dtype."
                )
            tokens = np.memmap(path, dtype, mode="r") if path.stat().st_size else np.zeros(0, dtype)
        else:
            raise UserError(f"data.paths: {path} is neither .npy nor .bin. Save tokens with numpy.save.")
    except OSError as error:
        raise UserError(f"data.paths: cannot read {path}: {error.strerror or error}.") from error
    except (ValueError, EOFError) as error:
        raise UserError(f"data.paths: {path} is not an .npy file: {error}.") from error
    if tokens.ndim not in (1, 2) or tokens.dtype.kind not in "iu" or not tokens.flags.c_contiguous:
        raise UserError(
            f"{path} holds {tokens.dtype} {tokens.shape}. Tokens are integers, (N,) or (rows, N) in C order: "
            "numpy.save(path, numpy.ascontiguousarray(tokens))."
        )
    if not tokens.size:
        raise UserError(f"data.paths: {path} is empty. Name files that contain tokens.")
    return tokens


def _cut_file(tokens: np.ndarray, config: DataConfig, name: str) -> Iterable[Rows]:
    """Training and held-out rows: of a stream its last rows, of rows the last of these, whole."""
    lengths = np.full(tokens.shape[0], tokens.shape[1]) if tokens.ndim == 2 else np.array([tokens.size])
    if tokens.shape[-1] < 2:
        raise UserError(f"{name} has rows of {tokens.shape[-1]} token. The first token of a row is no target: give 2 or more.")
    starts, sizes = cut(lengths, config.context)
    per_unit = len(starts) // len(tokens) if tokens.ndim == 2 else 1
    units = len(starts) // per_unit
    if units < 2:
        raise UserError(
            f"{name}: one row cannot be split into training and held-out rows. Give more tokens than data.context={config.context}."
        )
    held_out = min(max(1, round(config.held_out * units)), units - 1)
    cut_at = (units - held_out) * per_unit
    assert config.vocabulary is not None
    return [
        make_rows(
            tokens.reshape(-1), starts[part], sizes[part], context=config.context, vocabulary=config.vocabulary, padding=0,
            name=name,
        )
        for part in (slice(None, cut_at), slice(cut_at, None))
    ]  # fmt: skip


def _digest_file(path: Path) -> bytes:
    """Of the whole file, or of its size and evenly spaced blocks where it is larger than `WHOLE`."""
    size, block = path.stat().st_size, 2**16
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        if size <= WHOLE:
            digest.update(file.read())
        else:
            for place in np.linspace(0, size - block, BLOCKS).astype(int):
                file.seek(int(place))
                digest.update(file.read(block))
    return digest.digest()


LOADERS: dict[str, Callable[[DataConfig], Corpus]] = {
    "text": _text, "jsonl": _jsonl, "tokens": _token_files, "images": load_images, "shapes": load_shapes, "hf": _hf,
}  # fmt: skip
