"""Text to windows: documents, byte tokens, ragged rows, a held-out split, and a row order with a position."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxacc._split import Split, split_batch
from jaxacc.experiment.config import DataConfig, TrainConfig, UserError

BOUNDARY = 256
"""The token before and after every document; 0 to 255 are bytes."""
VOCABULARY = 257
IGNORED = -100


class Rows(NamedTuple):
    """Rows of different length, cut from one stream of tokens without being copied.

    Attributes:
      stream: all tokens, `(N,)` uint16.
      starts: first token of every row, `(R,)`.
      lengths: tokens of every row, `(R,)`, 2 to `context`. A row of T tokens has T - 1 targets.
      context: tokens of a padded row.
    """

    stream: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    context: int

    @property
    def targets(self) -> int:
        """Supervised tokens of one pass over the rows."""
        return int(np.sum(self.lengths - 1))

    def batch(self, indices: Any) -> dict[str, np.ndarray]:
        """Rows as `tokens` and `labels`, `(B, context)` int32; labels are -100 where there is no token."""
        indices = np.asarray(indices)
        offsets = np.arange(self.context)
        real = offsets < self.lengths[indices, None]
        places = np.where(real, self.starts[indices, None] + offsets, 0)
        tokens = np.where(real, self.stream[places], BOUNDARY).astype(np.int32)
        return {"tokens": tokens, "labels": np.where(real, tokens, IGNORED)}


class Corpus(NamedTuple):
    """Training and held-out rows, and a digest of both."""

    train: Rows
    held_out: Rows
    fingerprint: str


class Schedule(NamedTuple):
    """The run in rows: windows take `effective_batch` rows of the order, the last one what is left.

    Attributes:
      updates: windows of the whole run.
      examples: rows of the whole run.
    """

    updates: int
    examples: int


def load(config: DataConfig) -> Corpus:
    """Read the documents and split them, or raise `UserError` for files that are missing, empty or not text."""
    documents = _read_files(config) if config.paths else _help_topics()
    train, held_out = _split(documents, config.held_out)
    corpus = [_rows(part, config.context) for part in (train, held_out)]
    digest = hashlib.sha256()
    for rows in corpus:
        for array in (rows.stream, rows.starts, rows.lengths):
            digest.update(np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes())
    return Corpus(corpus[0], corpus[1], digest.hexdigest())


def order(rows: Rows, seed: int) -> Any:
    """The endless order of the rows: entry `p` is the row at position `p`, shuffled anew in every epoch."""
    import grain  # several seconds

    return grain.MapDataset.range(len(rows.starts)).seed(seed).shuffle().repeat()


def schedule(train: TrainConfig, rows: Rows, effective_batch: int) -> Schedule:
    """How many windows and rows the stated duration takes, exactly."""
    if train.updates is not None:
        return Schedule(train.updates, train.updates * effective_batch)
    if train.epochs is not None:
        examples = train.epochs * len(rows.starts)
        return Schedule(-(-examples // effective_batch), examples)
    assert train.tokens is not None
    epochs, missing = divmod(train.tokens, rows.targets)
    position = epochs * len(rows.starts)
    if missing:
        sequence = order(rows, train.seed)
        while missing > 0:
            missing -= int(rows.lengths[sequence[position]]) - 1
            position += 1
    updates = -(-position // effective_batch)
    return Schedule(updates, updates * effective_batch)


def windows(rows: Rows, plan: Schedule, split: Split, *, seed: int, start: int = 0) -> Iterator[dict[str, np.ndarray]]:
    """The windows from position `start` (rows consumed so far) to the end: leaves `(A, m * D, ...)`."""
    sequence = order(rows, seed)
    for first in range(start, plan.examples, split.effective_batch):
        indices = [sequence[position] for position in range(first, min(first + split.effective_batch, plan.examples))]
        yield _window(rows, indices, split)


def held_out_windows(rows: Rows, split: Split) -> Iterator[dict[str, np.ndarray]]:
    """All held-out rows, once, in windows of the training shape."""
    for first in range(0, len(rows.starts), split.effective_batch):
        yield _window(rows, range(first, min(first + split.effective_batch, len(rows.starts))), split)


def unigram_entropy(rows: Rows) -> float:
    """Entropy in nats of the frequencies of the targets: what a model without context could reach at best."""
    counts = np.zeros(VOCABULARY, np.int64)
    for first in range(0, len(rows.starts), 1024):
        labels = rows.batch(range(first, min(first + 1024, len(rows.starts))))["labels"][:, 1:]
        counts += np.bincount(labels[labels != IGNORED], minlength=VOCABULARY)
    frequencies = counts[counts > 0] / counts.sum()
    return float(-np.sum(frequencies * np.log(frequencies)))


def _window(rows: Rows, indices: Any, split: Split) -> dict[str, np.ndarray]:
    """A window of the split's shape; missing rows are filled, without labels and with `row_mask` False."""
    real = len(indices)
    filled = [*indices, *[indices[-1]] * (split.effective_batch - real)]
    batch = rows.batch(filled)
    batch["labels"][real:] = IGNORED
    batch["row_mask"] = np.arange(len(filled)) < real
    return split_batch(batch, accumulation_steps=split.accumulation_steps)


