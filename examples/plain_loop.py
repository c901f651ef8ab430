"""Dict parameters, your own loop: replace `jax.value_and_grad` by `jaxacc.accumulate` and keep the rest.

python examples/plain_loop.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxacc


def loss_fn(params, microbatch, key):
    """Logistic regression; every row has a weight, some are 0."""
    logits = microbatch["x"] @ params["w"] + params["b"]
    losses = optax.sigmoid_binary_cross_entropy(logits, microbatch["y"])
    return jaxacc.Mean(losses * microbatch["weight"], microbatch["weight"])


tx = optax.adam(0.05)
grads_of = jaxacc.accumulate(loss_fn)


@jax.jit
def train_step(params, opt_state, window):
    """One update per window of A microbatches."""
    out = grads_of(params, window)
    updates, opt_state = tx.update(out.grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, out.loss


def main():
    """Train on a separable problem."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 3)).astype(np.float32)
    batch = {"x": x, "y": (x.sum(1) > 0).astype(np.float32), "weight": (rng.uniform(size=64) < 0.7).astype(np.float32)}
    params = {"w": jnp.zeros(3), "b": jnp.zeros(())}
    opt_state = tx.init(params)
    for update in range(100):
        params, opt_state, loss = train_step(params, opt_state, jaxacc.split_batch(batch, accumulation_steps=8))
        if update == 0:
            first = float(loss)
    print(f"loss {first:.3f} -> {float(loss):.3f}")
    return first, float(loss)


if __name__ == "__main__":
    main()
