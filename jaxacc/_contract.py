"""What a loss function may return: checked once while tracing, then summed over its real rows."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxacc._keys import microbatch_key, row_keys
from jaxacc._mean import Array, Max, Mean, Sum, is_reduction
from jaxacc._split import ROW_MASK, row_mask_of
from jaxacc._tree import PyTree, Trainable, at_least_float32, vary

LossFn = Callable[..., Any]
"""`loss_fn(params, microbatch, key)` returning `Mean` or a dict of them, the terms; see `Objective` for more."""

Nonfinite = Literal["skip_window", "drop_microbatch"]

LOSS = "loss"
"""The name of the only term of a loss that is no dict."""


class Objective(NamedTuple):
    """What is differentiated, and how it is called: nothing here is an array.

    Attributes:
      loss_fn: `loss_fn(params, microbatch, key)`, or `loss_fn(params, state, microbatch, key)` with `has_state`. It returns
        the loss, then metrics with `has_aux`, then the new model state with `has_state`: as a tuple where that is several.
      has_aux: whether it returns metrics.
      has_state: whether it takes and returns model state.
      coefficients: of the terms of the loss but the main one, which has 1.
      row_keys: give one key per row, which no split changes, in place of one per microbatch.
      drops_nonfinite: leave out microbatches whose loss is not finite.
      state_reduction: how the states that the microbatches made become one; a tree prefix.
      trainable: which parameters are differentiated, see `partition`.
    """

    loss_fn: LossFn
    has_aux: bool = False
    has_state: bool = False
    coefficients: Mapping[str, float] | None = None
    row_keys: bool = False
    drops_nonfinite: bool = False
    state_reduction: PyTree = "sequential"
    trainable: Trainable = None

    def coefficient(self, name: str) -> float:
        """The factor of a term in the loss."""
        return (self.coefficients or {}).get(name, 1.0)

    def main(self, terms: Mapping[str, Any]) -> Any:
        """The entry of the main term: the one without a coefficient."""
        (name,) = set(terms) - set(self.coefficients or {})
        return terms[name]

    def loss(self, terms: Mapping[str, Mean]) -> jax.Array:
        """The loss: every term over its own weight, times its coefficient."""
        parts = [self.coefficient(name) * term.value for name, term in terms.items()]
        return sum(parts[1:], parts[0])

    def key(self, key: Any, index: jax.Array, steps: int | None, microbatch: PyTree, axes: tuple[str, ...]) -> Any:
        """What `loss_fn` is given as its key for microbatch `index` of a window."""
        if self.row_keys:
            return row_keys(key, index, steps, microbatch, axes)
        return microbatch_key(key, index, axes)


class Sums(NamedTuple):
    """The loss and the metrics of some rows, not divided.

    Attributes:
      terms: `Mean` by name.
      metrics: a tree of `Mean`, `Sum` and `Max`.
      dropped: microbatches left out because their loss is not finite.
    """

    terms: dict[str, Mean]
    metrics: PyTree
    dropped: Sum


def objective_of(
    loss_fn: LossFn,
    *,
    has_aux: bool = False,
    has_state: bool = False,
    coefficients: Mapping[str, float] | None = None,
    row_keys: bool = False,
    nonfinite: Nonfinite = "skip_window",
    state_reduction: PyTree = "sequential",
    trainable: Trainable = None,
) -> Objective:
    """Check what can be checked before anything is traced."""
    if nonfinite not in ("skip_window", "drop_microbatch"):
        raise ValueError(f"nonfinite={nonfinite!r} is not one of 'skip_window' and 'drop_microbatch'.")
    for name, value in (coefficients or {}).items():
        if not isinstance(value, numbers.Real) or not math.isfinite(value):
            raise ValueError(f"coefficients[{name!r}] is {value!r}. It must be a finite number, constant over the run.")
    drops = nonfinite == "drop_microbatch"
    return Objective(loss_fn, has_aux, has_state, coefficients, row_keys, drops, state_reduction, trainable)


def sums_of(
    objective: Objective, axes: tuple[str, ...], params: PyTree, state: PyTree, microbatch: PyTree, key: Any
) -> tuple[Sums, PyTree]:
    """Call the loss function, check what it returns, and sum it over the real rows of the microbatch.

    Floats are summed in float32 or wider, integers and bools in integers of at least 32 bits. The sums, and the new model
    state beside them, are marked as varying over the manual mesh axes `axes`, whatever the loss made of them.
    """
    return _sum_rows(objective, axes, _call(objective, params, state, microbatch, key), microbatch)


def sums_structure(
    objective: Objective, axes: tuple[str, ...], params: PyTree, state: PyTree, microbatch: PyTree, key: Any
) -> tuple[Sums, bool]:
    """Shapes of the sums, and whether the loss is computed in less than 32 bits (nothing is evaluated)."""
    narrow = False

    def probe(params: PyTree, state: PyTree, microbatch: PyTree, key: Any) -> Sums:
        nonlocal narrow
        called = _call(objective, params, state, microbatch, key)
        narrow = _is_narrow(called.terms)
        _check_state(state, called.state)
        return _sum_rows(objective, axes, called, microbatch)[0]

    return jax.eval_shape(probe, params, state, microbatch, key), narrow


def _sum_rows(objective: Objective, axes: tuple[str, ...], called: _Called, microbatch: PyTree) -> tuple[Sums, PyTree]:
    terms, metrics = _row_sums(called.terms, called.metrics, microbatch)
    finite = jnp.array(True)
    if objective.drops_nonfinite:
        finite = jnp.all(jnp.stack([jnp.isfinite(entry) for entry in jax.tree.leaves(terms)]))
        terms = jax.tree.map(lambda entry: jnp.where(finite, entry, jnp.zeros_like(entry)), terms)
    elif len(terms) > 1:
        terms = {name: Mean(jnp.where(w != 0, t, jnp.zeros_like(t)), w) for name, (t, w) in terms.items()}
    return vary((Sums(terms, metrics, Sum((~finite).astype(jnp.int32))), called.state), axes)


def _is_narrow(terms: Mapping[str, Mean]) -> bool:
    """Whether the loss is 16-bit; `ValueError` where it has several terms."""
    small = {name: dtype for name, (t, _) in terms.items() if jnp.finfo(dtype := jnp.result_type(t)).bits < 32}
    if small and len(terms) > 1:
        name, dtype = next(iter(small.items()))
        raise ValueError(
            f"the total of the term {name!r} is {dtype}, in which its coefficient and its denominator would be rounded. "
            "Compute it in float32: losses.astype(jnp.float32), before the sum."
        )
    return bool(small)


def _check_state(state: PyTree, new: PyTree) -> None:
    """`ValueError` unless the new model state has the structure, shapes and dtypes of the old."""
    old_paths, new_paths = ({jax.tree_util.keystr(p): x for p, x in jax.tree.leaves_with_path(t)} for t in (state, new))
    if jax.tree.structure(state) != jax.tree.structure(new):
        differ = sorted(old_paths.keys() ^ new_paths.keys()) or [f"{jax.tree.structure(new)}"]
        raise ValueError(f"loss_fn returned a model state of another structure than it was given: {', '.join(differ)} differ.")
    for path, old in old_paths.items():
        was, now = ((jnp.result_type(x), jnp.shape(x)) for x in (old, new_paths[path]))
        if was != now:
            raise ValueError(
                f"the model state {path or 'leaf'} is {was[0]} {was[1]}, and loss_fn returned {now[0]} {now[1]}. Return what "
                "it was given, or cast: new.astype(old.dtype)."
            )


def _row_sums(terms: Mapping[str, Mean], metrics: PyTree, microbatch: PyTree) -> tuple[dict[str, Mean], PyTree]:
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

    named = {name: "the loss" if len(terms) == 1 else f"the term {name!r}" for name in terms}
    reduced = jax.tree_util.tree_map_with_path(
        lambda path, node: over_rows(node, f"metric {jax.tree_util.keystr(path) or 'tree'}"), metrics, is_leaf=is_reduction
    )
    return {name: over_rows(term, named[name]) for name, term in terms.items()}, reduced


class _Called(NamedTuple):
    """What `loss_fn` returned."""

    terms: dict[str, Mean]
    metrics: PyTree
    state: PyTree


def _call(objective: Objective, params: PyTree, state: PyTree, microbatch: PyTree, key: Any) -> _Called:
    stateful = (state,) if objective.has_state else ()
    out = objective.loss_fn(params, *stateful, microbatch, key)
    parts = ["loss", *["metrics"] * objective.has_aux, *["new_state"] * objective.has_state]
    is_tuple = isinstance(out, tuple) and not isinstance(out, Mean)
    if len(parts) == 1 and is_tuple and out and isinstance(out[0], Mean | dict):
        raise ValueError("loss_fn returned (Mean, metrics). Pass has_aux=True to keep the metrics.")
    if len(parts) > 1 and not (is_tuple and len(out) == len(parts)):
        options = " and ".join(name for name in ("has_aux", "has_state") if getattr(objective, name))
        wanted = ", ".join(["jaxacc.Mean(total, weight)", *parts[1:]])
        raise ValueError(f"with {options}=True loss_fn must return ({wanted}). It returned {_describe(out)}.")
    named = dict(zip(parts, out if len(parts) > 1 else (out,), strict=True))
    return _Called(_terms(objective, named["loss"]), named.get("metrics", {}), named.get("new_state"))


def _terms(objective: Objective, loss: Any) -> dict[str, Mean]:
    """The loss as terms by name, whatever of it is wrong refused."""
    terms = loss if isinstance(loss, dict) else {LOSS: loss}
    if not terms or not all(isinstance(term, Mean) for term in terms.values()):
        strange = next((term for term in terms.values() if not isinstance(term, Mean)), loss)
        raise ValueError(
            f"loss_fn returned {_describe(strange)}{' as a term of the loss' if strange is not loss else ''}. It must return "
            "jaxacc.Mean(total, weight), or a dict of them; for a plain mean over rows: "
            "Mean(loss_per_row, jnp.ones_like(loss_per_row))."
        )
    given = set(objective.coefficients or {})
    if len(set(terms) - given) != 1 or given - set(terms):
        raise ValueError(
            f"the loss has the terms {sorted(terms)}, and coefficients names {sorted(given)}. Every term but one, the main "
            "one, needs a coefficient (1.0 where it has none), and no other name does."
        )
    for term in terms.values():
        if not jnp.issubdtype(dtype := jnp.result_type(term.total), jnp.floating):
            raise ValueError(f"the total of the loss must be floating to be differentiated, got {dtype}.")
    return terms


def _describe(out: Any) -> str:
    if hasattr(out, "shape"):
        return "a scalar" if out.shape == () else f"an array of shape {out.shape}"
    return "a scalar" if isinstance(out, int | float) else f"a {type(out).__name__}"


def _reduce_weight(weight: Array, rows: int, mask: Array | None, name: str) -> jax.Array:
    if mask is not None and not isinstance(weight, jax.Array) and np.ndim(weight) == 0:
        raise ValueError(
            f"{name} has the constant weight {weight}, which counts the padding that {ROW_MASK} marks. Give one weight "
            f"per row, jnp.ones_like(loss_per_row), or the sum of your own mask; for one per microbatch, jnp.int32(1)."
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
