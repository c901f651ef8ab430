"""A contrastive loss over the whole window: 8 microbatches of 4 pairs, every text a negative of all 32 images.

python examples/contrastive.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxacc


def embed_fn(params, microbatch, key):
    """Two towers, one embedding of length 1 per row from each."""
    hidden = jnp.tanh(microbatch["image"] @ params["image"]["in"])
    towers = {"image": hidden @ params["image"]["out"], "text": microbatch["text"] @ params["text"]}
    return jax.tree.map(lambda z: z / jnp.linalg.norm(z, axis=-1, keepdims=True), towers)


def loss_fn(params, embeddings, rows):
    """InfoNCE with a learned temperature: the text of the same row, among the texts of all rows."""
    logits = embeddings["image"] @ embeddings["text"].T * jnp.exp(params["log_scale"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.arange(len(logits)))
    return jaxacc.Mean(losses, jnp.ones_like(losses))


def big_batch_loss(params, batch):
    """What it equals: all rows at once."""
    return loss_fn(params, embed_fn(params, batch, None), batch).total.mean()


tx = optax.adam(0.02)
grads_of = jaxacc.two_pass(embed_fn, loss_fn)


@jax.jit
def train_step(params, opt_state, window):
    """One update per window."""
    out = grads_of(params, window)
    updates, opt_state = tx.update(out.grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, out


def main():
    """Learn to pair two views of the same 32 points."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
    points = normal(32, 4)
    batch = {"image": points @ normal(4, 12), "text": points @ normal(4, 8)}
    params = jax.tree.map(jnp.asarray, {"image": {"in": normal(12, 16) / 4, "out": normal(16, 8)}, "text": normal(8, 8)})
    params["log_scale"] = jnp.float32(1.0)
    opt_state = tx.init(params)
    window = jaxacc.split_batch(batch, accumulation_steps=8)
    losses = []
    for _ in range(60):
        before = params
        params, opt_state, out = train_step(params, opt_state, window)
        losses.append(float(out.loss))
    expected = jax.grad(big_batch_loss)(before, batch)
    largest = max(float(jnp.max(jnp.abs(g))) for g in jax.tree.leaves(expected))
    for got, wanted in zip(jax.tree.leaves(out.grads), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5 * largest)
    assert losses[-1] < losses[0] / 2
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; the last gradient equals the big batch's")
    return losses[0], losses[-1]


if __name__ == "__main__":
    main()
