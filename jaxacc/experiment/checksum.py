"""Names, shapes, dtypes and checksums of the leaves of a tree: what a checkpoint says it holds."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxacc._tree import PyTree


def describe(tree: PyTree) -> dict[str, list[Any]]:
    """`{name: [shape, dtype]}` of every leaf, JSON-able; of abstract leaves too.

    >>> describe({"a": np.zeros((2, 3), np.float32)})
    {'a': [[2, 3], 'float32']}
    """
    leaves = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): [[*leaf.shape], str(leaf.dtype)] for path, leaf in leaves}


def differences(saved: dict[str, list[Any]], now: dict[str, list[Any]], *, most: int = 8) -> list[str]:
    """One line per leaf that only one has, or that differs in shape or dtype; of more than `most` the first ones.

    >>> differences({"a": [[2], "float32"], "b": [[], "int32"]}, {"a": [[3], "float32"]})
    ['leaf a: float32[2] in the checkpoint, float32[3] now', 'leaf b: int32[] in the checkpoint, missing now']
    """

    def show(leaf: list[Any] | None) -> str:
        return "missing" if leaf is None else f"{leaf[1]}{leaf[0]}"

    names = [name for name in dict.fromkeys([*saved, *now]) if saved.get(name) != now.get(name)]
    lines = [f"leaf {name}: {show(saved.get(name))} in the checkpoint, {show(now.get(name))} now" for name in names[:most]]
    return lines + ([f"and {len(names) - most} leaves more"] if len(names) > most else [])


def checksums(tree: PyTree) -> list[str]:
    """64 bits of every leaf in hexadecimal, the same however it lies on a mesh.

    Every word `x[i]` of a leaf counts as `x[i] w[i]` modulo `2^32`, in two sums with their own odd pseudorandom weights,
    so that a flipped bit always shows. The sums are taken where the leaf lies, so that no array leaves its devices.
    """
    leaves = jax.tree.leaves(tree)
    mesh = next((leaf.sharding.mesh for leaf in leaves if isinstance(leaf.sharding, NamedSharding)), None)
    whole = None if mesh is None else NamedSharding(mesh, P())
    sums = np.asarray(jax.jit(_sums, out_shardings=whole)(leaves))
    return [f"{int(high):08x}{int(low):08x}" for high, low in sums]


def _sums(leaves: list[jax.Array]) -> jax.Array:
    return jnp.stack([_sum(_words(leaf)) for leaf in leaves])


def _sum(words: jax.Array) -> jax.Array:
    place = jnp.zeros(words.shape, jnp.uint32)
    for dimension, size in enumerate(words.shape):
        place = place * np.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, words.shape, dimension)
    return jnp.stack([jnp.sum(words * _scramble(place + seed), dtype=jnp.uint32) for seed in map(np.uint32, (1, 2**31 + 7))])


def _scramble(x: jax.Array) -> jax.Array:
    """Odd pseudorandom weights (the finalizer of MurmurHash3)."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
    return (x ^ (x >> np.uint32(16))) | np.uint32(1)


def _words(leaf: jax.Array) -> jax.Array:
    """The bits of an array as uint32, narrower types one element per word."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(leaf)
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        leaf = jnp.stack([leaf.real, leaf.imag])
    if leaf.dtype == jnp.bool_:
        return leaf.astype(jnp.uint32)
    narrow = {1: jnp.uint8, 2: jnp.uint16}.get(leaf.dtype.itemsize, jnp.uint32)
    return jax.lax.bitcast_convert_type(leaf, narrow).astype(jnp.uint32)
