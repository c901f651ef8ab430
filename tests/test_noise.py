"""The gradient noise scale against gradients whose noise is known."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxacc
from jaxacc._noise import NoiseState, Parts, noise_scale_of, observe, part_of, quiet

SIZE, SIGMA = 8, 2.0
TRUE = np.full(SIZE, 0.5, np.float32)
EXPECTED = SIZE * SIGMA**2 / (SIZE * 0.25)  # tr(covariance) / |G|² = 16


def gaussian(params, microbatch, key):
    """The gradient of one unit of weight is Gaussian around `TRUE`: each row is the sum of `n` of them."""
    return jaxacc.Mean(microbatch["g"] @ params, microbatch["n"])


def window_of(rng, steps, rows, counts=(1, 2, 3, 4)):
    n = np.resize(np.asarray(counts, np.int32), (steps, rows))
    noise = rng.normal(size=(steps, rows, SIZE)) * SIGMA * np.sqrt(n)[..., None]
    return {"g": (n[..., None] * TRUE + noise).astype(np.float32), "n": n}


@pytest.mark.parametrize(
    ("source", "replicas", "steps", "rows"), [("replicas", 4, 2, 16), ("microbatches", 1, 8, 4), ("microbatches", 2, 4, 8)]
)
def test_gaussian_gradients(source, replicas, steps, rows):
    """Ragged weights; the average over 150 windows is within 15 % of the truth, and in units of weight."""
    rng = np.random.default_rng(0)
    mesh = jax.make_mesh((replicas,), ("data",), devices=jax.devices()[:replicas])
    step = jaxacc.make_step(gaussian, optax.sgd(0.0), noise_scale=source, mesh=mesh)
    state, estimates = step.init(jnp.zeros(SIZE)), []
    for _ in range(150):
        state, info = step.update(state, window_of(rng, steps, rows))
        estimates.append(float(info.noise_scale))
    assert np.mean(estimates[50:]) == pytest.approx(EXPECTED, rel=0.15)


def test_the_two_equations():
    """Exact expectations in, the truth out; parts of weight 0 are no parts."""
    weights = np.array([3.0, 5.0, 0.0, 8.0])
    total, variance, square = weights.sum(), 7.0, 2.0
    inhabited = weights > 0
    squares = sum(n * (square + variance / n) for n in weights[inhabited]) / total**2  # sum of |h|² / n, h = g n / N
    state = observe(quiet(), Parts(squares, inhabited.sum()), square + variance / total, total, jnp.array(True))
    assert float(noise_scale_of(state)) == pytest.approx(variance / square, rel=1e-5)
    grads = {"a": jnp.array([3.0, 4.0], jnp.bfloat16)}
    assert [float(x) for x in part_of(grads, jnp.int32(5))] == [5, 1]
    assert [float(x) for x in part_of(grads, jnp.int32(0))] == [0, 0]


def test_unavailable_is_nan():
    """One replica, no applied window, noise above any signal: never a division by zero."""
    step = jaxacc.make_step(gaussian, optax.sgd(0.0), noise_scale="replicas")
    state, info = step.update(step.init(jnp.zeros(SIZE)), window_of(np.random.default_rng(0), 2, 4))
    assert np.isnan(float(info.noise_scale))
    assert np.isnan(float(noise_scale_of(NoiseState(jnp.float32(1), jnp.float32(-1)))))
    step = jaxacc.make_step(gaussian, optax.sgd(0.0), noise_scale="microbatches")
    window = window_of(np.random.default_rng(0), 2, 4)
    state, info = step.update(step.init(jnp.zeros(SIZE)), window)
    before = [float(x) for x in state.noise]
    assert before[0] > 0
    state, info = step.update(state, {**window, "g": window["g"] * np.nan})
    assert [float(x) for x in state.noise] == before
    plain = jaxacc.make_step(gaussian, optax.sgd(0.0))
    assert plain.update(plain.init(jnp.zeros(SIZE)), window)[1].noise_scale is None


@pytest.mark.parametrize("options", [{"loss_scale": jaxacc.LossScale(initial=2.0**10)}, {"nonfinite": "drop_microbatch"}])
def test_it_is_in_true_units(options):
    """Neither the loss scale nor a late division shows."""
    window = window_of(np.random.default_rng(1), 4, 4)
    states = []
    for extra in ({}, options):
        step = jaxacc.make_step(gaussian, optax.sgd(0.0), noise_scale="microbatches", **extra)
        states.append(step.update(step.init(jnp.zeros(SIZE)), window)[0].noise)
    assert [float(x) for x in states[1]] == pytest.approx([float(x) for x in states[0]], rel=1e-5)


def test_streamed_replicas_tell_the_same():
    """From the local sums at the end; microbatches cannot be looked at there."""
    mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
    step = jaxacc.make_step(gaussian, optax.sgd(0.0), noise_scale="replicas", mesh=mesh)
    window = window_of(np.random.default_rng(1), 2, 8)
    parts = [jax.tree.map(lambda leaf, a=a: leaf[a], window) for a in range(2)]
    resident = [float(x) for x in step.update(step.init(jnp.zeros(SIZE)), window)[0].noise]
    state = step.init(jnp.zeros(SIZE))
    accumulator = step.begin(state, parts[0])
    for part in parts:
        accumulator = step.add(accumulator, state, part)
    assert [float(x) for x in step.finish(accumulator, state)[0].noise] == pytest.approx(resident, rel=1e-5)
    other = jaxacc.make_step(gaussian, optax.sgd(0.0), noise_scale="microbatches")
    with pytest.raises(ValueError, match="noise_scale='microbatches' needs gradients of a window, which a streamed one"):
        other.begin(other.init(jnp.zeros(SIZE)), parts[0])


def test_memory_does_not_grow_with_a():
    """Case 185: squared norms are kept, not gradients; replicas cost no gradient tree beside the plain step's."""
    size = 2048

    def temp(steps, replicas, **options):
        mesh = jax.make_mesh((replicas,), ("data",), devices=jax.devices()[:replicas])
        step = jaxacc.make_step(gaussian, optax.sgd(0.1), mesh=mesh, fold="carry", **options)
        window = {"g": jnp.zeros((steps, 4, size)), "n": jnp.ones((steps, 4), jnp.int32)}
        compiled = step.update.lower(step.init(jnp.zeros(size)), window).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    few, many = (temp(steps, 1, noise_scale="microbatches") for steps in (4, 64))
    assert many - few < 4 * size / 4 + 64 * 16
    assert temp(4, 4, noise_scale="replicas") - temp(4, 4) < 4 * size / 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"noise_scale": "rows"}, "not one of 'replicas' and 'microbatches'"),
        ({"noise_scale": "microbatches", "fold": "in_place"}, "which fold='in_place' has not"),
    ],
)
def test_bad_options(options, message):
    """Refused when the step is made."""
    with pytest.raises(ValueError, match=message):
        jaxacc.make_step(gaussian, optax.sgd(0.1), **options)
