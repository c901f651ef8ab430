"""Fold the microbatches of one window on one device: weights, then totals and gradients, in place or as a carry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxacc._contract import Sums
from jaxacc._keys import microbatch_key
from jaxacc._mean import identity, merge
from jaxacc._split import row_mask_of
from jaxacc._tree import PyTree, vary, varying_axes

FoldName = Literal["auto", "in_place", "carry"]
ValueOf = Callable[[PyTree, PyTree, Any], Sums]
"""`value_of(trainable, microbatch, key)`: the undivided loss and metrics of one microbatch."""

IN_PLACE_SINCE = (0, 11)
"""The first jax whose `with_refs` is right through an inner `lax.scan` (jax-ml/jax#38929)."""


def uses_in_place(fold: FoldName, trainable: PyTree, accumulators: PyTree) -> bool:
    """Whether to fold in place; `ValueError` where that is asked for and not safe."""
    if fold not in ("auto", "in_place", "carry"):
        raise ValueError(f"fold={fold!r} is not one of 'auto', 'in_place' and 'carry'.")
    pairs = zip(jax.tree.leaves(trainable), jax.tree.leaves(accumulators), strict=True)
    differing = sorted({f"{p.dtype} parameters, {a.dtype} sums" for p, a in pairs if p.dtype != a.dtype})
    reason = None
    if jax.__version_info__ < IN_PLACE_SINCE:
        reason = f"jax {jax.__version__} gives wrong gradients through an inner lax.scan (jax-ml/jax#38929), 0.11 does not"
    elif differing:
        reason = f"it adds into sums of the parameters' own dtype, and here are {'; '.join(differing)}"
    if fold == "in_place" and reason:
        raise ValueError(f"fold='in_place' is not possible: {reason}. Use fold='carry', or fold='auto' to choose.")
    return fold != "carry" and reason is None


def microbatches(window: PyTree) -> tuple[jax.Array, PyTree]:
    """The scanned input of a window: microbatch indices beside the microbatches."""
    steps = jax.tree.leaves(window)[0].shape[0]
    return jnp.arange(steps, dtype=jnp.int32), window


def unless_padding(microbatch: PyTree, compute: Callable[[], Any], otherwise: Any) -> Any:
    """`compute()`, or `otherwise` and nothing computed where `row_mask` says that no row is real."""
    mask = row_mask_of(microbatch)
    return compute() if mask is None else jax.lax.cond(jnp.any(mask), compute, lambda: otherwise)


def weigh(value_of: ValueOf, trainable: PyTree, window: PyTree, key: Any, axes: tuple[str, ...], structure: Sums) -> jax.Array:
    """The weight of every microbatch, `(A,)`.

    Nothing but the weights is kept, so XLA drops the forward pass where they depend on the data only. Where they depend
    on the parameters this costs one forward pass.
    """
    nothing = jnp.asarray(start_of(structure)[0].weight)

    def weight_of(_: None, x: tuple[jax.Array, PyTree]) -> tuple[None, jax.Array]:
        index, microbatch = x

        def weight() -> jax.Array:
            loss, _metrics = value_of(trainable, microbatch, microbatch_key(key, index, axes))
            return jnp.asarray(loss.weight)

        return None, unless_padding(microbatch, weight, nothing)

    return jax.lax.scan(weight_of, None, microbatches(window))[1]


def start_of(structure: Sums) -> Sums:
    """The sums of no microbatches at all."""
    return jax.tree.map(lambda zero, like: vary(zero, varying_axes(like)), identity(structure), structure)


def fold_values(value_of: ValueOf, trainable: PyTree, window: PyTree, structure: Sums) -> Sums:
    """Sum loss and metrics without gradients and without randomness; microbatches of weight 0 contribute nothing."""

    def add(sums: Sums, microbatch: PyTree) -> tuple[Sums, None]:
        def merged() -> Sums:
            more = value_of(trainable, microbatch, None)
            inhabited = more[0].weight != 0
            return jax.tree.map(lambda new, old: jnp.where(inhabited, new, old), merge(sums, more), sums)

        return unless_padding(microbatch, merged, sums), None

    return jax.lax.scan(add, start_of(structure), window)[0]


def pull_back(value_of: ValueOf, trainable: PyTree, microbatch: PyTree, key: Any) -> tuple[Sums, Any]:
    """The sums of one microbatch, and the function from a cotangent of its total to its gradient."""

    def total_of(trainable: PyTree) -> tuple[jax.Array, Sums]:
        sums = value_of(trainable, microbatch, key)
        return jnp.asarray(sums[0].total), sums

    _, pull, sums = jax.vjp(total_of, trainable, has_aux=True)
    return sums, pull


def fold_microbatch(
    value_of: ValueOf, trainable: PyTree, microbatch: PyTree, key: Any, *, sums: Sums, accumulators: PyTree, in_place: bool
) -> tuple[Sums, PyTree]:
    """Add the sums and the gradient of one microbatch to those so far, unless its weight is 0.

    The accumulators have a leading axis of 1, and keep it while they are added to: XLA copies a sum that it has to reshape.
    """
    more, pull = pull_back(value_of, trainable, microbatch, key)
    inhabited, seed = more[0].weight != 0, jnp.ones_like(more[0].total)
    sums = jax.tree.map(lambda new, old: jnp.where(inhabited, new, old), merge(sums, more), sums)

    def add_in_place() -> PyTree:
        refs = jax.tree.map(lambda leaf: jax.new_ref(leaf[0]), accumulators)
        pull.with_refs(refs)(seed)
        return jax.tree.map(lambda ref: jax.freeze(ref)[None], refs)

    if in_place:
        return sums, jax.lax.cond(inhabited, add_in_place, lambda: accumulators)
    grad = jax.lax.cond(inhabited, lambda: pull(seed)[0], lambda: jax.tree.map(jnp.zeros_like, trainable))
    return sums, add_gradient(accumulators, jax.tree.map(lambda leaf: leaf[None], grad))


def add_gradient(accumulators: PyTree, grad: PyTree) -> PyTree:
    """The sums of gradients with one more, in the dtype of the sums."""
    return jax.tree.map(lambda total, term: total + term.astype(total.dtype), accumulators, grad)


def fold_gradients(
    value_of: ValueOf,
    trainable: PyTree,
    window: PyTree,
    key: Any,
    *,
    axes: tuple[str, ...],
    weights: jax.Array,
    seed: jax.Array,
    start: Sums,
    accumulators: PyTree,
    in_place: bool,
) -> tuple[Sums, PyTree]:
    """Sum loss, metrics and `seed` times the gradient over the microbatches whose weight is not 0.

    The others are not evaluated, so what they would give, NaN or not, never enters. In place, the backward pass adds
    every cotangent into its accumulator as soon as it has it; as a carry, a whole gradient tree exists beside the sum.
    """
    refs = jax.tree.map(jax.new_ref, accumulators) if in_place else None

    def add(carry: tuple[Sums, PyTree], x: Any) -> tuple[tuple[Sums, PyTree], None]:
        index, microbatch = x[0]

        def evaluate(carry: tuple[Sums, PyTree]) -> tuple[Sums, PyTree]:
            sums, grads = carry
            more, pull = pull_back(value_of, trainable, microbatch, microbatch_key(key, index, axes))
            if in_place:
                pull.with_refs(refs)(seed)
            else:
                grads = add_gradient(grads, pull(seed)[0])
            return merge(sums, more), grads

        return jax.lax.cond(x[1] != 0, evaluate, lambda carry: carry, carry), None

    carry = (start, None if in_place else accumulators)
    (sums, grads), _ = jax.lax.scan(add, carry, (microbatches(window), weights))
    return sums, jax.tree.map(jax.freeze, refs) if in_place else grads
