"""`accumulate`: like `jax.value_and_grad`, over a window of microbatches, with one division and one reduction."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxacc._contract import LossFn, Nonfinite, Objective, Sums, objective_of, sums_of, sums_structure
from jaxacc._fold import (
    Fold,
    FoldName,
    Running,
    fold_gradients,
    fold_values,
    has_weight,
    merge_if,
    uses_in_place,
    weigh,
    weights_of,
)
from jaxacc._mean import Mean, Sum, reduce_over
from jaxacc._model_state import conclude, reductions_of
from jaxacc._noise import NoiseScaleFrom, Parts, part_of
from jaxacc._split import check_window
from jaxacc._tree import PyTree, Trainable, as_arrays, at_least_float32, merge, partition, vary, varying_axes


class Accumulated(NamedTuple):
    """What a window gives.

    Attributes:
      loss: the weighted mean loss of the window, a scalar; 0 where the weight is 0. Of several terms: each over its own
        weight, times its coefficient.
      grads: its gradient, a tree like `params` with None at leaves that are not floating or not trained.
      weight: the weight that was really evaluated, over microbatches and replicas; of several terms, the main one's.
      metrics: the metrics `loss_fn` returned, merged over the window and not divided: read `.value`.
      terms: the terms of the loss by name, merged over the window and not divided: read `.value`.
      state: the model state after the window, None without.
      dropped: microbatches left out because their loss was not finite, with `nonfinite="drop_microbatch"`.
    """

    loss: jax.Array
    grads: PyTree
    weight: jax.Array
    metrics: PyTree
    terms: dict[str, Mean]
    state: PyTree
    dropped: jax.Array


class Evaluation(NamedTuple):
    """Undivided results of an evaluation, to be merged over windows with `jaxacc.merge`; `.value` divides.

    Attributes:
      loss: the loss; of several terms the main one.
      metrics: the metrics `loss_fn` returned.
      terms: the terms of the loss by name.
    """

    loss: Mean
    metrics: PyTree
    terms: dict[str, Mean]


class WindowSums(NamedTuple):
    """A window over all replicas: the loss and metrics not divided, the gradient divided.

    Attributes:
      sums: loss terms, metrics and dropped microbatches.
      state: the model state after the window.
      parts: the noise in the gradients of its parts, None where that is not asked for.
      grads: the gradient.
    """

    sums: Sums
    state: PyTree
    parts: Parts | None
    grads: PyTree


def accumulate(
    loss_fn: LossFn,
    *,
    has_aux: bool = False,
    has_state: bool = False,
    coefficients: Mapping[str, float] | None = None,
    row_keys: bool = False,
    nonfinite: Nonfinite = "skip_window",
    state_reduction: PyTree = "sequential",
    trainable: Trainable = None,
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

    A loss of several terms :math:`k`, a dict of `Mean`, gives each its own denominator, through one gradient tree:

    .. math:: L = \sum_k c_k \frac{\sum_i s_{ki}}{\sum_i n_{ki}}

    A microbatch in which a term has weight 0 adds nothing to that term, if what it computes there is finite. Every term must
    be a sum over rows or microbatches. What compares rows with each other (contrastive losses; a balance of router load over
    the *batch*) is another function of each microbatch than of the whole, and no choice of weights changes that: see
    `two_pass`, or define it per microbatch, `Mean(balance, jnp.int32(1))`.

    The weights are summed before the backward passes so that no pass over the gradient tree is needed to divide it.
    That is free where they depend on the data only; where they depend on `params`, or with `nonfinite="drop_microbatch"`
    for several terms, it costs a forward pass (A > 1).

    Args:
      loss_fn: `loss_fn(params, microbatch, key)` returning `Mean(total, weight)`, not divided, or a dict of them. With
        `has_aux` and `has_state` it returns a tuple. Entries are scalars or one per row.
      has_aux: whether `loss_fn` returns `(loss, metrics)`, where metrics is a tree of `Mean`, `Sum` and `Max`.
      has_state: whether it has mutable model state (batch statistics, fp8 maxima, router counts):
        `loss_fn(params, state, microbatch, key)` returning `(loss, new_state)`, or `(loss, metrics, new_state)`. State is not
        differentiated, and a microbatch of weight 0 does not touch it.
      coefficients: the factor of every term of a dict loss but the main one, by name.
      row_keys: give `loss_fn` one key per row, `(m,)`, in place of one per microbatch: the window's key folded with the row's
        position in the effective batch (the leaf `row_position`, else its place as `split_batch` cut it). The same rows then
        get the same randomness for every split. Use as `jax.vmap(lambda key, row: ...)(keys, rows)`; many small draws cost
        time under `jax_default_prng_impl="rbg"`.
      nonfinite: `"drop_microbatch"` leaves a microbatch whose loss is not finite out, total and weight, before its gradient
        is made; each replica decides for its own, without communication. The default leaves nothing out.
      state_reduction: how the states that the microbatches return become one; a tree prefix of the state.
        `"sequential"`: each microbatch reads what the one before returned (replicas: mean of floats, the first's of others).
        `"mean"`, `"sum"` (of the differences to the start) and `"max"`: each reads the state at the start of the window, and
        the new values are reduced over all microbatches and replicas.
      trainable: which parameters are differentiated: a tree prefix of bools, or a predicate of a leaf's path, such as
        `lambda path: "lora" in path` of `"layers/0/lora/a"`. For the others no gradient and no sum exists.
      axis_name: the manual mesh axes that split rows, inside your own `jax.shard_map` or `jax.pmap`; `()` if its axes
        do not split rows. The result is then already reduced: a `pmean` of it changes nothing, but **another psum makes
        the gradient D times too large**, and JAX gives no way to prevent that.
      fold: `"in_place"` adds every cotangent straight into the sum (jax >= 0.11; saves up to one gradient tree on
        scanned layers), `"carry"` adds whole gradient trees, `"auto"` takes the first where it is safe. Use `"carry"`
        under `jax.vmap`, under an outer `jax.checkpoint` and to differentiate the result again.
      accumulator_dtype: dtype of the sums and of `grads`; None is float32, or the parameter's own dtype where wider.
        Complex parameters are summed in the complex dtype of that width.

    Returns:
      `grads_of(params, window, key=None, *, state=None) -> Accumulated`: pure, for you to jit. Every leaf of `window` has
      shape `(A, m, ...)`, see `split_batch`; `key` is folded with the microbatch's index (and replica), None is passed on;
      `state` is the model state with `has_state`.

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
    objective = objective_of(
        loss_fn, has_aux=has_aux, has_state=has_state, coefficients=coefficients, row_keys=row_keys, nonfinite=nonfinite,
        state_reduction=state_reduction, trainable=trainable,
    )  # fmt: skip

    def grads_of(params: PyTree, window: PyTree, key: Any = None, *, state: PyTree = None) -> Accumulated:
        axes = check_manual_axes("accumulate", axis_name)
        sums, state, _, grads = window_sums(
            objective, params, state, window, key, axes=axes, fold=fold, accumulator_dtype=accumulator_dtype
        )
        terms = sums.terms
        weight = jnp.asarray(objective.main(terms).weight)
        return Accumulated(objective.loss(terms), grads, weight, sums.metrics, terms, state, sums.dropped.value)

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


def fold_of(
    objective: Objective, axes: tuple[str, ...], params: PyTree, state: PyTree, microbatch: PyTree, key: Any, steps: int | None
) -> tuple[Fold, bool]:
    """How the microbatches of a window are evaluated, of which one is given for its shapes; and whether the loss is 16-bit."""
    if objective.has_state != (state is not None):
        given = "no model state is given" if state is None else "a model state is given"
        raise ValueError(f"has_state={objective.has_state}, but {given}. State goes with has_state=True, and needs it.")
    trainable, frozen = partition(params, objective.trainable)

    def value_of(trainable: PyTree, state: PyTree, index: jax.Array, microbatch: PyTree) -> tuple[Sums, PyTree]:
        inner_key = objective.key(key, index, steps, microbatch, axes)
        return sums_of(objective, axes, merge(trainable, frozen), state, microbatch, inner_key)

    first_key = objective.key(key, jnp.int32(0), steps, microbatch, axes)
    structure, narrow = sums_structure(objective, axes, params, state, microbatch, first_key)
    reductions = reductions_of(state, objective.state_reduction)
    return Fold(value_of, trainable, state, reductions, structure, objective.drops_nonfinite), narrow


def window_sums(
    objective: Objective,
    params: PyTree,
    state: PyTree,
    window: PyTree,
    key: Any,
    *,
    axes: tuple[str, ...],
    fold: FoldName,
    accumulator_dtype: Any,
    scale: jax.Array | None = None,
    noise_from: NoiseScaleFrom | None = None,
    reduce: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]] | None = None,
) -> WindowSums:
    """Weigh, fold, reduce: a window over all replicas of `axes`.

    `reduce` sums the totals and the gradients over the replicas; None is one psum. The backward passes are run on `scale`
    times the loss.
    """
    steps, _ = check_window(window)
    params, state, window = as_arrays((params, state, window))
    varying_params, varying_state, window = vary((params, state, window), axes)
    first = jax.tree.map(lambda leaf: leaf[0], window)

    def fold_as(objective: Objective) -> tuple[Fold, bool]:
        return fold_of(objective, axes, varying_params, varying_state, first, key, steps)

    how, narrow = fold_as(objective)
    accumulators = zero_gradient(how.trainable, accumulator_dtype)
    fold = "carry" if noise_from == "microbatches" and fold == "auto" else fold
    in_place = uses_in_place(fold, how.trainable, accumulators)
    seeds_for = partial(seeds_of, objective, how.structure, scale=scale, narrow=narrow)
    if steps == 1:
        local = _fold_first(how, first, axes, seeds_for, accumulators)
    else:
        # What is dropped is known after the forward pass: a single term is divided afterwards, several are weighed with it.
        late = objective.drops_nonfinite and len(how.structure.terms) == 1
        weighing = fold_as(objective._replace(drops_nonfinite=False))[0] if late else how
        main = objective.main if noise_from == "microbatches" else None
        local = _fold_all(how, weighing, window, axes, seeds_for, accumulators, late=late, in_place=in_place, main=main)
    if noise_from is not None and local.parts is None:
        local = local._replace(parts=part_of(local.grads, objective.main(local.running.sums.terms).weight))
    summed = _reduce_local(objective, axes, local, scale, narrow, reduce or partial(_psum_both, axes))
    return summed._replace(state=conclude(state, local.running.state, how.reductions, axes))


class _Local(NamedTuple):
    """What one replica makes of its part of a window.

    Attributes:
      running: its sums.
      grads: its sum of gradients.
      parts: the noise in them, None where it is not asked for or not known yet.
      weights: the weights over all replicas; None where dropped microbatches have to leave them first.
      seeds: what its totals were multiplied by.
    """

    running: Running
    grads: PyTree
    parts: Parts | None
    weights: dict[str, jax.Array] | None
    seeds: dict[str, jax.Array]


SeedsFor = Callable[[Mapping[str, jax.Array]], dict[str, jax.Array]]


def _fold_first(how: Fold, microbatch: PyTree, axes: tuple[str, ...], seeds_for: SeedsFor, accumulators: PyTree) -> _Local:
    """A window of one microbatch: its forward pass gives the weights."""
    evaluated, pull = how.pull_back(how.start().state, jnp.int32(0), microbatch)
    weights = psum_over(axes, weights_of(evaluated[0]))
    seeds = seeds_for(weights)
    running, grads = pull_inhabited(how, evaluated, pull, cotangents(how.structure, seeds), accumulators)
    return _Local(running, grads, None, weights, seeds)


def _fold_all(
    how: Fold, weighing: Fold, window: PyTree, axes: tuple[str, ...], seeds_for: SeedsFor, accumulators: PyTree, *,
    late: bool, in_place: bool, main: Callable[[Any], Any] | None,
) -> _Local:  # fmt: skip
    """A window of several: the weights first, then the gradients."""
    each, dropped = weigh(weighing, window)
    weights = psum_over(axes, jax.tree.map(partial(_count, finite=late), each))
    seeds = seeds_for(weights)
    running, grads, parts = fold_gradients(
        how, window, inhabited=has_weight(each), seeds=cotangents(how.structure, seeds), accumulators=accumulators,
        in_place=in_place, main=main,
    )  # fmt: skip
    sums = running.sums._replace(dropped=Sum(running.sums.dropped.value + _count(dropped)))
    return _Local(running._replace(sums=sums), grads, parts, None if late else weights, seeds)


def _reduce_local(
    objective: Objective, axes: tuple[str, ...], local: _Local, scale: jax.Array | None, narrow: bool,
    reduce: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]],
) -> WindowSums:  # fmt: skip
    """The one reduction, and what the gradient lacks then; without the model state."""
    sums = local.running.sums
    totals, grads = reduce({name: term.total for name, term in sums.terms.items()}, local.grads)
    weights = psum_over(axes, weights_of(sums)) if local.weights is None else local.weights
    corrected = local.seeds if narrow or local.weights is None else None
    grads, parts = rescale(factor_of(objective, weights, corrected, scale), grads, psum_over(axes, local.parts))
    dropped = reduce_over(axes, sums.dropped) if objective.drops_nonfinite else Sum(jnp.int32(0))
    terms = {name: Mean(totals[name], weights[name]) for name in totals}
    return WindowSums(Sums(terms, reduce_over(axes, sums.metrics), dropped), None, parts, grads)


def evaluate_window(
    objective: Objective, params: PyTree, state: PyTree, window: PyTree, *, axes: tuple[str, ...] = ()
) -> Evaluation:
    """Undivided loss and metrics of a window, over all replicas of `axes`, without key; what is not finite shows."""
    steps, _ = check_window(window)
    params, state, window = vary((params, state, window), axes)
    first = jax.tree.map(lambda leaf: leaf[0], window)
    how, _ = fold_of(objective._replace(drops_nonfinite=False, trainable=None), axes, params, state, first, None, steps)
    sums = reduce_over(axes, fold_values(how, window))
    return Evaluation(objective.main(sums.terms), sums.metrics, sums.terms)


def pull_inhabited(
    how: Fold, evaluated: tuple[Sums, PyTree], pull: Any, seeds: dict[str, jax.Array], accumulators: PyTree
) -> tuple[Running, PyTree]:
    """The backward pass of a single microbatch, not run where its weight is 0."""
    (sums, new), start = evaluated, how.start()
    inhabited = has_weight(weights_of(sums))

    def backward() -> PyTree:
        (grads,) = pull(seeds)
        return jax.tree.map(lambda grad, like: grad.astype(like.dtype), grads, accumulators)

    grads = jax.lax.cond(inhabited, backward, lambda: accumulators)
    return Running(merge_if(inhabited, start.sums, sums), how.touch(start.state, new, inhabited)), grads


def seeds_of(
    objective: Objective, structure: Sums, weights: Mapping[str, jax.Array], *, scale: jax.Array | None, narrow: bool
) -> dict[str, jax.Array]:
    """What the totals are multiplied by: `scale * coefficient / weight`, so that nobody has to divide the gradient.

    A 16-bit (`narrow`) loss would round them, the same way in every gradient: there they are powers of two near that, and
    the sum is divided by what is missing.
    """

    def seed_of(name: str, total: Any) -> jax.Array:
        seed = _reciprocal(weights[name], total.dtype) * float(objective.coefficient(name))
        seed = seed if scale is None else seed * scale.astype(total.dtype)
        return _power_of_two(seed) if narrow else seed

    return {name: seed_of(name, term.total) for name, term in structure.terms.items()}


def cotangents(structure: Sums, seeds: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """The seeds as the backward passes of one replica take them."""
    return {name: vary(seeds[name], varying_axes(term.total)) for name, term in structure.terms.items()}


def factor_of(
    objective: Objective, weights: Mapping[str, jax.Array], late_seeds: Mapping[str, jax.Array] | None, scale: jax.Array | None
) -> jax.Array | None:
    """What the summed gradient lacks once the backward passes had their seeds; None where that is nothing."""
    if late_seeds is not None:
        seed = objective.main(late_seeds)
        return _reciprocal(objective.main(weights), seed.dtype) * _reciprocal(seed, seed.dtype)
    return None if scale is None else _reciprocal(scale, scale.dtype)


def rescale(factor: jax.Array | None, grads: PyTree, parts: Parts | None) -> tuple[PyTree, Parts | None]:
    """Summed gradients, and what is known of their noise, times the factor."""
    if factor is None:
        return grads, parts
    parts = None if parts is None else parts._replace(squares=parts.squares * jnp.square(factor).astype(jnp.float32))
    return jax.tree.map(lambda grad: grad * factor.astype(grad.dtype), grads), parts


def psum_over(axes: tuple[str, ...], tree: PyTree) -> PyTree:
    """The sum over the replicas of `axes`."""
    return jax.lax.psum(tree, axes) if axes else tree


def _psum_both(axes: tuple[str, ...], totals: PyTree, grads: PyTree) -> tuple[PyTree, PyTree]:
    return psum_over(axes, (totals, grads))


def _count(entries: jax.Array, finite: bool = False) -> jax.Array:
    """The sum, of the entries that are finite if that is asked for."""
    kept = jnp.where(jnp.isfinite(entries), entries, jnp.zeros_like(entries)) if finite else entries
    return jnp.sum(kept, dtype=entries.dtype)


def _power_of_two(value: jax.Array) -> jax.Array:
    """A power of two that float16 can hold, near the absolute value; 0 for 0."""
    _, exponent = jnp.frexp(value)
    power = jnp.ldexp(jnp.ones_like(value), jnp.clip(exponent - 1, -14, 15))
    return jnp.where(value == 0, jnp.zeros_like(value), power)


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
