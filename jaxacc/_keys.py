"""Random keys: by window, replica and microbatch, or by window and row; all distinct, whatever came before."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from jaxacc._ledger import Counter
from jaxacc._split import ROW_POSITION, reserved_leaf
from jaxacc._tree import PyTree


def window_key(key: jax.Array | None, attempted: Counter) -> jax.Array | None:
    """The key of a window: `key` folded with the number of windows attempted so far."""
    if key is None:
        return None
    return jax.random.fold_in(jax.random.fold_in(key, attempted.high), attempted.low)


def microbatch_key(key: jax.Array | None, index: jax.Array, axes: tuple[str, ...] = ()) -> jax.Array | None:
    """The key of microbatch `index` on this replica, from the key of its window."""
    if key is None:
        return None
    key = jax.random.fold_in(key, index)
    return jax.random.fold_in(key, jax.lax.axis_index(axes)) if axes else key


def row_keys(
    key: jax.Array | None, index: jax.Array, steps: int | None, microbatch: PyTree, axes: tuple[str, ...] = ()
) -> jax.Array | None:
    """One key per row `(m,)` of microbatch `index`: the window's key folded with the row's position in the effective batch.

    The position is the leaf `row_position`, or what `split_batch` gives row `i` of microbatch `a` of replica `d`:
    `(d * m + i) * A + a`, with `A` = `steps`. Either is the same for every split of the effective batch.
    """
    if key is None:
        return None
    position = reserved_leaf(microbatch, ROW_POSITION)
    if position is None:
        if steps is None:
            raise ValueError(
                f"row_keys=True needs the leaf {ROW_POSITION!r} in a streamed microbatch: int32 (rows,), each row's place in "
                "the effective batch, which a microbatch alone does not know."
            )
        rows = jax.tree.leaves(microbatch)[0].shape[0]
        replica = jax.lax.axis_index(axes) if axes else 0
        position = (replica * rows + jnp.arange(rows, dtype=jnp.int32)) * steps + index
    elif not jnp.issubdtype(position.dtype, jnp.integer) or position.ndim != 1:
        raise ValueError(f"{ROW_POSITION} must hold one integer per row, got {position.dtype} {position.shape}.")
    return jax.vmap(partial(jax.random.fold_in, key))(position)
