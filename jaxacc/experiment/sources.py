"""`load`: from `[data]` to rows, for every source: text, conversations, token files, images."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxacc.experiment.config import DataConfig, UserError, check_data
from jaxacc.experiment.images import load_images, load_shapes
from jaxacc.experiment.pieces import cut
from jaxacc.experiment.readers import chat, check_text, help_topics, open_table, read_files, read_jsonl
from jaxacc.experiment.rows import Corpus as Corpus
from jaxacc.experiment.rows import Examples as Examples
from jaxacc.experiment.rows import Rows, check_tokens, digest_rows, hold_out, join, make_rows
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
    documents = read_files(config) if config.paths else help_topics()
    return _from_documents(config, documents, 'Give more files, or documents = "paragraph".')


def _jsonl(config: DataConfig) -> Corpus:
    return _from_chats(config, [example for path in map(Path, config.paths) for example in read_jsonl(path)])


def _hf(config: DataConfig) -> Corpus:
    """Columns `messages`, or `prompt` and `response`, or `text`: the first of these that the table has."""
    table, name = open_table(config), config.paths[0]
    columns = set(table.column_names)
    if "messages" in columns or {"prompt", "response"} <= columns:
        names = ["messages"] if "messages" in columns else ["prompt", "response"]
        rows = table.select_columns(names)
        return _from_chats(config, [chat(row, f"{name}, row {index}") for index, row in enumerate(rows)])
    if "text" not in columns:
        raise UserError(
            f"{name} has the columns {', '.join(sorted(columns))}. It needs text, or prompt and response, or "
            "messages: rename_column gives them these names."
        )
    documents = list(table["text"])
    for index, text in enumerate(documents):
        check_text(text, f"{name}, row {index}: text")
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
            f"data: none of {len(chats)} examples has a response within the context of {context} tokens. State a larger "
            "data.context."
        )
    notes = []
    if cut_short:
        notes.append(
            f"{cut_short} of {len(chats)} examples were longer than the context of {context} tokens: responses were cut."
        )
    if len(kept) < len(chats):
        notes.append(
            f"{len(chats) - len(kept)} of {len(chats)} examples have no response within the context of {context} tokens "
            "and were left out."
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
    return None if arrays is None else [arrays[index] for index in np.flatnonzero(chosen).tolist()]


def _rows(config: DataConfig, tokenizer: Tokenizer, sequences: Any, supervised: Any) -> Rows:
    starts, lengths = cut(np.array(list(map(len, sequences))), config.context)
    return make_rows(
        np.concatenate(sequences), starts, lengths, context=config.context, vocabulary=tokenizer.vocabulary,
        padding=next(iter(tokenizer.special.values())), packing=config.packing,
        supervised=None if supervised is None else np.concatenate(supervised),
    )  # fmt: skip


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
    return Corpus(join(parts[0]), join(parts[1]), digest.hexdigest(), config.vocabulary)


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
            f"{name}: one row cannot be split into training and held-out rows. Give more tokens than "
            f"data.context={config.context}."
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
