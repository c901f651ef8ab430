"""Losses that return `Mean`: the denominator comes from the same lines that compute the loss.

In all of them, logits at positions that are not counted do not matter, neither for the value nor for the gradient, not
even when they are NaN; a negative label is never counted, whatever `ignore_index` is, so that rows filled up with -100 weigh
nothing; and a label beyond the last class makes the total NaN instead of passing for another class.
"""

from __future__ import annotations

from typing import Literal, get_args

import jax
import jax.numpy as jnp
import optax

from jaxacc._mean import Array, Mean
from jaxacc._tree import at_least_float32, is_inexact

Aggregation = Literal["token_mean", "sequence_mean", "constant"]


def causal_lm(
    logits: Array,
    labels: Array,
    *,
    mask: Array | None = None,
    segment_ids: Array | None = None,
    ignore_index: int = -100,
    shift: bool = True,
    aggregation: Aggregation = "token_mean",
    constant: float | None = None,
) -> Mean:
    r"""Next-token cross-entropy, summed, with the number of targets it was summed over.

    With `shift=True` position `t` of the logits is scored against label `t + 1`, so that a row of `T` labels has `T - 1`
    targets, and only those are counted. With the segments `s` of a packed row there is no target across segments:

    .. math:: \ell_t = -\log \mathrm{softmax}(z_t)_{y_{t+1}}, \qquad
              V = \{t < T - 1 : y_{t+1} \ne \text{ignore\_index},\ m_{t+1} \ne 0,\ s_t = s_{t+1} > 0\}

    How the targets `V` make one number, for sequences :math:`i` with the targets :math:`V_i`, of which `N` have any. A
    sequence is a row, or a segment of a packed row, so that packing changes nothing:

    ================= =========================================== ====================================================
    `aggregation`     total                                       weight
    ================= =========================================== ====================================================
    `"token_mean"`    :math:`\sum_i \sum_{V_i} \ell_t`            :math:`|V|`: every token counts the same
    `"sequence_mean"` :math:`\sum_i \sum_{V_i} \ell_t / |V_i|`    :math:`N`: every sequence counts the same
    `"constant"`      :math:`\sum_i \sum_{V_i} \ell_t / c`        :math:`N`: divided by the same `constant` c, whatever
                                                                  the length (Dr. GRPO, https://arxiv.org/abs/2503.20783)
    ================= =========================================== ====================================================

    All three are sums over sequences, hence exact over any split of the rows. With the last two the weight, and with it the
    ledger's `tokens`, counts sequences; a metric `Sum` named "tokens" counts tokens.

    Args:
      logits: `(..., T, V)`, computed in float32 or wider from here on.
      labels: `(..., T)` integer token ids, or `ignore_index` where there is no target. With `shift=True` these are the
        input tokens themselves.
      mask: `(..., T)`, optional: False or 0 where the label is not a target.
      segment_ids: `(..., T)` integers, optional: which of the sequences packed into the row a token belongs to. A
        sequence is contiguous; neighbours have different ids; 0 and negative ids are padding. Only with `shift=True`.
      ignore_index: the label that is not a target.
      shift: False if the labels come shifted already (label `t` is the target of position `t`).
      aggregation: see the table.
      constant: what to divide by, a positive number (the longest length, usually); with `aggregation="constant"` only.

    Returns:
      `Mean(total, weight)`: float32 or wider, and int32.

    Raises:
      ValueError: if shapes or dtypes of the arrays do not belong together, for `segment_ids` with `shift=False`, for an
        unknown aggregation, and for a constant that is missing, superfluous or not positive.

    >>> import jax.numpy as jnp
    >>> from jaxacc import losses
    >>> loss = losses.causal_lm(jnp.zeros((2, 5, 7)), jnp.ones((2, 5), int))
    >>> int(loss.weight), round(float(loss.value), 4)  # 2 x 4 targets, log(7)
    (8, 1.9459)
    >>> packed = jnp.array([[1, 1, 1, 2, 2], [1, 2, 2, 0, 0]])  # three sequences have targets: 2, 1 and 1
    >>> int(losses.causal_lm(jnp.zeros((2, 5, 7)), jnp.ones((2, 5), int), segment_ids=packed).weight)
    4
    """
    if segment_ids is not None and not shift:
        raise ValueError(
            "segment_ids with shift=False: the ids do not say whether a label that was shifted before belongs to its own or "
            "to the next segment. Pass the labels unshifted with shift=True, or set the labels that cross to ignore_index and "
            "leave segment_ids out."
        )
    _check_aggregation(aggregation, constant)
    logits, labels, counted = _select(logits, labels, ignore_index, mask=mask, segment_ids=segment_ids)
    segments = jnp.zeros_like(labels) if segment_ids is None else jnp.asarray(segment_ids)
    if shift:
        logits, labels, counted = logits[..., :-1, :], labels[..., 1:], counted[..., 1:]
        if segment_ids is not None:
            counted = counted & (segments[..., 1:] > 0) & (segments[..., 1:] == segments[..., :-1])
        segments = segments[..., 1:]
    return _aggregate(_cross_entropy(logits, labels, counted), counted, segments, aggregation, constant)


