"""`make_step`: gate the window's gradient, apply exactly one Optax update, keep the ledger."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxacc._accumulate import Evaluation, WindowSums, zero_gradient
from jaxacc._contract import LossFn, Nonfinite, Objective, Sums, objective_of
from jaxacc._fold import FoldName
from jaxacc._keys import window_key
from jaxacc._ledger import Ledger, new_ledger
from jaxacc._mean import Mean, Sum
from jaxacc._mesh import (
    Layout,
    auto_mesh,
    build_on,
    constrain_state,
    constrain_update,
    constrain_window,
    evaluate_on,
    gather_rows,
    layout_of,
    on_mesh,
    sums_on,
)
from jaxacc._noise import NoiseScaleFrom, NoiseState, noise_scale_of, observe, quiet
from jaxacc._scaling import LossScale, ScaleState, adjust, check_scale, start_scale
from jaxacc._split import ROW_IDS, check_window, reserved_leaf, row_mask_of
from jaxacc._stream import Accumulator, add_on, begin_on, reduce_on
from jaxacc._tree import PyTree, Trainable, all_finite, cast_like, copy, merge, partition


class Outcome(enum.IntEnum):
    """What became of a window."""

    APPLIED = 0
    SKIPPED_NONFINITE = 1
    SKIPPED_EMPTY = 2
    SKIPPED_WEIGHTS = 3
    """The weights that `step.begin` was told are not those that were added."""


class TrainState(NamedTuple):
    """All that a run needs to go on: a pytree of arrays.

    Attributes:
      params: the parameters.
      opt_state: the Optax state of the leaves of `params` that are trained.
      model_state: the mutable state of the model, or None.
      key: the random key that window keys are folded from, or None.
      loss_scale: the scale of the next window, or None.
      noise: the averages behind the gradient noise scale, or None.
      ledger: exact counts of what was consumed and applied.
      layout: how the arrays lie on a mesh (static, no array), or None on one device.
    """

    params: PyTree
    opt_state: PyTree
    model_state: PyTree
    key: Any
    loss_scale: ScaleState | None
    noise: NoiseState | None
    ledger: Ledger
    layout: Layout | None = None


class StepInfo(NamedTuple):
    """What one window did.

    Attributes:
      loss: weighted mean loss before the update; of several terms, each over its weight, times its coefficient.
      weight: the weight evaluated; of several terms, the main one's.
      grad_norm: global norm of the gradient, before any clipping, without loss scale.
      outcome: an `Outcome` as int32.
      examples: real rows in the window, of all replicas.
      tokens: the integer weight of the (main) loss, or the metric `Sum` named "tokens"; 0 where there is neither.
      metrics: the metrics of `loss_fn`, merged over the window and not divided: read `.value`.
      terms: the terms of the loss by name, merged over the window and not divided: read `.value`.
      dropped: microbatches left out because their loss was not finite, of all replicas.
      loss_scale: the scale of this window's backward passes, None without.
      noise_scale: the gradient noise scale in units of weight, averaged over windows; NaN while it cannot be estimated, None
        where it is not asked for.
      duplicate_rows: with `check_row_ids`, real rows whose id occurred before in the window, on any replica; else None.
    """

    loss: jax.Array
    weight: jax.Array
    grad_norm: jax.Array
    outcome: jax.Array
    examples: jax.Array
    tokens: jax.Array
    metrics: PyTree
    terms: dict[str, Mean]
    dropped: jax.Array
    loss_scale: jax.Array | None = None
    noise_scale: jax.Array | None = None
    duplicate_rows: jax.Array | None = None


class Step(NamedTuple):
    """The functions of a training step, see `make_step`. All but `init` are `jax.jit` objects.

    A window that is too large to be resident, or that is made while it runs, is streamed:

        accumulator = step.begin(state, microbatch)             # of the first microbatch only the shapes matter
        for microbatch in microbatches:                         # leaves (m·D, ...)
            accumulator = step.add(accumulator, state, microbatch)
        state, info = step.finish(accumulator, state)

    gives the update of the same microbatches in one window. Between two of them `accumulator` is a plain pytree.

    Attributes:
      init: `init(params, *, key=None, model_state=None) -> TrainState`. Copies: your arrays stay valid after the state is
        donated.
      update: `update(state, window) -> (TrainState, StepInfo)`; donates `state`.
      evaluate: `evaluate(state, window) -> Evaluation`. No randomness, nothing moves; what is not finite shows.
      begin: `begin(state, microbatch, saved=None, weights=None) -> Accumulator`: empty, or what was saved, for the replicas of
        this step. A loss of several terms needs the weight of each in the whole window, over all replicas, as
        `weights={name: weight}`; where they turn out to be others the window is skipped. For one term they are optional.
      add: `add(accumulator, state, microbatch) -> Accumulator`; donates the accumulator, communicates nothing.
      finish: `finish(accumulator, state) -> (TrainState, StepInfo)`: the one reduction, division and
        update; donates the state.
    """

    init: Callable[..., TrainState]
    update: Any
    evaluate: Any
    begin: Any
    add: Any
    finish: Any


def make_step(
    loss_fn: LossFn,
    tx: optax.GradientTransformation,
    *,
    has_aux: bool = False,
    has_state: bool = False,
    coefficients: Mapping[str, float] | None = None,
    row_keys: bool = False,
    nonfinite: Nonfinite = "skip_window",
    state_reduction: PyTree = "sequential",
    trainable: Trainable = None,
    loss_scale: LossScale | None = None,
    noise_scale: NoiseScaleFrom | None = None,
    fold: FoldName = "auto",
    accumulator_dtype: Any = None,
    mesh: jax.sharding.Mesh | None = None,
    data_axes: tuple[str, ...] | None = None,
    params_specs: PyTree = None,
    shard_optimizer: bool = False,
    reduction_dtype: Any = None,
    check_row_ids: bool = False,
) -> Step:
    r"""A training step whose update equals that of the one big batch, for any split of it.

    One window gives one call of `tx.update` on the gradient that `accumulate` defines: clipping, schedules, weight
    decay and averages see the whole window, once. If its loss or gradient is not finite, or its weight is 0, nothing in
    params and opt_state moves, bit for bit; `info.outcome` and `state.ledger` say so, and schedules, which count
    applied updates, do not advance.

    On a mesh the replicas, `D` = the product of the sizes of `data_axes`, each take `m` of the `m·D` rows of every
    microbatch index. The gradient is that of all their rows over all their weight; it is reduced once, after the last
    microbatch, whatever `A`. Three layouts follow from where the parameters lie:

    * *replicated* over the data axes: one all-reduce per window. Other axes may shard them (tensor parallelism).
    * with `shard_optimizer`: every gradient leaf is reduce-scattered along its largest dimension that `D` divides, each
      replica updates its shard with its shard of the optimizer state, and the parameters are gathered. Leaves without
      such a dimension stay whole: `state.layout.unsharded(state.params)` lists them. Leaves that other axes shard are
      all-reduced and then cut.
    * *sharded* over a data axis (FSDP): gathered and reduce-scattered by the compiler for every microbatch. There the
      loss sees all `m·D` rows at once, so that random keys differ from those of the other layouts.

    Args:
      loss_fn: as for `accumulate`.
      tx: the Optax transformation. It is given `params` and the extra arguments `value` and `grad`. New state is cast
        back to the dtypes of the state it replaces. Line searches (which need `value_fn`) and `optax.MultiSteps` (a
        second accumulation) are refused.
      has_aux, has_state, coefficients, row_keys, nonfinite, state_reduction: as for `accumulate`. Model state is given to
        `init`, and evaluation reads it without changing it. A window that is skipped leaves it as it was.
      trainable: as for `accumulate`; optimizer state too exists for these leaves only.
      loss_scale: how to scale the loss for float16 gradients, see `LossScale`.
      noise_scale: estimate the gradient noise scale of McCandlish et al., 2018 (https://arxiv.org/abs/1812.06162): the batch,
        in units of the loss's weight, above which more of it stops paying. From the gradients of the `"replicas"` at no
        cost in memory, if they fold their own (D > 1, parameters not sharded over a data axis); or from those of the
        `"microbatches"`, which takes `fold="carry"` and so a gradient tree.
      fold: as for `accumulate`.
      accumulator_dtype: as for `accumulate`.
      mesh: the devices to run on; its axes may be `Auto` or `Explicit`. None is one device. State and info lie on the
        `Auto` copy of it: while an `Explicit` one is current, read them as Python numbers or NumPy arrays.
      data_axes: the axes of `mesh` that split rows; None is `("data",)`. The others are the model's.
      params_specs: a tree prefix of `PartitionSpec`s for the parameters; None is as `init` finds them placed, replicated
        where that is not on `mesh`.
      shard_optimizer: keep `1 / D` of the optimizer state on each replica.
      reduction_dtype: dtype in which gradients cross the data axes; None is that of the sums.
      check_row_ids: count `info.duplicate_rows` from the integer leaf `row_ids`, `(A, m·D)`, of a dict window.

    Returns:
      A `Step`. The leading axis of the window is `A`: windows of one shape compile once, and
      `jax.lax.scan(step.update, state, windows)` runs several. The arrays of a `state` given to `update` are gone.

    Raises:
      ValueError: for axes that the mesh does not have; from `init` for a `tx` that cannot work; from the first call
        for what breaks the contract, and for rows that the replicas do not divide.

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
    mesh, axes = _check_mesh(mesh, data_axes, params_specs, shard_optimizer, reduction_dtype)
    objective = objective_of(
        loss_fn, has_aux=has_aux, has_state=has_state, coefficients=coefficients, row_keys=row_keys, nonfinite=nonfinite,
        state_reduction=state_reduction, trainable=trainable,
    )  # fmt: skip
    _check_options(loss_scale, noise_scale, fold)

    def init(params: PyTree, *, key: Any = None, model_state: PyTree = None) -> TrainState:
        layout = layout_of(params, mesh, axes, params_specs, shard_optimizer, trainable) if mesh is not None else None

        def build(params: PyTree, rest: tuple[Any, PyTree]) -> TrainState:
            key, model_state = copy(rest)
            params = copy(params)
            trained, _ = partition(params, trainable)
            opt_state = copy(transform.init(trained))
            _check_transform(transform, opt_state, trained, accumulator_dtype)
            scale = start_scale(loss_scale) if loss_scale is not None else None
            noise = quiet() if noise_scale is not None else None
            return TrainState(params, opt_state, model_state, key, scale, noise, new_ledger(), layout)

        return build_on(layout, build, params, (key, model_state))

    def update(state: TrainState, window: PyTree) -> tuple[TrainState, StepInfo]:
        layout = _check_layout(state.layout, mesh)
        with on_mesh(layout):
            state, window = constrain_state(layout, state), constrain_window(layout, window)
            window_sums = sums_on(
                layout, objective, state.params, state.model_state, window, window_key(state.key, state.ledger.attempted),
                _scale_of(state), fold=fold, accumulator_dtype=accumulator_dtype, reduction_dtype=reduction_dtype,
                noise_from=noise_scale,
            )  # fmt: skip
            examples, real_microbatches = _count_rows(window, layout.replicas if layout is not None else 1)
            duplicates = _count_duplicates(layout, window) if check_row_ids else None
            gate = _outcome(objective, window_sums)
            return conclude(state, window_sums, gate, examples, real_microbatches, duplicates)

    def conclude(state: TrainState, window: WindowSums, gate: jax.Array, *counts: Any) -> tuple[TrainState, StepInfo]:
        return _conclude(transform, objective, loss_scale, state, window, gate, *counts)

    def begin(
        state: TrainState, microbatch: PyTree, saved: Accumulator | None = None, weights: Mapping[str, Any] | None = None
    ) -> Accumulator:
        layout = _check_layout(state.layout, mesh)
        if check_row_ids or noise_scale == "microbatches":
            option = "check_row_ids=True compares the rows" if check_row_ids else "noise_scale='microbatches' needs gradients"
            raise ValueError(f"{option} of a window, which a streamed one does not hold. Leave it out.")
        with on_mesh(layout):
            state, window = constrain_state(layout, state), constrain_window(layout, _window_of(microbatch))
            return begin_on(
                layout, objective, state.params, state.model_state, window,
                window_key(state.key, state.ledger.attempted), saved, weights, accumulator_dtype=accumulator_dtype,
            )  # fmt: skip

    def add(accumulator: Accumulator, state: TrainState, microbatch: PyTree) -> Accumulator:
        layout = _check_layout(state.layout, mesh)
        with on_mesh(layout):
            state, window = constrain_state(layout, state), constrain_window(layout, _window_of(microbatch))
            return add_on(
                layout, objective, accumulator, state.params, state.model_state, window,
                window_key(state.key, state.ledger.attempted), _scale_of(state), fold=fold,
            )  # fmt: skip

    def finish(accumulator: Accumulator, state: TrainState) -> tuple[TrainState, StepInfo]:
        layout = _check_layout(state.layout, mesh)
        with on_mesh(layout):
            state = constrain_state(layout, state)
            reduced = reduce_on(
                layout, objective, accumulator, state.params, state.model_state, _scale_of(state),
                reduction_dtype=reduction_dtype, noise=noise_scale is not None,
            )  # fmt: skip
            gate = _outcome(objective, reduced.window)
            gate = jnp.where(reduced.as_stated | (gate != Outcome.APPLIED), gate, Outcome.SKIPPED_WEIGHTS)
            return conclude(state, reduced.window, gate, reduced.examples, reduced.microbatches, None)

    def evaluate(state: TrainState, window: PyTree) -> Evaluation:
        layout = _check_layout(state.layout, mesh)
        with on_mesh(layout):
            state, window = constrain_state(layout, state), constrain_window(layout, window)
            return evaluate_on(layout, objective, state.params, state.model_state, window)

    return Step(
        init, jax.jit(update, donate_argnums=0), jax.jit(evaluate),
        jax.jit(begin), jax.jit(add, donate_argnums=0), jax.jit(finish, donate_argnums=1),
    )  # fmt: skip


def _window_of(microbatch: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], microbatch)


