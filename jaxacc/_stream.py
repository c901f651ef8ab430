"""A window fed one microbatch at a time: its sums between two microbatches are a plain pytree."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxacc._accumulate import WindowSums, cotangents, factor_of, fold_of, psum_over, rescale, seeds_of, zero_gradient
from jaxacc._contract import LOSS, Objective, Sums
from jaxacc._fold import FoldName, Running, fold_one, uses_in_place
from jaxacc._mean import Max, Mean, Sum, is_reduction, reduce_over
from jaxacc._mesh import Layout, constrain_update, manual, reduced_specs, reduction
from jaxacc._model_state import StateSums, conclude, join, reductions_of
from jaxacc._noise import part_of
from jaxacc._split import row_mask_of
from jaxacc._tree import PyTree, as_arrays, vary


class Accumulator(NamedTuple):
    """The sums of a window in the making, of which nothing is divided or reduced yet.

    A plain pytree to save between two microbatches. Every leaf has a leading axis: one entry per replica that folds its own
    rows, `D` of them, sharded over the data axes of the mesh; 1 on one device and where parameters are sharded over a data
    axis. `step.begin(state, microbatch, accumulator)` takes over one that was saved with another `D`: it sums that axis.

    Attributes:
      terms: the summed totals and weights of the loss, by term.
      metrics: the merged metrics.
      state: what the microbatches made of the model state.
      grads: the summed gradients.
      stated: the weights of the terms in the whole window, where `begin` was told.
      added: microbatches.
      examples: real rows added.
      microbatches: those added that held at least one real row.
      dropped: those left out because their loss was not finite.
    """

    terms: dict[str, Mean]
    metrics: PyTree
    state: StateSums
    grads: PyTree
    stated: dict[str, Max] | None
    added: Max
    examples: Sum
    microbatches: Sum
    dropped: Sum


def begin_on(
    layout: Layout | None,
    objective: Objective,
    params: PyTree,
    state: PyTree,
    window: PyTree,
    key: Any,
    saved: Accumulator | None,
    weights: Any,
    *,
    accumulator_dtype: Any,
) -> Accumulator:
    """The sums of no microbatches, or `saved` for this layout; of `window`, `(1, rows, ...)`, only the shapes matter."""

    def begin(axes: tuple[str, ...], params: PyTree, state: PyTree, window: PyTree, key: Any) -> Accumulator:
        params, state, microbatch = vary(as_arrays((params, state, _only(window))), axes)
        how, narrow = fold_of(objective, axes, params, state, microbatch, key, None)
        running, none = how.start(), jnp.int32(0)
        stated = _check_weights(objective, how.structure, weights, narrow)
        grads = zero_gradient(how.trainable, accumulator_dtype)
        (terms, metrics, dropped), touched = running
        begun = Accumulator(terms, metrics, touched, grads, stated, Max(none), Sum(none), Sum(none), dropped)
        return _lead(vary(begun, axes))

    if saved is not None:
        return _constrain(layout, params, _fit(saved, layout, reductions_of(state, objective.state_reduction)))
    rows, entries = _splits(layout)
    begun = _on_replicas(layout, begin, (P(), P(), rows, P()), entries)(params, state, window, key)
    return _constrain(layout, params, begun)


def add_on(
    layout: Layout | None,
    objective: Objective,
    accumulator: Accumulator,
    params: PyTree,
    state: PyTree,
    window: PyTree,
    key: Any,
    scale: jax.Array | None,
    *,
    fold: FoldName,
) -> Accumulator:
    """The sums after one more microbatch, the only one of `window`. Nothing is communicated."""

    def add(
        axes: tuple[str, ...], accumulator: Accumulator, params: PyTree, state: PyTree, window: PyTree, key: Any, scale: Any
    ) -> Accumulator:
        so_far = _only(accumulator._replace(grads=None))
        index, rows = so_far.added.value, _real_rows(_only(window))
        params, state, microbatch = vary(as_arrays((params, state, _only(window))), axes)
        how, narrow = fold_of(objective, axes, params, state, microbatch, key, None)
        if so_far.stated is None:
            seeds = _late_seeds({name: term.total for name, term in how.structure.terms.items()}, scale)
        else:
            seeds = seeds_of(objective, how.structure, _values(so_far.stated), scale=scale, narrow=narrow)
        running, grads = fold_one(
            how, Running(Sums(so_far.terms, so_far.metrics, so_far.dropped), so_far.state), index, microbatch,
            seeds=cotangents(how.structure, seeds), accumulators=accumulator.grads,
            in_place=uses_in_place(fold, how.trainable, accumulator.grads),
        )  # fmt: skip
        (terms, metrics, dropped), touched = running
        examples = Sum(so_far.examples.value + rows)
        microbatches = Sum(so_far.microbatches.value + (rows > 0).astype(jnp.int32))
        added = so_far._replace(
            terms=terms, metrics=metrics, state=touched, added=Max(index + 1), examples=examples, microbatches=microbatches,
            dropped=dropped,
        )  # fmt: skip
        return _lead(vary(added, axes))._replace(grads=grads)

    rows, entries = _splits(layout)
    accumulator = _constrain(layout, params, _check_entries(accumulator, layout))
    in_specs = (entries, P(), P(), rows, P(), P())
    added = _on_replicas(layout, add, in_specs, entries)(accumulator, params, state, window, key, scale)
    return _constrain(layout, params, added)


class Reduced(NamedTuple):
    """A streamed window over all replicas.

    Attributes:
      window: as that of a resident window.
      examples: real rows.
      microbatches: those with at least one.
      as_stated: whether its weights are those that `begin` was told.
    """

    window: WindowSums
    examples: jax.Array
    microbatches: jax.Array
    as_stated: jax.Array


def reduce_on(
    layout: Layout | None,
    objective: Objective,
    accumulator: Accumulator,
    params: PyTree,
    state: PyTree,
    scale: jax.Array | None,
    *,
    reduction_dtype: Any,
    noise: bool,
) -> Reduced:
    """The window that was streamed, its gradient divided, where the update happens. Here is its one reduction."""

    def reduce(axes: tuple[str, ...], accumulator: Accumulator, state: PyTree, scale: Any) -> Reduced:
        local = _only(accumulator)
        parts = part_of(local.grads, objective.main(local.terms).weight) if noise else None
        totals, grads = reduction(layout, params, reduction_dtype)({n: t.total for n, t in local.terms.items()}, local.grads)
        weights = _values(reduce_over(axes, {name: Sum(term.weight) for name, term in local.terms.items()}))
        counted = reduce_over(axes, (local.metrics, local.examples, local.microbatches, local.dropped, local.stated))
        metrics, examples, microbatches, dropped, stated = counted
        late = _late_seeds(totals, scale) if stated is None else None
        factor = factor_of(objective, weights, late, scale)
        grads, parts = rescale(factor, grads, psum_over(axes, parts))
        sums = Sums({name: Mean(totals[name], weights[name]) for name in totals}, metrics, dropped)
        reductions = reductions_of(state, objective.state_reduction)
        window = WindowSums(sums, conclude(state, local.state, reductions, axes), parts, grads)
        return Reduced(window, examples.value, microbatches.value, _agree(weights, stated))

    _, entries = _splits(layout)
    accumulator = _constrain(layout, params, _check_entries(accumulator, layout))
    grads_specs = reduced_specs(layout, params, accumulator.grads)
    out_specs = Reduced(WindowSums(P(), P(), P(), grads_specs), P(), P(), P())  # pyright: ignore[reportArgumentType] (specs)
    reduced = _on_replicas(layout, reduce, (entries, P(), P()), out_specs)(accumulator, state, scale)
    window = reduced.window._replace(grads=constrain_update(layout, params, reduced.window.grads))
    return reduced._replace(window=window)


def _check_weights(objective: Objective, structure: Sums, weights: Any, narrow: bool) -> dict[str, Max] | None:
    """The stated weights in the dtypes of those that will be summed; `ValueError` where they are needed or of no use."""
    names = sorted(structure.terms)
    if weights is None:
        if len(names) > 1:
            raise ValueError(
                f"the loss has the terms {names}: each is divided by its own weight, which the backward passes need before "
                "the first. State those of the whole window: step.begin(state, microbatch, weights={name: weight, ...})."
            )
        return None
    weights = weights if isinstance(weights, Mapping) else {LOSS: weights}
    if sorted(weights) != names:
        raise ValueError(f"weights names {sorted(weights)}, and the loss has the terms {names}. State one weight for each.")
    if objective.drops_nonfinite or narrow:
        reason = "a dropped microbatch would change them" if objective.drops_nonfinite else "a 16-bit loss would round them"
        raise ValueError(f"weights cannot be stated here: {reason}. Use nonfinite='skip_window' and a loss in float32.")
    return {name: Max(jnp.asarray(weights[name]).astype(structure.terms[name].weight.dtype)) for name in names}


def _late_seeds(totals: Mapping[str, Any], scale: jax.Array | None) -> dict[str, jax.Array]:
    """Nothing is divided yet."""
    seed = jnp.float32(1) if scale is None else scale
    return {name: seed.astype(total.dtype) for name, total in totals.items()}


def _agree(weights: Mapping[str, jax.Array], stated: Mapping[str, Max] | None) -> jax.Array:
    """Whether the weights evaluated are those stated: integers exactly, floats up to the rounding of their sum."""
    if stated is None:
        return jnp.array(True)

    def agree(found: jax.Array, told: jax.Array) -> jax.Array:
        return found == told if jnp.issubdtype(found.dtype, jnp.integer) else jnp.abs(found - told) <= 1e-4 * jnp.abs(told)

    return jnp.all(jnp.stack([agree(weights[name], stated[name].value) for name in weights]))


def _values(sums: Mapping[str, Any]) -> dict[str, jax.Array]:
    return {name: node.value for name, node in sums.items()}


def _on_replicas(layout: Layout | None, function: Any, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """`function(axes, ...)` on every replica, or once for all rows where no replica folds its own."""
    if layout is None or not layout.is_manual:
        return partial(function, ())
    return manual(layout, partial(function, layout.data_axes), in_specs, out_specs)


def _splits(layout: Layout | None) -> tuple[P, P]:
    """How windows and how accumulators are split over the replicas."""
    axes = layout.data_axes if layout is not None else None
    return P(None, axes), P(axes)


def _constrain(layout: Layout | None, params: PyTree, accumulator: Accumulator) -> Accumulator:
    """Every leaf over the data axes by its leading axis, gradients like their parameters by the others."""
    if layout is None:
        return accumulator
    return jax.lax.with_sharding_constraint(accumulator, layout.accumulator_shardings(params, accumulator))


def _entries(layout: Layout | None) -> int:
    return layout.replicas if layout is not None and layout.is_manual else 1


def _check_entries(accumulator: Accumulator, layout: Layout | None) -> Accumulator:
    found, needed = accumulator.added.value.shape[0], _entries(layout)
    if found != needed:
        raise ValueError(
            f"the accumulator holds the sums of {found} replicas, and the step has {needed}. Take them over first: "
            "accumulator = step.begin(state, microbatch, accumulator)."
        )
    return accumulator


def _fit(accumulator: Accumulator, layout: Layout | None, reductions: PyTree) -> Accumulator:
    """Give an accumulator the leading axis of this layout: its sums to replica 0."""
    entries = _entries(layout)
    if accumulator.added.value.shape[0] == entries:
        return accumulator

    def fit(node: Any) -> Any:
        if isinstance(node, Max):
            largest = jnp.max(node.value, axis=0, keepdims=True)
            return Max(jnp.broadcast_to(largest, (entries, *largest.shape[1:])))
        return jax.tree.map(first_holds_all, node)

    def first_holds_all(leaf: jax.Array) -> jax.Array:
        summed = jnp.sum(leaf, axis=0, keepdims=True, dtype=leaf.dtype)
        return jnp.concatenate([summed, jnp.zeros((entries - 1, *leaf.shape[1:]), leaf.dtype)])

    fitted = jax.tree.map(fit, accumulator._replace(state=None), is_leaf=is_reduction)
    return fitted._replace(state=join(accumulator.state, reductions, entries))


def _only(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: leaf[0], tree)


def _lead(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: leaf[None], tree)


def _real_rows(microbatch: PyTree) -> jax.Array:
    mask = row_mask_of(microbatch)
    return jnp.int32(jax.tree.leaves(microbatch)[0].shape[0]) if mask is None else jnp.sum(mask, dtype=jnp.int32)
