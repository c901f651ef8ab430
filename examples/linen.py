"""Flax Linen: the parameters are a dict, the key of the microbatch drives dropout.

python examples/linen.py
"""

import flax.linen as nn
import jax
import numpy as np
import optax

import jaxacc


class Classifier(nn.Module):
    """A small classifier with dropout."""

    @nn.compact
    def __call__(self, x, deterministic):
        """Logits of three classes."""
        x = nn.Dropout(0.1, deterministic=deterministic)(nn.relu(nn.Dense(32)(x)))
        return nn.Dense(3)(x)


model = Classifier()


def loss_fn(params, microbatch, key):
    """`key` is None when jaxacc evaluates."""
    rngs = {} if key is None else {"dropout": key}
    logits = model.apply({"params": params}, microbatch["x"], deterministic=key is None, rngs=rngs)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, microbatch["y"])
    hits = logits.argmax(-1) == microbatch["y"]
    ones = jax.numpy.ones_like(microbatch["y"])
    return jaxacc.Mean(losses, ones), {"accuracy": jaxacc.Mean(hits, ones)}


def main():
    """Train with windows of 4 microbatches, evaluate without dropout."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(96, 4)).astype(np.float32)
    window = jaxacc.split_batch({"x": x, "y": x[:, :3].argmax(1)}, accumulation_steps=4)
    step = jaxacc.make_step(loss_fn, optax.adamw(1e-2), has_aux=True)
    params = model.init(jax.random.key(0), x[:1], deterministic=True)["params"]
    state = step.init(params, key=jax.random.key(1))
    first = step.evaluate(state, window).loss.value
    for _ in range(60):
        state, _ = step.update(state, window)
    last = step.evaluate(state, window)
    print(f"loss {first:.3f} -> {last.loss.value:.3f}, accuracy {last.metrics['accuracy'].value:.2f}")
    return float(first), float(last.loss.value)


if __name__ == "__main__":
    main()