def _check_mesh(mesh: Any, data_axes: Any, *only_on_a_mesh: Any) -> tuple[jax.sharding.Mesh | None, tuple[str, ...]]:
    if mesh is None:
        if data_axes is not None or any(only_on_a_mesh):
            raise ValueError(
                "data_axes, params_specs, shard_optimizer and reduction_dtype say how to use a mesh, and mesh is None. "
                "Pass mesh=jax.make_mesh(...), or leave them out."
            )
        return None, ()
    axes = (data_axes,) if isinstance(data_axes, str) else tuple(data_axes if data_axes is not None else ("data",))
    return auto_mesh(mesh, axes), axes


def _check_layout(layout: Layout | None, mesh: jax.sharding.Mesh | None) -> Layout | None:
    if (layout.mesh if layout is not None else None) != mesh:
        raise ValueError(
            f"the state lies on {layout.mesh if layout is not None else 'one device'}, the step was made for "
            f"{mesh if mesh is not None else 'one device'}. Make the state with step.init of this step, or carry its "
            "layout over: state._replace(layout=step.init(params).layout)."
        )
    return layout


def _check_options(loss_scale: LossScale | None, noise_scale: NoiseScaleFrom | None, fold: FoldName) -> None:
    if loss_scale is not None:
        if not isinstance(loss_scale, LossScale):
            raise ValueError(f"loss_scale={loss_scale!r} is no jaxacc.LossScale. For a constant one give it floor and ceiling.")
        check_scale(loss_scale)
    if noise_scale not in (None, "replicas", "microbatches"):
        raise ValueError(f"noise_scale={noise_scale!r} is not one of 'replicas' and 'microbatches'.")
    if noise_scale == "microbatches" and fold == "in_place":
        raise ValueError(
            "noise_scale='microbatches' looks at each gradient before it is added, which fold='in_place' has not. Use "
            "fold='carry' or 'auto'."
        )


