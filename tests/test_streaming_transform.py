"""`streaming.accumulate_gradients`: one call per microbatch, the big batch's update per window (laws 1 to 5, 7 and 10)."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from problems import assert_identical, assert_trees_close, big_batch_updates, difference, host, lm_batch, lm_loss, lm_params

import jaxacc
from jaxacc._tree import merge, partition
from jaxacc.streaming import PENDING, accumulate_gradients, flush, has_updated

OPTIMIZERS = {
    "sgd": lambda: optax.sgd(1.0),
    "clip_adamw": lambda: optax.chain(
        optax.clip_by_global_norm(0.05), optax.adamw(optax.linear_schedule(0.1, 0.0, 4), weight_decay=0.1)
    ),
}


@jax.jit
def summed_gradient(params, batch):
    """The gradient of the summed loss and its weight, what a loop of one's own has."""
    floats, rest = partition(params)

    def total(floats):
        loss = lm_loss(merge(floats, rest), batch, None)
        return loss.total, loss.weight

    grads, weight = jax.grad(total, has_aux=True)(floats)
    return jaxacc.Mean(grads, weight)


def split(batch, steps=4):
    window = jaxacc.split_batch(batch, accumulation_steps=steps)
    return [jax.tree.map(lambda leaf, a=a: leaf[a], window) for a in range(steps)]


def joined(microbatches):
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *microbatches)


def as_sum(grad):
    return (grad,), {}


def as_mean(grad):
    """The gradient of the mean, NaN where the weight is 0, as a loop that divides for itself has it."""
    return (jax.tree.map(lambda leaf: leaf / grad.weight, grad.total),), {"weight": grad.weight}


def poison(grad):
    """A microbatch in which nothing counts and everything is NaN."""
    return jaxacc.Mean(jax.tree.map(lambda leaf: leaf * jnp.nan, grad.total), jnp.int32(0))


def is_float(leaf):
    return jnp.issubdtype(leaf.dtype, jnp.floating)


def floats_of(params):
    return {name: params[name] for name in ("embed", "layers", "unused")}


def looped(tx):
    """One jitted call per microbatch, and how often it was traced."""
    traces = []

    @jax.jit
    def call(params, state, updates, keywords):
        traces.append(1)
        updates, state = tx.update(*updates, state, params, **keywords)
        return optax.apply_updates(params, updates), state

    return call, traces


def small(grad, weight):
    """A microbatch of the small problem, whose parameters are `jnp.zeros(2)`, as the gradient of a mean."""
    return (jnp.asarray(grad, jnp.float32),), {"weight": weight}


@functools.cache
def small_loop():
    tx = accumulate_gradients(optax.sgd(1.0, momentum=0.5), 2)
    return tx, looped(tx)[0]


@pytest.mark.parametrize("form", [as_sum, as_mean])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_windows_equal_the_big_batch(optimizer, form, x64):
    """Three windows of ragged microbatches and one of weight 0 full of NaNs; `make_step` says the same; one trace.

    Cases 1, 3, 4, 30, 35, 41, 94, 98, 112, 136.
    """
    params = lm_params(dtype=jnp.float64)
    batches = [lm_batch(seed=seed) for seed in range(3)]
    expected = big_batch_updates(params, batches, OPTIMIZERS[optimizer]())
    step = jaxacc.make_step(lm_loss, OPTIMIZERS[optimizer]())
    stepped = step.init(params)
    tx = accumulate_gradients(OPTIMIZERS[optimizer](), accumulation_steps=5)
    (call, traces), streamed, state = looped(tx), params, tx.init(params)
    before = jax.tree.map(jnp.result_type, state)
    for batch in batches:
        grads = [summed_gradient(streamed, microbatch) for microbatch in split(batch)]
        for grad in [*grads[:2], poison(grads[0]), *grads[2:]]:
            streamed, state = call(streamed, state, *form(grad))
        assert has_updated(state)
        stepped, _ = step.update(stepped, jaxacc.split_batch(batch, accumulation_steps=4))
    assert difference(expected, floats_of(params)) > 1e-3
    assert_trees_close(floats_of(streamed), expected, rtol=1e-10, atol=1e-10)
    assert_trees_close(floats_of(streamed), floats_of(stepped.params), rtol=1e-12, atol=1e-12)
    assert_identical(streamed["table"], params["table"])
    assert (int(state.attempted), int(state.applied), len(traces)) == (3, 3, 1)
    assert before == jax.tree.map(jnp.result_type, state)