def _help_topics() -> list[bytes]:
    """The sections of all help topics; topics repeat each other, so a paragraph is taken where it first occurs."""
    from pydoc_data.topics import topics

    seen: set[str] = set()
    sections = []
    for section in (part for name in sorted(topics) for part in re.split(r"\n{3,}", topics[name])):
        fresh = [part.strip("\n") for part in _paragraphs(section) if part.strip() not in seen]
        seen.update(part.strip() for part in fresh)
        if fresh:
            sections.append("\n\n".join(fresh).encode())
    return sections


def _paragraphs(text: str) -> list[str]:
    return [part for part in re.split(r"\n\s*\n", text) if part.strip()]


def _read_files(config: DataConfig) -> list[bytes]:
    documents = []
    for path in map(Path, config.paths):
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise UserError(f"data.paths: cannot read {path}: {error.strerror}.") from error
        except UnicodeDecodeError as error:
            raise UserError(f"data.paths: {path} is not UTF-8 text: {error}.") from error
        parts = [text] if config.documents == "file" else _paragraphs(text)
        found = [part.strip().encode() for part in parts if part.strip()]
        if not found:
            raise UserError(f"data.paths: {path} is empty. Name files that contain text.")
        documents += found
    return documents


def _split(documents: list[bytes], share: float) -> tuple[list[bytes], list[bytes]]:
    """Hold out whole documents, chosen by their own digest, until they hold `share` of the bytes."""
    if len(documents) < 2:
        raise UserError(
            'data: one document cannot be split into training and held-out text. Give more files, or documents = "paragraph".'
        )
    by_digest = sorted(range(len(documents)), key=lambda index: hashlib.sha256(documents[index]).digest())
    wanted = share * sum(map(len, documents))
    chosen: set[int] = set()
    held = 0
    for index in by_digest[:-1]:
        if chosen and held + len(documents[index]) / 2 > wanted:
            continue
        chosen.add(index)
        held += len(documents[index])
    parts = [[doc for i, doc in enumerate(documents) if (i in chosen) is held_out] for held_out in (False, True)]
    return parts[0], parts[1]


def _rows(documents: list[bytes], context: int) -> Rows:
    """Cut every document into rows of `context` tokens that overlap by one, so that every byte is predicted once."""
    pieces, starts, lengths, offset = [], [], [], 0
    for document in documents:
        tokens = np.concatenate([[BOUNDARY], np.frombuffer(document, np.uint8), [BOUNDARY]]).astype(np.uint16)
        cuts = np.arange(0, len(tokens) - 1, context - 1)
        pieces.append(tokens)
        starts.append(offset + cuts)
        lengths.append(np.minimum(len(tokens) - cuts, context))
        offset += len(tokens)
    return Rows(np.concatenate(pieces), np.concatenate(starts), np.concatenate(lengths), context)
