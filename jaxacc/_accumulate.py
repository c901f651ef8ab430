"""`accumulate`: like `jax.value_and_grad`, over a window of microbatches, with one division and one reduction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxacc._contract import LossFn, Sums, sums_of, sums_structure
from jaxacc._fold import FoldName, fold_gradients, fold_values, pull_back, start_of, uses_in_place, weigh
from jaxacc._keys import microbatch_key
from jaxacc._mean import Mean, reduce_over
from jaxacc._split import check_window
from jaxacc._tree import PyTree, as_arrays, at_least_float32, merge, partition, vary, varying_axes


class Accumulated(NamedTuple):
    """What a window gives.

    Attributes:
      loss: the weighted mean loss of the window, a scalar; 0 where the weight is 0.
      grads: its gradient, a tree like `params` with None at leaves that are not floating.
      weight: the weight that was really evaluated, over microbatches and replicas.
      metrics: the metrics `loss_fn` returned, merged over the window and not divided: read `.value`.
    """

    loss: jax.Array
    grads: PyTree
    weight: jax.Array
    metrics: PyTree


class Evaluation(NamedTuple):
    """Undivided results of an evaluation, to be merged over windows with `jaxacc.merge`; `.value` divides."""

    loss: Mean
    metrics: PyTree


def accumulate(
    loss_fn: LossFn,
    *,
    has_aux: bool = False,
    axis_name: str | tuple[str, ...] | None = None,
    fold: FoldName = "auto",
    accumulator_dtype: Any = None,
) -> Callable[..., Accumulated]:
    r"""Gradient of a weighted mean over all microbatches of a window.

    With :math:`(s_i, n_i)` = `loss_fn(params, window[i], key_i)` the result is

    .. math:: L = \frac{\sum_i s_i}{\sum_i n_i}, \qquad \nabla L = \frac{\sum_i \nabla s_i}{\sum_i n_i}

    with both sums over the `A` microbatches and, given `axis_name`, over the replicas. Because the denominator is what
    was really evaluated, any split of the same rows gives the same result. A microbatch of weight 0 contributes nothing
    even where its loss is NaN. Memory does not depend on `A`.

    The weights are summed before the backward passes so that no pass over the gradient tree is needed to divide it.
    That is free where they depend on the data only; where they depend on `params` it costs a forward pass (A > 1).

    Args:
      loss_fn: `loss_fn(params, microbatch, key)` returning `Mean(total, weight)`, not divided, or `(Mean, metrics)`
        with `has_aux=True`, where metrics is a tree of `Mean`, `Sum` and `Max`. Entries are scalars or one per row.
      has_aux: whether `loss_fn` returns metrics too.
      axis_name: the manual mesh axes that split rows, inside your own `jax.shard_map` or `jax.pmap`; `()` if its axes
        do not split rows. The result is then already reduced: a `pmean` of it changes nothing, but **another psum makes
        the gradient D times too large**, and JAX gives no way to prevent that.
      fold: `"in_place"` adds every cotangent straight into the sum (jax >= 0.11; saves up to one gradient tree on
        scanned layers), `"carry"` adds whole gradient trees, `"auto"` takes the first where it is safe. Use `"carry"`
        under `jax.vmap`, under an outer `jax.checkpoint` and to differentiate the result again.
      accumulator_dtype: dtype of the sums and of `grads`; None is float32, or the parameter's own dtype where wider.
        Complex parameters are summed in the complex dtype of that width.

    Returns:
      `grads_of(params, window, key=None) -> Accumulated`: pure, for you to jit. Every leaf of `window` has shape
      `(A, m, ...)`, see `split_batch`; `key` is folded with the microbatch's index (and replica), None is passed on.

    Raises:
      ValueError: while tracing, for a window or a return value that breaks the contract, a `fold` that is not safe
        here, or an `axis_name` that does not account for the manual mesh axes.

    >>> import jax, jax.numpy as jnp, jaxacc
    >>> def loss_fn(params, microbatch, key):
    ...     error = (microbatch["x"] @ params - microbatch["y"]) ** 2
    ...     return jaxacc.Mean(error, jnp.ones_like(error))
    >>> batch = {"x": jnp.arange(12.0).reshape(6, 2), "y": jnp.ones(6)}
    >>> window = jaxacc.split_batch(batch, accumulation_steps=3)
    >>> out = jax.jit(jaxacc.accumulate(loss_fn))(jnp.array([0.1, 0.2]), window)
    >>> float(out.weight), [round(float(g), 3) for g in out.grads]
    (6.0, [14.0, 15.4])
    """

    def grads_of(params: PyTree, window: PyTree, key: Any = None) -> Accumulated:
        axes = check_manual_axes("accumulate", axis_name)
        loss, metrics, grads = window_sums(
            loss_fn, params, window, key, has_aux=has_aux, axes=axes, fold=fold, accumulator_dtype=accumulator_dtype
        )
        return Accumulated(loss.value, grads, jnp.asarray(loss.weight), metrics)

    return grads_of


def check_manual_axes(caller: str, axis_name: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The axes of `axis_name`, or `ValueError` where they do not account for the manual mesh axes here."""
    axes = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name or ())
    manual = jax.sharding.get_abstract_mesh().manual_axes
    if axis_name is None and manual:
        raise ValueError(
            f"{caller} is called where the mesh axes {manual} are manual (shard_map or pmap), without axis_name. Each "
            f"replica would divide by its own weight. Pass axis_name={manual[0]!r} (the axes that split rows), or "
            "axis_name=() if they do not split rows."
        )
    if unknown := [axis for axis in axes if axis not in manual]:
        raise ValueError(
            f"axis_name={axis_name!r} names {unknown}, but the manual mesh axes here are {manual}. Call {caller} inside a "
            "jax.shard_map or jax.pmap over these axes (jax.vmap over rows is no replica), or leave axis_name out."
        )
    return axes


