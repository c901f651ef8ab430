"""The exact sums as an Optax transformation, for loops that exist already and call `update` once per microbatch.

Where the loop is given (`nnx.Optimizer`, a Flax `TrainState`, one written by hand), `accumulate_gradients` wraps its
optimizer. Where it is not, `make_step` runs the whole window in one program and holds no gradient between calls.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxacc._accumulate import zero_gradient
from jaxacc._ledger import Counter, zero
from jaxacc._mean import Array, Mean
from jaxacc._step import Outcome
from jaxacc._tree import PyTree, all_finite, as_arrays, at_least_float32, cast_like, copy, merge, partition

PENDING = -1
"""The `outcome` of a call that closed no window."""


class WeightSum(NamedTuple):
    """A sum of weights of any real dtype: whole parts are counted in 64 bits, fractions are summed in floats.

    Token counts are exact however they come, as integers or as the float32 sum of a mask, beyond 2^24 and 2^31 too. A
    negative weight makes the sum infinite, which no later one can hide.

    >>> import jax.numpy as jnp
    >>> from jaxacc.streaming import zero_weight
    >>> weight = zero_weight()
    >>> for n in (2**31 - 1, 16_777_215.0, 0.5):
    ...     weight = weight.add(jnp.asarray(n))
    >>> int(weight.whole) == 2**31 - 1 + 16_777_215, float(weight.fraction)
    (True, 0.5)
    """

    whole: Counter
    fraction: jax.Array

    def add(self, weight: jax.Array) -> WeightSum:
        """The sum with one more weight."""
        if jnp.issubdtype(weight.dtype, jnp.integer):
            whole, fraction = jnp.maximum(weight, 0), jnp.zeros_like(self.fraction)
        else:
            countable = (weight >= 0) & (weight < 2.0**31)
            floor = jnp.where(countable, jnp.floor(weight), jnp.zeros_like(weight))
            whole, fraction = floor.astype(jnp.uint32), (weight - floor).astype(self.fraction.dtype)
        fraction = jnp.where(weight < 0, jnp.full_like(fraction, -jnp.inf), fraction)
        return WeightSum(self.whole.add(whole), self.fraction + fraction)

    def astype(self, dtype: Any) -> jax.Array:
        """The sum as one number of an inexact dtype."""
        return self.whole.high.astype(dtype) * 2.0**32 + self.whole.low.astype(dtype) + self.fraction.astype(dtype)


def zero_weight() -> WeightSum:
    """The sum of no weights."""
    return WeightSum(zero(), jnp.zeros((), jnp.result_type(float)))


class AccumulationState(NamedTuple):
    """The state of `accumulate_gradients`: a pytree of arrays, whose structure and dtypes never change.

    Attributes:
      inner_state: the state of the inner transformation, for the floating leaves of the parameters.
      sums: the gradient of the open window, summed and not divided; None at leaves that are not floating.
      weight: the weight of the open window.
      microbatches: how many the open window has so far, those of weight 0 included; int32.
      attempted: windows closed.
      applied: updates that changed the parameters; `attempted - applied` windows were skipped.
      outcome: what the last call did: an `Outcome` as int32, or `PENDING` if it closed no window.
    """

    inner_state: PyTree
    sums: PyTree
    weight: WeightSum
    microbatches: jax.Array
    attempted: Counter
    applied: Counter
    outcome: jax.Array


def accumulate_gradients(
    tx: optax.GradientTransformation, accumulation_steps: int | None = None, *, accumulator_dtype: Any = None
) -> optax.GradientTransformationExtraArgs:
    r"""Wrap an optimizer so that one call of `update` takes one microbatch, and one window gives one exact update.

    A microbatch comes as the gradient :math:`g_i` of its *mean* loss with the weight :math:`n_i` that the mean was
    divided by, `update(g, state, params, weight=n)`, or as the gradient :math:`\nabla s_i` of its *summed* loss,
    `update(jaxacc.Mean(grad_of_sum, n), state, params)`, for loops that pass no keywords on (Flax `TrainState`). At the
    end of the window the inner transformation is called, once, with

    .. math:: \nabla L = \frac{\sum_i n_i\, g_i}{\sum_i n_i} = \frac{\sum_i \nabla s_i}{\sum_i n_i}

    which is the gradient of the one big batch whatever the weights are. In between the updates are zeros and the inner
    state rests. If the sum or the weight is not finite, a weight is negative, or all are 0, the window is skipped: inner
    state and parameters stay as they are, bit for bit, and the next window starts clean. A microbatch of weight 0
    contributes nothing even where its gradient is NaN.

    Wrap the whole optimizer, with this outermost: a clipping chained before it would clip microbatches. Inside your own
    `jax.shard_map`, psum gradient and weight first, `jax.lax.psum(jaxacc.Mean(grad_of_sum, n), axis)`. Jit the loop.

    Args:
      tx: the Optax transformation. It is given the mean gradient in the dtype of the sums, and `params` and the extra
        arguments of the call that closes the window. `optax.MultiSteps` inside is refused.
      accumulation_steps: how many microbatches close a window, counted also where their weight is 0. None: only
        `last=True` and `flush` close one.
      accumulator_dtype: dtype of the sums; None is float32, or the parameter's own dtype where wider.

    Returns:
      `init(params) -> AccumulationState` and `update(updates, state, params=None, *, weight=None, last=False, **extra)`.
      `weight` is a scalar, integer or floating (see `WeightSum`); `weight=1` says that every microbatch counts the same.
      `last`, which may be traced, closes the window here, divided by what was really there.

    Raises:
      ValueError: for `accumulation_steps` that are no positive integer; from `init` for a second accumulation inside
        `tx`; while tracing `update`, for a gradient without weight, with two, or of another structure than `params`.

    >>> import jax, jax.numpy as jnp, jaxacc, optax
    >>> tx = jaxacc.streaming.accumulate_gradients(optax.sgd(1.0), accumulation_steps=2)
    >>> params = jnp.zeros(())
    >>> state = tx.init(params)
    >>> update = jax.jit(tx.update)
    >>> for grad_of_mean, tokens in [(4.0, 1), (0.0, 3)]:
    ...     updates, state = update(jnp.asarray(grad_of_mean), state, params, weight=tokens)
    ...     params = optax.apply_updates(params, updates)
    >>> float(params), bool(jaxacc.streaming.has_updated(state))
    (-1.0, True)
    """
    _check_steps(accumulation_steps)
    transform = optax.with_extra_args_support(tx)

    def init(params: PyTree) -> AccumulationState:
        trainable, _ = partition(as_arrays(params))
        inner_state = copy(transform.init(trainable))
        _refuse_second_accumulation(inner_state)
        sums = zero_gradient(trainable, accumulator_dtype)
        return AccumulationState(inner_state, sums, zero_weight(), jnp.int32(0), zero(), zero(), jnp.int32(PENDING))

    def update(
        updates: PyTree, state: Any, params: PyTree = None, *, weight: Any = None, last: Any = False, **extra: Any
    ) -> tuple[PyTree, Any]:
        state = _add(state, updates, weight)
        closes = jnp.asarray(last, bool)
        if accumulation_steps is not None:
            closes |= state.microbatches >= accumulation_steps
        trainable, frozen = (None, None) if params is None else partition(as_arrays(params))

        def move() -> tuple[PyTree, PyTree]:
            mean = _divide(state.sums, state.weight)
            updates, inner_state = transform.update(mean, state.inner_state, trainable, **extra)
            return updates, cast_like(inner_state, state.inner_state)

        shapes, _ = jax.eval_shape(move)
        outcome = jax.lax.cond(closes, lambda: _outcome(state.sums, state.weight), lambda: jnp.int32(PENDING))
        updates, inner_state = jax.lax.cond(
            outcome == Outcome.APPLIED, move, lambda: (jax.tree.map(jnp.zeros_like, shapes), state.inner_state)
        )
        if params is not None:  # the caller applies updates to the leaves that are not floating too
            updates = merge(updates, jax.tree.map(jnp.zeros_like, frozen))
        return updates, _settle(state._replace(inner_state=inner_state), closes, outcome)

    return optax.GradientTransformationExtraArgs(init, update)


def flush(
    tx: optax.GradientTransformationExtraArgs, state: AccumulationState, params: PyTree, **extra: Any
) -> tuple[PyTree, AccumulationState]:
    """Close a window without another microbatch: the last one of an epoch, shorter than the others.

    It is divided by the weight that was really there. With nothing pending, updates are zeros and the state is returned
    as it was, bit for bit, `outcome` included: `has_updated` then still tells of the call before.

    Where the loop owns the call of `update`, a microbatch of weight 0 that is the last closes the window too:
    `optimizer.update(model, grads, weight=0, last=True)`. It is a microbatch, so that with nothing pending it is a
    window of its own, skipped as empty.

    Args:
      tx: what `accumulate_gradients` returned.
      state: its state.
      params: the parameters, a tree as given to `tx.init`.
      **extra: extra arguments for the inner transformation.

    Returns:
      `(updates, state)`, as from `tx.update`.

    Raises:
      ValueError: for a state that is not of `accumulate_gradients`.

    >>> import jax.numpy as jnp, jaxacc, optax
    >>> tx = jaxacc.streaming.accumulate_gradients(optax.sgd(1.0), accumulation_steps=4)
    >>> params = jnp.zeros(())
    >>> _, state = tx.update(jnp.asarray(3.0), tx.init(params), params, weight=2)
    >>> updates, state = jaxacc.streaming.flush(tx, state, params)
    >>> float(updates), int(state.applied), int(state.microbatches)
    (-3.0, 1, 0)
    """
    nothing = Mean(jax.tree.map(jnp.zeros_like, _check_state(state).sums), 0)

    def close() -> tuple[PyTree, Any]:
        return tx.update(nothing, state, params, last=True, **extra)

    zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(close)[0])
    return jax.lax.cond(state.microbatches > 0, close, lambda: (zeros, state))


def has_updated(state: AccumulationState) -> jax.Array:
    """Whether the last call changed the parameters: it closed a window, and the window was not skipped.

    Args:
      state: the state that `update` or `flush` returned.

    Returns:
      A bool scalar.

    Raises:
      ValueError: for a state that is not of `accumulate_gradients`.

    >>> import jax.numpy as jnp, jaxacc, optax
    >>> tx = jaxacc.streaming.accumulate_gradients(optax.sgd(1.0), accumulation_steps=1)
    >>> state = tx.init(jnp.zeros(()))
    >>> before = bool(jaxacc.streaming.has_updated(state))
    >>> _, state = tx.update(jnp.asarray(jnp.nan), state, weight=2)
    >>> before, bool(jaxacc.streaming.has_updated(state)), jaxacc.Outcome(int(state.outcome)).name
    (False, False, 'SKIPPED_NONFINITE')
    """
    return _check_state(state).outcome == Outcome.APPLIED


def _add(state: AccumulationState, updates: PyTree, weight: Any) -> AccumulationState:
    """The state with one more microbatch in its open window."""
    if isinstance(updates, Mean) == (weight is not None):
        given = "a Mean, which has its weight, and weight= too" if weight is not None else "a gradient without a weight"
        raise ValueError(
            f"update was given {given}. Pass the gradient of a mean with the weight it was divided by, weight=n; or, where "
            "keywords are not passed on, the gradient of a sum, jaxacc.Mean(grads, n). If every microbatch counts the same: "
            "weight=1."
        )
    grads, n = updates if isinstance(updates, Mean) else (updates, weight)
    n = _check_weight(n)

    def add_leaf(total: jax.Array, grad: Array) -> jax.Array:
        wide = at_least_float32(total.dtype)
        added = jnp.asarray(grad).astype(wide)
        if weight is not None:
            added = n.astype(wide) * added
        # Selected, never multiplied: 0 * NaN would stay.
        return jnp.where(n != 0, (total.astype(wide) + added).astype(total.dtype), total)

    sums, structure = jax.tree.flatten(_check_state(state).sums)
    sums = [add_leaf(total, grad) for total, grad in zip(sums, _check_gradient(grads, state.sums), strict=True)]
    return state._replace(sums=structure.unflatten(sums), weight=state.weight.add(n), microbatches=state.microbatches + 1)


def _divide(sums: PyTree, weight: WeightSum) -> PyTree:
    """The one division; by 1 where nothing was counted."""
    empty = weight.astype(weight.fraction.dtype) == 0

    def divide_leaf(total: jax.Array) -> jax.Array:
        divisor = weight.astype(at_least_float32(total.dtype))
        divisor = jnp.where(empty, jnp.ones_like(divisor), divisor)
        return (total.astype(divisor.dtype) / divisor).astype(total.dtype)

    return jax.tree.map(divide_leaf, sums)


def _outcome(sums: PyTree, weight: WeightSum) -> jax.Array:
    total = weight.astype(weight.fraction.dtype)
    finite = jnp.isfinite(total) & all_finite(_divide(sums, weight))
    outcome = jnp.where(finite, Outcome.APPLIED, Outcome.SKIPPED_NONFINITE)
    return jnp.where(total == 0, Outcome.SKIPPED_EMPTY, outcome).astype(jnp.int32)


def _settle(state: AccumulationState, closes: jax.Array, outcome: jax.Array) -> AccumulationState:
    """The state after a call: a window that is closed leaves nothing behind."""

    def reset() -> tuple[PyTree, WeightSum, jax.Array]:
        return jax.tree.map(jnp.zeros_like, (state.sums, state.weight, state.microbatches))

    sums, weight, microbatches = jax.lax.cond(closes, reset, lambda: (state.sums, state.weight, state.microbatches))
    return AccumulationState(
        inner_state=state.inner_state,
        sums=sums,
        weight=weight,
        microbatches=microbatches,
        attempted=state.attempted.add(closes.astype(jnp.int32)),
        applied=state.applied.add((outcome == Outcome.APPLIED).astype(jnp.int32)),
        outcome=outcome,
    )


def _check_steps(accumulation_steps: Any) -> None:
    integer = isinstance(accumulation_steps, int | np.integer) and not isinstance(accumulation_steps, bool)
    if accumulation_steps is not None and not (integer and accumulation_steps >= 1):
        raise ValueError(
            f"accumulation_steps={accumulation_steps!r} is not a positive integer. Give the number of microbatches that close "
            "a window (1 updates at every call), or None to close windows by last=True and flush alone."
        )


def _check_weight(weight: Any) -> jax.Array:
    weight = jnp.asarray(weight)
    if weight.ndim or jnp.issubdtype(weight.dtype, jnp.complexfloating):
        raise ValueError(
            f"the weight is {weight.dtype} {weight.shape}. It must be one real number for the whole microbatch, the one its "
            "loss is divided by: sum the weights of the rows, jnp.sum(weight)."
        )
    if jnp.issubdtype(weight.dtype, jnp.floating):
        return weight.astype(at_least_float32(weight.dtype))
    return weight.astype(jnp.int32) if weight.dtype == jnp.bool_ else weight


def _check_gradient(grads: PyTree, sums: PyTree) -> list[Array]:
    """The floating leaves of `grads`, which must be those of the parameters."""
    given, expected = (
        {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(partition(tree)[0])}
        for tree in (grads, sums)
    )
    for path in [*expected, *given]:
        of_gradient, of_params = (jnp.shape(tree[path]) if path in tree else "missing" for tree in (given, expected))
        if of_gradient != of_params:
            raise ValueError(
                f"the gradient does not match the parameters that init was given, at {path or 'the root'}: {of_gradient} in "
                f"the gradient, {of_params} in the parameters. Differentiate with respect to the same tree."
            )
    return [given[path] for path in expected]


def _check_state(state: Any) -> AccumulationState:
    if not isinstance(state, AccumulationState):
        raise ValueError(
            f"the state is a {type(state).__name__}, not an AccumulationState. Pass the state that init, update or flush of "
            "accumulate_gradients returned; wrap the whole optimizer, not a part of a chain."
        )
    return state


def _refuse_second_accumulation(inner_state: PyTree) -> None:
    is_accumulation = lambda node: isinstance(node, optax.MultiStepsState | AccumulationState)
    if any(map(is_accumulation, jax.tree.leaves(inner_state, is_leaf=is_accumulation))):
        raise ValueError(
            "tx contains optax.MultiSteps or accumulate_gradients, a second accumulation inside this one: updates would be "
            "applied every k windows and as means of means. Pass the inner optimizer and choose accumulation_steps here."
        )
