"""Fold the microbatches of one window on one device: weights, then totals and gradients, in place or as a carry."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxacc._contract import Sums
from jaxacc._mean import identity, merge
from jaxacc._model_state import StateSums, seen, touch, untouched
from jaxacc._noise import Parts, no_parts, part_of
from jaxacc._split import row_mask_of
from jaxacc._tree import PyTree, vary, varying_axes

FoldName = Literal["auto", "in_place", "carry"]
ValueOf = Callable[[PyTree, PyTree, jax.Array, PyTree], tuple[Sums, PyTree]]
"""`value_of(trainable, state, index, microbatch)`: undivided sums, and the new model state, of one microbatch."""

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


class Fold(NamedTuple):
    """How every microbatch of a window is evaluated.

    Attributes:
      value_of: its sums.
      trainable: the parameters that are differentiated.
      state: the model state at the start of the window, None without.
      reductions: how its leaves reduce.
      structure: the shapes of the sums.
      drops: whether a microbatch can turn out to have no weight once it is evaluated.
    """

    value_of: ValueOf
    trainable: PyTree
    state: PyTree
    reductions: PyTree
    structure: Sums
    drops: bool

    def start(self) -> Running:
        """The sums of no microbatches at all."""
        sums = jax.tree.map(lambda zero, like: vary(zero, varying_axes(like)), identity(self.structure), self.structure)
        axes = varying_axes(self.structure.dropped.value)
        return Running(sums, vary(untouched(self.state, self.reductions), axes))

    def pull_back(self, so_far: StateSums, index: jax.Array, microbatch: PyTree) -> tuple[tuple[Sums, PyTree], Any]:
        """The sums and the state of one microbatch, and the function from cotangents of its totals to its gradient."""
        state = seen(self.state, so_far, self.reductions)

        def totals_of(trainable: PyTree) -> tuple[dict[str, jax.Array], tuple[Sums, PyTree]]:
            sums, new = self.value_of(trainable, state, index, microbatch)
            return {name: jnp.asarray(term.total) for name, term in sums.terms.items()}, (sums, new)

        _, pull, evaluated = jax.vjp(totals_of, self.trainable, has_aux=True)
        return evaluated, pull

    def touch(self, so_far: StateSums, new: PyTree, touches: jax.Array) -> StateSums:
        """The model states after one more microbatch."""
        return touch(self.state, so_far, new, self.reductions, touches)


class Running(NamedTuple):
    """The sums so far."""

    sums: Sums
    state: StateSums


def weights_of(sums: Sums) -> dict[str, jax.Array]:
    """The weight of every term."""
    return {name: jnp.asarray(term.weight) for name, term in sums.terms.items()}


def has_weight(weights: Mapping[str, jax.Array]) -> jax.Array:
    """Whether any term has weight: what has none is not evaluated and touches nothing."""
    return jnp.any(jnp.stack([weight != 0 for weight in weights.values()]), axis=0)


def merge_if(inhabited: jax.Array, sums: Sums, more: Sums) -> Sums:
    """The sums with those of a microbatch that may have no weight; whether it was dropped is counted all the same."""
    both = merge(sums, more)
    chosen = jax.tree.map(lambda new, old: jnp.where(inhabited, new, old), both, sums)
    return chosen._replace(dropped=both.dropped)


def microbatches(window: PyTree) -> tuple[jax.Array, PyTree]:
    """The scanned input of a window: microbatch indices beside the microbatches."""
    steps = jax.tree.leaves(window)[0].shape[0]
    return jnp.arange(steps, dtype=jnp.int32), window


def unless_padding(microbatch: PyTree, compute: Callable[[], Any], otherwise: Any) -> Any:
    """`compute()`, or `otherwise` and nothing computed where `row_mask` says that no row is real."""
    mask = row_mask_of(microbatch)
    return compute() if mask is None else jax.lax.cond(jnp.any(mask), compute, lambda: otherwise)


def weigh(fold: Fold, window: PyTree) -> tuple[dict[str, jax.Array], jax.Array]:
    """The weights of every microbatch, by term `(A,)`, and whether it was dropped, `(A,)`.

    Nothing else is kept, so XLA drops the forward pass where the weights depend on the data only. Where they depend on the
    parameters, or on whether the loss is finite, this costs one forward pass.
    """
    start = fold.start()
    nothing = weights_of(start.sums), start.sums.dropped.value

    def next_weights(so_far: StateSums, x: tuple[jax.Array, PyTree]) -> tuple[StateSums, Any]:
        def evaluate() -> tuple[StateSums, Any]:
            index, microbatch = x
            state = seen(fold.state, so_far, fold.reductions)
            sums, new = fold.value_of(fold.trainable, state, index, microbatch)
            weights = weights_of(sums)
            return fold.touch(so_far, new, has_weight(weights)), (weights, sums.dropped.value)

        return unless_padding(x[1], evaluate, (so_far, nothing))

    return jax.lax.scan(next_weights, start.state, microbatches(window))[1]


def fold_values(fold: Fold, window: PyTree) -> Sums:
    """Sum loss and metrics without gradients; microbatches of weight 0 contribute nothing, the model state stays."""

    def add(sums: Sums, x: tuple[jax.Array, PyTree]) -> tuple[Sums, None]:
        def merged() -> Sums:
            more, _ = fold.value_of(fold.trainable, fold.state, *x)
            return merge_if(has_weight(weights_of(more)), sums, more)

        return unless_padding(x[1], merged, sums), None

    return jax.lax.scan(add, fold.start().sums, microbatches(window))[0]


def fold_one(
    fold: Fold, running: Running, index: jax.Array, microbatch: PyTree, *, seeds: Any, accumulators: PyTree, in_place: bool
) -> tuple[Running, PyTree]:
    """Add the sums and the gradient of one microbatch to those so far, unless its weight is 0.

    The accumulators have a leading axis of 1, and keep it while they are added to: XLA copies a sum that it has to reshape.
    """
    (more, new), pull = fold.pull_back(running.state, index, microbatch)
    inhabited = has_weight(weights_of(more))
    sums = merge_if(inhabited, running.sums, more)
    state = fold.touch(running.state, new, inhabited)

    def add_in_place() -> PyTree:
        refs = jax.tree.map(lambda leaf: jax.new_ref(leaf[0]), accumulators)
        pull.with_refs(refs)(seeds)
        return jax.tree.map(lambda ref: jax.freeze(ref)[None], refs)

    if in_place:
        return Running(sums, state), jax.lax.cond(inhabited, add_in_place, lambda: accumulators)
    grad = jax.lax.cond(inhabited, lambda: pull(seeds)[0], lambda: jax.tree.map(jnp.zeros_like, fold.trainable))
    return Running(sums, state), add_gradient(accumulators, jax.tree.map(lambda leaf: leaf[None], grad))


def add_gradient(accumulators: PyTree, grad: PyTree) -> PyTree:
    """The sums of gradients with one more, in the dtype of the sums."""
    return jax.tree.map(lambda total, term: total + term.astype(total.dtype), accumulators, grad)


def fold_gradients(
    fold: Fold,
    window: PyTree,
    *,
    inhabited: jax.Array,
    seeds: dict[str, jax.Array],
    accumulators: PyTree,
    in_place: bool,
    main: Callable[[Any], Any] | None = None,
) -> tuple[Running, PyTree, Parts | None]:
    """Sum loss, metrics and, by the seeds of the totals, the gradient over the microbatches that are `inhabited`, `(A,)`.

    The others are not evaluated, so what they would give, NaN or not, never enters. In place, the backward pass adds
    every cotangent into its accumulator as soon as it has it; as a carry, a whole gradient tree exists beside the sum.
    Given `main`, which picks the main term, the carry also says how noisy the gradients of the microbatches are.
    """
    refs = jax.tree.map(jax.new_ref, accumulators) if in_place else None
    start = fold.start()
    parts = None if main is None else jax.tree.map(lambda x: vary(x, varying_axes(fold.structure.dropped.value)), no_parts())

    def add(carry: Any, x: Any) -> tuple[Any, None]:
        (index, microbatch), evaluated = x

        def evaluate(carry: Any) -> Any:
            running, grads, parts = carry
            (more, new), pull = fold.pull_back(running.state, index, microbatch)
            kept = has_weight(weights_of(more))

            def backward() -> Any:
                if in_place:
                    pull.with_refs(refs)(seeds)
                    return grads, parts
                grad = pull(seeds)[0]
                noise = None if main is None else jax.tree.map(jnp.add, parts, part_of(grad, main(more.terms).weight))
                return add_gradient(grads, grad), noise

            state = fold.touch(running.state, new, kept)
            if not fold.drops:
                return Running(merge(running.sums, more), state), *backward()
            return Running(merge_if(kept, running.sums, more), state), *jax.lax.cond(kept, backward, lambda: (grads, parts))

        return jax.lax.cond(evaluated, evaluate, lambda carry: carry, carry), None

    carry = (start, None if in_place else accumulators, parts)
    (running, grads, parts), _ = jax.lax.scan(add, carry, (microbatches(window), inhabited))
    return running, jax.tree.map(jax.freeze, refs) if in_place else grads, parts
