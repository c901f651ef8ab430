"""Your own `jax.pmap`: name the axis, and the gradient is reduced once, after the last microbatch.

python examples/own_pmap.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxacc


def loss_fn(params, microbatch, key):
    """Linear regression with dropout; the key differs per microbatch and per device."""
    keep = jax.random.bernoulli(key, 0.9, microbatch["x"].shape)
    error = (microbatch["x"] * keep / 0.9) @ params - microbatch["y"]
    return jaxacc.Mean(error**2, jnp.ones_like(error))


tx = optax.adam(0.05)
grads_of = jaxacc.accumulate(loss_fn, axis_name="devices")


def train_step(params, opt_state, window, key):
    """Runs on every device with its own rows. `out` is reduced already: no psum of yours may follow."""
    out = grads_of(params, window, key)
    updates, opt_state = tx.update(out.grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, out.loss


def main():
    """Train on all devices there are: leaves of the window are (devices, A, m, ...)."""
    devices = jax.device_count()
    step = jax.pmap(train_step, axis_name="devices", in_axes=(None, None, 0, None), out_axes=None)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(devices, 16, 3)).astype(np.float32)
    batch = {"x": x, "y": x @ np.array([1.0, -2.0, 0.5], np.float32)}
    parts = [jaxacc.split_batch({name: leaf[d] for name, leaf in batch.items()}, accumulation_steps=4) for d in range(devices)]
    window = jax.tree.map(lambda *leaves: np.stack(leaves), *parts)
    params = jnp.zeros(3)
    opt_state = tx.init(params)
    losses = []
    for update in range(100):
        params, opt_state, loss = step(params, opt_state, window, jax.random.key(update))
        losses.append(float(loss))  # waits: fake CPU devices deadlock when many updates are under way at once
    print(f"{devices} devices, loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    return losses[0], losses[-1]


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 4)  # fake ones, where there is no accelerator
    main()
