"""What accumulation costs, read from the compiler (law 8; cases 210 to 212, 220)."""

import jax
import jax.numpy as jnp
import pytest
from problems import FOLDS

import jaxacc
from benchmarks import memory, model


@pytest.fixture(scope="module")
def plain():
    return memory.compile_plain()


@pytest.fixture(scope="module")
def compiled():
    return {(fold, steps): memory.compile_jaxacc(steps, fold) for fold in FOLDS for steps in (1, 4, 32)}


@pytest.mark.parametrize("fold", FOLDS)
def test_one_microbatch_costs_nothing(fold, plain, compiled):
    """A = 1 has the temp bytes and the flops of a plain step that checks finiteness before it updates."""
    assert abs(memory.temp_bytes(compiled[fold, 1]) - memory.temp_bytes(plain)) < 4096
    flops, plain_flops = (c.cost_analysis()["flops"] for c in (compiled[fold, 1], plain))
    assert flops == pytest.approx(plain_flops, rel=1e-3)
    assert count(compiled[fold, 1], " dot(") == count(plain, " dot(")


@pytest.mark.parametrize("fold", FOLDS)
def test_memory_does_not_depend_on_a(fold, compiled):
    """Temp bytes for A = 4 and A = 32 differ by no more than the weights of the microbatches."""
    assert abs(memory.temp_bytes(compiled[fold, 4]) - memory.temp_bytes(compiled[fold, 32])) < 1024


def test_extra_gradient_trees(plain, compiled):
    """One gradient tree for the carry, almost nothing in place."""
    assert 0.5 < memory.extra_trees(compiled["carry", 4], plain) <= 1.1
    if "in_place" in FOLDS:
        assert memory.extra_trees(compiled["in_place", 4], plain) <= 0.15


@pytest.mark.skipif("in_place" not in FOLDS, reason="in place needs jax 0.11")
def test_bfloat16_computation_folds_in_place():
    """Float32 parameters cast inside the scanned layer: their gradients go straight into the float32 sums."""
    half = memory.compile_jaxacc(4, "in_place", model.half_loss_fn)
    assert memory.extra_trees(half, memory.compile_plain(jnp.bfloat16)) <= 0.15
    params, window = model.init_params(jax.random.key(0), layers=4, width=32), model.make_window(4, width=32)
    grads = [jax.jit(jaxacc.accumulate(f))(params, window).grads for f in (model.half_loss_fn, model.loss_fn)]
    assert jax.tree.leaves(grads[0])[0].dtype == jnp.float32
    errors = jax.tree.map(lambda a, b: jnp.linalg.norm(a - b) / jnp.linalg.norm(b), *grads)
    assert 1e-4 < max(map(float, jax.tree.leaves(errors))) < 2e-2  # bfloat16 has 8 bits (case 207)


@pytest.mark.parametrize("fold", FOLDS)
def test_program_does_not_grow_with_a(fold, compiled):
    """The same number of instructions for A = 4 and A = 32, so compile time does not depend on A."""
    assert count(compiled[fold, 4], " = ") == count(compiled[fold, 32], " = ")


@pytest.mark.parametrize("fold", FOLDS)
def test_weighing_is_free_where_weights_are_data(fold, compiled, plain):
    """The pass over the weights has no matrix product: A = 4 has as many as the plain step."""
    assert count(compiled[fold, 4], " dot(") == count(plain, " dot(") > 0


def test_weights_from_the_forward_pass_cost_one():
    """Where the weight depends on the parameters the first pass stays, as the docstring says."""

    def loss_fn(params, microbatch, key):
        total, _ = model.sums(params, microbatch)
        return jaxacc.Mean(total, jax.lax.stop_gradient(total))

    def dots(loss_fn):
        params = jax.eval_shape(model.init_params, jax.random.key(0))
        window = memory.abstract(model.make_window(4))
        return count(jax.jit(jaxacc.accumulate(loss_fn, fold="carry")).lower(params, window).compile(), " dot(")

    assert dots(loss_fn) > dots(model.loss_fn)


def test_integers_and_masks_cost_no_gradient():
    """Leaves without a gradient have no accumulator: a large integer table adds no temp bytes."""

    def temp(table):
        params = {"w": jnp.ones(8), "table": jnp.zeros(table, jnp.int32)}
        loss_fn = lambda p, mb, key: jaxacc.Mean(mb["x"] @ p["w"] + p["table"][0], jnp.ones(2))
        window = {"x": jnp.ones((4, 2, 8))}
        return memory.temp_bytes(jax.jit(jaxacc.accumulate(loss_fn)).lower(params, window).compile())

    assert temp(1_000_000) - temp(8) < 4096


def count(compiled, text):
    return compiled.as_text().count(text)