def test_the_wrong_weights_would_be_noticed(x64):
    """The planted mistakes that the equality above must catch: mean of means, one microbatch dropped."""
    params, batch = lm_params(dtype=jnp.float64), lm_batch(counts=(1, 2, 3, 5, 8, 13, 16, 7))
    tx = accumulate_gradients(optax.sgd(1.0))
    call, _ = looped(tx)
    grads = [summed_gradient(params, microbatch) for microbatch in split(batch)]
    right = big_batch_updates(params, [batch], optax.sgd(1.0))

    def run(grads, reweighted):
        moved, state = params, tx.init(params)
        for i, grad in enumerate(grads):
            updates, keywords = as_mean(grad)
            weight = jnp.ones_like(grad.weight) if reweighted else grad.weight
            moved, state = call(moved, state, updates, {**keywords, "weight": weight, "last": jnp.bool_(i == len(grads) - 1)})
        return difference(floats_of(moved), right)

    assert run(grads, reweighted=False) < 1e-12
    assert run(grads, reweighted=True) > 1e-3
    assert run(grads[:3], reweighted=False) > 1e-3


@pytest.mark.parametrize("how", ["last", "flush", "weight 0 and last"])
def test_a_short_last_window(how, x64):
    """Six microbatches in windows of 4: the last two are divided by what they hold (cases 76, 77, 80, 83, 87 to 89)."""
    params = lm_params(dtype=jnp.float64)
    microbatches = split(lm_batch(rows=12), 6)
    windows = [joined(microbatches[:4]), joined(microbatches[4:])]
    expected = big_batch_updates(params, windows, OPTIMIZERS["clip_adamw"]())
    tx = accumulate_gradients(OPTIMIZERS["clip_adamw"](), accumulation_steps=4)
    (call, _), moved, state = looped(tx), params, tx.init(params)
    close = jax.jit(functools.partial(flush, tx))
    for i, microbatch in enumerate(microbatches):
        grads, _ = as_sum(summed_gradient(moved, microbatch))
        moved, state = call(moved, state, grads, {"last": jnp.bool_(how == "last" and i == 5)})
    if how == "weight 0 and last":
        moved, state = call(moved, state, as_sum(poison(grads[0]))[0], {"last": jnp.bool_(True)})
    if how == "flush":
        assert int(state.microbatches) == 2
        updates, state = close(state, moved)
        moved = optax.apply_updates(moved, updates)
    assert_trees_close(floats_of(moved), expected, rtol=1e-10, atol=1e-10)
    assert has_updated(state)
    assert int(state.applied) == 2
    updates, after = close(state, moved)
    assert_identical(after, state)
    assert_identical(optax.apply_updates(moved, updates), moved)


@pytest.mark.parametrize(
    ("outcome", "bad"),
    [
        ("SKIPPED_NONFINITE", ([jnp.nan, 1.0], 2)),
        ("SKIPPED_NONFINITE", ([jnp.inf, 1.0], 2)),
        ("SKIPPED_NONFINITE", ([1.0, 1.0], jnp.inf)),
        ("SKIPPED_NONFINITE", ([1.0, 1.0], jnp.nan)),
        ("SKIPPED_NONFINITE", ([1.0, 1.0], -1)),
        ("SKIPPED_NONFINITE", ([1.0, 1.0], -0.5)),
        ("SKIPPED_EMPTY", ([jnp.nan, 1.0], 0)),
        ("SKIPPED_EMPTY", ([jnp.nan, 1.0], 0.0)),
    ],
)
def test_a_bad_window_is_skipped_whole(outcome, bad):
    """Nothing moves, bit for bit; the window after is right, in the optimizer's momentum too (cases 122, 129, 132, 139)."""
    tx, call = small_loop()
    params, state = jnp.zeros(2), tx.init(jnp.zeros(2))
    for grad, weight in [([1.0, 0.0], 1), ([5.0, 2.0], 3)]:
        params, state = call(params, state, *small(grad, weight))
    before = params, state.inner_state
    other = ([jnp.nan] * 2, 0) if outcome == "SKIPPED_EMPTY" else ([1.0, 1.0], 3)
    for grad, weight in [bad, other]:
        params, state = call(params, state, *small(grad, weight))
        assert not has_updated(state)
    assert jaxacc.Outcome(int(state.outcome)).name == outcome
    assert_identical((params, state.inner_state), before)
    for grad, weight in [([2.0, 2.0], 1), ([1.0, 1.0], 1)]:
        params, state = call(params, state, *small(grad, weight))
    np.testing.assert_allclose(params, -np.array([4.0 + 0.5 * 4.0 + 1.5, 1.5 + 0.5 * 1.5 + 1.5]), rtol=1e-6)
    assert (int(state.attempted), int(state.applied)) == (3, 2)


