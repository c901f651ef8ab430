"""Rows of one shape by index: pieces of a stream of tokens, one or several in a row, and what a source gives."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from jaxacc.experiment.config import UserError
from jaxacc.experiment.pieces import pack, ranges

IGNORED = -100
AT_A_TIME = 2**20
"""Tokens that `label_counts` holds at a time."""


class Examples(Protocol):
    """Rows of one shape, by index."""

    @property
    def targets(self) -> np.ndarray:
        """`(R,)` int64: supervised tokens, or labelled pixels, of every row."""
        ...

    @property
    def fill(self) -> dict[str, int]:
        """What padding rows hold, by leaf."""
        ...

    def batch(self, indices: Any) -> dict[str, np.ndarray]:
        """Rows as leaves `(B, ...)`; a row depends on nothing but its index."""
        ...

    def label_counts(self) -> np.ndarray:
        """`(V,)` int64: how often every token or class is a target."""
        ...


class Corpus(NamedTuple):
    """What a source gives.

    Attributes:
      train: the rows to train on.
      held_out: the rows to evaluate on; nothing of them is in `train`.
      fingerprint: digest of what both hold.
      vocabulary: token ids, or classes, are below it.
      notes: what the user should hear once, each a sentence.
    """

    train: Examples
    held_out: Examples
    fingerprint: str
    vocabulary: int
    notes: tuple[str, ...] = ()


class Rows(NamedTuple):
    """Rows made of pieces of one stream of tokens, which is not copied. `make_rows` makes them.

    Attributes:
      stream: all tokens, `(N,)` integers, in memory or memory-mapped.
      starts: first token of every piece, `(P,)` int64, the pieces of a row one after the other.
      lengths: tokens of every piece, `(P,)` int64, at least 2.
      first: first piece of every row, and `P` at the end, `(R + 1,)` int64.
      targets: supervised tokens of every row, `(R,)` int64: the first token of a piece is none.
      context: tokens of a padded row.
      vocabulary: token ids are below it.
      padding: the token that fills up a row.
      packed: whether rows have the leaf `segment_ids`.
      supervised: which tokens may be targets, `(N,)` bool; None: all.
      name: of the stream, for errors.
    """

    stream: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    first: np.ndarray
    targets: np.ndarray
    context: int
    vocabulary: int
    padding: int
    packed: bool = False
    supervised: np.ndarray | None = None
    name: str = "the text"

    @property
    def fill(self) -> dict[str, int]:
        """Padding rows have no labels."""
        return {"labels": IGNORED}

    def batch(self, indices: Any) -> dict[str, np.ndarray]:
        """Rows as `tokens` and `labels`, `(B, context)` int32, and `segment_ids` if they are packed.

        Labels are the tokens themselves, not shifted, and -100 where nothing is supervised. Segments count from 1 in every
        row; padding is 0.

        Raises:
          UserError: for a token id that is not in the vocabulary.
        """
        chosen = np.asarray(indices, np.int64)
        pieces, row_of = ranges(self.first[chosen], self.first[chosen + 1] - self.first[chosen])
        places, piece = ranges(self.starts[pieces], self.lengths[pieces])
        row = row_of[piece]
        column = np.arange(len(row)) - np.searchsorted(row, row)
        found = np.asarray(self.stream[places])
        check_tokens(found, places, self.vocabulary, self.name)
        found = found.astype(np.int32)
        shape = (len(chosen), self.context)
        tokens, labels = np.full(shape, self.padding, np.int32), np.full(shape, IGNORED, np.int32)
        tokens[row, column] = found
        labels[row, column] = found if self.supervised is None else np.where(self.supervised[places], found, IGNORED)
        if not self.packed:
            return {"tokens": tokens, "labels": labels}
        number = np.arange(len(pieces)) - np.searchsorted(row_of, row_of)
        segments = np.zeros(shape, np.int32)
        segments[row, column] = 1 + number[piece]
        return {"tokens": tokens, "labels": labels, "segment_ids": segments}

    def label_counts(self) -> np.ndarray:
        """How often every token is a target, `(vocabulary,)` int64."""
        counts = np.zeros(self.vocabulary, np.int64)
        step = max(1, AT_A_TIME // self.context)
        for begin in range(0, len(self.starts), step):
            some = slice(begin, begin + step)
            places, _ = ranges(self.starts[some] + 1, self.lengths[some] - 1)
            if self.supervised is not None:
                places = places[self.supervised[places]]
            found = np.asarray(self.stream[places])
            check_tokens(found, places, self.vocabulary, self.name)
            counts += np.bincount(found.astype(np.int64), minlength=self.vocabulary)
        return counts


class Joined(NamedTuple):
    """The rows of several sources of one kind, one after the other. `join` makes it."""

    parts: tuple[Examples, ...]
    targets: np.ndarray

    @property
    def fill(self) -> dict[str, int]:
        """Of the first part: they are of one kind."""
        return self.parts[0].fill

    def batch(self, indices: Any) -> dict[str, np.ndarray]:
        """The rows in the order asked for."""
        indices = np.asarray(indices, np.int64)
        ends = np.cumsum([len(part.targets) for part in self.parts])
        owner = np.searchsorted(ends, indices, side="right")
        order = np.argsort(owner, kind="stable")
        begins = np.concatenate([[0], ends])
        batches = [self.parts[part].batch(indices[owner == part] - begins[part]) for part in np.unique(owner)]
        back = np.argsort(order)
        return {name: np.concatenate([batch[name] for batch in batches])[back] for name in batches[0]}

    def label_counts(self) -> np.ndarray:
        """Of all parts together."""
        return np.sum([part.label_counts() for part in self.parts], axis=0)


def join(parts: Sequence[Examples]) -> Examples:
    """The rows of all parts."""
    if len(parts) == 1:
        return parts[0]
    return Joined(tuple(parts), np.concatenate([part.targets for part in parts]))


def make_rows(
    stream: np.ndarray, starts: np.ndarray, lengths: np.ndarray, *, context: int, vocabulary: int, padding: int,
    packing: bool = False, supervised: np.ndarray | None = None, name: str = "the text",
) -> Rows:  # fmt: skip
    """Rows of one piece each, or of as many whole pieces as `pack` finds room for."""
    first = np.arange(len(starts) + 1)
    if packing:
        order, first = pack(lengths, context)
        starts, lengths = starts[order], lengths[order]
    if supervised is None:
        per_piece = lengths - 1
    else:
        before = np.concatenate([[0], np.cumsum(supervised, dtype=np.int64)])
        per_piece = before[starts + lengths] - before[starts + 1]
    targets = np.add.reduceat(per_piece, first[:-1], dtype=np.int64)
    return Rows(stream, starts, lengths, first, targets, context, vocabulary, padding, packing, supervised, name)


def check_tokens(tokens: np.ndarray, places: np.ndarray | range, vocabulary: int, name: str) -> None:
    """Raise `UserError` for the first token that is negative or not below the vocabulary, with its place in the stream."""
    if len(tokens) == 0 or (tokens.max() < vocabulary and tokens.min() >= 0):
        return
    bad = int(np.argmax((tokens >= vocabulary) | (tokens < 0)))
    raise UserError(
        f"{name}: token id {int(tokens[bad])} at position {int(places[bad])} is not in the vocabulary of {vocabulary}. State "
        "the data.vocabulary of the tokenizer that wrote the file, and for a .bin its data.token_dtype."
    )


def hold_out(keys: Sequence[bytes], share: float, *, sizes: Sequence[int], single: str) -> tuple[np.ndarray, int]:
    """Choose whole examples by their own digest, until they hold `share` of the size; equal ones stay together.

    The choice does not depend on the order of the examples.

    Args:
      keys: what an example is known by, its text for instance.
      share: of the size, more than 0 and less than 1.
      sizes: of every example, bytes for instance.
      single: the error where there are not two different examples.

    Returns:
      Which examples are held out, `(N,)` bool, and how many repeat an earlier one.
    """
    members: dict[bytes, list[int]] = {}
    for index, key in enumerate(keys):
        members.setdefault(hashlib.sha256(key).digest(), []).append(index)
    if len(members) < 2:
        raise UserError(single)
    held_out = np.zeros(len(keys), bool)
    wanted, held = share * sum(sizes), 0
    for digest in sorted(members)[:-1]:
        size = sum(sizes[index] for index in members[digest])
        if held and held + size / 2 > wanted:
            continue
        held_out[members[digest]] = True
        held += size
    return held_out, len(keys) - len(members)


def digest_rows(*corpus: Rows) -> str:
    """Digest of all tokens and of how rows are made of them."""
    digest = hashlib.sha256()
    for rows in corpus:
        for array in (rows.stream, *_layout(rows)):
            digest.update(np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes())
    return digest.hexdigest()


def _layout(rows: Rows) -> Iterator[np.ndarray]:
    """The arrays that say how rows are made of the stream."""
    yield from (rows.starts, rows.lengths)
    if rows.packed:
        yield rows.first
    if rows.supervised is not None:
        yield rows.supervised