def _scale_of(state: TrainState) -> jax.Array | None:
    return None if state.loss_scale is None else state.loss_scale.scale


def _conclude(
    transform: optax.GradientTransformationExtraArgs, objective: Objective, loss_scale: LossScale | None, state: TrainState,
    window: WindowSums, outcome: jax.Array, examples: jax.Array, microbatches: jax.Array, duplicates: jax.Array | None,
) -> tuple[TrainState, StepInfo]:  # fmt: skip
    """Apply one update if that is the outcome of the window, and count."""
    sums, grads = window.sums, window.grads
    applied = outcome == Outcome.APPLIED
    loss, main, norm = objective.loss(sums.terms), objective.main(sums.terms), optax.tree.norm(grads)
    params, opt_state, model_state = _gated_update(transform, objective, applied, state, window, loss)
    tokens = _count_tokens(main, sums.metrics)
    noise, scale = state.noise, state.loss_scale
    if noise is not None and window.parts is not None:
        noise = observe(noise, window.parts, jnp.square(norm), main.weight, applied)
    if scale is not None and loss_scale is not None:
        scale = adjust(loss_scale, scale, good=applied, overflowed=outcome == Outcome.SKIPPED_NONFINITE)
    info = StepInfo(
        loss=loss, weight=jnp.asarray(main.weight), grad_norm=norm, outcome=outcome, examples=examples, tokens=tokens,
        metrics=sums.metrics, terms=sums.terms, dropped=sums.dropped.value, loss_scale=_scale_of(state),
        noise_scale=None if noise is None else noise_scale_of(noise), duplicate_rows=duplicates,
    )  # fmt: skip
    ledger = state.ledger.record(
        microbatches=microbatches, applied=applied, examples=examples, tokens=tokens, dropped=sums.dropped.value
    )
    state = TrainState(params, opt_state, model_state, state.key, scale, noise, ledger, state.layout)
    return constrain_state(state.layout, state), info