def masked_lm(
    logits: Array,
    labels: Array,
    *,
    mask: Array | None = None,
    ignore_index: int = -100,
    aggregation: Aggregation = "token_mean",
    constant: float | None = None,
) -> Mean:
    r"""Cross-entropy of the masked-out tokens, each at its own position: nothing is shifted, `T` labels have `T` targets.

    .. math:: \Big(\sum_{t \in V} -\log \mathrm{softmax}(z_t)_{y_t},\; |V|\Big), \qquad
              V = \{t : y_t \ne \text{ignore\_index},\ m_t \ne 0\}

    Args:
      logits: `(..., T, V)`, computed in float32 or wider from here on.
      labels: `(..., T)` integer token ids before masking, or `ignore_index` where nothing is to be predicted.
      mask: `(..., T)`, optional: False or 0 where nothing is to be predicted.
      ignore_index: the label that is not a target.
      aggregation: `"token_mean"`, `"sequence_mean"` or `"constant"`: see `causal_lm`.
      constant: what `aggregation="constant"` divides by.

    Returns:
      `Mean(total, weight)`: float32 or wider, and int32.

    Raises:
      ValueError: as `causal_lm`.

    >>> import jax.numpy as jnp
    >>> from jaxacc import losses
    >>> labels = jnp.array([[3, -100, -100, 5], [-100, -100, 2, -100]])
    >>> int(losses.masked_lm(jnp.zeros((2, 4, 7)), labels).weight)
    3
    """
    return causal_lm(
        logits, labels, mask=mask, ignore_index=ignore_index, shift=False, aggregation=aggregation, constant=constant
    )


def classification(
    logits: Array,
    labels: Array,
    *,
    class_weights: Array | None = None,
    label_smoothing: float = 0.0,
    mask: Array | None = None,
    ignore_index: int = -100,
) -> Mean:
    r"""Cross-entropy with integer labels, class weights `w` and label smoothing `ε`, over the weights of the true classes.

    With :math:`V` the examples that count, `C` classes and :math:`w_c = 1` without class weights:

    .. math:: \Big(\sum_{i \in V} \Big[(1 - ε)\, w_{y_i} (-\log p_{i, y_i})
              + \frac{ε}{C} \sum_c w_c (-\log p_{i, c})\Big],\; \sum_{i \in V} w_{y_i}\Big), \qquad
              p_i = \mathrm{softmax}(z_i)

    which is the numerator and the denominator of `torch.nn.CrossEntropyLoss(weight, label_smoothing=...)`. The mean of such
    quotients over microbatches is another number, because each has its own mix of classes. Without smoothing, an example
    whose class weighs 0 is not counted at all.

    Args:
      logits: `(..., C)`, computed in float32 or wider from here on.
      labels: `(...)` integers below C, or `ignore_index` where there is no label.
      class_weights: `(C,)`, optional.
      label_smoothing: `ε`, a number from 0 to 1.
      mask: `(...)`, optional: False or 0 where the example does not count.
      ignore_index: the label that does not count.

    Returns:
      `Mean(total, weight)`: float32 or wider; the weight int32 without class weights, else of the dtype of the total.

    Raises:
      ValueError: if shapes or dtypes of the arrays do not belong together, or the smoothing is outside of 0 to 1.

    >>> import jax.numpy as jnp
    >>> from jaxacc import losses
    >>> loss = losses.classification(jnp.zeros((3, 2)), jnp.array([0, 1, 1]), class_weights=jnp.array([1.0, 0.25]))
    >>> float(loss.weight), round(float(loss.value), 4)  # 1 + 2 x 0.25, log(2)
    (1.5, 0.6931)
    """
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing={label_smoothing} is not in the range from 0 to 1. Use 0.0 for none, or often 0.1.")
    logits, labels, counted = _select(logits, labels, ignore_index, mask=mask)
    classes = logits.shape[-1]
    weights = jnp.ones((classes,)) if class_weights is None else jnp.asarray(class_weights)
    if weights.shape != (classes,):
        raise ValueError(f"class_weights {weights.shape} with {classes} classes: give one weight per class, ({classes},).")
    weights = weights.astype(at_least_float32(logits.dtype))
    targets = jnp.where(counted, labels, jnp.zeros_like(labels))
    true_weights = weights.at[targets].get(mode="fill", fill_value=jnp.nan)
    if not label_smoothing:
        counted = counted & (true_weights != 0)
    true_weights = jnp.where(counted, true_weights, jnp.zeros_like(true_weights))
    per_example = (1 - label_smoothing) * true_weights * _cross_entropy(logits, labels, counted)
    if label_smoothing:
        uniform = jnp.broadcast_to(weights * (label_smoothing / classes), logits.shape)
        spread = optax.softmax_cross_entropy(_counted_logits(logits, counted), uniform)
        per_example = per_example + jnp.where(counted, spread, jnp.zeros_like(spread))
    weight = jnp.sum(counted, dtype=jnp.int32) if class_weights is None else jnp.sum(true_weights)
    return Mean(jnp.sum(per_example), weight)


