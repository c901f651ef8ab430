"""What a plan may turn on: in the order of cost, only where nothing fits without, with what each is worth."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import FOLDS

import jaxacc
from jaxacc._search import settings_of

pytestmark = pytest.mark.skipif(sys.version_info < (3, 12), reason="slow: one Python is enough")

WIDTH, ROWS, LENGTH = 32, 8, 64
PARAMS = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
TREE = 4 * WIDTH * WIDTH
ROW = {"x": jax.ShapeDtypeStruct((LENGTH, WIDTH), jnp.float32)}


def loss_fn(params, microbatch, key):
    """A product, and a chain of elementwise operations whose intermediate values need not be kept."""
    h = microbatch["x"] @ params
    for _ in range(12):
        h = jnp.tanh(h + jnp.sin(h))
    error = jnp.mean((h - 1) ** 2, axis=(1, 2))
    return jaxacc.Mean(error, jnp.ones_like(error))


def plan(budget, effective_batch=ROWS, loss=loss_fn, **options):
    return jaxacc.plan(loss, optax.adam(1e-3), PARAMS, ROW, effective_batch=effective_batch, budget=budget, **options)


def mesh_of(replicas):
    types = (jax.sharding.AxisType.Auto,)
    return jax.make_mesh((replicas,), ("data",), devices=jax.devices()[:replicas], axis_types=types)


def test_nothing_is_turned_on_where_it_fits():
    """What could be is told all the same: at A = 1 the fold is worth nothing, remat is."""
    found = plan("1GiB", search=("remat", "fold"))
    assert found.setting == {}
    assert found.split.microbatch == ROWS
    assert found.savings["remat=dots"] > 4 * ROWS * LENGTH * WIDTH
    assert found.savings.get("fold=carry", 0) == 0
    assert f"saved by {'remat=dots':<19}" in str(found)
    assert "turned on" not in str(found)
    assert found.to_dict()["savings"] == found.savings


def test_remat_is_turned_on_where_it_must_be():
    """With a budget that the smallest microbatch exceeds by a byte: then it is that of the program with remat."""
    smallest = plan("1GiB", effective_batch=1).total
    with pytest.raises(ValueError, match="the smallest"):
        plan(smallest - 1, effective_batch=1)
    found = plan(smallest - 1, effective_batch=1, search=("remat",))
    assert found.setting == {"remat": "dots"}
    assert "turned on: remat=dots" in str(found)
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    wrapped = plan("1GiB", effective_batch=1, loss=jax.checkpoint(loss_fn, policy=policy))
    assert found.total == wrapped.total < smallest
    assert found.savings["remat=dots"] == smallest - found.total


def test_the_optimizer_is_sharded_where_it_must_be():
    """Params and optimizer state alone exceed the budget until each replica keeps its half."""
    budget = 3 * TREE - 1
    with pytest.raises(ValueError, match="accumulation cannot help"):
        plan(budget, mesh=mesh_of(2))
    with pytest.raises(
        ValueError, match=r"Tried: remat=dots; remat=full; shard_optimizer=True; remat=dots, shard_optimizer=True"
    ):
        plan(budget, mesh=mesh_of(2), search=("shard_optimizer", "remat"))
    whole = plan("1GiB", mesh=mesh_of(2), search=("shard_optimizer",))
    assert whole.setting == {}
    sharded = plan("1GiB", mesh=mesh_of(2), shard_optimizer=True)
    assert whole.savings == {"shard_optimizer=True": whole.total - sharded.total}
    assert sharded.bytes["optimizer state"] == whole.bytes["optimizer state"] - TREE


@pytest.mark.skipif(len(FOLDS) == 1, reason="needs jax >= 0.11")
def test_settings_in_the_order_of_cost():
    """Whatever the order they are named in; single ones first."""
    found = settings_of(("fold", "remat"), {}, replicas=1)
    carry = {"fold": "carry"}
    single = [{}, {"remat": "dots"}, {"remat": "full"}, carry]
    assert found == [*single, {"remat": "dots", **carry}, {"remat": "full", **carry}]
    assert settings_of(("shard_optimizer",), {}, replicas=1) == [{}]
    assert len(settings_of(("remat", "fold", "shard_optimizer"), {}, replicas=2)) == 3 * 2 * 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"search": ("offload",)}, "'offload' is not known. Name some of remat, fold, shard_optimizer"),
        ({"search": ("fold",), "fold": "carry"}, "fold='carry' is stated, and search names it too"),
    ],
)
def test_bad_search(options, message):
    with pytest.raises(ValueError, match=message):
        plan("1GiB", **options)


def test_gradients_do_not_change():
    """What the search turns on is the same update."""
    params = jax.random.normal(jax.random.key(0), PARAMS.shape) / 8
    window = {"x": jax.random.normal(jax.random.key(1), (2, 2, LENGTH, WIDTH))}
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    plain, wrapped = (
        jax.jit(jaxacc.accumulate(loss))(params, window, None).grads
        for loss in (loss_fn, jax.checkpoint(loss_fn, policy=policy))
    )
    assert np.abs(plain).max() > 1e-6
    np.testing.assert_allclose(plain, wrapped, rtol=1e-5, atol=1e-9)
