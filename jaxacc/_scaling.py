"""`LossScale`: a factor on the loss that keeps float16 gradients from vanishing, constant within a window."""

from __future__ import annotations

import math
import numbers
from typing import NamedTuple

import jax
import jax.numpy as jnp


class LossScale(NamedTuple):
    """How a loss is scaled so that float16 gradients neither vanish nor overflow.

    Within a window the scale is constant. The gradient of the whole window is divided by it once, after the reduction over
    replicas and before clipping, so that `grad_norm`, `tx` and you see true units. Then, once per window: a window that was
    skipped because something was not finite divides the scale by `factor`; the `growth_interval`-th good one in a row
    multiplies it. Windows without weight change nothing. The state is `state.loss_scale`.

    Attributes:
      initial: the first scale.
      growth_interval: good windows in a row, after the last change, that raise the scale.
      factor: by how much it changes; a power of two loses no digits.
      floor: it does not fall below.
      ceiling: it does not rise above. A `floor` and a `ceiling` equal to `initial` make it constant.

    Source: Micikevicius et al., 2018, https://arxiv.org/abs/1710.03740.

    >>> import jax.numpy as jnp, jaxacc, optax
    >>> loss_fn = lambda params, microbatch, key: jaxacc.Mean(microbatch["x"].astype(jnp.float16) @ params, microbatch["n"])
    >>> step = jaxacc.make_step(loss_fn, optax.sgd(0.1), loss_scale=jaxacc.LossScale(initial=2.0**10, growth_interval=1))
    >>> window = {"x": jnp.ones((2, 3, 4)), "n": jnp.ones((2, 3), int)}
    >>> state, info = step.update(step.init(jnp.ones(4, jnp.float16)), window)
    >>> float(info.loss_scale), float(state.loss_scale.scale), float(info.grad_norm)
    (1024.0, 2048.0, 2.0)
    """

    initial: float = 2.0**15
    growth_interval: int = 2000
    factor: float = 2.0
    floor: float = 1.0
    ceiling: float = 2.0**24


class ScaleState(NamedTuple):
    """Where a loss scale is.

    Attributes:
      scale: the scale of the next window, a float32 scalar.
      good: good windows since it changed.
    """

    scale: jax.Array
    good: jax.Array


def check_scale(config: LossScale) -> None:
    """`ValueError` for a loss scale that could not work."""
    numeric = all(isinstance(value, numbers.Real) and math.isfinite(value) for value in config)
    if not numeric or not (0 < config.floor <= config.initial <= config.ceiling):
        raise ValueError(f"{config}: finite numbers with 0 < floor <= initial <= ceiling are needed.")
    if config.factor <= 1 or config.growth_interval < 1:
        raise ValueError(f"{config}: factor must be above 1 and growth_interval at least 1.")


def start_scale(config: LossScale) -> ScaleState:
    """The state before the first window."""
    return ScaleState(jnp.float32(config.initial), jnp.int32(0))


def adjust(config: LossScale, state: ScaleState, *, good: jax.Array, overflowed: jax.Array) -> ScaleState:
    """The state after a window that was `good`, or that `overflowed`; where neither holds, the same."""
    run = jnp.where(overflowed, 0, state.good + good.astype(jnp.int32))
    grows = run >= config.growth_interval
    grown = jnp.minimum(state.scale * config.factor, config.ceiling)
    shrunk = jnp.maximum(state.scale / config.factor, config.floor)
    scale = jnp.where(overflowed, shrunk, jnp.where(grows, grown, state.scale))
    return ScaleState(scale, jnp.where(grows, 0, run))
