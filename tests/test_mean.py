"""`Mean`, `Sum`, `Max` and the 64-bit counter."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import pytest

import jaxacc
from jaxacc._keys import window_key
from jaxacc._ledger import zero


def test_safe_division():
    """Cases 140, 146: 0 at weight 0, with a finite gradient; the naive guard has a NaN gradient."""
    assert float(jaxacc.Mean(jnp.float32(0), jnp.int32(0)).value) == 0
    gradient = jax.grad(lambda s, n: jaxacc.Mean(s, n).value, argnums=(0, 1))
    assert gradient(1.0, 0.0) == (0, 0)
    assert gradient(6.0, 2.0) == (0.5, -1.5)
    assert jnp.isnan(jax.grad(lambda n: jnp.where(n > 0, n / n, 0.0))(0.0))


@pytest.mark.parametrize(
    ("total", "weight", "dtype"),
    [(3, 2, jnp.float32), (jnp.bfloat16(3), 2, jnp.float32), (jnp.int32(3), jnp.int32(2), jnp.float32), (3.0, 2, jnp.float32)],
)
def test_value_dtypes(total, weight, dtype, strict):
    """A mean is divided in float32 or wider, under strict promotion too."""
    value = jaxacc.Mean(total, weight).value
    assert value.dtype == dtype
    assert float(value) == 1.5


def test_plus_is_refused():
    """Adding tuples would join them."""
    with pytest.raises(TypeError, match=r"jaxacc\.merge"):
        jaxacc.Mean(1.0, 2) + jaxacc.Mean(3.0, 4)


def test_merge_reduces_as_declared():
    """Python numbers merge without overflow or rounding."""
    a = {"m": jaxacc.Mean(1.0, 2**62), "s": jaxacc.Sum(3), "x": jaxacc.Max(jnp.float32(2))}
    b = {"m": jaxacc.Mean(2.0, 2**62), "s": jaxacc.Sum(4), "x": jaxacc.Max(jnp.float32(-1))}
    merged = jaxacc.merge(a, b)
    assert merged["m"] == (3.0, 2**63)
    assert float(merged["m"].value) == 3 / 2**63
    assert float(jaxacc.Mean(3 * 2**70, 2**70).value) == 3
    assert merged["s"].value == 7
    assert float(merged["x"].value) == 2


@hypothesis.settings(deadline=None, derandomize=True, max_examples=50)
@hypothesis.given(st.lists(st.integers(0, 2**31 - 1), max_size=5), st.integers(0, 2**20))
def test_counters_are_exact(counts, repeats):
    """Law 10: the two halves carry, with Python integers as the oracle."""
    counter, expected = zero(), repeats * (2**32 - 1)
    counter = counter._replace(high=jnp.uint32(expected >> 32), low=jnp.uint32(expected & 0xFFFFFFFF))
    for count in counts:
        counter, expected = counter.add(jnp.int32(count)), expected + count
    assert int(counter) == expected


def test_keys_use_all_64_bits_of_the_counter():
    """Window 2^32 does not draw what window 0 drew."""
    counts = [zero(), zero().add(1), zero()._replace(high=jnp.uint32(1)), zero()._replace(high=jnp.uint32(1)).add(1)]
    keys = [window_key(jax.random.key(0), count) for count in counts]
    assert len({float(jax.random.uniform(key)) for key in keys}) == len(keys)
    assert window_key(None, zero()) is None


def test_counters_take_64_bits(x64):
    """With x64 a single addition may exceed 32 bits."""
    assert int(zero().add(jnp.int64(2**40 + 5)).add(2**33)) == 2**40 + 2**33 + 5
