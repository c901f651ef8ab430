"""The examples run as they stand, and the frameworks they show give the big batch's update."""

import runpy
from pathlib import Path

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from problems import FOLDS, assert_trees_close, largest

import jaxacc

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path, capsys):
    """Each trains: the loss falls by half at least."""
    first, last = runpy.run_path(str(path))["main"]()
    assert last < first / 2
    assert "loss" in capsys.readouterr().out


def linen():
    model = nn.Sequential([nn.Dense(5), nn.tanh, nn.Dense(1)])
    params = model.init(jax.random.key(0), jnp.ones((1, 3)))["params"]
    return params, lambda params, x: model.apply({"params": params}, x)[..., 0]


def flax_nnx():
    model = nnx.Sequential(nnx.Linear(3, 5, rngs=nnx.Rngs(0)), nnx.tanh, nnx.Dropout(0.0, rngs=nnx.Rngs(1)))
    graph, params = nnx.split(model)
    return params, lambda params, x: nnx.merge(graph, params)(x).sum(-1)


def equinox():
    params, static = eqx.partition(eqx.nn.MLP(3, "scalar", 5, 1, key=jax.random.key(0)), eqx.is_array)
    return params, lambda params, x: jax.vmap(eqx.combine(params, static))(x)


@pytest.mark.parametrize("fold", FOLDS)
@pytest.mark.parametrize("framework", [linen, flax_nnx, equinox])
def test_frameworks_equal_the_big_batch(framework, fold):
    """Linen, NNX (whose state holds keys and counters too) and Equinox (whose modules hold None): one SGD update."""
    params, apply = framework()
    rng = np.random.default_rng(0)
    batch = {"x": rng.normal(size=(8, 3)).astype(np.float32), "n": (np.arange(8) % 3).astype(np.float32)}

    def loss_fn(params, microbatch, key):
        return jaxacc.Mean(microbatch["n"] * (apply(params, microbatch["x"]) - 1) ** 2, microbatch["n"])

    floats, rest = jaxacc._tree.partition(params)

    def mean(floats):
        total, weight = loss_fn(jaxacc._tree.merge(floats, rest), batch, None)
        return jnp.sum(total) / jnp.sum(weight)

    expected = optax.apply_updates(floats, jax.tree.map(lambda g: -g, jax.grad(mean)(floats)))
    step = jaxacc.make_step(loss_fn, optax.sgd(1.0), fold=fold)
    state, _ = step.update(step.init(params), jaxacc.split_batch(batch, accumulation_steps=4))
    assert largest(jax.grad(mean)(floats)) > 0.1
    assert_trees_close(jaxacc._tree.partition(state.params)[0], expected, rtol=1e-4, atol=1e-5)