def test_schedules_and_has_updated_follow_applied_updates():
    """A schedule 1, 2, 3, ... shows which update this is: only windows that were applied count (cases 94 to 97, 127)."""
    tx = accumulate_gradients(optax.sgd(lambda count: 1.0 + count), 3)
    (call, traces), params, state = looped(tx), jnp.zeros(2), tx.init(jnp.zeros(2))
    assert not has_updated(state)
    moves, flags, outcomes = [], [], []
    for i in range(12):
        before = params
        params, state = call(params, state, *small([jnp.nan if i == 4 else 1.0, 0.0], 2.0))
        moves.append(float(before[0] - params[0]))
        flags.append(bool(has_updated(state)))
        outcomes.append(int(state.outcome))
    np.testing.assert_allclose(moves, [0, 0, 1, 0, 0, 0, 0, 0, 2, 0, 0, 3], rtol=1e-6)
    assert flags == [move > 0 for move in moves]
    assert [outcomes[i] for i in (1, 2, 5)] == [PENDING, jaxacc.Outcome.APPLIED, jaxacc.Outcome.SKIPPED_NONFINITE]
    assert (int(state.attempted), int(state.applied), len(traces)) == (4, 3, 1)


def test_weights_count_exactly():
    """Beyond 2^24 and 2^31 in a window, as integers and as the float32 sums of masks; fractions too."""
    tx = accumulate_gradients(optax.sgd(1.0))
    add = jax.jit(lambda state, weight: tx.update(jaxacc.Mean(jnp.ones(2), weight), state, jnp.zeros(2))[1])
    for weights in [
        (2**24, 1, 1, 1),
        (2.0**24, 1.0, 1.0, 1.0),
        (2**31 - 1,) * 5,
        (2.0**30, 1.0, 0.25),
        (True, 0.5),
        (2.0**34, 1),
    ]:
        state = tx.init(jnp.zeros(2))
        for weight in weights:
            state = add(state, jnp.asarray(weight))
        assert int(state.weight.whole) + float(state.weight.fraction) == sum(weights)
    updates, _ = flush(tx, state, jnp.zeros(2))
    np.testing.assert_allclose(updates, -2 / 2.0**34, rtol=1e-6)


def test_bfloat16_parameters():
    """Sums in float32, which the inner transformation sees; every leaf keeps its dtype (cases 6, 198, 201, 202)."""
    params = {"w": jnp.zeros((8, 4), jnp.bfloat16), "b": jnp.zeros(4, jnp.bfloat16)}
    for inner in (optax.adafactor(1e-2, min_dim_size_to_factor=4), optax.contrib.schedule_free_adamw(1e-2), optax.sgd(1.0)):
        tx = accumulate_gradients(optax.chain(optax.zero_nans(), inner))
        state = tx.init(params)

        def body(carry, last, tx=tx):
            params, state = carry
            grads = jax.tree.map(jnp.ones_like, params)
            updates, state = tx.update(grads, state, params, weight=1, last=last)
            return (optax.apply_updates(params, updates), state), updates["w"][0, 0]

        (moved, after), updates = jax.jit(lambda *args, body=body: jax.lax.scan(body, *args))(
            (params, state), jnp.arange(1024) == 1023
        )
        assert has_updated(after)
        assert jax.tree.map(jnp.result_type, (params, state)) == jax.tree.map(jnp.result_type, (moved, after))
        assert {leaf.dtype for leaf in jax.tree.leaves(state.sums)} == {jnp.dtype(jnp.float32)}
        assert not np.any(np.asarray(updates[:-1], np.float32))
        assert updates[-1] != 0
    assert_identical(moved, jax.tree.map(lambda leaf: leaf - 1, params))


