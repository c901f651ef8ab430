"""Flax NNX: split the module outside, rebuild it inside the differentiated function.

python examples/nnx.py
"""

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxacc


class Regressor(nnx.Module):
    """Two layers."""

    def __init__(self, rngs):
        """Make the layers."""
        self.hidden = nnx.Linear(3, 16, rngs=rngs)
        self.out = nnx.Linear(16, 1, rngs=rngs)

    def __call__(self, x):
        """One number per row."""
        return self.out(nnx.tanh(self.hidden(x)))[..., 0]


def main():
    """Train, then put the parameters back into the module."""
    model = Regressor(nnx.Rngs(0))
    graph, params = nnx.split(model)

    def loss_fn(params, microbatch, key):
        errors = (nnx.merge(graph, params)(microbatch["x"]) - microbatch["y"]) ** 2
        return jaxacc.Mean(errors, jnp.ones_like(errors))

    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 3)).astype(np.float32)
    window = jaxacc.split_batch({"x": x, "y": np.sin(x.sum(1))}, accumulation_steps=4)
    step = jaxacc.make_step(loss_fn, optax.adam(1e-2))
    state = step.init(params)
    first = step.evaluate(state, window).loss.value
    for _ in range(100):
        state, _ = step.update(state, window)
    nnx.update(model, state.params)
    last = jnp.mean((model(x) - np.sin(x.sum(1))) ** 2)
    print(f"loss {first:.3f} -> {last:.3f}")
    return float(first), float(last)


if __name__ == "__main__":
    main()
