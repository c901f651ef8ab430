"""The gradient noise scale: how many units of weight a gradient needs before its noise falls below its signal."""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxacc._tree import PyTree, at_least_float32

NoiseScaleFrom = Literal["replicas", "microbatches"]

DECAY = 0.95
"""Of the averages over windows."""


class Parts(NamedTuple):
    """What the parts of a window, its replicas or its microbatches, tell of the noise in their gradients.

    Attributes:
      squares: sum over the parts of `|h|² / n`, with `h` what the part adds to the window's gradient and `n` its weight.
      number: parts with weight.
    """

    squares: jax.Array
    number: jax.Array


class NoiseState(NamedTuple):
    """Averages over windows, from 0: their common bias cancels in the quotient.

    Attributes:
      variance: of the trace of the covariance of the gradient of one unit of weight.
      square: of the squared norm of the true gradient.
    """

    variance: jax.Array
    square: jax.Array


def no_parts() -> Parts:
    """Nothing known yet."""
    return Parts(jnp.float32(0), jnp.float32(0))


def quiet() -> NoiseState:
    """The averages of no windows."""
    return NoiseState(jnp.float32(0), jnp.float32(0))


def part_of(grads: PyTree, weight: jax.Array) -> Parts:
    """One part: its gradient and its weight; nothing where that is not positive."""
    weight = jnp.asarray(weight).astype(jnp.float32)
    square = square_of(grads) / jnp.where(weight > 0, weight, 1)
    return Parts(jnp.where(weight > 0, square, 0), (weight > 0).astype(jnp.float32))


def square_of(grads: PyTree) -> jax.Array:
    """The squared global norm of a gradient, in float32."""
    wide = jax.tree.map(lambda leaf: leaf.astype(at_least_float32(leaf.dtype)), grads)
    return optax.tree.norm(wide, squared=True).astype(jnp.float32)


def observe(state: NoiseState, parts: Parts, square: jax.Array, weight: jax.Array, applied: jax.Array) -> NoiseState:
    r"""The averages after a window of this weight, whose gradient has the squared norm `square`.

    A part of weight :math:`n_i` has the gradient :math:`g_i = h_i N / n_i`, of expectation :math:`G` and variance
    :math:`\Sigma / n_i`. So the mean of :math:`|g_i|^2` weighted by :math:`n_i` has the expectation
    :math:`|G|^2 + P \,\mathrm{tr}\Sigma / N` over :math:`P` parts, and that of the whole gradient
    :math:`|G|^2 + \mathrm{tr}\Sigma / N`: two equations for two unknowns.
    """
    weight = jnp.asarray(weight).astype(jnp.float32)
    small = parts.squares * weight
    more = parts.number - 1
    known = applied & (more > 0)
    divisor = jnp.where(known, more, 1)
    variance = (small - square) * weight / divisor
    estimate = NoiseState(variance, square - variance / jnp.where(weight > 0, weight, 1))
    return jax.tree.map(lambda old, new: jnp.where(known, DECAY * old + (1 - DECAY) * new, old), state, estimate)


def noise_scale_of(state: NoiseState) -> jax.Array:
    """The quotient; NaN where the averages cannot tell, for want of windows, of parts, or of signal above the noise."""
    known = (state.variance > 0) & (state.square > 0)
    return jnp.where(known, state.variance / jnp.where(known, state.square, 1), jnp.nan)