def window_sums(
    loss_fn: LossFn,
    params: PyTree,
    window: PyTree,
    key: Any,
    *,
    has_aux: bool,
    axes: tuple[str, ...],
    fold: FoldName,
    accumulator_dtype: Any,
    reduce: Callable[[jax.Array, PyTree], tuple[jax.Array, PyTree]] | None = None,
) -> tuple[Mean, PyTree, PyTree]:
    """Weigh, fold, reduce: the undivided loss and metrics, and the divided gradient, over all replicas of `axes`.

    `reduce` sums the total and the gradients over the replicas; None is one psum.
    """
    steps, _ = check_window(window)
    params, window = vary(as_arrays((params, window)), axes)
    trainable, frozen = partition(params)

    def value_of(trainable: PyTree, microbatch: PyTree, key: Any) -> Sums:
        return sums_of(loss_fn, has_aux, axes, merge(trainable, frozen), microbatch, key)

    first = jax.tree.map(lambda leaf: leaf[0], window)
    structure, narrow = sums_structure(loss_fn, has_aux, axes, params, first, microbatch_key(key, jnp.int32(0), axes))
    accumulators = zero_gradient(trainable, accumulator_dtype)
    in_place = uses_in_place(fold, trainable, accumulators)

    if steps == 1:
        sums, pull = pull_back(value_of, trainable, first, microbatch_key(key, jnp.int32(0), axes))
        weights = jnp.asarray(sums[0].weight)[None]
        weight = _sum_weights(weights, axes)
        sums, grads = pull_inhabited(sums, pull, seed_of(structure, narrow, weight), start_of(structure), accumulators)
    else:
        weights = weigh(value_of, trainable, window, key, axes, structure)
        weight = _sum_weights(weights, axes)
        sums, grads = fold_gradients(
            value_of, trainable, window, key, axes=axes, weights=weights, seed=seed_of(structure, narrow, weight),
            start=start_of(structure), accumulators=accumulators, in_place=in_place,
        )  # fmt: skip
    loss, metrics = sums
    total, grads = (reduce or _psum_over(axes))(loss.total, grads)
    if narrow:
        grads = divide_by(weight, grads)
    return Mean(total, weight), reduce_over(axes, metrics), grads


