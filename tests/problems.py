"""Problems to accumulate over, each with an oracle that knows nothing of microbatches."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxacc

FOLDS = ["carry", *(["in_place"] if jax.__version_info__ >= (0, 11) else [])]
VOCABULARY, WIDTH, LAYERS, LENGTH = 11, 6, 3, 16
COUNTS = (0, 1, 2, 3, 5, 8, 13, 16)  # valid tokens per row


def lm_params(seed=0, dtype=jnp.float32, vocabulary=VOCABULARY, width=WIDTH):
    """A tied, gathered embedding, scanned layers, and leaves that get no gradient: unused, integer, None."""
    rng = np.random.default_rng(seed)
    return {
        "embed": jnp.asarray(rng.normal(size=(vocabulary, width)), dtype),
        "layers": {"mix": jnp.asarray(rng.normal(size=(LAYERS, width, width)) * 0.4, dtype)},
        "unused": jnp.ones(3, dtype),
        "table": jnp.arange(4),
        "absent": None,
    }


def lm_batch(rows=8, seed=0, counts=COUNTS):
    """Rows of `LENGTH` tokens of which the first `counts[r]` are targets."""
    rng = np.random.default_rng(seed)
    counts = np.resize(np.asarray(counts), rows)
    return {
        "tokens": rng.integers(0, VOCABULARY, (rows, LENGTH)),
        "targets": rng.integers(0, VOCABULARY, (rows, LENGTH)),
        "mask": np.arange(LENGTH)[None] < counts[:, None],
    }


def lm_nll(params, batch):
    """Negative log likelihood of every token, `(rows, LENGTH)`."""
    hidden = params["embed"][batch["tokens"]]
    hidden, _ = jax.lax.scan(lambda h, mix: (h + jnp.tanh(h @ mix), None), hidden, params["layers"]["mix"])
    logits = hidden @ params["embed"].T
    picked = jnp.take_along_axis(logits, batch["targets"][..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - picked


def lm_loss(params, microbatch, key):
    """The problem as jaxacc wants it."""
    nll = lm_nll(params, microbatch)
    mask = microbatch["mask"]
    return jaxacc.Mean(jnp.sum(jnp.where(mask, nll, jnp.zeros_like(nll))), jnp.sum(mask, dtype=jnp.int32))


def lm_oracle(params, batch):
    """Loss and gradient of one big batch, by `jax.value_and_grad` alone."""
    floats = {name: params[name] for name in ("embed", "layers", "unused")}

    def mean(floats):
        mask = batch["mask"]
        return jnp.sum(jnp.where(mask, lm_nll({**params, **floats}, batch), 0)) / mask.sum()

    loss, grads = jax.value_and_grad(mean)(floats)
    return loss, {**grads, "table": None, "absent": None}


def big_batch_updates(params, batches, tx):
    """Plain Optax on one big batch after another, the integer leaves left out by hand."""
    floats = {name: params[name] for name in ("embed", "layers", "unused")}
    state = tx.init(floats)
    for batch in batches:
        _, grads = lm_oracle({**params, **floats}, batch)
        grads = {name: grads[name] for name in floats}
        updates, state = tx.update(grads, state, floats)
        floats = optax.apply_updates(floats, updates)
    return floats


def linear_loss(params, microbatch, key):
    """`w . x` summed over rows, weighted by the leaf `n`: the gradient of the total is the sum of `x`."""
    return jaxacc.Mean(microbatch["x"] @ params, microbatch["n"])


def assert_trees_close(actual, expected, rtol, atol=0.0):
    """Every leaf close, None where None, and never a comparison of nothing with nothing."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    leaves = list(zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True))
    assert leaves
    for a, e in leaves:
        np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(e, np.float64), rtol=rtol, atol=atol)


def assert_identical(actual, expected):
    """Bit for bit, NaNs included."""
    leaves = list(zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True))
    assert leaves
    for a, e in leaves:
        assert a.dtype == e.dtype
        assert np.asarray(a).tobytes() == np.asarray(e).tobytes()


def largest(tree):
    """The largest absolute entry of a tree: the signal that a tolerance must lie far below."""
    return max(float(jnp.max(jnp.abs(leaf))) for leaf in jax.tree.leaves(tree))


def difference(a, b):
    """The largest absolute difference of two trees."""
    return largest(jax.tree.map(lambda x, y: x - y, a, b))


def host(tree):
    """A copy on the host that no donation can take away."""
    return jax.tree.map(lambda leaf: np.array(leaf), tree)