def test_an_interrupted_window_resumes_bit_equal(tmp_path):
    """Saved after microbatch 2 of 4, through NumPy and through Orbax (case 129; law 7)."""
    params = lm_params()
    tx = accumulate_gradients(optax.adamw(1e-2), 4)
    call, _ = looped(tx)
    grads = [as_sum(summed_gradient(params, microbatch)) for microbatch in split(lm_batch())]
    moved, state = params, tx.init(params)
    for grad in grads[:2]:
        moved, state = call(moved, state, *grad)

    def finish(state):
        end = params, state
        for grad in [*grads[2:], *grads]:
            end = call(*end, *grad)
        return end

    expected = finish(state)
    assert int(expected[1].applied) == 2
    assert difference(floats_of(expected[0]), floats_of(params)) > 1e-3
    assert_identical(finish(jax.tree.map(jnp.asarray, host(state))), expected)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", jax.eval_shape(tx.init, params))
    assert_identical(restored, state)
    assert_identical(finish(restored), expected)


def regression(seed=0, rows=12):
    """Rows with weights, some 0."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 3)).astype(np.float32)
    return {"x": x, "y": np.sin(x.sum(1)), "n": (np.arange(rows) % 4).astype(np.float32)}


def big_update(mean, params, lr):
    return jax.tree.map(lambda p, g: p - lr * g, params, jax.grad(mean)(params))


def test_flax_train_state():
    """`apply_gradients` passes no keywords on: the weight travels with the gradient."""
    model, batch = nn.Dense(1), regression()
    params = model.init(jax.random.key(0), batch["x"])["params"]

    def total(params, rows):
        return jnp.sum(rows["n"] * (model.apply({"params": params}, rows["x"])[..., 0] - rows["y"]) ** 2)

    @jax.jit
    def step(state, rows):
        grads = jax.grad(total)(state.params, rows)
        return state.apply_gradients(grads=jaxacc.Mean(grads, jnp.sum(rows["n"])))

    state = TrainState.create(apply_fn=model.apply, params=params, tx=accumulate_gradients(optax.sgd(1.0), 3))
    for rows in split(batch, 3):
        assert_identical(state.params, params)
        state = step(state, rows)
    expected = big_update(lambda params: total(params, batch) / batch["n"].sum(), params, 1.0)
    assert difference(expected, params) > 0.1
    assert_trees_close(state.params, expected, rtol=1e-5, atol=1e-6)
    assert has_updated(state.opt_state)
    state = step(state, split(batch, 3)[2])
    updates, opt_state = flush(state.tx, state.opt_state, state.params)
    assert int(opt_state.applied) == 2
    assert difference(optax.apply_updates(state.params, updates), state.params) > 0.01


def test_nnx_optimizer():
    """`nnx.Optimizer.update` passes keywords on; the model's other variables are left alone."""
    batch = regression()
    model = nnx.Sequential(
        nnx.Linear(3, 4, rngs=nnx.Rngs(0)), nnx.BatchNorm(4, rngs=nnx.Rngs(0)), nnx.Linear(4, 1, rngs=nnx.Rngs(1))
    )
    model.eval()
    optimizer = nnx.Optimizer(model, accumulate_gradients(optax.sgd(0.1), 4), wrt=nnx.Param)
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    params = host(params)

    def mean(model, rows):
        return jnp.sum(rows["n"] * (model(rows["x"])[..., 0] - rows["y"]) ** 2) / jnp.sum(rows["n"])

    @nnx.jit
    def step(model, optimizer, rows, last):
        optimizer.update(model, nnx.grad(mean)(model, rows), weight=jnp.sum(rows["n"]), last=last)

    for i, rows in enumerate(split(batch, 3)):
        assert not has_updated(optimizer.opt_state)
        step(model, optimizer, rows, jnp.bool_(i == 2))
    expected = big_update(lambda params: mean(nnx.merge(graph, params, rest), batch), params, 0.1)
    actual = nnx.state(model, nnx.Param)
    assert difference(expected, params) > 0.01
    assert_trees_close(jax.tree.leaves(actual), jax.tree.leaves(expected), rtol=1e-5, atol=1e-6)
    assert has_updated(optimizer.opt_state)
    assert (int(optimizer.opt_state.applied), int(optimizer.opt_state.microbatches)) == (1, 0)


