"""A window fed one microbatch at a time: its sums between two microbatches are a plain pytree."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxacc._accumulate import divide_by, zero_gradient
from jaxacc._contract import LossFn, sums_of, sums_structure
from jaxacc._fold import FoldName, fold_microbatch, start_of, uses_in_place
from jaxacc._keys import microbatch_key
from jaxacc._mean import Max, Mean, Sum, is_reduction, reduce_over
from jaxacc._mesh import Layout, constrain_update, manual, reduced_specs, reduction
from jaxacc._split import row_mask_of
from jaxacc._tree import PyTree, as_arrays, merge, partition, vary


class Accumulator(NamedTuple):
    """The sums of a window in the making, of which nothing is divided or reduced yet.

    A plain pytree to save between two microbatches. Every leaf has a leading axis: one entry per replica that folds its own
    rows, `D` of them, sharded over the data axes of the mesh; 1 on one device and where parameters are sharded over a data
    axis. `step.begin(state, microbatch, accumulator)` takes over one that was saved with another `D`: it sums that axis.

    Attributes:
      loss: the summed loss and weight.
      metrics: the merged metrics.
      grads: the summed gradients of the total.
      added: microbatches.
      examples: real rows added.
      microbatches: those added that held at least one real row.
    """

    loss: Mean
    metrics: PyTree
    grads: PyTree
    added: Max
    examples: Sum
    microbatches: Sum


def begin_on(
    layout: Layout | None,
    loss_fn: LossFn,
    params: PyTree,
    window: PyTree,
    key: Any,
    saved: Accumulator | None,
    *,
    has_aux: bool,
    accumulator_dtype: Any,
) -> Accumulator:
    """The sums of no microbatches, or `saved` for this layout; of `window`, `(1, rows, ...)`, only the shapes matter."""

    def begin(axes: tuple[str, ...], params: PyTree, window: PyTree, key: Any) -> Accumulator:
        params, microbatch = vary((as_arrays(params), _only(window)), axes)
        none = jnp.int32(0)
        structure, _ = sums_structure(loss_fn, has_aux, axes, params, microbatch, microbatch_key(key, none, axes))
        grads = zero_gradient(partition(params)[0], accumulator_dtype)
        return _lead(vary(Accumulator(*start_of(structure), grads, Max(none), Sum(none), Sum(none)), axes))

    if saved is not None:
        return _constrain(layout, params, _fit(saved, layout))
    rows, entries = _splits(layout)
    begun = _on_replicas(layout, begin, (P(), rows, P()), entries)(params, window, key)
    return _constrain(layout, params, begun)


def add_on(
    layout: Layout | None,
    loss_fn: LossFn,
    accumulator: Accumulator,
    params: PyTree,
    window: PyTree,
    key: Any,
    *,
    has_aux: bool,
    fold: FoldName,
) -> Accumulator:
    """The sums after one more microbatch, the only one of `window`. Nothing is communicated."""

    def add(axes: tuple[str, ...], accumulator: Accumulator, params: PyTree, window: PyTree, key: Any) -> Accumulator:
        so_far = _only(accumulator._replace(grads=None))
        index, rows = so_far.added.value, _real_rows(_only(window))
        params, microbatch = vary((as_arrays(params), _only(window)), axes)
        trainable, frozen = partition(params)
        sums, grads = fold_microbatch(
            lambda trainable, *args: sums_of(loss_fn, has_aux, axes, merge(trainable, frozen), *args),
            trainable, microbatch, microbatch_key(key, index, axes),
            sums=(so_far.loss, so_far.metrics), accumulators=accumulator.grads,
            in_place=uses_in_place(fold, trainable, accumulator.grads),
        )  # fmt: skip
        examples = Sum(so_far.examples.value + rows)
        microbatches = Sum(so_far.microbatches.value + (rows > 0).astype(jnp.int32))
        added = _lead(vary(Accumulator(*sums, None, Max(index + 1), examples, microbatches), axes))
        return added._replace(grads=grads)

    rows, entries = _splits(layout)
    accumulator = _constrain(layout, params, _check_entries(accumulator, layout))
    added = _on_replicas(layout, add, (entries, P(), rows, P()), entries)(accumulator, params, window, key)
    return _constrain(layout, params, added)


def reduce_on(
    layout: Layout | None, accumulator: Accumulator, params: PyTree, *, reduction_dtype: Any
) -> tuple[Accumulator, PyTree]:
    """The accumulator over all replicas, without its leading axis, and the divided gradient where the update happens.

    Here is the one reduction of a window that was streamed.
    """

    def reduce(axes: tuple[str, ...], accumulator: Accumulator) -> tuple[Accumulator, PyTree]:
        local = _only(accumulator)
        total, grads = reduction(layout, params, reduction_dtype)(local.loss.total, local.grads)
        weight, counts = reduce_over(axes, (Sum(local.loss.weight), local._replace(loss=None, grads=None)))
        return counts._replace(loss=Mean(total, weight.value)), divide_by(weight.value, grads)

    _, entries = _splits(layout)
    accumulator = _constrain(layout, params, _check_entries(accumulator, layout))
    out_specs = (P(), reduced_specs(layout, params, accumulator.grads))
    sums, grads = _on_replicas(layout, reduce, (entries,), out_specs)(accumulator)
    return sums, constrain_update(layout, params, grads)


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


def _fit(accumulator: Accumulator, layout: Layout | None) -> Accumulator:
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

    return jax.tree.map(fit, accumulator, is_leaf=is_reduction)


def _only(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: leaf[0], tree)


def _lead(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: leaf[None], tree)


def _real_rows(microbatch: PyTree) -> jax.Array:
    mask = row_mask_of(microbatch)
    return jnp.int32(jax.tree.leaves(microbatch)[0].shape[0]) if mask is None else jnp.sum(mask, dtype=jnp.int32)
