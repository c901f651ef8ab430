"""A Flax `TrainState` loop that exists already: wrap the optimizer, hand over sums with their weights, keep the rest.

python examples/train_state.py
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

import jaxacc

model = nn.Sequential([nn.Dense(16), nn.tanh, nn.Dense(1)])
optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))


def summed_loss(params, rows):
    """The weighted squared error, not divided."""
    return jnp.sum(rows["weight"] * (model.apply({"params": params}, rows["x"])[..., 0] - rows["y"]) ** 2)


@jax.jit
def train_step(state, rows):
    """One call per microbatch. `Mean` carries the weight, because `apply_gradients` passes no keywords on."""
    loss, grads = jax.value_and_grad(summed_loss)(state.params, rows)
    weight = jnp.sum(rows["weight"])
    return state.apply_gradients(grads=jaxacc.Mean(grads, weight)), jaxacc.Mean(loss, weight)


def main():
    """Train on windows of 4 microbatches whose weights differ; the rows that are left over make a short window."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(72, 3)).astype(np.float32)
    rows = {"x": x, "y": np.sin(x.sum(1)), "weight": rng.integers(0, 6, 72).astype(np.float32)}
    microbatches = [{name: leaf[i : i + 8] for name, leaf in rows.items()} for i in range(0, 72, 8)]  # 9: 4, 4, 1
    params = model.init(jax.random.key(0), x[:1])["params"]
    tx = jaxacc.streaming.accumulate_gradients(optimizer, accumulation_steps=4)
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    flush = jax.jit(lambda state: jaxacc.streaming.flush(tx, state.opt_state, state.params))

    # One window is one update of the big batch, clipping included.
    one = state
    for microbatch in microbatches[:4]:
        one, _ = train_step(one, microbatch)
    big = {name: leaf[:32] for name, leaf in rows.items()}
    grads = jax.grad(lambda params: summed_loss(params, big) / big["weight"].sum())(params)
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    expected = optax.apply_updates(params, updates)
    assert all(map(lambda a, b: jnp.allclose(a, b, atol=1e-5), *map(jax.tree.leaves, (one.params, expected))))

    losses = []
    for _ in range(60):
        seen = []
        for microbatch in microbatches:
            state, mean = train_step(state, microbatch)
            seen.append(mean)
        updates, opt_state = flush(state)  # the window of one, divided by what it holds
        state = state.replace(params=optax.apply_updates(state.params, updates), opt_state=opt_state)
        losses.append(float(sum(mean.total for mean in seen) / sum(mean.weight for mean in seen)))
    assert int(state.opt_state.applied) == 60 * 3
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, {int(state.opt_state.applied)} updates in {int(state.step)} calls")
    return losses[0], losses[-1]


if __name__ == "__main__":
    main()