def evaluate_window(
    loss_fn: LossFn, params: PyTree, window: PyTree, *, has_aux: bool, axes: tuple[str, ...] = ()
) -> Evaluation:
    """Undivided loss and metrics of a window, over all replicas of `axes`, `loss_fn` called with `key=None`."""
    check_window(window)
    params, window = vary((params, window), axes)

    def value_of(params: PyTree, microbatch: PyTree, key: Any) -> Sums:
        return sums_of(loss_fn, has_aux, axes, params, microbatch, key)

    first = jax.tree.map(lambda leaf: leaf[0], window)
    structure = jax.eval_shape(value_of, params, first, None)
    return Evaluation(*reduce_over(axes, fold_values(value_of, params, window, structure)))


def pull_inhabited(sums: Sums, pull: Any, seed: jax.Array, start: Sums, accumulators: PyTree) -> tuple[Sums, PyTree]:
    """The backward pass of a single microbatch, not run where its weight is 0."""

    def backward() -> tuple[Sums, PyTree]:
        (grads,) = pull(seed)
        return sums, jax.tree.map(lambda grad, like: grad.astype(like.dtype), grads, accumulators)

    return jax.lax.cond(sums[0].weight != 0, backward, lambda: (start, accumulators))


def seed_of(structure: Sums, narrow: bool, weight: jax.Array) -> jax.Array:
    """The cotangent of the total: `1 / weight`, so that nobody has to divide the gradient.

    A 16-bit (`narrow`) loss would round it, the same way in every gradient: there it is 1, and the sum is divided instead.
    """
    total = structure[0].total
    scale = jnp.ones((), total.dtype) if narrow else _reciprocal(weight, total.dtype)
    return vary(scale, varying_axes(total))


def _psum_over(axes: tuple[str, ...]) -> Callable[[jax.Array, PyTree], tuple[jax.Array, PyTree]]:
    return lambda total, grads: jax.lax.psum((total, grads), axes) if axes else (total, grads)


def _sum_weights(weights: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    weight = jnp.sum(weights, dtype=weights.dtype)
    return jax.lax.psum(weight, axes) if axes else weight


def divide_by(weight: jax.Array, grads: PyTree) -> PyTree:
    """Summed gradients over the weight, 0 where that is 0."""
    return jax.tree.map(lambda grad: grad * _reciprocal(weight, grad.dtype), grads)


def _reciprocal(weight: jax.Array, dtype: Any) -> jax.Array:
    """`1 / weight`, and 0 where the weight is 0."""
    weight = weight.astype(dtype)
    return jnp.where(weight != 0, 1 / jnp.where(weight != 0, weight, jnp.ones_like(weight)), jnp.zeros_like(weight))


def zero_gradient(trainable: PyTree, accumulator_dtype: Any) -> PyTree:
    """The sum of no gradients: zeros of the dtype that each leaf of `trainable` is accumulated in."""
    if accumulator_dtype is not None and not jnp.issubdtype(accumulator_dtype, jnp.floating):
        raise ValueError(f"accumulator_dtype={accumulator_dtype!r} is not floating. Use jnp.float32, or None to choose.")

    def dtype_of(leaf: Any) -> Any:
        if accumulator_dtype is None:
            return at_least_float32(leaf.dtype)
        if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
            return jnp.complex128 if jnp.finfo(accumulator_dtype).bits == 64 else jnp.complex64
        return accumulator_dtype

    return jax.tree.map(lambda leaf: jnp.zeros_like(leaf, dtype_of(leaf)), trainable)