def _outcome(objective: Objective, window: WindowSums) -> jax.Array:
    sums: Sums = window.sums
    weights = jnp.stack([jnp.asarray(term.weight).astype(jnp.float32) for term in sums.terms.values()])
    main = objective.main(sums.terms).weight
    finite = jnp.isfinite(objective.loss(sums.terms)) & jnp.all(jnp.isfinite(weights)) & all_finite(window.grads)
    applied = jnp.where(finite & (main >= 0), Outcome.APPLIED, Outcome.SKIPPED_NONFINITE)
    return jnp.where(jnp.all(weights == 0), Outcome.SKIPPED_EMPTY, applied).astype(jnp.int32)


def _gated_update(
    transform: optax.GradientTransformationExtraArgs, objective: Objective, apply: jax.Array, state: TrainState,
    window: WindowSums, value: jax.Array,
) -> tuple[PyTree, PyTree, PyTree]:  # fmt: skip
    """One `tx.update` where `apply`, else the old leaves untouched; a branch, because a select would copy them all."""
    trainable, frozen = partition(state.params, objective.trainable)
    trainable = constrain_update(state.layout, state.params, trainable)
    grads = window.grads

    def moved() -> tuple[PyTree, PyTree, PyTree]:
        updates, opt_state = transform.update(grads, state.opt_state, trainable, value=value, grad=grads)
        return optax.apply_updates(trainable, updates), cast_like(opt_state, state.opt_state), window.state

    untouched = (trainable, state.opt_state, state.model_state)
    trainable, opt_state, model_state = jax.lax.cond(apply, moved, lambda: untouched)
    return merge(trainable, frozen), opt_state, model_state


