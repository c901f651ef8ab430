"""Training part of the parameters: no gradient, no sum and no optimizer state exists for the others."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import (
    FOLDS,
    assert_identical,
    assert_trees_close,
    difference,
    host,
    lm_batch,
    lm_loss,
    lm_oracle,
    lm_params,
)

import jaxacc

ONLY_LAYERS = {"embed": False, "layers": True, "unused": False, "table": False, "absent": None}


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("fold", FOLDS)
@pytest.mark.parametrize("trainable", [ONLY_LAYERS, lambda path: path.startswith("layers/")])
def test_gradients_exist_for_what_is_trained(trainable, fold, steps):
    """The same values as without, and None elsewhere."""
    params, batch = lm_params(), lm_batch()
    run = jax.jit(jaxacc.accumulate(lm_loss, trainable=trainable, fold=fold))
    out = run(params, jaxacc.split_batch(batch, accumulation_steps=steps))
    loss, grads = lm_oracle(params, batch)
    assert float(out.loss) == pytest.approx(float(loss), rel=1e-5)
    assert_trees_close(out.grads, {**dict.fromkeys(params), "layers": grads["layers"]}, rtol=1e-4, atol=1e-6)
    assert out.grads["embed"] is None


@pytest.mark.parametrize("options", [{}, {"shard_optimizer": True}])
def test_only_they_move(options):
    """On a mesh, resident and streamed: the others stay bit for bit, weight decay included."""
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    step = jaxacc.make_step(lm_loss, optax.adamw(1e-2, weight_decay=0.1), trainable=ONLY_LAYERS, mesh=mesh, **options)
    window = jaxacc.split_batch(lm_batch(), accumulation_steps=4)
    state = step.init(lm_params())
    assert all(leaf.shape in ((), (3, 6, 6)) for leaf in jax.tree.leaves(state.opt_state))
    state, _ = step.update(state, window)
    assert_identical(
        [state.params[n] for n in ("embed", "unused", "table")], [lm_params()[n] for n in ("embed", "unused", "table")]
    )
    assert difference(state.params["layers"], lm_params()["layers"]) > 1e-3
    streamed = step.init(lm_params())
    parts = [jax.tree.map(lambda leaf, a=a: leaf[a], window) for a in range(4)]
    accumulator = step.begin(streamed, parts[0])
    assert accumulator.grads["embed"] is None
    for part in parts:
        accumulator = step.add(accumulator, streamed, part)
    streamed, _ = step.finish(accumulator, streamed)
    assert_trees_close(streamed.params, host(state.params), rtol=1e-5, atol=1e-6)


def lora_loss(params, microbatch, key):
    """A frozen matrix with a trained correction of rank 2."""
    hidden = microbatch["x"] @ params["base"] + microbatch["x"] @ params["lora"]["a"] @ params["lora"]["b"]
    error = jnp.square(jnp.sum(hidden, axis=1) - microbatch["y"])
    return jaxacc.Mean(error, jnp.ones_like(error))


def test_memory_of_a_low_rank_correction():
    """Arguments and temporaries shrink by the optimizer state and the gradient of what is frozen."""
    size, rank = 256, 2
    params = {"base": jnp.ones((size, size)), "lora": {"a": jnp.ones((size, rank)), "b": jnp.zeros((rank, size))}}
    window = {"x": jnp.ones((4, 2, size)), "y": jnp.ones((4, 2))}

    def bytes_of(trainable):
        step = jaxacc.make_step(lora_loss, optax.adamw(1e-3), trainable=trainable)
        analysis = step.update.lower(step.init(params), window).compile().memory_analysis()
        return analysis.argument_size_in_bytes, analysis.temp_size_in_bytes

    everything, part = bytes_of(None), bytes_of(lambda path: "lora" in path)
    tree = 4 * size * size
    assert everything[0] - part[0] == pytest.approx(2 * tree, rel=1e-2)
    assert everything[1] - part[1] > 0.9 * tree


@pytest.mark.parametrize(
    ("trainable", "message"),
    [
        (lambda path: False, "chooses no floating leaf"),
        ({"table": True, "embed": False, "layers": False, "unused": False, "absent": None}, "chooses no floating leaf"),
        ({"embed": True}, "no tree prefix"),
        (dict.fromkeys(lm_params(), 1) | {"absent": None}, "holds 1. Its leaves are True or False"),
    ],
)
def test_choices_that_do_not_fit(trainable, message):
    """Before anything is traced."""
    with pytest.raises(ValueError, match=message):
        jaxacc.make_step(lm_loss, optax.sgd(0.1), trainable=trainable).init(lm_params())


def test_numpy_masks():
    """A mask made with NumPy or by a tree map is as good."""
    mask = jax.tree.map(lambda leaf: np.bool_(leaf.ndim == 3), lm_params())
    step = jaxacc.make_step(lm_loss, optax.sgd(0.1), trainable=mask)
    assert step.init(lm_params()).opt_state is not None
