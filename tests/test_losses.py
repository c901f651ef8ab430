"""`causal_lm` counts what it sums (cases 136, 147 to 149, 151, 153, 155)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxacc import losses


def numpy_causal_lm(logits, labels, mask, ignore_index, shift):
    """One position after another, in float64."""
    total, weight = 0.0, 0
    for row in np.ndindex(labels.shape[:-1]):
        for t in range(labels.shape[-1] - shift):
            target = labels[row][t + shift]
            if target != ignore_index and (mask is None or mask[row][t + shift]):
                z = logits[row][t].astype(np.float64)
                total -= z[target] - z.max() - np.log(np.exp(z - z.max()).sum())
                weight += 1
    return total, weight


@pytest.mark.parametrize("shift", [True, False])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("ignore_index", [-100, 0])
def test_against_numpy(shift, masked, ignore_index):
    """Any shape, mask and ignored label."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(3, 2, 6, 5)).astype(np.float32)
    labels = np.where(rng.uniform(size=(3, 2, 6)) < 0.3, ignore_index, rng.integers(0, 5, (3, 2, 6)))
    mask = rng.integers(0, 2, (3, 2, 6)) if masked else None
    loss = losses.causal_lm(logits, labels, mask=mask, ignore_index=ignore_index, shift=shift)
    total, weight = numpy_causal_lm(logits, labels, mask, ignore_index, shift)
    assert weight > 0
    assert int(loss.weight) == weight
    assert loss.weight.dtype == jnp.int32
    np.testing.assert_allclose(loss.total, total, rtol=1e-5)


@pytest.mark.parametrize("masked_first", [True, False])
def test_shifted_targets_are_counted(masked_first):
    """Case 148: 2 x 5 unpadded labels have 8 targets, whether position 0 is masked or not; shifted labels have 10."""
    labels = np.ones((2, 5), int)
    if masked_first:
        labels[:, 0] = -100
    assert int(losses.causal_lm(jnp.zeros((2, 5, 3)), labels).weight) == 8
    assert int(losses.causal_lm(jnp.zeros((2, 5, 3)), np.ones((2, 5), int), shift=False).weight) == 10


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_masked_positions_do_not_matter(dtype, strict):
    """NaN and inf logits at masked positions reach neither the value nor the gradient; the sum is float32."""
    labels = jnp.array([[1, 2, -100, -100]])
    logits = jnp.zeros((1, 4, 3), dtype).at[0, 1:].set(jnp.nan).at[0, 2].set(jnp.inf)
    loss, grads = jax.value_and_grad(lambda z: losses.causal_lm(z, labels).total)(logits)
    assert loss.dtype == jnp.float32
    assert float(loss) == pytest.approx(np.log(3), rel=1e-6)
    assert grads.dtype == dtype
    assert bool(jnp.all(jnp.isfinite(grads)))
    assert float(jnp.abs(grads).max()) > 0.3
    empty = losses.causal_lm(logits, jnp.full((1, 4), -100))
    assert (float(empty.total), int(empty.weight)) == (0, 0)


def test_ignored_labels_raise_no_alarm():
    """Under `jax_debug_nans` no intermediate value is NaN: an ignored label of -100 does not index the vocabulary."""
    labels = jnp.array([[1, -100, 2, -100]])
    with jax.debug_nans(True):
        loss, grads = jax.value_and_grad(lambda z: losses.causal_lm(z, labels).total)(jnp.zeros((1, 4, 3)))
    assert float(loss) == pytest.approx(np.log(3), rel=1e-6)
    assert float(jnp.abs(grads).max()) > 0.3


@pytest.mark.parametrize(
    ("logits", "labels", "mask"), [((2, 5, 3), (2, 4), None), ((2, 5), (2, 5), None), ((2, 5, 3), (2, 5), (5,))]
)
def test_shapes_that_do_not_belong_together(logits, labels, mask):
    """The shapes are named."""
    with pytest.raises(ValueError, match="one axis for the vocabulary"):
        losses.causal_lm(jnp.zeros(logits), jnp.zeros(labels, int), mask=None if mask is None else jnp.ones(mask))