def test_scan_donation_and_devices():
    """Eight microbatches by `lax.scan`, donated; the same on rows that 4 devices share; equal to `make_step`."""
    rng = np.random.default_rng(0)
    window = {"x": rng.normal(size=(8, 4, 3)).astype(np.float32), "n": rng.integers(0, 5, (8, 4)).astype(np.int32)}

    def loss_fn(params, rows, key):
        errors = (jnp.tanh(rows["x"] @ params["w"]).sum(-1) - 1) ** 2
        return jaxacc.Mean(rows["n"] * errors, rows["n"])

    tx = accumulate_gradients(optax.adam(0.1, eps=0.1), 4)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def run(params, state, window):
        def body(carry, rows):
            params, state = carry
            grads = jax.grad(lambda params: jnp.sum(loss_fn(params, rows, None).total))(params)
            updates, state = tx.update(jaxacc.Mean(grads, jnp.sum(rows["n"])), state, params)
            return (optax.apply_updates(params, updates), state), has_updated(state)

        return jax.lax.scan(body, (params, state), window)

    w = rng.normal(size=(3, 4)).astype(np.float32)
    step = jaxacc.make_step(loss_fn, optax.adam(0.1, eps=0.1))
    stepped = step.init({"w": w})
    for half in (slice(4), slice(4, 8)):
        stepped, _ = step.update(stepped, jax.tree.map(lambda leaf, half=half: leaf[half], window))
    mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4], axis_types=(jax.sharding.AxisType.Auto,))
    one = NamedSharding(jax.make_mesh((1,), ("data",), devices=jax.devices()[:1]), P())
    for of_rows, of_params in [
        (one, one),
        (NamedSharding(mesh, P(None, "data")), NamedSharding(mesh, P())),
        (NamedSharding(mesh, P(None, "data")), NamedSharding(mesh, P(None, "data"))),
    ]:
        params = jax.device_put({"w": w}, of_params)
        state = tx.init(params)
        assert state.sums["w"].sharding == params["w"].sharding
        (moved, state), flags = run(params, state, jax.device_put(window, of_rows))
        assert params["w"].is_deleted()
        assert list(flags) == [False, False, False, True] * 2
        assert difference(host(moved), {"w": w}) > 0.1
        assert_trees_close(host(moved), host(stepped.params), rtol=1e-5, atol=1e-6)


def test_the_state_can_be_donated():
    """An inner state that is the parameters themselves, and a weakly typed number: own buffers, one trace."""
    inner = optax.GradientTransformation(
        lambda params: (params, jnp.asarray(1.0)),
        lambda updates, state, params=None: (updates, (state[0], state[1] * 2)),
    )
    tx, traces = accumulate_gradients(inner, 2), []

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def call(params, state):
        traces.append(1)
        updates, state = tx.update(jnp.ones(2), state, params, weight=1)
        return optax.apply_updates(params, updates), state

    params = jnp.zeros(2)
    end = call(params, tx.init(params))
    for _ in range(3):
        end = call(*end)
    assert_identical((end[0], *end[1].inner_state), (jnp.full(2, 2.0), jnp.zeros(2), jnp.float32(4)))
    assert len(traces) == 1


def test_two_gradient_trees_beside_the_arguments():
    """Donated: the updates that the interface asks for and one copy of the sums; `optax.MultiSteps` needs three."""
    params = {name: jnp.ones((64, 64)) for name in "abcdefgh"}
    tx = accumulate_gradients(optax.adamw(1e-3), 8)

    def call(params, state, grads):
        updates, state = tx.update(grads, state, params, weight=1)
        return optax.apply_updates(params, updates), state

    compiled = jax.jit(call, donate_argnums=(0, 1)).lower(params, tx.init(params), params).compile()
    assert compiled.memory_analysis().temp_size_in_bytes / (8 * 64 * 64 * 4) < 2.1


