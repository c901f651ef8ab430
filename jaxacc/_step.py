"""`make_step`: gate the window's gradient, apply exactly one Optax update, keep the ledger."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxacc._accumulate import Evaluation, evaluate_window, window_sums, zero_gradient
from jaxacc._contract import LossFn
from jaxacc._fold import FoldName
from jaxacc._keys import window_key
from jaxacc._ledger import Ledger, new_ledger
from jaxacc._mean import Mean, Sum
from jaxacc._split import check_window, row_mask_of
from jaxacc._tree import PyTree, all_finite, cast_like, copy, merge, partition


class Outcome(enum.IntEnum):
    """What became of a window."""

    APPLIED = 0
    SKIPPED_NONFINITE = 1
    SKIPPED_EMPTY = 2


class TrainState(NamedTuple):
    """All that a run needs to go on: a pytree of arrays.

    Attributes:
      params: the parameters.
      opt_state: the Optax state of the floating leaves of `params`.
      key: the random key that window keys are folded from, or None.
      ledger: exact counts of what was consumed and applied.
    """

    params: PyTree
    opt_state: PyTree
    key: Any
    ledger: Ledger


class StepInfo(NamedTuple):
    """What one window did.

    Attributes:
      loss: weighted mean loss before the update.
      weight: the weight evaluated.
      grad_norm: global norm of the gradient, before any clipping.
      outcome: an `Outcome` as int32.
      examples: real rows in the window.
      tokens: the integer weight of the loss, or the metric `Sum` named "tokens"; 0 where there is neither.
      metrics: the metrics of `loss_fn`, merged over the window and not divided: read `.value`.
    """

    loss: jax.Array
    weight: jax.Array
    grad_norm: jax.Array
    outcome: jax.Array
    examples: jax.Array
    tokens: jax.Array
    metrics: PyTree


class Step(NamedTuple):
    """The functions of a training step, see `make_step`.

    Attributes:
      init: `init(params, *, key=None) -> TrainState`. Copies: your arrays stay valid after the state is donated.
      update: `update(state, window) -> (TrainState, StepInfo)`, a `jax.jit` object that donates `state`.
      evaluate: `evaluate(state, window) -> Evaluation`, a `jax.jit` object. No randomness, nothing moves.
    """

    init: Callable[..., TrainState]
    update: Any
    evaluate: Any


def make_step(
    loss_fn: LossFn,
    tx: optax.GradientTransformation,
    *,
    has_aux: bool = False,
    fold: FoldName = "auto",
    accumulator_dtype: Any = None,
) -> Step:
    r"""A training step whose update equals that of the one big batch, for any split of it.

    One window gives one call of `tx.update` on the gradient that `accumulate` defines: clipping, schedules, weight
    decay and averages see the whole window, once. If its loss or gradient is not finite, or its weight is 0, nothing in
    params and opt_state moves, bit for bit; `info.outcome` and `state.ledger` say so, and schedules, which count
    applied updates, do not advance.

    Args:
      loss_fn: as for `accumulate`.
      tx: the Optax transformation. It is given `params` and the extra arguments `value` and `grad`. New state is cast
        back to the dtypes of the state it replaces. Line searches (which need `value_fn`) and `optax.MultiSteps` (a
        second accumulation) are refused.
      has_aux: as for `accumulate`.
      fold: as for `accumulate`.
      accumulator_dtype: as for `accumulate`.

    Returns:
      `Step(init, update, evaluate)`. The leading axis of the window is `A`: windows of one shape compile once, and
      `jax.lax.scan(step.update, state, windows)` runs several. The arrays of a `state` given to `update` are gone.

    Raises:
      ValueError: from `init` for a `tx` that cannot work, from the first call for what breaks the contract.

    >>> import jax, jax.numpy as jnp, jaxacc, optax
    >>> def loss_fn(params, microbatch, key):
    ...     error = (microbatch["x"] @ params - microbatch["y"]) ** 2
    ...     return jaxacc.Mean(error, jnp.ones_like(error))
    >>> step = jaxacc.make_step(loss_fn, optax.sgd(0.01))
    >>> state = step.init(jnp.array([0.1, 0.2]))
    >>> batch = {"x": jnp.arange(12.0).reshape(6, 2), "y": jnp.ones(6)}
    >>> state, info = step.update(state, jaxacc.split_batch(batch, accumulation_steps=3))
    >>> jaxacc.Outcome(int(info.outcome)).name, int(state.ledger.examples)
    ('APPLIED', 6)
    >>> [round(float(p), 3) for p in state.params]
    [-0.04, 0.046]
    """
    transform = optax.with_extra_args_support(tx)

    def init(params: PyTree, *, key: Any = None) -> TrainState:
        params = copy(params)
        trainable, _ = partition(params)
        opt_state = copy(transform.init(trainable))
        _check_transform(transform, opt_state, trainable, accumulator_dtype)
        return TrainState(params, opt_state, copy(key), new_ledger())

    def update(state: TrainState, window: PyTree) -> tuple[TrainState, StepInfo]:
        loss, metrics, grads = window_sums(
            loss_fn, state.params, window, window_key(state.key, state.ledger.attempted),
            has_aux=has_aux, axes=(), fold=fold, accumulator_dtype=accumulator_dtype,
        )  # fmt: skip
        outcome = _outcome(loss, grads)
        params, opt_state = _gated_update(transform, outcome == Outcome.APPLIED, state, grads, loss.value)
        examples, real_microbatches = _count_rows(window)
        tokens = _count_tokens(loss, metrics)
        ledger = state.ledger.record(
            microbatches=real_microbatches, applied=outcome == Outcome.APPLIED, examples=examples, tokens=tokens
        )
        info = StepInfo(
            loss=loss.value, weight=jnp.asarray(loss.weight), grad_norm=optax.tree.norm(grads), outcome=outcome,
            examples=examples, tokens=tokens, metrics=metrics,
        )  # fmt: skip
        return TrainState(params, opt_state, state.key, ledger), info

    def evaluate(state: TrainState, window: PyTree) -> Evaluation:
        return evaluate_window(loss_fn, state.params, window, has_aux=has_aux)

    return Step(init, jax.jit(update, donate_argnums=0), jax.jit(evaluate))


def _outcome(loss: Mean, grads: PyTree) -> jax.Array:
    weight = jnp.asarray(loss.weight)
    finite = jnp.isfinite(loss.value) & jnp.isfinite(weight) & all_finite(grads)
    applied = jnp.where(finite & (weight > 0), Outcome.APPLIED, Outcome.SKIPPED_NONFINITE)
    return jnp.where(weight == 0, Outcome.SKIPPED_EMPTY, applied).astype(jnp.int32)


def _gated_update(
    transform: optax.GradientTransformationExtraArgs, apply: jax.Array, state: TrainState, grads: PyTree, value: jax.Array
) -> tuple[PyTree, PyTree]:
    """One `tx.update` where `apply`, else the old leaves untouched; a branch, because a select would copy them all."""
    trainable, frozen = partition(state.params)

    def moved() -> tuple[PyTree, PyTree]:
        updates, opt_state = transform.update(grads, state.opt_state, trainable, value=value, grad=grads)
        return optax.apply_updates(trainable, updates), cast_like(opt_state, state.opt_state)

    trainable, opt_state = jax.lax.cond(apply, moved, lambda: (trainable, state.opt_state))
    return merge(trainable, frozen), opt_state


def _count_rows(window: PyTree) -> tuple[jax.Array, jax.Array]:
    """Real rows, and microbatches that have at least one."""
    steps, rows = check_window(window)
    mask = row_mask_of(window)
    if mask is None:
        return jnp.int32(steps * rows), jnp.int32(steps)
    return jnp.sum(mask, dtype=jnp.int32), jnp.sum(jnp.any(mask, axis=1), dtype=jnp.int32)


def _count_tokens(loss: Mean, metrics: PyTree) -> jax.Array:
    declared = metrics.get("tokens") if isinstance(metrics, Mapping) else None
    if isinstance(declared, Sum):
        tokens = jnp.asarray(declared.value)
        if not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise ValueError(
                f'the metric Sum named "tokens" is {tokens.dtype}, which the ledger cannot count exactly. Sum integers or '
                "bools, jnp.sum(mask, dtype=jnp.int32), or name the metric otherwise."
            )
        return tokens
    weight = jnp.asarray(loss.weight)
    return weight if jnp.issubdtype(weight.dtype, jnp.integer) else jnp.int32(0)


def _check_transform(
    transform: optax.GradientTransformationExtraArgs, opt_state: PyTree, trainable: PyTree, accumulator_dtype: Any
) -> None:
    """Refuse transformations that cannot be applied once per window, before anything is compiled."""
    is_multi_steps = lambda node: isinstance(node, optax.MultiStepsState)
    if any(map(is_multi_steps, jax.tree.leaves(opt_state, is_leaf=is_multi_steps))):
        raise ValueError(
            "tx contains optax.MultiSteps, a second accumulation inside this one: updates would be applied every k "
            "windows and as means of means. Pass the inner optimizer and choose A by the window's leading axis."
        )
    value = jax.ShapeDtypeStruct((), jnp.float32)
    grads = jax.eval_shape(lambda trainable: zero_gradient(trainable, accumulator_dtype), trainable)
    try:
        jax.eval_shape(
            lambda grads, state, params, value: transform.update(grads, state, params, value=value, grad=grads),
            grads, opt_state, trainable, value,
        )  # fmt: skip
    except TypeError as error:
        if "value_fn" not in str(error):
            differ = jax.tree.leaves(jax.tree.map(lambda grad, leaf: grad.dtype != leaf.dtype, grads, trainable))
            if any(differ):
                error.add_note(
                    "jaxacc gives tx float32 gradients of narrower parameters. If tx needs them in the parameters' own dtype, "
                    "pass accumulator_dtype (the sum over microbatches then rounds to it)."
                )
            raise
        raise ValueError(
            "tx needs value_fn (a line search): it would evaluate the loss again at trial points, over the whole window. "
            "jaxacc evaluates every microbatch once. Use an optimizer without a line search."
        ) from error
