"""Random keys: one per window, replica and microbatch, all distinct, whatever came before."""

from __future__ import annotations

import jax

from jaxacc._ledger import Counter


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
