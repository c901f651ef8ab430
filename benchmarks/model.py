"""The model of the benchmarks: residual blocks in one scanned, rematerialised stack, with a ragged mask."""

import jax
import jax.numpy as jnp
import numpy as np

import jaxacc

LAYERS, WIDTH, ROWS, LENGTH = 16, 256, 2, 16


def init_params(key, layers=LAYERS, width=WIDTH):
    """Stacked weights of all layers."""
    up, down = jax.random.split(key)
    return {
        "up": jax.random.normal(up, (layers, width, 4 * width)) * 0.02,
        "down": jax.random.normal(down, (layers, 4 * width, width)) * 0.02,
    }


def loss_fn(params, microbatch, key):
    """Mean square of the output over the positions that the mask keeps."""
    total, weight = sums(params, microbatch)
    return jaxacc.Mean(total, weight)


def half_loss_fn(params, microbatch, key):
    """The same computed in bfloat16, the float32 parameters cast inside the layer."""
    total, weight = sums(params, microbatch, jnp.bfloat16)
    return jaxacc.Mean(total, weight)


def sums(params, microbatch, dtype=jnp.float32):
    """The same as a plain pair."""

    @jax.checkpoint
    def layer(h, weights):
        return h + jnp.tanh(h @ weights["up"].astype(dtype)) @ weights["down"].astype(dtype), None

    h, _ = jax.lax.scan(layer, microbatch["x"].astype(dtype), params)
    loss = jnp.mean((h.astype(jnp.float32) - 1) ** 2, axis=-1)
    return jnp.sum(jnp.where(microbatch["mask"], loss, 0.0)), jnp.sum(microbatch["mask"], dtype=jnp.int32)


def make_window(steps, rows=ROWS, length=LENGTH, width=WIDTH, seed=0):
    """A window of `steps` microbatches with ragged rows."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, length + 1, (steps, rows, 1))
    return {
        "x": rng.normal(size=(steps, rows, length, width)).astype(np.float32),
        "mask": np.arange(length) < lengths,
    }
