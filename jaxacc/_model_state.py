"""Model state (batch statistics, fp8 maxima, router counts) over a window: each leaf reduces as it was declared to."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp

from jaxacc._mean import Max, identity
from jaxacc._tree import PyTree, at_least_float32, is_inexact

StateReduction = Literal["sequential", "mean", "sum", "max"]


class StateSums(NamedTuple):
    """The model state of the microbatches so far.

    Attributes:
      leaves: what the reduction of every leaf needs: the newest value where that is sequential, else the sum of the new
        values, the sum of their differences to the start, or their maximum.
      touched: microbatches of weight > 0, the only ones that touch the state.
    """

    leaves: PyTree
    touched: jax.Array


def reductions_of(state: PyTree, declared: PyTree) -> PyTree:
    """A tree like `state` of the declared reductions, which may be a prefix of it.

    Raises:
      ValueError: no such reduction, no prefix, or a leaf that cannot reduce so.
    """
    names = get_args(StateReduction)
    if unknown := [name for name in jax.tree.leaves(declared) if name not in names]:
        raise ValueError(f"state_reduction holds {unknown[0]!r}, which is not one of {', '.join(names)}.")
    try:
        reductions = jax.tree.map(lambda name, part: jax.tree.map(lambda _: name, part), declared, state)
    except ValueError as error:
        raise ValueError(f"state_reduction is no tree prefix of the model state: {error}") from error

    def check(path: Any, leaf: Any, how: str) -> None:
        dtype = jnp.result_type(leaf)
        numeric = jnp.issubdtype(dtype, jnp.number)
        if (how == "mean" and not is_inexact(leaf)) or (how in ("sum", "max") and not numeric):
            raise ValueError(f"the model state {jax.tree_util.keystr(path)} is {dtype}, which has no {how}.")

    jax.tree_util.tree_map_with_path(check, state, reductions)
    return reductions


def untouched(state: PyTree, reductions: PyTree) -> StateSums:
    """The sums of no microbatches, from the state at the start of the window."""

    def start(leaf: Any, how: str) -> Any:
        if how == "sequential":
            return leaf
        if how == "max":
            return identity(Max(leaf)).value
        return jnp.zeros_like(leaf, at_least_float32(leaf.dtype) if is_inexact(leaf) else leaf.dtype)

    return StateSums(jax.tree.map(start, state, reductions), jnp.int32(0))


def seen(state: PyTree, sums: StateSums, reductions: PyTree) -> PyTree:
    """The state that the next microbatch reads: the newest of a sequential leaf, that of the window's start of the others."""
    return jax.tree.map(lambda old, new, how: new if how == "sequential" else old, state, sums.leaves, reductions)


def touch(state: PyTree, sums: StateSums, new: PyTree, reductions: PyTree, touches: jax.Array) -> StateSums:
    """The sums after a microbatch that made `new`, if it `touches` the state."""

    def add(old: Any, so_far: Any, new: Any, how: str) -> Any:
        if how == "sequential":
            added = new
        elif how == "max":
            added = jnp.maximum(so_far, new)
        elif how == "mean":
            added = so_far + new.astype(so_far.dtype)
        else:
            added = so_far + (new.astype(so_far.dtype) - old.astype(so_far.dtype))
        return jnp.where(touches, added, so_far)

    leaves = jax.tree.map(add, state, sums.leaves, new, reductions)
    return StateSums(leaves, sums.touched + touches.astype(jnp.int32))


def conclude(state: PyTree, sums: StateSums, reductions: PyTree, axes: tuple[str, ...]) -> PyTree:
    """The state after the window, over all replicas of `axes`; the old where no microbatch touched it.

    Of sequential leaves, floats are averaged over the replicas that touched theirs; others are taken from the first of them.
    """
    if state is None:
        return None
    total = _sum(sums.touched, axes)

    def end(old: Any, leaf: Any, how: str) -> Any:
        if how == "sequential":
            new = _joined(leaf, sums.touched > 0, axes)
        elif how == "max":
            new = jax.lax.pmax(leaf, axes) if axes else leaf
        elif how == "mean":
            new = _sum(leaf, axes) / jnp.maximum(total, 1).astype(leaf.real.dtype)
        else:
            new = old.astype(leaf.dtype) + _sum(leaf, axes)
        new = new if new.dtype == old.dtype else new.astype(old.dtype)  # keys cannot be cast
        return jnp.where(total > 0, new, old)

    return jax.tree.map(end, state, sums.leaves, reductions)


def join(sums: StateSums, reductions: PyTree, entries: int) -> StateSums:
    """Give sums with a leading axis over replicas one of other length, as if replica 0 had touched all of the state."""
    touched = sums.touched > 0

    def first_holds(total: jax.Array, others: jax.Array) -> jax.Array:
        return jnp.concatenate([total[None], jnp.broadcast_to(others, (entries - 1, *total.shape))])

    def fit(leaf: jax.Array, how: str) -> jax.Array:
        if how == "max":
            return jnp.broadcast_to(jnp.max(leaf, axis=0), (entries, *leaf.shape[1:]))
        if how == "sequential":
            newest = leaf[jnp.argmax(touched)]
            if is_inexact(leaf):
                shares = touched / jnp.maximum(jnp.sum(touched), 1)
                mean = jnp.tensordot(shares.astype(at_least_float32(leaf.dtype)), leaf.astype(at_least_float32(leaf.dtype)), 1)
                newest = jnp.where(jnp.any(touched), mean.astype(leaf.dtype), newest)
            return jnp.broadcast_to(newest, (entries, *leaf.shape[1:]))
        return first_holds(jnp.sum(leaf, axis=0, dtype=leaf.dtype), jnp.zeros((), leaf.dtype))

    leaves = jax.tree.map(fit, sums.leaves, reductions)
    return StateSums(leaves, first_holds(jnp.sum(sums.touched, dtype=jnp.int32), jnp.int32(0)))


def _sum(value: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    return jax.lax.psum(value, axes) if axes else value


def _joined(leaf: jax.Array, touched: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """One value of those that the replicas have: the mean of floats, else that of the first replica that has a new one."""
    if not axes:
        return leaf
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        data = _joined(jax.random.key_data(leaf), touched, axes)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    if is_inexact(leaf):
        wide = leaf.astype(at_least_float32(leaf.dtype))
        replicas = jax.lax.psum(touched.astype(wide.real.dtype), axes)
        mean = jax.lax.psum(jnp.where(touched, wide, jnp.zeros_like(wide)), axes) / jnp.maximum(replicas, 1)
        return mean.astype(leaf.dtype)
    replica = jax.lax.axis_index(axes)
    first = jax.lax.pmin(jnp.where(touched, replica, jnp.iinfo(jnp.int32).max), axes)
    chosen = jnp.where(replica == first, leaf, jnp.zeros_like(leaf))
    return jax.lax.psum(chosen.astype(jnp.int32) if leaf.dtype == bool else chosen, axes).astype(leaf.dtype)
