"""Numbers that are not finished yet: `Mean`, `Sum` and `Max` know how they merge, and divide only when read."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxacc._tree import PyTree, at_least_float32, is_inexact

Array = Any


class Mean(NamedTuple):
    """A mean not yet divided: `total / weight`.

    Means merge by adding totals and weights, so the mean over microbatches, replicas and windows is exact whatever the
    weights are. A mean of means is not:

    >>> import jaxacc
    >>> a, b = jaxacc.Mean(512 * 2.0, 512), jaxacc.Mean(1536 * 4.0, 1536)
    >>> float(jaxacc.merge(a, b).value)
    3.5

    Attributes:
      total: the sum of what is averaged; floating, a scalar or one entry per row `(m,)`.
      weight: how much was summed, usually a count; a scalar or one entry per row. Integers and bools are counted as
        integers, floats in float32.
    """

    total: Array
    weight: Array

    @property
    def value(self) -> jax.Array:
        """`total / weight`; 0 where the weight is 0, with a gradient that is finite there too."""
        # Python integers may be too large for any integer dtype.
        total, weight = (jnp.asarray(float(x) if isinstance(x, int) else x) for x in self)
        dtype = at_least_float32(total.dtype) if is_inexact(total) else jnp.float32
        inhabited = weight != 0
        divisor = jnp.where(inhabited, weight, jnp.ones_like(weight)).astype(dtype)
        return jnp.where(inhabited, total.astype(dtype) / divisor, jnp.zeros_like(total, dtype))

    def __add__(self, other: Any) -> Any:
        """Refused: tuples would be joined, `(total, weight, total, weight)`."""
        raise TypeError(
            "Mean + Mean is not defined. To merge two of them use jaxacc.merge(a, b); to add losses, give them as terms."
        )


class Sum(NamedTuple):
    """A metric that adds up over microbatches, replicas and windows. `value`: a scalar or one entry per row."""

    value: Array


class Max(NamedTuple):
    """A metric of which the largest counts. `value`: a scalar or one entry per row."""

    value: Array


def is_reduction(node: Any) -> bool:
    """Whether a node of a metrics tree says how it reduces."""
    return isinstance(node, Mean | Sum | Max)


def merge(a: PyTree, b: PyTree) -> PyTree:
    """Merge two equal trees of `Mean`, `Sum` and `Max`: means and sums add, maxima compete.

    Array totals keep their dtype. To merge more windows than float32 or int32 can count, turn the entries into
    Python numbers first: they merge just the same and never overflow.

    Args:
      a, b: trees of the same structure, from two sets of rows that do not overlap.

    Returns:
      The tree for the union of the rows.

    >>> import jaxacc
    >>> jaxacc.merge({"hits": jaxacc.Sum(3)}, {"hits": jaxacc.Sum(4)})
    {'hits': Sum(value=7)}
    """

    def merge_pair(x: Any, y: Any) -> Any:
        if isinstance(x, Mean):
            return Mean(x.total + y.total, x.weight + y.weight)
        if isinstance(x, Sum):
            return Sum(x.value + y.value)
        return Max(jnp.maximum(x.value, y.value))

    return jax.tree.map(merge_pair, a, b, is_leaf=is_reduction)


def reduce_over(axes: tuple[str, ...], tree: PyTree) -> PyTree:
    """Merge a tree of `Mean`, `Sum` and `Max` over the replicas of the manual mesh axes `axes`."""

    def reduce_node(node: Any) -> Any:
        if isinstance(node, Max):
            return Max(jax.lax.pmax(node.value, axes))
        return jax.lax.psum(node, axes)

    return jax.tree.map(reduce_node, tree, is_leaf=is_reduction) if axes else tree


def identity(tree: PyTree) -> PyTree:
    """What changes nothing when merged with `tree`, arrays or shapes: zeros, and the least of the dtype for `Max`."""

    def identity_node(node: Any) -> Any:
        if isinstance(node, Max):
            least = -jnp.inf if jnp.issubdtype(node.value.dtype, jnp.inexact) else jnp.iinfo(node.value.dtype).min
            return Max(jnp.full(node.value.shape, least, node.value.dtype))
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), node)

    return jax.tree.map(identity_node, tree, is_leaf=is_reduction)
