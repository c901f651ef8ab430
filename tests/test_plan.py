"""The microbatch that fits is found by compiling, and the figures are those of the program that then runs."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import FOLDS

import jaxacc
from benchmarks import model
from jaxacc._bytes import parse_bytes, show_bytes
from jaxacc._fit import check_lines, largest_that_fits, predict
from jaxacc._flops import matrix_flops

ROWS, LAYERS, WIDTH, LENGTH = 12, 8, 32, 32
PARAMS = jax.eval_shape(lambda key: model.init_params(key, LAYERS, WIDTH), jax.random.key(0))
ROW = {"x": jax.ShapeDtypeStruct((LENGTH, WIDTH), jnp.float32), "mask": jax.ShapeDtypeStruct((LENGTH,), bool)}
TREE = sum(leaf.size * 4 for leaf in jax.tree.leaves(PARAMS))
TX = optax.adamw(1e-3)


def plan(effective_batch=ROWS, budget="1GiB", params=PARAMS, row=ROW, loss_fn=model.loss_fn, **options):
    return jaxacc.plan(loss_fn, TX, params, row, effective_batch=effective_batch, budget=budget, **options)


def mesh_of(replicas):
    types = (jax.sharding.AxisType.Auto,)
    return jax.make_mesh((replicas,), ("data",), devices=jax.devices()[:replicas], axis_types=types) if replicas > 1 else None


def compiled_bytes(microbatch, steps, **options):
    """What the compiler says about the step itself, read here and not by the planner."""
    step = jaxacc.make_step(model.loss_fn, TX, **options)
    window = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((steps, microbatch, *leaf.shape), leaf.dtype), ROW)
    found = step.update.lower(jax.eval_shape(step.init, PARAMS), window).compile().memory_analysis()
    held = found.argument_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
    return held + found.temp_size_in_bytes


@pytest.fixture(scope="module")
def sizes():
    """The compiler's bytes for every microbatch of `ROWS` rows."""
    return {m: compiled_bytes(m, ROWS // m) for m in (1, 2, 3, 4, 6, 12)}


def test_planned_bytes_are_those_of_the_program(sizes):
    """Within 1 % for every microbatch, interpolated ones too, where a neighbour is further off than that."""
    assert sizes[3] > 1.02 * sizes[2]
    found = plan(budget=sizes[6])
    assert {c.microbatch for c in found.candidates if not c.compiled}
    assert [c.microbatch for c in found.candidates] == list(sizes)
    for candidate in found.candidates:
        np.testing.assert_allclose(candidate.total, sizes[candidate.microbatch], rtol=0.01)
        assert candidate.microbatch * candidate.accumulation_steps == ROWS
    assert found.total == sum(found.bytes.values()) == sizes[6]
    assert min(found.bytes.values()) >= 0


@pytest.mark.parametrize("microbatch", [1, 4, 12])
def test_the_largest_that_fits(sizes, microbatch):
    """A budget of exactly a program's bytes takes it; a byte less takes the next smaller one, or nothing."""
    found = plan(budget=sizes[microbatch])
    assert found.split == (microbatch, ROWS // microbatch, 1)
    assert found.headroom == 0
    if microbatch == 1:
        with pytest.raises(ValueError, match=r"microbatches of 1 row, the smallest, take .* activations and other temp"):
            plan(budget=sizes[1] - 1)
    else:
        assert plan(budget=sizes[microbatch] - 1).split.microbatch == {4: 3, 12: 6}[microbatch]


def test_the_big_batch_that_fits_is_compiled_once():
    compiled = []
    assert plan(on_candidate=compiled.append).split == (ROWS, 1, 1)
    assert [(c.microbatch, c.compiled, c.fits) for c in compiled] == [(ROWS, True, True)]


@pytest.mark.parametrize(("effective", "replicas"), [(6, 1), (12, 3)])
def test_the_effective_batch_is_exact(effective, replicas):
    """For every budget."""
    options = {"effective_batch": effective, "mesh": mesh_of(replicas)}
    whole = plan(**options)
    smaller = plan(**options, budget=whole.total - 1)
    smallest = min(c.total for c in smaller.candidates)
    plans = [whole, smaller, plan(**options, budget=smallest)]
    for found in plans:
        m, steps, data = found.split
        assert (m * steps * data, data) == (effective, replicas)
        assert found.total <= found.budget
    assert plans[2].split.microbatch < plans[0].split.microbatch == effective // replicas


@settings(max_examples=300, deadline=None)
@given(
    rows=st.integers(1, 400), fixed=st.integers(0, 10**6), slope=st.integers(1, 10**4), sum_=st.integers(0, 10**5),
    wiggle=st.floats(0, 0.02), budget=st.integers(0, 5 * 10**6), limit=st.integers(1, 400),
)  # fmt: skip
def test_the_search_finds_what_trying_all_finds(rows, fixed, slope, sum_, wiggle, budget, limit):
    """Nearly linear memory, a sum of gradients where A > 1, and a compiler that fails beyond a limit."""
    divisors = [d for d in range(1, rows + 1) if rows % d == 0]
    bumps = np.random.default_rng(rows).uniform(-wiggle, wiggle, rows + 1)
    total = lambda m: round((fixed + sum_ * (m < rows) + slope * m) * (1 + bumps[m] * (m > 1)))
    totals = dict(zip(divisors, np.maximum.accumulate([total(m) for m in divisors]).tolist(), strict=True))
    totals[rows] = max(totals.values())
    measure = lambda m: None if m > limit else totals[m]
    chosen, measured = largest_that_fits(divisors, measure, budget)
    assert chosen == max((m for m in divisors if m <= limit and totals[m] <= budget), default=None)
    assert chosen is None or chosen in measured
    assert all(measured[m] == measure(m) for m in measured)


def test_few_compilations():
    """Two ends and a guess for memory that is linear, whatever the number of divisors."""
    sizes = [d for d in range(1, 5041) if 5040 % d == 0]
    chosen, measured = largest_that_fits(sizes, lambda m: 1000 + 7 * m, 1000 + 7 * 252)
    assert (len(sizes), chosen, len(measured)) == (60, 252, 3)


@pytest.mark.parametrize("bend", [1, 5, 60, 400])
def test_a_line_with_a_bend(bend):
    """Small microbatches take no more than the update does: every prediction is right to a per cent all the same."""
    sizes = [d for d in range(1, 2521) if 2520 % d == 0]
    total = lambda m: 10_000 + 40 * max(m, bend)
    measured = {1: total(1), 1260: total(1260)}
    check_lines(sizes[:-1], total, measured)
    for m in sizes[:-1]:
        np.testing.assert_allclose(predict(measured, m, whole=2520), total(m), rtol=0.01)
    assert len(measured) <= (3 if bend == 1 else 16)


def test_in_place_saves_a_gradient_tree():
    """In the planner's own figures, unclipped, on scanned layers."""
    if len(FOLDS) == 1:
        pytest.skip("needs jax >= 0.11")
    totals = {fold: {c.microbatch: c.total for c in plan(fold=fold, budget=6 * TREE).candidates} for fold in FOLDS}
    saved = [(totals["carry"][m] - totals["in_place"][m]) / TREE for m in totals["carry"].keys() - {ROWS}]
    assert saved
    assert all(0.7 < trees < 1.3 for trees in saved), saved


def test_parts_and_collectives():
    """The optimizer's part is divided over the replicas that shard it, and the reduction is there once."""
    whole, sharded = (plan(mesh=mesh_of(2), shard_optimizer=shard, budget="2MiB") for shard in (False, True))
    assert whole.bytes["params"] == sharded.bytes["params"] == TREE
    assert whole.bytes["optimizer state"] == 2 * TREE + 4
    assert sharded.bytes["optimizer state"] == TREE + 4
    assert whole.bytes["inputs"] == ROWS // 2 * LENGTH * (4 * WIDTH + 1)
    reduced = [c for c in whole.collectives if c.kind == "all-reduce"]
    assert TREE <= sum(c.bytes for c in reduced) < TREE + 100
    assert not any(c.in_loop for c in whole.collectives)
    assert {c.kind for c in sharded.collectives} >= {"reduce-scatter", "all-gather"}


def test_parameters_that_are_placed():
    """Shapes with a sharding lie where that says: FSDP without params_specs."""
    mesh = mesh_of(2)
    spec = jax.sharding.NamedSharding(mesh, jax.P(None, None, "data"))
    placed = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=spec), PARAMS)
    assert plan(params=placed, mesh=mesh).bytes["params"] == TREE // 2


def test_flops_by_hand():
    """Forward, recomputed but for the last product of a layer, and twice backward; of all microbatches and replicas."""
    forward = ROWS * LAYERS * LENGTH * 2 * (2 * WIDTH * 4 * WIDTH)
    for mesh in (None, mesh_of(2)):
        for budget in (6 * TREE, "1GiB"):
            assert plan(mesh=mesh, budget=budget).flops == 3.5 * forward
    assert forward > 0


def test_flops_of_convolutions_and_dead_code():
    image, kernel = jnp.ones((2, 8, 8, 3)), jnp.ones((3, 3, 3, 5))
    convolve = lambda x, k: jax.lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    assert matrix_flops(jax.make_jaxpr(convolve)(image, kernel)) == 2 * (2 * 8 * 8 * 5) * (3 * 3 * 3)

    def unused(x):
        _ = x @ x
        return jax.lax.cond(x[0, 0] > 0, lambda: x @ x @ x, lambda: x)

    assert matrix_flops(jax.make_jaxpr(unused)(jnp.ones((4, 4)))) == 2 * (2 * 4 * 4 * 4)


def test_table_and_json():
    found = plan(budget=6 * TREE)
    tree = json.loads(json.dumps(found.to_dict()))
    assert tree["microbatch"] * tree["accumulation_steps"] == tree["effective_batch"] == ROWS
    assert tree["total"] + tree["headroom"] == tree["budget"] == 6 * TREE
    assert "estimate" in tree["compiler"]
    assert "1.05 to 2.2" in tree["compiler"]
    for text in ("params", show_bytes(found.total), "effective batch 12", "fits", "too large", "estimate"):
        assert text in str(found)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"effective_batch": 0}, "effective_batch=0 is less than 1"),
        ({"effective_batch": 96, "replicas": 5}, "Set effective_batch to 95 or 100"),
        ({"budget": "10KiB"}, r"params \(256.00 KiB\) and optimizer state \(512.00 KiB\) .* accumulation cannot help"),
        ({"budget": None}, "budget=None, and cpu devices do not say"),
        ({"budget": "much"}, "'much' is no amount of memory"),
        ({"row": {"x": ROW["x"]}}, r"rows \['x'\] float32\[32, 32\]: KeyError: 'mask'\. Give row_spec"),
        (
            {"row": {**ROW, "x": jax.ShapeDtypeStruct((32, 31), jnp.float32)}},
            r"\['x'\] float32\[32, 31\]: TypeError: dot_general",
        ),
        ({"loss_fn": lambda *_: jnp.float32(0)}, r"must return jaxacc.Mean"),
    ],
)
def test_bad_input(options, message):
    replicas = options.pop("replicas", 1)
    with pytest.raises(ValueError, match=message) as error:
        plan(mesh=mesh_of(replicas), **options)
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize(
    ("text", "size"), [("20GiB", 20 * 2**30), ("1.5 GB", 1_500_000_000), ("7", 7), (9, 9), ("2kib", 2048), ("5B", 5)]
)
def test_amounts_of_memory(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "-1", "GiB", "1 XB", "0", True, 1.5e400, None])
def test_no_amounts_of_memory(text):
    with pytest.raises(ValueError, match=r"State the memory|is no amount of memory"):
        parse_bytes(text)
    assert show_bytes(1536) == "1.50 KiB"
