"""Your own `jax.shard_map`: name the axis that splits rows, and the gradient is reduced once, after the last microbatch.

python examples/own_shard_map.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import jaxacc


def loss_fn(params, microbatch, key):
    """Logistic regression; every row has a weight, some are 0."""
    logits = microbatch["x"] @ params["w"] + params["b"]
    losses = optax.sigmoid_binary_cross_entropy(logits, microbatch["y"])
    return jaxacc.Mean(losses * microbatch["weight"], microbatch["weight"])


tx = optax.adam(0.05)
grads_of = jaxacc.accumulate(loss_fn, axis_name="data")


def train_step(params, opt_state, window):
    """Runs on every device with its own rows. `out` is reduced already: no psum of yours may follow."""
    out = grads_of(params, window)
    updates, opt_state = tx.update(out.grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, out.loss


def main():
    """Train on all devices there are."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    step = jax.jit(jax.shard_map(train_step, mesh=mesh, in_specs=(P(), P(), P(None, "data")), out_specs=P()))
    rng = np.random.default_rng(0)
    rows = 16 * mesh.size
    x = rng.normal(size=(rows, 3)).astype(np.float32)
    batch = {"x": x, "y": (x.sum(1) > 0).astype(np.float32), "weight": (rng.uniform(size=rows) < 0.7).astype(np.float32)}
    window = jaxacc.place_window(jaxacc.split_batch(batch, accumulation_steps=4), mesh)
    params = {"w": jnp.zeros(3), "b": jnp.zeros(())}
    opt_state = tx.init(params)
    losses = []
    for _ in range(100):
        params, opt_state, loss = step(params, opt_state, window)
        losses.append(float(loss))  # waits: fake CPU devices deadlock when many updates are under way at once
    print(f"{mesh.size} devices, loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    return losses[0], losses[-1]


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 4)  # fake ones, where there is no accelerator
    main()