def segmentation(logits: Array, labels: Array, *, ignore_index: int = 255, class_weights: Array | None = None) -> Mean:
    r"""Cross-entropy per pixel, over the pixels that are labelled: images with more void count less, pixel by pixel.

    .. math:: \Big(\sum_{p \in V} w_{y_p} (-\log \mathrm{softmax}(z_p)_{y_p}),\; \sum_{p \in V} w_{y_p}\Big), \qquad
              V = \{p : 0 \le y_p \ne \text{ignore\_index}\}

    Args:
      logits: `(..., C)`, channels last, any number of axes before them, such as `(m, H, W, C)`; computed in float32 or
        wider from here on.
      labels: `(...)` integers below C, uint8 for instance, or `ignore_index` where there is no label.
      ignore_index: the label that does not count; 255 as in Pascal VOC and Cityscapes.
      class_weights: `(C,)`, optional: `w`, else 1.

    Returns:
      `Mean(total, weight)`: float32 or wider; the weight int32 without class weights, else of the dtype of the total.

    Raises:
      ValueError: if shapes or dtypes of the arrays do not belong together.

    >>> import jax.numpy as jnp
    >>> from jaxacc import losses
    >>> labels = jnp.array([[[0, 1], [255, 255]]], jnp.uint8)
    >>> int(losses.segmentation(jnp.zeros((1, 2, 2, 3)), labels).weight)
    2
    """
    return classification(logits, labels, class_weights=class_weights, ignore_index=ignore_index)


def from_mean(mean: Array, weight: Array) -> Mean:
    r"""Undo the division of a loss that is a mean already: `(mean * weight, weight)`.

    .. math:: \frac{\sum_k \bar\ell_k\, n_k}{\sum_k n_k} = \frac{\sum_k \sum_{t \in V_k} \ell_t}{\sum_k n_k} \qquad
              \text{for } \bar\ell_k = \frac{1}{n_k} \sum_{t \in V_k} \ell_t

    holds only for the `n_k` that the mean was divided by: with any other weight the result depends on the split. A mean over
    nothing contributes nothing, even where it is NaN. Its *gradient* may still be NaN, by `0 * inf` inside the loss; jaxacc
    leaves that out where the whole microbatch weighs 0.

    Args:
      mean: the mean, a scalar or one per row `(m,)`.
      weight: what it was divided by, of the same shape: a count or a sum of weights.

    Returns:
      `Mean(total, weight)`: float32 or wider, and the weight as given.

    Raises:
      ValueError: if the shapes differ.

    >>> import jax.numpy as jnp
    >>> import jaxacc
    >>> a, b = jaxacc.losses.from_mean(jnp.float32(2.0), 512), jaxacc.losses.from_mean(jnp.float32(4.0), 1536)
    >>> float(jaxacc.merge(a, b).value)
    3.5
    """
    if jnp.shape(mean) != jnp.shape(weight):
        raise ValueError(
            f"mean {jnp.shape(mean)}, weight {jnp.shape(weight)}: each mean needs the weight it was divided by. Give both the "
            "same shape, a scalar or one entry per row."
        )
    mean = jnp.asarray(mean)
    mean = mean.astype(at_least_float32(mean.dtype) if is_inexact(mean) else jnp.float32)
    factor = jnp.asarray(weight, mean.dtype)
    return Mean(jnp.where(factor != 0, mean, jnp.zeros_like(mean)) * factor, weight)


