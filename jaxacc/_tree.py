"""Leafwise helpers on pytrees: what is differentiated, what is not, and whether it is finite."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

PyTree = Any


def is_inexact(leaf: Any) -> bool:
    """Whether `leaf` is a float or complex array (PRNG keys, integers and bools are not)."""
    dtype = leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)
    return jnp.issubdtype(dtype, jnp.inexact)


def at_least_float32(dtype: Any) -> Any:
    """The inexact dtype itself, or float32 where it has fewer than 32 bits (per component)."""
    return dtype if jnp.finfo(dtype).bits >= 32 else jnp.dtype(jnp.float32)


Trainable = Any
"""A tree (prefix) of bools, or a predicate of a leaf's path such as `"layers/lora"`, or None for all."""


def partition(tree: PyTree, trainable: Trainable = None) -> tuple[PyTree, PyTree]:
    """Split a tree into its inexact leaves that are trained and the rest, each with None where the other has a leaf."""
    leaves, structure = jax.tree.flatten(tree)
    chosen = is_trained(tree, trainable)
    trained = [leaf if take else None for leaf, take in zip(leaves, chosen, strict=True)]
    rest = [None if take else leaf for leaf, take in zip(leaves, chosen, strict=True)]
    return jax.tree.unflatten(structure, trained), jax.tree.unflatten(structure, rest)


def is_trained(tree: PyTree, trainable: Trainable = None) -> tuple[bool, ...]:
    """For every leaf, in the order of `jax.tree.leaves`, whether it is inexact and `trainable`.

    Raises:
      ValueError: `trainable` is neither a predicate nor a tree prefix of bools, or chooses nothing.
    """
    paths = jax.tree.leaves_with_path(tree)
    if trainable is None:
        return tuple(is_inexact(leaf) for _, leaf in paths)
    if callable(trainable):
        named = [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in paths]
        chosen = [is_inexact(leaf) and bool(trainable(name)) for name, leaf in named]
    else:
        try:
            spread = jax.tree.leaves(jax.tree.map(lambda take, part: jax.tree.map(lambda _: take, part), trainable, tree))
        except ValueError as error:
            raise ValueError(f"trainable is no tree prefix of the parameters: {error}") from error
        if wrong := [take for take in spread if not isinstance(take, bool | np.bool_)]:
            raise ValueError(f"trainable holds {wrong[0]!r}. Its leaves are True or False, or it is a predicate of a path.")
        chosen = [is_inexact(leaf) and take for (_, leaf), take in zip(paths, spread, strict=True)]
    if not any(chosen):
        raise ValueError("trainable chooses no floating leaf of the parameters, so that nothing would be trained.")
    return tuple(chosen)


def merge(inexact: PyTree, rest: PyTree) -> PyTree:
    """Undo `partition`."""
    return jax.tree.map(lambda a, b: b if a is None else a, inexact, rest, is_leaf=lambda leaf: leaf is None)


def all_finite(tree: PyTree) -> jax.Array:
    """One bool: no leaf holds a NaN or an infinity."""
    finite = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]
    return jnp.all(jnp.stack(finite)) if finite else jnp.array(True)


def cast_like(tree: PyTree, like: PyTree) -> PyTree:
    """Cast every leaf, Python numbers too, to the dtype its counterpart in `like` has."""
    return jax.tree.map(lambda new, old: jnp.asarray(new).astype(old.dtype), tree, like)


def as_arrays(tree: PyTree) -> PyTree:
    """Make JAX arrays of NumPy arrays and Python numbers, which `jax.jit` does and an eager call does not."""
    return jax.tree.map(jnp.asarray, tree)


def copy(tree: PyTree) -> PyTree:
    """Copy every leaf into a device buffer of its own, strongly typed, so that it can be donated."""
    return jax.tree.map(lambda leaf: jnp.array(leaf, dtype=jnp.result_type(leaf), copy=True), tree)


def vary(tree: PyTree, axes: tuple[str, ...]) -> PyTree:
    """Mark every leaf as varying over the manual mesh axes in `axes` that it does not vary over yet.

    Inside `jax.shard_map(check_vma=True)` autodiff sums the gradient of an unvarying value over the mesh by itself,
    once per backward pass. A varying value keeps its local gradient, which is what accumulation needs. Where JAX does
    not track varying axes (`check_vma=False`, `pmap`) the mark changes nothing.
    """

    def vary_leaf(leaf: Any) -> Any:
        missing = tuple(axis for axis in axes if axis not in jax.typeof(leaf).mat.varying)
        return jax.lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(vary_leaf, tree) if axes else tree


def varying_axes(shape_dtype: Any) -> tuple[str, ...]:
    """The manual mesh axes over which a result of `jax.eval_shape` varies."""
    manual = shape_dtype.manual_axis_type
    return tuple(manual.varying) if manual is not None else ()
