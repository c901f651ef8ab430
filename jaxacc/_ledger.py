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
      dropped: microbatches left out because their loss was not finite.
      skipped_in_a_row: windows skipped since the last applied one, an int32.
    """

    microbatches: Counter
    attempted: Counter
    applied: Counter
    examples: Counter
    tokens: Counter
    dropped: Counter
    skipped_in_a_row: jax.Array

    def record(
        self,
        *,
        microbatches: jax.Array | int,
        applied: jax.Array,
        examples: jax.Array | int,
        tokens: jax.Array | int,
        dropped: jax.Array | int,
    ) -> Ledger:
        """The ledger after one more window."""
        return Ledger(
            microbatches=self.microbatches.add(microbatches),
            attempted=self.attempted.add(1),
            applied=self.applied.add(applied.astype(jnp.int32)),
            examples=self.examples.add(examples),
            tokens=self.tokens.add(tokens),
            dropped=self.dropped.add(dropped),
            skipped_in_a_row=jnp.where(applied, 0, self.skipped_in_a_row + 1),
        )


def new_ledger() -> Ledger:
    """A ledger with every counter at 0."""
    return Ledger(*(zero() for _ in range(6)), skipped_in_a_row=jnp.int32(0))


def check_skipped(ledger: Ledger, *, raise_after: int) -> None:
    """Stop a loop that learns nothing any more.

    Reads the ledger, so that it waits for the update that made it. Call it as often as that may cost.

    Args:
      ledger: of a training state, `state.ledger`.
      raise_after: how many windows in a row may be skipped, less one.

    Raises:
      FloatingPointError: the last `raise_after` windows, or more, were all skipped.

    >>> import jaxacc, jax.numpy as jnp, optax
    >>> loss_fn = lambda params, microbatch, key: jaxacc.Mean(jnp.log(microbatch) * params, jnp.ones_like(microbatch))
    >>> step = jaxacc.make_step(loss_fn, optax.sgd(0.1))
    >>> state, _ = step.update(step.init(jnp.float32(1)), -jnp.ones((2, 4)))
    >>> jaxacc.check_skipped(state.ledger, raise_after=2)
    >>> state, _ = step.update(state, -jnp.ones((2, 4)))
    >>> jaxacc.check_skipped(state.ledger, raise_after=2)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    FloatingPointError: the last 2 windows were all skipped (0 of 2 attempted were applied)...
    """
    if raise_after < 1:
        raise ValueError(f"raise_after={raise_after} is less than 1.")
    skipped = int(ledger.skipped_in_a_row)
    if skipped >= raise_after:
        raise FloatingPointError(
            f"the last {skipped} windows were all skipped ({int(ledger.applied)} of {int(ledger.attempted)} attempted were "
            "applied). info.outcome says why: SKIPPED_NONFINITE is a loss or gradient that is NaN or infinite. Look at the "
            "data of these windows, lower the learning rate, or go back to an earlier state."
        )
