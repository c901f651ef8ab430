"""Equinox: partition the arrays out, combine them inside the loss.

python examples/equinox_model.py
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxacc


def main():
    """Train an MLP."""
    model = eqx.nn.MLP(3, "scalar", 16, 2, key=jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def loss_fn(params, microbatch, key):
        predictions = jax.vmap(eqx.combine(params, static))(microbatch["x"])
        errors = (predictions - microbatch["y"]) ** 2
        return jaxacc.Mean(errors, jnp.ones_like(errors))

    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 3)).astype(np.float32)
    window = jaxacc.split_batch({"x": x, "y": np.sin(x.sum(1))}, accumulation_steps=4)
    step = jaxacc.make_step(loss_fn, optax.adam(1e-2))
    state = step.init(params)
    first = step.evaluate(state, window).loss.value
    for _ in range(100):
        state, _ = step.update(state, window)
    last = step.evaluate(state, window).loss.value
    print(f"loss {first:.3f} -> {last:.3f}")
    return float(first), float(last)


if __name__ == "__main__":
    main()