def _count_rows(window: PyTree, replicas: int) -> tuple[jax.Array, jax.Array]:
    """Real rows, and microbatches (of each replica) that have at least one."""
    steps, rows = check_window(window)
    mask = row_mask_of(window)
    if mask is None:
        return jnp.int32(steps * rows), jnp.int32(steps * replicas)
    inhabited = jnp.any(mask.reshape(steps, replicas, rows // replicas), axis=2)
    return jnp.sum(mask, dtype=jnp.int32), jnp.sum(inhabited, dtype=jnp.int32)


def _count_duplicates(layout: Layout | None, window: PyTree) -> jax.Array:
    """Real rows whose id occurred before in the window: neighbours that are equal once the ids are sorted."""
    ids = reserved_leaf(window, ROW_IDS)
    if ids is None or not jnp.issubdtype(ids.dtype, jnp.integer) or ids.ndim != 2:
        given = "none" if ids is None else f"{ids.dtype} {ids.shape}"
        raise ValueError(f"check_row_ids=True needs the leaf {ROW_IDS!r}, integers (A, rows), in a dict window; got {given}.")
    mask = row_mask_of(window)
    real = jnp.ones(ids.shape, bool) if mask is None else mask
    padding, ids = jax.lax.sort([gather_rows(layout, ~real).ravel(), gather_rows(layout, ids).ravel()], num_keys=2)
    return jnp.sum((ids[1:] == ids[:-1]) & ~padding[1:], dtype=jnp.int32)


def _count_tokens(loss: Mean, metrics: PyTree) -> jax.Array:
    declared = metrics.get("tokens") if isinstance(metrics, Mapping) else None
    if isinstance(declared, Sum):
        tokens = jnp.asarray(declared.value)
        if not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise ValueError(
                f'the metric Sum named "tokens" is {tokens.dtype}, which the ledger cannot count exactly. Sum integers or '
                "bools, jnp.sum(mask, dtype=jnp.int32), or name the metric otherwise."
            )
        return jnp.maximum(tokens, 0)
    weight = jnp.asarray(loss.weight)
    return jnp.maximum(weight, 0) if jnp.issubdtype(weight.dtype, jnp.integer) else jnp.int32(0)


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
