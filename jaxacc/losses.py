"""Losses that return `Mean`: the denominator comes from the same lines that compute the loss."""

from __future__ import annotations

import jax.numpy as jnp
import optax

from jaxacc._mean import Array, Mean
from jaxacc._tree import at_least_float32


def causal_lm(logits: Array, labels: Array, *, mask: Array | None = None, ignore_index: int = -100, shift: bool = True) -> Mean:
    r"""Next-token cross-entropy, summed, with the number of targets it was summed over.

    With `shift=True` position `t` of the logits is scored against label `t + 1`, so that a row of `T` labels has `T - 1`
    targets, and only those are counted:

    .. math:: \Big(\sum_{t \in V} -\log \mathrm{softmax}(z_t)_{y_{t+1}},\; |V|\Big), \qquad
              V = \{t < T - 1 : y_{t+1} \ne \text{ignore\_index},\ m_{t+1} \ne 0\}

    Logits at positions that are not counted do not matter, not even when they are NaN.

    Args:
      logits: `(..., T, V)`, computed in float32 or wider from here on.
      labels: `(..., T)` integer token ids, or `ignore_index` where there is no target. With `shift=True` these are the
        input tokens themselves.
      mask: `(..., T)`, optional: False or 0 where the label is not a target.
      ignore_index: the label that is not a target.
      shift: False if the labels come shifted already (label `t` is the target of position `t`).

    Returns:
      `Mean(total, weight)`: float32 or wider, and int32.

    Raises:
      ValueError: if the shapes of labels, mask and logits do not belong together.

    >>> import jax.numpy as jnp
    >>> from jaxacc import losses
    >>> loss = losses.causal_lm(jnp.zeros((2, 5, 7)), jnp.ones((2, 5), int))
    >>> int(loss.weight), round(float(loss.value), 4)  # 2 x 4 targets, log(7)
    (8, 1.9459)
    """
    if logits.shape[:-1] != labels.shape or (mask is not None and mask.shape != labels.shape):
        raise ValueError(
            f"logits {logits.shape}, labels {labels.shape}, mask {None if mask is None else mask.shape}: logits must have "
            "the shape of the labels plus one axis for the vocabulary, and the mask the shape of the labels."
        )
    counted = labels != ignore_index
    if mask is not None:
        counted &= mask.astype(bool)
    if shift:
        logits, labels, counted = logits[..., :-1, :], labels[..., 1:], counted[..., 1:]
    logits = logits.astype(at_least_float32(logits.dtype))
    logits = jnp.where(counted[..., None], logits, jnp.zeros_like(logits))
    targets = jnp.where(counted, labels, jnp.zeros_like(labels))
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return Mean(jnp.sum(jnp.where(counted, nll, jnp.zeros_like(nll))), jnp.sum(counted, dtype=jnp.int32))