def _select(logits: Array, labels: Array, ignore_index: int, **beside: Array | None) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Check the arrays; return logits, int32 labels and the positions that count by label and mask."""
    shapes = {"labels": labels.shape, **{name: array.shape for name, array in beside.items() if array is not None}}
    if any(shape != logits.shape[:-1] for shape in shapes.values()):
        raise ValueError(
            f"logits {logits.shape}, {', '.join(f'{name} {shape}' for name, shape in shapes.items())}: logits must have the "
            "shape of the labels plus one axis for the vocabulary or the classes, and everything else the shape of the labels."
        )
    logits, labels = jnp.asarray(logits), jnp.asarray(labels)
    if not jnp.issubdtype(logits.dtype, jnp.floating) or not jnp.issubdtype(labels.dtype, jnp.integer):
        raise ValueError(
            f"logits are {logits.dtype}, labels {labels.dtype}: logits must be floating and labels integers. Cast them; "
            "one-hot labels become integers by argmax over the last axis."
        )
    labels = labels.astype(jnp.int32)  # an ignore_index of -100 does not exist in uint8
    counted = (labels >= 0) & (labels != ignore_index)
    mask = beside["mask"]
    return logits, labels, counted if mask is None else counted & jnp.asarray(mask).astype(bool)


def _counted_logits(logits: jax.Array, counted: jax.Array) -> jax.Array:
    """In float32 or wider, and 0 where they do not count: a select afterwards would leave NaN in the gradient."""
    logits = logits.astype(at_least_float32(logits.dtype))
    return jnp.where(counted[..., None], logits, jnp.zeros_like(logits))


def _cross_entropy(logits: jax.Array, labels: jax.Array, counted: jax.Array) -> jax.Array:
    """The negative log-likelihood of every label, 0 where it does not count."""
    targets = jnp.where(counted, labels, jnp.zeros_like(labels))
    nll = optax.softmax_cross_entropy_with_integer_labels(_counted_logits(logits, counted), targets)
    return jnp.where(counted, nll, jnp.zeros_like(nll))


def _check_aggregation(aggregation: str, constant: float | None) -> None:
    names = get_args(Aggregation)
    if aggregation not in names:
        raise ValueError(f"aggregation={aggregation!r} is unknown. Use one of {', '.join(map(repr, names))}.")
    if (aggregation == "constant") != (constant is not None) or (constant is not None and not constant > 0):
        raise ValueError(
            f"aggregation={aggregation!r} with constant={constant}: aggregation='constant' divides by a positive number, the "
            "others take none. Set constant to the longest length, for instance, or leave it out."
        )


def _aggregate(
    nll: jax.Array, counted: jax.Array, segments: jax.Array, aggregation: Aggregation, constant: float | None
) -> Mean:
    """One `Mean` of losses per token `(..., T)` that are 0 where they do not count."""
    if aggregation == "token_mean":
        return Mean(jnp.sum(nll), jnp.sum(counted, dtype=jnp.int32))
    # Sequences are told apart by running counts along the row: no scatter, and nothing crosses rows that lie on other devices.
    so_far = jnp.cumsum(counted, axis=-1, dtype=jnp.int32)
    starts, ends = (segments != jnp.roll(segments, by, axis=-1) for by in (1, -1))
    axis = so_far.ndim - 1
    before = jax.lax.cummax(jnp.where(starts, so_far - counted.astype(jnp.int32), jnp.zeros_like(so_far)), axis=axis)
    through = jax.lax.cummin(jnp.where(ends, so_far, so_far[..., -1:]), axis=axis, reverse=True)
    first_targets = counted & (so_far - before == 1)
    divisor = constant if constant is not None else jnp.maximum(through - before, 1).astype(nll.dtype)
    return Mean(jnp.sum(nll / divisor), jnp.sum(first_targets, dtype=jnp.int32))
