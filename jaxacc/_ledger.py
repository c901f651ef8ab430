"""Exact counters: 64-bit without `jax_enable_x64`, as a pytree that lives in the training state."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Counter(NamedTuple):
    """A non-negative 64-bit integer as two uint32 halves. `int(counter)` reads it on the host.

    >>> from jaxacc._ledger import zero
    >>> count = zero()
    >>> for _ in range(3):
    ...     count = count.add(jnp.int32(2**31 - 1))
    >>> int(count) == 3 * (2**31 - 1)
    True
    """

    high: jax.Array
    low: jax.Array

    def add(self, count: jax.Array | int) -> Counter:
        """Add a non-negative integer of up to 64 bits."""
        added = jnp.asarray(count)
        wide = jnp.iinfo(added.dtype).bits > 32
        added_high = (added >> 32).astype(jnp.uint32) if wide else jnp.zeros_like(self.high)
        low = self.low + (added & 0xFFFFFFFF if wide else added).astype(jnp.uint32)
        overflowed = (low < self.low).astype(jnp.uint32)
        return Counter(self.high + added_high + overflowed, low)

    def __int__(self) -> int:
        return (int(self.high) << 32) | int(self.low)


def zero() -> Counter:
    """A counter at 0."""
    return Counter(jnp.zeros((), jnp.uint32), jnp.zeros((), jnp.uint32))


class Ledger(NamedTuple):
    """What a training state has consumed and done so far.

    Attributes:
      microbatches: microbatches that held at least one real row.
      attempted: windows run.
      applied: updates that changed the parameters; `attempted - applied` windows were skipped.
      examples: real rows, those of skipped windows included.
      tokens: the integer weight of the loss, or the metric `Sum` named "tokens", those of skipped windows included.
    """

    microbatches: Counter
    attempted: Counter
    applied: Counter
    examples: Counter
    tokens: Counter

    def record(
        self, *, microbatches: jax.Array | int, applied: jax.Array, examples: jax.Array | int, tokens: jax.Array | int
    ) -> Ledger:
        """The ledger after one more window."""
        return Ledger(
            microbatches=self.microbatches.add(microbatches),
            attempted=self.attempted.add(1),
            applied=self.applied.add(applied.astype(jnp.int32)),
            examples=self.examples.add(examples),
            tokens=self.tokens.add(tokens),
        )


def new_ledger() -> Ledger:
    """A ledger with every counter at 0."""
    return Ledger(*(zero() for _ in Ledger._fields))
