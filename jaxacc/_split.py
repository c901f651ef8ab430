"""The arithmetic of rows: microbatch x accumulation steps x replicas = effective batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxacc._tree import PyTree

ROW_MASK = "row_mask"
ROW_IDS = "row_ids"
ROW_POSITION = "row_position"


class Split(NamedTuple):
    """How an effective batch is cut: `effective_batch = microbatch * accumulation_steps * replicas` rows."""

    microbatch: int
    accumulation_steps: int
    replicas: int = 1

    @property
    def effective_batch(self) -> int:
        """Rows behind one update."""
        return self.microbatch * self.accumulation_steps * self.replicas


def solve_split(
    *,
    effective_batch: int | None = None,
    microbatch: int | None = None,
    accumulation_steps: int | None = None,
    replicas: int = 1,
) -> Split:
    """Find the third of effective batch, microbatch and accumulation steps from the other two.

    Args:
      effective_batch: rows behind one update.
      microbatch: rows of one forward and backward pass on one replica.
      accumulation_steps: microbatches per window.
      replicas: data-parallel replicas.

    Returns:
      The `Split`.

    Raises:
      ValueError: a quantity below 1 or not whole, fewer than two quantities, three that contradict each other, or an
        effective batch that does not divide. The message names the nearest ones that do.

    >>> import jaxacc
    >>> jaxacc.solve_split(effective_batch=96, microbatch=8)
    Split(microbatch=8, accumulation_steps=12, replicas=1)
    """
    effective_batch, microbatch, accumulation_steps = _counts(
        effective_batch=effective_batch, microbatch=microbatch, accumulation_steps=accumulation_steps
    )
    replicas = _counts(replicas=replicas)[0] or 1
    if microbatch is not None and accumulation_steps is not None:
        split = Split(microbatch, accumulation_steps, replicas)
        if effective_batch is not None and effective_batch != split.effective_batch:
            raise ValueError(
                f"effective_batch={effective_batch} contradicts microbatch {microbatch} x accumulation_steps "
                f"{accumulation_steps} x replicas {replicas} = {split.effective_batch}. State two of the three."
            )
        return split
    if effective_batch is not None and microbatch is not None:
        return Split(microbatch, _divide(effective_batch, "microbatch", microbatch, replicas), replicas)
    if effective_batch is not None and accumulation_steps is not None:
        return Split(_divide(effective_batch, "accumulation_steps", accumulation_steps, replicas), accumulation_steps, replicas)
    raise ValueError(
        f"two of effective_batch, microbatch and accumulation_steps are needed, got effective_batch={effective_batch}, "
        f"microbatch={microbatch}, accumulation_steps={accumulation_steps}."
    )


def _counts(**given: Any) -> list[int | None]:
    """The quantities as Python integers, None where not given, or the error that names the one that is no count."""
    for name, value in given.items():
        if value is not None and not hasattr(value, "__index__"):
            raise ValueError(f"{name}={value!r} is not a whole number. Use a positive integer.")
        if value is not None and value < 1:
            raise ValueError(f"{name}={value} is less than 1. Use a positive number.")
    return [None if value is None else int(value) for value in given.values()]


def _divide(effective_batch: int, name: str, value: int, replicas: int) -> int:
    """`effective_batch / (value * replicas)`, or the error that names what would divide."""
    unit = value * replicas
    if effective_batch % unit == 0:
        return effective_batch // unit
    below = effective_batch // unit * unit
    near = " or ".join(str(rows) for rows in (below, below + unit) if rows > 0)
    remedy = f"set effective_batch to {near}."
    if effective_batch % replicas == 0:
        rows = effective_batch // replicas
        divisors = sorted((d for d in range(1, rows + 1) if rows % d == 0), key=lambda d: abs(d - value))
        nearest = ", ".join(map(str, sorted(divisors[:2])))
        remedy = f"use {name} dividing {rows} ({nearest}, ...) or {remedy}"
    raise ValueError(
        f"effective_batch={effective_batch} is not divisible by {name} {value} x replicas {replicas}. "
        f"{remedy[0].upper()}{remedy[1:]}"
    )


def split_batch(
    batch: PyTree,
    *,
    accumulation_steps: int | None = None,
    microbatch: int | None = None,
    pad: bool = False,
) -> PyTree:
    """Cut a batch of `B` rows into a window: every leaf `(B, ...)` becomes `(A, m, ...)`, strided.

    Row `r` goes to microbatch `r % A` at place `r // A`, so that a batch whose rows are sharded over a mesh is cut
    without moving a row between devices. NumPy arrays stay NumPy arrays (views where possible).

    Args:
      batch: a tree of arrays that agree on their leading dimension, the rows.
      accumulation_steps: `A`, or
      microbatch: the rows of one microbatch, `m` (on a mesh those of all replicas, `m·D`). State exactly one of the
        two; with `pad=True` both may be stated, and the batch is filled up to exactly `A·m` rows.
      pad: fill up a batch (a dict) that does not divide. The filling repeats the last row and the leaf `row_mask`
        (bool, `(A, m)`) is False there; an existing `row_mask` is extended. It costs no weight if the loss
        weighs its rows: see `Mean`. A process without rows of its own gives any row with a False `row_mask`.

    Returns:
      The window.

    Raises:
      ValueError: leaves that disagree on their rows, no rows, a batch that does not divide or has more rows than
        stated, or padding a batch that is not a dict.

    >>> import jax.numpy as jnp, jaxacc
    >>> jaxacc.split_batch(jnp.arange(6), accumulation_steps=3).tolist()
    [[0, 3], [1, 4], [2, 5]]
    """
    rows = _rows_of(batch)
    both = accumulation_steps is not None and microbatch is not None
    if (accumulation_steps is None and microbatch is None) or (both and not pad):
        raise ValueError(
            "state exactly one of accumulation_steps and microbatch; the rows of the batch give the other. With pad=True "
            "both may be stated, to fill the batch up."
        )
    accumulation_steps, microbatch = _counts(accumulation_steps=accumulation_steps, microbatch=microbatch)
    if pad:
        padded = _padded_rows(rows, accumulation_steps, microbatch)
        batch, rows = _pad(batch, rows, padded), padded
    try:
        split = solve_split(effective_batch=rows, microbatch=microbatch, accumulation_steps=accumulation_steps)
    except ValueError as error:
        raise ValueError(f"{error} Or fill the batch up with padding: pad=True.") from error

    def cut(leaf: Any) -> Any:
        shape = (split.microbatch, split.accumulation_steps, *leaf.shape[1:])
        return leaf.reshape(shape).swapaxes(0, 1)

    return jax.tree.map(cut, batch)


def _rows_of(batch: PyTree) -> int:
    shapes = {jax.tree_util.keystr(path): np.shape(leaf) for path, leaf in jax.tree.leaves_with_path(batch)}
    rows = {shape[0] if shape else None for shape in shapes.values()}
    if len(rows) != 1 or None in rows:
        raise ValueError(f"every leaf of a batch must have the rows as its leading dimension, got shapes {shapes}.")
    if rows == {0}:
        raise ValueError(f"the batch has no rows: shapes {shapes}.")
    return rows.pop() or 0


def _padded_rows(rows: int, accumulation_steps: int | None, microbatch: int | None) -> int:
    if accumulation_steps is not None and microbatch is not None:
        stated = solve_split(accumulation_steps=accumulation_steps, microbatch=microbatch).effective_batch
        if rows > stated:
            raise ValueError(
                f"the batch has {rows} rows, more than accumulation_steps {accumulation_steps} x microbatch {microbatch} = "
                f"{stated}. Use more accumulation steps, or split the batch over several windows."
            )
        return stated
    unit = accumulation_steps or microbatch or 1
    return -(-rows // unit) * unit


def _pad(batch: PyTree, rows: int, padded: int) -> PyTree:
    if not isinstance(batch, Mapping):
        raise ValueError(f"pad=True adds the leaf {ROW_MASK!r}, so the batch must be a dict, got {type(batch).__name__}.")
    mask = batch.get(ROW_MASK, np.ones(rows, bool))

    def fill(leaf: Any) -> Any:
        numpy = np if isinstance(leaf, np.ndarray) else jnp
        return numpy.concatenate([leaf, numpy.repeat(leaf[-1:], padded - rows, axis=0)])

    extended = (np if isinstance(mask, np.ndarray) else jnp).concatenate([mask, np.zeros(padded - rows, bool)])
    return {**jax.tree.map(fill, batch), ROW_MASK: extended}


def check_window(window: PyTree) -> tuple[int, int]:
    """Read `(A, m)` off a window, or raise `ValueError` before anything is traced.

    Every leaf must have shape `(A, m, ...)` with the same `A >= 1` and `m >= 1`, and `row_mask` must be bool `(A, m)`.
    """
    shapes = {jax.tree_util.keystr(path): np.shape(leaf) for path, leaf in jax.tree.leaves_with_path(window)}
    remedy = "Every leaf must have shape (A, m, ...); jaxacc.split_batch makes such a window from a batch."
    leading = {shape[:2] for shape in shapes.values()}
    if len(leading) != 1 or len(next(iter(leading))) < 2:
        raise ValueError(f"the leaves of the window disagree on (accumulation steps, rows): {shapes}. {remedy}")
    accumulation_steps, rows = leading.pop()
    if accumulation_steps < 1 or rows < 1:
        raise ValueError(f"the window has {accumulation_steps} microbatches of {rows} rows; both must be at least 1. {remedy}")
    mask = row_mask_of(window)
    if mask is not None and (mask.dtype != np.bool_ or mask.ndim != 2):
        raise ValueError(f"{ROW_MASK} must be a bool array (A, m), got {mask.dtype} {mask.shape}. True marks a real row.")
    return accumulation_steps, rows


def row_mask_of(window: PyTree) -> Any:
    """The reserved leaf `row_mask` of a dict window or microbatch, or None."""
    return reserved_leaf(window, ROW_MASK)


def reserved_leaf(window: PyTree, name: str) -> Any:
    """A leaf whose name has a meaning, of a dict window or microbatch, or None."""
    return window.get(name) if isinstance(window, Mapping) else None
