"""Pieces of a stream of tokens: where sequences are cut, and which pieces share a row."""

from __future__ import annotations

import numpy as np


def cut(lengths: np.ndarray, context: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut sequences that follow each other in a stream into pieces of at most `context` tokens.

    The pieces of a sequence overlap by one token, so that every token but its first is a target once.

    Args:
      lengths: tokens of every sequence, `(S,)`, at least 2.
      context: most tokens of a piece, at least 2.

    Returns:
      First token and tokens of every piece, `(P,)` int64 each.

    >>> [part.tolist() for part in cut(np.array([5, 2]), 4)]
    [[0, 3, 5], [4, 2, 2]]
    """
    lengths = np.asarray(lengths, np.int64)
    ends = np.cumsum(lengths)
    counts = -(-(lengths - 1) // (context - 1))
    number, sequence = ranges(np.zeros_like(counts), counts)
    starts = (ends - lengths)[sequence] + number * (context - 1)
    return starts, np.minimum(ends[sequence] - starts, context)


def pack(lengths: np.ndarray, context: int) -> tuple[np.ndarray, np.ndarray]:
    """Put pieces into rows of `context` tokens: the longest first, each where the least room is left that takes it.

    This is best-fit decreasing: linear in the pieces, and the same for the same lengths.

    Args:
      lengths: tokens of every piece, `(P,)`, none longer than `context`.
      context: tokens of a row.

    Returns:
      The pieces row by row, `(P,)`, and the first of every row with `P` at the end, `(R + 1,)`.

    >>> order, first = pack(np.array([3, 6, 2, 5, 4]), 10)
    >>> [order[begin:end].tolist() for begin, end in zip(first[:-1], first[1:])]
    [[1, 4], [3, 0, 2]]
    """
    rows: list[list[int]] = []
    waiting: list[list[int]] = [[] for _ in range(context + 1)]  # rows by the room left in them
    rooms = 0  # bit r: a row with room r waits
    sizes = np.asarray(lengths).tolist()
    for piece in np.argsort(-np.asarray(lengths), kind="stable").tolist():
        fitting = rooms >> sizes[piece]
        if fitting:
            room = sizes[piece] + (fitting & -fitting).bit_length() - 1
            row = waiting[room].pop()
            rooms ^= 0 if waiting[room] else 1 << room
        else:
            room, row = context, len(rows)
            rows.append([])
        rows[row].append(piece)
        left = room - sizes[piece]
        waiting[left].append(row)
        rooms |= 1 << left
    first = np.cumsum([0, *map(len, rows)])
    return np.array([piece for row in rows for piece in row], np.int64), first


def ranges(starts: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`start, start + 1, ...` for every start, as many as its length, one after the other; and whose each one is."""
    owner = np.repeat(np.arange(len(lengths)), lengths)
    before = np.cumsum(lengths) - lengths
    return np.arange(len(owner)) + (starts - before)[owner], owner
