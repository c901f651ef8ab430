"""Your own loop, saved and restored by plain Orbax, onto another mesh too.

python examples/orbax_library.py
"""

import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

import jaxacc


def loss_fn(params, microbatch, key):
    """Linear regression."""
    error = jnp.square(microbatch["x"] @ params["w"] - microbatch["y"])
    return jaxacc.Mean(error, jnp.ones_like(error))


def step_on(replicas):
    """A step on a mesh of so many devices."""
    mesh = jax.make_mesh((replicas,), ("data",), devices=jax.devices()[:replicas])
    return jaxacc.make_step(loss_fn, optax.adam(0.05), mesh=mesh, shard_optimizer=replicas > 1)


def run(step, state, window, updates):
    """So many updates on the same window."""
    for _ in range(updates):
        state, info = step.update(state, window)
        loss = float(info.loss)
    return state, loss


def main():
    """Twenty updates, a checkpoint, sixty more on another mesh."""
    x = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)
    window = jaxacc.split_batch({"x": x, "y": x.sum(axis=1)}, accumulation_steps=4)
    params, key = {"w": jnp.zeros(8)}, jax.random.key(0)
    step = step_on(min(4, jax.device_count()))
    state, first = run(step, step.init(params, key=key), window, 20)

    with tempfile.TemporaryDirectory() as folder, ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(Path(folder) / "state", state._replace(layout=None))  # the layout is no array: it stays with the step
        checkpointer.wait_until_finished()
        other = step_on(1)
        fresh = other.init(params, key=key)  # gives the layout, and where each array lies
        like = jax.tree.map(ocp.utils.to_shape_dtype_struct, fresh._replace(layout=None))
        restored = checkpointer.restore(Path(folder) / "state", like)._replace(layout=fresh.layout)

    assert int(restored.ledger.examples) == 20 * 64
    state, last = run(other, restored, window, 60)
    print(f"loss {first:.3f} -> {last:.3f} after {int(state.ledger.applied)} updates")
    return first, last


if __name__ == "__main__":
    main()
