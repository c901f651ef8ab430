"""Model state: threaded or reduced as declared, over microbatches that have weight and over replicas."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import FOLDS, assert_identical, assert_trees_close, host

import jaxacc

START = {
    "average": jnp.float32(10), "mean": jnp.float32(100), "count": jnp.int32(7), "amax": jnp.float32(50),
    "last": jnp.int32(-1), "key": jax.random.key(0),
}  # fmt: skip
DECLARED = {
    "average": "sequential", "mean": "mean", "count": "sum", "amax": "max", "last": "sequential", "key": "sequential",
}  # fmt: skip


def loss_fn(params, state, microbatch, key):
    """State that tells in which order and from what it was made."""
    x, rows = microbatch["x"], jnp.sum(microbatch["n"])
    new = {
        "average": 0.9 * state["average"] + 0.1 * jnp.mean(x),
        "mean": 0.5 * state["mean"] + jnp.mean(x),
        "count": state["count"] + rows,
        "amax": jnp.max(x),
        "last": microbatch["id"][0],
        "key": jax.random.fold_in(state["key"], microbatch["id"][0]),
    }
    return jaxacc.Mean(params * jnp.sum(x * microbatch["n"]) * state["average"], rows), new


WINDOW = {
    "x": jnp.array([[5.0, 1.0], [900.0, 900.0], [1.0, 0.5], [2.0, 2.0]]),
    "n": jnp.array([[1, 1], [0, 0], [1, 0], [1, 1]]),
    "id": jnp.array([[10, 11], [20, 21], [30, 31], [40, 41]]),
}


def fold(key, *ids):
    for i in ids:
        key = jax.random.fold_in(key, i)
    return jax.random.key_data(key)


@pytest.mark.parametrize("which", FOLDS)
def test_leaves_reduce_as_declared(which):
    """Cases 172, 176, 183: in order; mean, sum, maximum of what each makes of the start; weight 0 touches nothing."""
    run = jax.jit(jaxacc.accumulate(loss_fn, has_state=True, state_reduction=DECLARED, fold=which))
    out = run(jnp.float32(1), WINDOW, state=START)
    means = [3.0, 0.75, 2.0]
    average, seen = 10.0, []
    for mean in means:
        seen.append(average)
        average = 0.9 * average + 0.1 * mean
    assert float(out.state["average"]) == pytest.approx(average, rel=1e-6)
    assert float(out.state["mean"]) == pytest.approx(50 + np.mean(means), rel=1e-6)
    assert int(out.state["count"]) == 7 + 5
    assert float(out.state["amax"]) == 5  # (5, 1, 2): neither the start, 50, nor the microbatch without weight, 900
    assert int(out.state["last"]) == 40
    np.testing.assert_array_equal(jax.random.key_data(out.state["key"]), fold(START["key"], 10, 30, 40))
    assert float(out.grads) == pytest.approx((6 * seen[0] + 1 * seen[1] + 4 * seen[2]) / 5, rel=1e-6)


@pytest.mark.parametrize("steps", [1, 2])
def test_replicas_reduce_too(steps):
    """Two replicas: floats averaged over those that touched theirs, others from the first that did; and streamed alike."""
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    step = jaxacc.make_step(loss_fn, optax.sgd(0.1), has_state=True, state_reduction=DECLARED, mesh=mesh)
    window = {  # replica 0 has the first row of each microbatch, and no weight at all in the second case
        "x": jnp.array([[5.0, 1.0], [3.0, 7.0]])[:steps],
        "n": jnp.array([[1, 1], [1, 1]])[:steps],
        "id": jnp.array([[10, 11], [20, 21]])[:steps],
    }
    lonely = {**window, "n": window["n"].at[:, 0].set(0)}
    for case, touched in ((window, (0, 1)), (lonely, (1,))):
        state, info = step.update(step.init(jnp.float32(1), model_state=START), case)
        ends = []
        for d in touched:
            average = 10.0
            for x in case["x"][:, d]:
                average = 0.9 * average + 0.1 * float(x)
            ends.append(average)
        got, x = state.model_state, np.asarray(case["x"])[:, list(touched)]
        assert float(got["average"]) == pytest.approx(np.mean(ends), rel=1e-6)
        assert float(got["mean"]) == pytest.approx(50 + x.mean(), rel=1e-6)
        assert int(got["count"]) == 7 + x.size
        assert float(got["amax"]) == x.max()
        ids = np.asarray(case["id"])[:, touched[0]]
        assert int(got["last"]) == ids[-1]
        np.testing.assert_array_equal(jax.random.key_data(got["key"]), fold(START["key"], *ids))
        streamed = stream(step, case)
        assert_trees_close(data(streamed[0].model_state), data(got), rtol=1e-6)
        assert float(streamed[1].loss) == pytest.approx(float(info.loss), rel=1e-6)


def data(state):
    return {**state, "key": jax.random.key_data(state["key"])}


def stream(step, window):
    state = step.init(jnp.float32(1), model_state=START)
    parts = [jax.tree.map(lambda leaf, a=a: leaf[a], window) for a in range(window["x"].shape[0])]
    accumulator = step.begin(state, parts[0])
    for part in parts:
        accumulator = step.add(accumulator, state, part)
    return step.finish(accumulator, state)


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_a_streamed_window_continues_on_other_replicas(before, after):
    """The state of the accumulator follows from D to D': sums add, maxima compete, sequential floats are averaged."""
    window = {"x": jnp.arange(1.0, 9.0).reshape(4, 2), "n": jnp.ones((4, 2), jnp.int32), "id": jnp.arange(8).reshape(4, 2)}
    parts = [jax.tree.map(lambda leaf, a=a: leaf[a], window) for a in range(4)]
    steps = []
    for size in (before, after):
        mesh = jax.make_mesh((size,), ("data",), devices=jax.devices()[:size])
        steps.append(jaxacc.make_step(loss_fn, optax.sgd(0.1), has_state=True, state_reduction=DECLARED, mesh=mesh))
    states = [step.init(jnp.float32(1), model_state=START) for step in steps]
    accumulator = steps[0].begin(states[0], parts[0])
    for part in parts[:2]:
        accumulator = steps[0].add(accumulator, states[0], part)
    accumulator = steps[1].begin(states[1], parts[2], jax.device_get(accumulator))
    for part in parts[2:]:
        accumulator = steps[1].add(accumulator, states[1], part)
    state, _ = steps[1].finish(accumulator, states[1])
    got = state.model_state
    assert (int(got["count"]), float(got["amax"])) == (7 + 8, 8)
    parts_of = lambda size, rows: np.asarray(rows).reshape(2, size, -1).mean(axis=2)
    new = [*parts_of(before, window["x"][:2]).ravel(), *parts_of(after, window["x"][2:]).ravel()]
    assert float(got["mean"]) == pytest.approx(50 + np.mean(new), rel=1e-6)
    decay = lambda start, xs: start if not len(xs) else decay(0.9 * start + 0.1 * xs[0], xs[1:])
    middle = np.mean([decay(10.0, parts_of(before, window["x"][:2])[:, d]) for d in range(before)])
    end = np.mean([decay(middle, parts_of(after, window["x"][2:])[:, d]) for d in range(after)])
    assert float(got["average"]) == pytest.approx(end, rel=1e-6)