def test_other_leaves_are_left_alone(strict):
    """Integers, bools and None: the inner transformation sees None, the caller gets updates that can be applied."""
    params = {"w": jnp.ones(2), "table": jnp.arange(3), "flag": jnp.array(True), "absent": None}
    seen = []

    def look(updates, state, params=None):
        seen.extend([updates, params])
        return updates, state

    tx = accumulate_gradients(
        optax.chain(optax.GradientTransformation(lambda params: optax.EmptyState(), look), optax.sgd(1.0))
    )
    grads = jax.grad(lambda params: jnp.sum(params["w"] ** 2), allow_int=True)(params)
    for given in (grads, {**grads, "table": None, "flag": None}):
        updates, _ = tx.update(given, tx.init(params), params, weight=2.0, last=True)
        assert_identical(optax.apply_updates(params, updates), {**params, "w": -jnp.ones(2)})
    assert all(jax.tree.leaves(jax.tree.map(is_float, tree)) == [True] for tree in seen)
    updates, _ = tx.update({"w": jnp.ones(2)}, tx.init({"w": jnp.ones(2)}), weight=1, last=True)
    assert_identical(updates, {"w": -jnp.ones(2)})


def test_extra_arguments_are_those_of_the_closing_call():
    """`weight` and `last` stay here, the others go on."""

    def scaled(updates, state, params=None, *, value, **extra):
        assert not extra
        return jax.tree.map(lambda leaf: leaf * value, updates), state

    inner = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), scaled)
    tx = accumulate_gradients(inner)
    state = tx.init(jnp.zeros(2))
    for value, last in [(5.0, False), (7.0, True)]:
        updates, state = tx.update(jnp.ones(2), state, weight=1, last=last, value=jnp.asarray(value))
    assert_identical(updates, 7 * jnp.ones(2))
    _, state = tx.update(jnp.ones(2), state, weight=1, value=jnp.asarray(1.0))
    assert_identical(flush(tx, state, None, value=jnp.asarray(3.0))[0], 3 * jnp.ones(2))


def test_errors():
    """What was given, the rule, the remedy, before anything runs (cases 26, 80, 114)."""
    for steps in (0, -1, 2.0, True, "4"):
        with pytest.raises(ValueError, match="is not a positive integer"):
            accumulate_gradients(optax.sgd(1.0), steps)
    for inner in (optax.MultiSteps(optax.sgd(1.0), 2).gradient_transformation(), accumulate_gradients(optax.sgd(1.0), 2)):
        with pytest.raises(ValueError, match="a second accumulation"):
            accumulate_gradients(optax.chain(optax.clip(1.0), inner)).init(jnp.zeros(2))
    with pytest.raises(ValueError, match="is not floating"):
        accumulate_gradients(optax.sgd(1.0), accumulator_dtype=jnp.int32).init(jnp.zeros(2))
    tx = accumulate_gradients(optax.sgd(1.0), 2)
    params = {"w": jnp.zeros(2), "b": jnp.zeros(())}
    state = tx.init(params)
    with pytest.raises(ValueError, match=r"without a weight.*weight=1"):
        jax.eval_shape(tx.update, params, state, params)
    with pytest.raises(ValueError, match="and weight= too"):
        tx.update(jaxacc.Mean(params, 1), state, params, weight=1)
    with pytest.raises(ValueError, match=r"float32 \(2,\).*sum the weights"):
        tx.update(jaxacc.Mean(params, jnp.ones(2)), state, params)
    for grads, found in [
        ({"w": jnp.zeros(3), "b": jnp.zeros(())}, r"\['w'\]: \(3,\) in the gradient, \(2,\) in the parameters"),
        ({"w": jnp.zeros(2)}, r"\['b'\]: missing in the gradient"),
        ({**params, "c": jnp.zeros(1)}, r"\['c'\]: \(1,\) in the gradient, missing in the parameters"),
    ]:
        with pytest.raises(ValueError, match=found):
            tx.update(grads, state, params, weight=1)
    for wrong in (tx.update, functools.partial(flush, tx)):
        with pytest.raises(ValueError, match="not an AccumulationState"):
            wrong(*((params,) if wrong is tx.update else ()), (state,), params, **({"weight": 1} if wrong is tx.update else {}))
    with pytest.raises(ValueError, match="not an AccumulationState"):
        has_updated((state,))
