"""What a loss function may return: checked once while tracing, then summed over its real rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxacc._mean import Array, Max, Mean, Sum, is_reduction
from jaxacc._split import ROW_MASK, row_mask_of
from jaxacc._tree import PyTree, at_least_float32, vary

LossFn = Callable[[Any, Any, Any], Any]
"""`loss_fn(params, microbatch, key)` returning `Mean`, or `(Mean, metrics)` with `has_aux=True`."""

Sums = tuple[Mean, PyTree]
"""The loss and the metrics of some rows, not divided."""


def sums_of(loss_fn: LossFn, has_aux: bool, axes: tuple[str, ...], *args: Any) -> Sums:
    """Call `loss_fn(*args)`, check what it returns, and sum it over the real rows of the microbatch.

    Floats are summed in float32 or wider, integers and bools in integers of at least 32 bits. The sums are marked as
    varying over the manual mesh axes `axes`, whatever the loss made of them.
    """
    return _row_sums(*_unpack(loss_fn(*args), has_aux), args[1], axes)


def sums_structure(loss_fn: LossFn, has_aux: bool, axes: tuple[str, ...], *args: Any) -> tuple[Sums, bool]:
    """Shapes of `sums_of`, and whether the loss is computed in less than 32 bits (nothing is evaluated)."""
    narrow = False

    def probe(*args: Any) -> Sums:
        nonlocal narrow
        loss, metrics = _unpack(loss_fn(*args), has_aux)
        narrow = jnp.finfo(jnp.result_type(loss.total)).bits < 32
        return _row_sums(loss, metrics, args[1], axes)

    return jax.eval_shape(probe, *args), narrow


def _row_sums(loss: Mean, metrics: PyTree, microbatch: PyTree, axes: tuple[str, ...]) -> Sums:
    rows = jax.tree.leaves(microbatch)[0].shape[0]
    mask = row_mask_of(microbatch)

    def over_rows(node: Any, name: str) -> Any:
        if isinstance(node, Mean):
            return Mean(_reduce(node.total, rows, mask, name), _reduce_weight(node.weight, rows, mask, name))
        if isinstance(node, Sum):
            return Sum(_reduce(node.value, rows, mask, name))
        if isinstance(node, Max):
            return Max(_reduce_max(node.value, rows, mask, name))
        raise ValueError(
            f"{name} is a {type(node).__name__}, which does not say how it reduces over microbatches. "
            "Wrap it: jaxacc.Mean(total, weight), jaxacc.Sum(value) or jaxacc.Max(value)."
        )

    sums = jax.tree_util.tree_map_with_path(
        lambda path, node: over_rows(node, f"metric {jax.tree_util.keystr(path) or 'tree'}"), metrics, is_leaf=is_reduction
    )
    return vary((over_rows(loss, "the loss"), sums), axes)


def _unpack(out: Any, has_aux: bool) -> tuple[Mean, PyTree]:
    if has_aux:
        if isinstance(out, tuple) and not isinstance(out, Mean) and len(out) == 2 and isinstance(out[0], Mean):
            return _check_loss(out[0]), out[1]
        raise ValueError(
            f"with has_aux=True loss_fn must return (jaxacc.Mean(total, weight), metrics). It returned {_describe(out)}."
        )
    if isinstance(out, Mean):
        return _check_loss(out), {}
    if isinstance(out, tuple) and out and isinstance(out[0], Mean):
        raise ValueError("loss_fn returned (Mean, metrics). Pass has_aux=True to keep the metrics.")
    raise ValueError(
        f"loss_fn returned {_describe(out)}. It must return jaxacc.Mean(total, weight); for a plain mean over rows: "
        "Mean(loss_per_row, jnp.ones_like(loss_per_row))."
    )


def _describe(out: Any) -> str:
    if hasattr(out, "shape"):
        return "a scalar" if out.shape == () else f"an array of shape {out.shape}"
    return "a scalar" if isinstance(out, int | float) else f"a {type(out).__name__}"


def _check_loss(loss: Mean) -> Mean:
    dtype = jnp.result_type(loss.total)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"the total of the loss must be floating to be differentiated, got {dtype}.")
    return loss


def _reduce_weight(weight: Array, rows: int, mask: Array | None, name: str) -> jax.Array:
    if mask is not None and not isinstance(weight, jax.Array) and np.ndim(weight) == 0:
        raise ValueError(
            f"{name} has the constant weight {weight}, which counts the padding that {ROW_MASK} marks. Give one weight "
            f"per row, jnp.ones_like(loss_per_row), or the sum of your own mask."
        )
    return _reduce(weight, rows, mask, name)


def _reduce(value: Array, rows: int, mask: Array | None, name: str) -> jax.Array:
    value = jnp.asarray(value)
    value = value.astype(_sum_dtype(value.dtype))
    if not _is_per_row(value, rows, name):
        return value
    if mask is not None:
        value = jnp.where(mask, value, jnp.zeros_like(value))
    return jnp.sum(value, dtype=value.dtype)


def _reduce_max(value: Array, rows: int, mask: Array | None, name: str) -> jax.Array:
    value = jnp.asarray(value)
    value = value.astype(_sum_dtype(value.dtype))
    if not _is_per_row(value, rows, name):
        return value
    if mask is not None:
        least = -jnp.inf if jnp.issubdtype(value.dtype, jnp.inexact) else jnp.iinfo(value.dtype).min
        value = jnp.where(mask, value, jnp.full_like(value, least))
    return jnp.max(value)


def _is_per_row(value: jax.Array, rows: int, name: str) -> bool:
    if value.shape not in ((), (rows,)):
        raise ValueError(
            f"{name} has an entry of shape {value.shape}; entries are scalars or one per row, ({rows},). "
            "Sum over the other axes."
        )
    return value.ndim == 1


def _sum_dtype(dtype: Any) -> Any:
    """The dtype to sum in: at least 32 bits, of the same kind."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return at_least_float32(dtype)
    return dtype if dtype != jnp.bool_ and jnp.iinfo(dtype).bits >= 32 else jnp.dtype(jnp.int32)