@pytest.mark.parametrize("steps", [1, 4])
def test_an_empty_window_leaves_it(steps):
    """Without the gate of a step too: no mean of nothing, no maximum of nothing."""
    window = jax.tree.map(lambda leaf: leaf[:steps], {**WINDOW, "n": WINDOW["n"] * 0})
    out = jaxacc.accumulate(loss_fn, has_state=True, state_reduction=DECLARED)(1.0, window, state=START)
    assert_identical(data(out.state), data(START))


def test_weights_may_follow_the_state():
    """A weight that counts what came before: the denominators come from the same states as the gradient."""

    def counting(params, state, microbatch, key):
        weight = state + 1
        return jaxacc.Mean(params * jnp.sum(microbatch["x"]) * weight, weight), weight

    out = jaxacc.accumulate(counting, has_state=True)(1.0, {"x": jnp.arange(1.0, 5.0)[:, None]}, state=jnp.int32(0))
    assert (int(out.weight), int(out.state)) == (1 + 2 + 3 + 4, 4)
    assert float(out.grads) == pytest.approx((1 + 4 + 9 + 16) / 10, rel=1e-6)


def test_a_skipped_window_does_not_move_it():
    """Bit for bit; nor does an empty one, nor an evaluation."""
    step = jaxacc.make_step(loss_fn, optax.sgd(0.1), has_state=True, state_reduction=DECLARED)
    state = step.init(jnp.float32(1), model_state=START)
    before = host(data(state.model_state))
    step.evaluate(state, WINDOW)
    state, info = step.update(state, {**WINDOW, "x": WINDOW["x"].at[3, 0].set(jnp.nan)})
    assert int(info.outcome) == jaxacc.Outcome.SKIPPED_NONFINITE
    state, info = step.update(state, {**WINDOW, "n": WINDOW["n"] * 0})
    assert int(info.outcome) == jaxacc.Outcome.SKIPPED_EMPTY
    assert_identical(data(state.model_state), before)
    state, _ = step.update(state, WINDOW)
    assert float(state.model_state["average"]) != 10


class Net(nn.Module):
    """A batch normalization between two layers."""

    @nn.compact
    def __call__(self, x, train):
        x = nn.Dense(4)(x)
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
        return nn.Dense(1)(nn.relu(x))[:, 0]


