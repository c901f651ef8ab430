"""Read rows from examples or batches, check that they agree, and stack them into a window."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxacc._split import ROW_IDS, ROW_MASK

ROW_POSITION = "row_position"
FILL = {"labels": -100, "mask": 0}
"""What padding rows hold by default, in leaves of these names; in all other leaves they repeat the last real row."""

Row = Mapping[str, np.ndarray]
Window = dict[str, np.ndarray]


class Input(NamedTuple):
    batched: bool
    tokens: Callable[[Row], int]
    fill: Mapping[str, Any] | None
    check_row_ids: bool
    check_finite: bool


def token_counter(tokens: str | Callable[[Row], int] | None) -> Callable[[Row], int]:
    if tokens is None:
        return lambda row: 0
    if not isinstance(tokens, str):
        return tokens

    def total(row: Row) -> int:
        if tokens not in row:
            raise ValueError(f"tokens={tokens!r} is not a leaf of the rows, which have {sorted(row)}.")
        leaf = np.asarray(row[tokens])
        if leaf.dtype.kind not in "biu" or np.any(leaf < 0):
            raise ValueError(
                f"tokens={tokens!r} must be a mask or a number of tokens, integers of at least 0. For labels give a "
                "function: tokens=lambda row: int((row['labels'][1:] != -100).sum())."
            )
        return int(np.sum(leaf, dtype=np.int64))

    return total


def read_rows(items: Iterable[Mapping[str, Any]], batched: bool) -> Iterator[Row]:
    for index, item in enumerate(items):
        where = f"{'batch' if batched else 'example'} {index}"
        if not isinstance(item, Mapping) or not item:
            raise ValueError(f"{where} is a {type(item).__name__}. It must be a dict of arrays with a leaf at least.")
        arrays = {name: _array(leaf, f"leaf {name!r} of {where}") for name, leaf in item.items()}
        if not batched:
            yield arrays
            continue
        shapes = {name: array.shape for name, array in arrays.items()}
        if len({shape[:1] for shape in shapes.values()}) != 1 or () in shapes.values():
            raise ValueError(f"the leaves of {where} must agree on a leading row axis, got shapes {shapes}.")
        yield from ({name: array[row] for name, array in arrays.items()} for row in range(len(next(iter(arrays.values())))))


def _array(leaf: Any, where: str) -> np.ndarray:
    """A copy: loaders reuse their buffers, and a row waits until its window is full."""
    try:
        array = np.array(leaf)
    except ValueError as error:
        raise ValueError(f"{where} is ragged: {error}. Pad it to one length.") from error
    if array.dtype.kind in "OSUMm":
        raise ValueError(f"{where} has dtype {array.dtype}. Leaves must be numbers or bools; encode text before.")
    return array


def check_leaves(row: Row, options: Input, where: str) -> None:
    reserved = sorted({ROW_MASK, ROW_POSITION} & set(row))
    if reserved:
        raise ValueError(f"{where} has {reserved}, which windows writes. Rename them; leave padding rows out of the source.")
    if options.check_row_ids and ROW_IDS not in row:
        raise ValueError(f"check_row_ids=True needs the leaf {ROW_IDS!r}; {where} has {sorted(row)}.")
    unknown = sorted(set(options.fill or ()) - set(row))
    if unknown:
        raise ValueError(f"fill names {unknown}, which {where} has not: its leaves are {sorted(row)}.")
    for name, value in (FILL if options.fill is None else options.fill).items():
        if name in row and not _holds(np.asarray(row[name]).dtype, value):
            raise ValueError(
                f"leaf {name!r} of dtype {row[name].dtype} cannot hold the fill value {value!r} of padding rows. State "
                f"one that it can hold and the loss ignores: fill={{{name!r}: ...}}."
            )


def _holds(dtype: np.dtype, value: Any) -> bool:
    try:
        return bool(np.full((), value, dtype) == value or value != value)
    except (OverflowError, TypeError, ValueError):
        return False


def check_row(row: Row, first: Row, where: str) -> None:
    if row.keys() != first.keys():
        missing, extra = sorted(first.keys() - row.keys()), sorted(row.keys() - first.keys())
        raise ValueError(
            f"{where} has other leaves than the first row: missing {missing}, not seen before {extra}. Every row needs the "
            "same leaves; fill in a value that the loss ignores."
        )
    for name, leaf in row.items():
        if leaf.shape != first[name].shape or leaf.dtype != first[name].dtype:
            raise ValueError(
                f"leaf {name!r} of {where} is {leaf.dtype} {leaf.shape}, in the first row {first[name].dtype} "
                f"{first[name].shape}. Rows must agree: pad them to one length, with labels that the loss ignores."
            )


def check_finite_row(row: Row, where: str) -> None:
    for name, leaf in row.items():
        if not np.all(np.isfinite(leaf)):
            raise ValueError(
                f"leaf {name!r} of {where} has NaN or infinite entries. Clean the source, or do not ask (check_finite)."
            )


def check_id(row: Row, seen: set[bytes], where: str) -> None:
    identity = np.asarray(row[ROW_IDS]).tobytes()
    if identity in seen:
        raise ValueError(f"{where} repeats {ROW_IDS} {row[ROW_IDS]!s}. Ids must differ within a pass: remove the duplicate.")
    seen.add(identity)


def stack(rows: list[Row], steps: int, unit: int, fill: Mapping[str, Any]) -> Window:
    total = steps * unit
    filler = {name: np.full_like(leaf, fill[name]) if name in fill else leaf for name, leaf in rows[-1].items()}
    padded = [*rows, *[filler] * (total - len(rows))]
    flat = {name: np.stack([row[name] for row in padded]) for name in filler}
    flat |= {ROW_MASK: np.arange(total) < len(rows), ROW_POSITION: np.arange(total, dtype=np.int32)}
    return {name: leaf.reshape(steps, unit, *leaf.shape[1:]) for name, leaf in flat.items()}
