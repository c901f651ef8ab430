"""`two_pass`: gradients of losses in which all rows of the effective batch see each other, by cached embeddings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxacc._accumulate import (
    Accumulated,
    check_manual_axes,
    factor_of,
    pull_inhabited,
    rescale,
    seeds_of,
    zero_gradient,
)
from jaxacc._contract import LOSS, Objective, Sums, sums_of, sums_structure
from jaxacc._fold import Fold, FoldName, fold_gradients, microbatches, unless_padding, uses_in_place, weights_of
from jaxacc._keys import microbatch_key
from jaxacc._mean import Mean
from jaxacc._split import check_window, row_mask_of
from jaxacc._tree import PyTree, as_arrays, is_inexact, merge, partition, vary, varying_axes

EmbedFn = Callable[[Any, Any, Any], PyTree]
"""`embed_fn(params, microbatch, key)` returning a tree of arrays `(m, ...)`."""

BatchLossFn = Callable[[Any, Any, Any], Mean]
"""`loss_fn(params, embeddings, rows)` returning `Mean`, of all rows of the effective batch at once."""


def two_pass(
    embed_fn: EmbedFn,
    loss_fn: BatchLossFn,
    *,
    axis_name: str | tuple[str, ...] | None = None,
    fold: FoldName = "auto",
    accumulator_dtype: Any = None,
) -> Callable[..., Accumulated]:
    r"""Gradient of a loss that compares all rows of the effective batch, embedded one microbatch at a time.

    A contrastive loss (InfoNCE, CLIP, SimCLR, SigLIP) takes its negatives from the whole batch. `accumulate` would take
    them from the microbatch, which is another loss. This one is the big batch's, for any `A`: with the embeddings
    :math:`z_i = f(\theta, x_i, k_i)` of the microbatches and :math:`(s, n)` = `loss_fn(params, z, rows)`,

    .. math:: L = \frac{s(\theta, z_1, \dots, z_A)}{n}, \qquad
              \nabla L = \frac{1}{n} \frac{\partial s}{\partial \theta}
                         + \sum_i \Big(\frac{\partial f(\theta, x_i, k_i)}{\partial \theta}\Big)^{\!\top} g_i, \qquad
              g_i = \frac{1}{n} \frac{\partial s}{\partial z_i}

    The first pass embeds every microbatch and keeps no activations; then the loss and all :math:`g_i` are computed once, on
    the whole; the second pass embeds every microbatch again, with the same key :math:`k_i` and hence the same dropout, and
    pulls :math:`g_i` back. That is one forward pass more than `accumulate` makes, also at A = 1. Of the memory only the
    embeddings and what `loss_fn` makes of them (`B x B` logits, usually) grow with `A`.

    With `axis_name` every replica gathers the embeddings of all and computes the same loss. It differentiates with respect
    to the *gathered* embeddings and pulls back those that it embedded itself, so that each row is pulled back on one
    replica, once; the loss, its weight and the direct gradient :math:`\partial s / \partial \theta`, which all replicas
    have alike, enter the one psum from the first replica only.

    Args:
      embed_fn: `embed_fn(params, microbatch, key)` returning the embeddings of a microbatch: a tree of arrays
        `(m, ...)`, one entry per row, such as both towers of CLIP. All its randomness must come from `key`.
      loss_fn: `loss_fn(params, embeddings, rows)` returning `Mean(total, weight)`, not divided; entries are scalars or one
        per row `(B,)`. `embeddings` and `rows` have leaves `(B, ...)`, with `B` the effective batch, in the order of the
        batch that `split_batch` cut: row `r` of the batch, or on a mesh row `i` of microbatch `a` of replica `d` at
        `(d * m + i) * A + a`. `rows` are the leaves of the window, gathered only as far as they are used. `params` may
        occur, as a learned temperature. Padding, where `rows["row_mask"]` is False, has the embedding of the first real
        row, and **must be left out as a negative** too: jaxacc only drops its own entry from per-row totals and weights.
      axis_name: the manual mesh axes that split rows, as in `accumulate`. The result is then already reduced.
      fold: how the second pass adds up, as in `accumulate`.
      accumulator_dtype: dtype of the sums and of `grads`, as in `accumulate`.

    Returns:
      `grads_of(params, window, key=None) -> Accumulated`, without metrics: pure, for you to jit. Every leaf of `window` has
      shape `(A, m, ...)`; `key` is folded with the microbatch's index (and replica). For an update give the gradient to
      your optimizer: `updates, opt_state = tx.update(out.grads, opt_state, params)`.

    Raises:
      ValueError: while tracing, for embeddings without the leading axis of the rows, a `loss_fn` that does not return
        `Mean`, and what `accumulate` refuses.

    The method is GradCache: Gao, Zhang, Han and Callan, 2021, https://arxiv.org/abs/2101.06983.

    >>> import jax, jax.numpy as jnp, jaxacc, optax
    >>> def embed_fn(params, microbatch, key):
    ...     return {"image": microbatch["image"] @ params["image"], "text": microbatch["text"] @ params["text"]}
    >>> def loss_fn(params, embeddings, rows):  # InfoNCE: the text of the same row, among the texts of all rows
    ...     logits = embeddings["image"] @ embeddings["text"].T * jnp.exp(params["scale"])
    ...     losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.arange(len(logits)))
    ...     return jaxacc.Mean(losses, jnp.ones_like(losses))
    >>> params = {"image": jnp.eye(3, 2), "text": jnp.ones((3, 2)), "scale": 0.0}
    >>> batch = {"image": jnp.arange(24.0).reshape(8, 3) / 24, "text": jnp.arange(24.0).reshape(8, 3) ** 2 / 576}
    >>> run = jax.jit(jaxacc.two_pass(embed_fn, loss_fn))
    >>> outs = [run(params, jaxacc.split_batch(batch, accumulation_steps=steps)) for steps in (1, 2, 8)]
    >>> [round(float(out.loss), 4) for out in outs], [round(float(out.grads["scale"]), 4) for out in outs]
    ([2.0575, 2.0575, 2.0575], [0.3772, 0.3772, 0.3772])
    """

    def grads_of(params: PyTree, window: PyTree, key: Any = None) -> Accumulated:
        axes = check_manual_axes("two_pass", axis_name)
        check_window(window)
        params, window = vary(as_arrays((params, window)), axes)
        trainable, _ = partition(params)
        accumulators = zero_gradient(trainable, accumulator_dtype)
        in_place = uses_in_place(fold, trainable, accumulators)
        embeddings = _embed(embed_fn, params, window, key, axes)
        loss, factor, direct, cotangents = _compare(loss_fn, params, embeddings, window, axes, accumulators)
        inhabited = loss.weight != 0
        total, weight, direct = _from_first_replica((*loss, direct), axes)
        grads = _pull_back_embeddings(
            embed_fn,
            params,
            window,
            key,
            axes=axes,
            cotangents=cotangents,
            inhabited=inhabited,
            start=direct,
            in_place=in_place,
        )
        if axes:
            total, weight, grads = jax.lax.psum((total, weight, grads), axes)
        whole = Mean(total, weight)
        return Accumulated(whole.value, rescale(factor, grads, None)[0], weight, {}, {LOSS: whole}, None, jnp.int32(0))

    return grads_of


def _embed(embed_fn: EmbedFn, params: PyTree, window: PyTree, key: Any, axes: tuple[str, ...]) -> PyTree:
    """The first pass: the embeddings of every microbatch, `(A, m, ...)`, 0 where a microbatch is padding only."""
    _, rows = check_window(window)
    first = jax.tree.map(lambda leaf: leaf[0], window)

    def embed(microbatch: PyTree, key: Any) -> PyTree:
        return vary(as_arrays(embed_fn(params, microbatch, key)), axes)

    structure = jax.eval_shape(embed, first, microbatch_key(key, jnp.int32(0), axes))
    _check_embeddings(structure, rows)
    nothing = jax.tree.map(lambda like: vary(jnp.zeros(like.shape, like.dtype), varying_axes(like)), structure)

    def embed_next(_: None, x: tuple[jax.Array, PyTree]) -> tuple[None, PyTree]:
        index, microbatch = x
        return None, unless_padding(microbatch, lambda: embed(microbatch, microbatch_key(key, index, axes)), nothing)

    return jax.lax.scan(embed_next, None, microbatches(window))[1]


def _check_embeddings(structure: PyTree, rows: int) -> None:
    shapes = {jax.tree_util.keystr(path): like.shape for path, like in jax.tree.leaves_with_path(structure)}
    if any(shape[:1] != (rows,) for shape in shapes.values()):
        raise ValueError(
            f"embed_fn returned shapes {shapes} for a microbatch of {rows} rows. It must return one embedding per row: every "
            f"leaf of shape ({rows}, ...)."
        )
    if not any(is_inexact(like) for like in jax.tree.leaves(structure)):
        raise ValueError(
            f"embed_fn returned nothing floating (shapes {shapes}): no gradient could reach it. Return embeddings."
        )


def _compare(
    loss_fn: BatchLossFn, params: PyTree, embeddings: PyTree, window: PyTree, axes: tuple[str, ...], accumulators: PyTree
) -> tuple[Mean, jax.Array | None, PyTree, PyTree]:
    """The loss of the whole batch, the same on every replica; what its gradient lacks; and that, unless its weight is 0.

    The gradient is with respect to the parameters in `loss_fn`, then to the embeddings of this replica, `(A, m, ...)`.
    """
    trainable, frozen = partition(params)
    rows = _gather(window, axes)
    cached, rest = partition(_fill_padding(_gather(embeddings, axes), row_mask_of(rows)))

    def compare(params: PyTree, rows: PyTree, embeddings: PyTree) -> Mean:
        loss = loss_fn(params, embeddings, rows)
        if isinstance(loss, tuple) and not isinstance(loss, Mean):
            raise ValueError("loss_fn returned a tuple. two_pass takes no metrics: return jaxacc.Mean(total, weight) alone.")
        return loss

    objective = Objective(compare)

    def value_of(variables: tuple[PyTree, PyTree], state: None, _: Any, rows: PyTree) -> tuple[Sums, PyTree]:
        return sums_of(objective, axes, merge(variables[0], frozen), state, rows, merge(variables[1], rest))

    structure, narrow = sums_structure(objective, axes, params, None, rows, merge(cached, rest))
    how = Fold(value_of, (trainable, cached), None, None, structure, drops=False)
    evaluated, pull = how.pull_back(how.start().state, jnp.int32(0), rows)
    weights = weights_of(evaluated[0])
    seeds = seeds_of(objective, structure, weights, scale=None, narrow=narrow)
    like = (accumulators, jax.tree.map(jnp.zeros_like, cached))
    running, (direct, cotangents) = pull_inhabited(how, evaluated, pull, seeds, like)
    factor = factor_of(objective, weights, seeds if narrow else None, None)
    return objective.main(running.sums.terms), factor, direct, _own_part(cotangents, check_window(window), axes)


def _pull_back_embeddings(
    embed_fn: EmbedFn,
    params: PyTree,
    window: PyTree,
    key: Any,
    *,
    axes: tuple[str, ...],
    cotangents: PyTree,
    inhabited: jax.Array,
    start: PyTree,
    in_place: bool,
) -> PyTree:
    """The second pass: `start` and the gradient of the cotangents through every microbatch that is not padding only.

    The gradient of `sum(embeddings * cotangents)` is that, so the fold of any other loss does it.
    """
    trainable, frozen = partition(params)
    mask = row_mask_of(window)
    steps, _ = check_window(window)
    real = jnp.ones(steps, bool) if mask is None else jnp.any(mask, axis=1)

    def product(params: PyTree, pair: tuple[PyTree, PyTree], key: Any) -> Mean:
        microbatch, cotangents = pair
        embeddings, _ = partition(as_arrays(embed_fn(params, microbatch, key)))
        products = jax.tree.map(lambda z, g: jnp.sum(jnp.real(z * g).astype(jnp.float32)), embeddings, cotangents)
        return Mean(sum(jax.tree.leaves(products)), 1)

    objective = Objective(product)

    def value_of(trainable: PyTree, state: None, index: jax.Array, pair: PyTree) -> tuple[Sums, PyTree]:
        return sums_of(objective, axes, merge(trainable, frozen), state, pair, microbatch_key(key, index, axes))

    pairs = (window, cotangents)
    first = jax.tree.map(lambda leaf: leaf[0], pairs)
    structure, _ = sums_structure(objective, axes, params, None, first, microbatch_key(key, jnp.int32(0), axes))
    one = vary(jnp.float32(1), varying_axes(structure.terms[LOSS].total))
    _, grads, _ = fold_gradients(
        Fold(value_of, trainable, None, None, structure, drops=False), pairs, inhabited=inhabited & real, seeds={LOSS: one},
        accumulators=start, in_place=in_place,
    )  # fmt: skip
    return grads


def _gather(stacked: PyTree, axes: tuple[str, ...]) -> PyTree:
    """Leaves `(A, m, ...)` of this replica as leaves `(B, ...)` of all, in the order of the batch."""

    def gather(leaf: jax.Array) -> jax.Array:
        leaf = leaf.swapaxes(0, 1)
        leaf = leaf.reshape(-1, *leaf.shape[2:])
        return jax.lax.all_gather(leaf, axes, tiled=True) if axes else leaf

    return jax.tree.map(gather, stacked)


def _own_part(batch: PyTree, steps_and_rows: tuple[int, int], axes: tuple[str, ...]) -> PyTree:
    """Leaves `(B, ...)` of all replicas as leaves `(A, m, ...)` of this one: `_gather` undone."""
    steps, rows = steps_and_rows

    def cut(leaf: jax.Array) -> jax.Array:
        if axes:
            leaf = jax.lax.dynamic_slice_in_dim(leaf, jax.lax.axis_index(axes) * (steps * rows), steps * rows)
        return leaf.reshape(rows, steps, *leaf.shape[1:]).swapaxes(0, 1)

    return jax.tree.map(cut, batch)


def _fill_padding(embeddings: PyTree, mask: jax.Array | None) -> PyTree:
    """Give padding the embedding of the first real row.

    Whatever padding holds, NaN or the zeros of a microbatch that was not embedded, would reach the gradient as `0 * NaN`
    through the products and norms that a contrastive loss is made of, masked or not.
    """
    if mask is None:
        return embeddings
    first = jnp.argmax(mask)

    def fill(leaf: jax.Array) -> jax.Array:
        return jnp.where(jnp.expand_dims(mask, tuple(range(1, leaf.ndim))), leaf, leaf[first][None])

    return jax.tree.map(fill, embeddings)


def _from_first_replica(tree: PyTree, axes: tuple[str, ...]) -> PyTree:
    """What all replicas hold alike, on the first one, and zeros on the others: a sum over replicas counts it once."""
    if not axes:
        return tree
    first = jax.lax.axis_index(axes) == 0
    return jax.tree.map(lambda leaf: jnp.where(first, leaf, jnp.zeros_like(leaf)), tree)