def test_batch_normalization():
    """Case 172: the gradient is that of microbatch statistics; running statistics move per microbatch or, as a mean, once."""
    rng = np.random.default_rng(0)
    batch = {"x": rng.normal(size=(16, 3)).astype(np.float32), "y": rng.normal(size=16).astype(np.float32)}
    variables = Net().init(jax.random.key(0), batch["x"], train=True)
    params, start = variables["params"], variables["batch_stats"]

    def loss_fn(params, stats, microbatch, key):
        out, new = Net().apply({"params": params, "batch_stats": stats}, microbatch["x"], train=True, mutable=["batch_stats"])
        error = jnp.square(out - microbatch["y"])
        return jaxacc.Mean(error, jnp.ones_like(error)), new["batch_stats"]

    window = jaxacc.split_batch(batch, accumulation_steps=4)
    run = lambda how: jax.jit(jaxacc.accumulate(loss_fn, has_state=True, state_reduction=how))(params, window, state=start)
    by_hand, stats = [], start
    for a in range(4):
        microbatch = jax.tree.map(lambda leaf, a=a: leaf[a], window)
        mean_of = lambda p, stats=stats, microbatch=microbatch: jnp.mean(loss_fn(p, stats, microbatch, None)[0].total)
        by_hand.append(jax.grad(mean_of)(params))
        stats = loss_fn(params, stats, microbatch, None)[1]
    expected = jax.tree.map(lambda *grads: sum(grads) / 4, *by_hand)
    sequential, mean = run("sequential"), run("mean")
    assert_trees_close(sequential.grads, expected, rtol=1e-4, atol=1e-6)
    assert_trees_close(sequential.state, stats, rtol=1e-5, atol=1e-6)
    each = [loss_fn(params, start, jax.tree.map(lambda leaf, a=a: leaf[a], window), None)[1] for a in range(4)]
    assert_trees_close(mean.state, jax.tree.map(lambda *xs: sum(xs) / 4, *each), rtol=1e-5, atol=1e-6)
    whole = loss_fn(params, start, batch, None)[1]
    mean_of_means = jax.tree.leaves(mean.state)[0]  # of equal microbatches the means of the big batch, not its variances
    np.testing.assert_allclose(mean_of_means, jax.tree.leaves(whole)[0], rtol=1e-5, atol=1e-6)
    assert float(jnp.max(jnp.abs(jax.tree.leaves(sequential.state)[0] - mean_of_means))) > 1e-3


def test_remat_does_not_touch_twice():
    """Cases 164, 166, 167: the forward pass runs again for the backward one, the state is made once."""
    run = lambda f: jax.jit(jaxacc.accumulate(f, has_state=True, state_reduction=DECLARED))(1.0, WINDOW, state=START)
    assert_identical(data(run(jax.checkpoint(loss_fn)).state), data(run(loss_fn).state))


@pytest.mark.parametrize(
    ("new", "message"),
    [
        (lambda state: {**state, "mean": jnp.zeros(3)}, r"the model state \['mean'\] is float32 \(\), and loss_fn returned"),
        (lambda state: {**state, "mean": state["mean"].astype(jnp.bfloat16)}, "returned bfloat16"),
        (lambda state: {"mean": state["mean"]}, "another structure"),
    ],
)
def test_states_that_do_not_fit(new, message):
    """The leaf is named."""

    def wrong(params, state, microbatch, key):
        return loss_fn(params, state, microbatch, key)[0], new(state)

    with pytest.raises(ValueError, match=message):
        jaxacc.accumulate(wrong, has_state=True, state_reduction=DECLARED)(1.0, WINDOW, state=START)


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ("average", "not one of sequential, mean, sum, max"),
        ({"mean": "mean"}, "no tree prefix"),
        ({**DECLARED, "count": "mean"}, r"\['count'\] is int32, which has no mean"),
        ({**DECLARED, "key": "sum"}, "which has no sum"),
    ],
)
def test_declarations_that_do_not_fit(declared, message):
    """Before anything is traced."""
    with pytest.raises(ValueError, match=message):
        jaxacc.accumulate(loss_fn, has_state=True, state_reduction=declared)(1.0, WINDOW, state=START)


def test_state_goes_with_has_state():
    """One without the other is an error, and so is a loss that forgets to return it."""
    with pytest.raises(ValueError, match="has_state=True, but no model state is given"):
        jaxacc.accumulate(loss_fn, has_state=True)(1.0, WINDOW)
    with pytest.raises(ValueError, match="has_state=False, but a model state is given"):
        jaxacc.accumulate(loss_fn)(1.0, WINDOW, state=START)
    with pytest.raises(ValueError, match=r"must return \(jaxacc\.Mean\(total, weight\), new_state\)"):
        jaxacc.accumulate(lambda *args: loss_fn(*args)[0], has_state=True)(1.0, WINDOW, state=START)
