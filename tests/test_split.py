"""The arithmetic of rows and the strided split."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxacc


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"effective_batch": 96, "microbatch": 8}, (8, 12, 1)),
        ({"effective_batch": 96, "accumulation_steps": 12}, (8, 12, 1)),
        ({"microbatch": 8, "accumulation_steps": 12}, (8, 12, 1)),
        ({"effective_batch": 1024, "microbatch": 4, "replicas": 128}, (4, 2, 128)),
        ({"effective_batch": 64, "microbatch": 8, "accumulation_steps": 8}, (8, 8, 1)),
    ],
)
def test_two_quantities_give_the_third(given, expected):
    """Cases 74, 75, 104: the replicas are counted once (global 1024, microbatch 4, 8 x 16 devices: A = 2, not 32)."""
    split = jaxacc.solve_split(**given)
    assert split == expected
    assert split.effective_batch == split.microbatch * split.accumulation_steps * split.replicas


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"effective_batch": 96, "microbatch": 40},
            r"effective_batch=96 is not divisible by microbatch 40 x replicas 1\. "
            r"Use microbatch dividing 96 \(32, 48, \.\.\.\) or set effective_batch to 80 or 120\.",
        ),
        ({"effective_batch": 96, "microbatch": 1, "replicas": 5}, "Set effective_batch to 95 or 100"),
        ({"effective_batch": 4, "microbatch": 8}, "set effective_batch to 8"),
        ({"effective_batch": 10, "accumulation_steps": 4}, "not divisible by accumulation_steps 4"),
        ({"effective_batch": 64, "microbatch": 8, "accumulation_steps": 4}, r"contradicts microbatch 8 x .* = 32"),
        ({"effective_batch": 64}, "two of effective_batch, microbatch and accumulation_steps"),
        ({"microbatch": 8, "accumulation_steps": 0}, "accumulation_steps=0 is less than 1"),
        ({"effective_batch": 96, "microbatch": 8.0}, r"microbatch=8\.0 is not a whole number"),
        ({"microbatch": 8, "accumulation_steps": "2"}, "accumulation_steps='2' is not a whole number"),
        ({"effective_batch": 8, "microbatch": 8, "replicas": 0.5}, r"replicas=0\.5 is not a whole number"),
        ({"effective_batch": -8, "microbatch": 8}, "effective_batch=-8 is less than 1"),
    ],
)
def test_what_cannot_be_solved(given, message):
    """What was given, the rule, the remedy (case 80: A = 0)."""
    with pytest.raises(ValueError, match=message):
        jaxacc.solve_split(**given)


def test_split_is_strided_and_complete():
    """Row r goes to microbatch r % A at place r // A (case 219), NumPy stays NumPy, every row once."""
    batch = {"x": np.arange(24).reshape(12, 2), "y": np.arange(12)}
    window = jaxacc.split_batch(batch, accumulation_steps=4)
    assert isinstance(window["x"], np.ndarray)
    assert window["x"].shape == (4, 3, 2)
    for r in range(12):
        assert window["y"][r % 4, r // 4] == r
    same = jaxacc.split_batch(jax.tree.map(jnp.asarray, batch), microbatch=3)
    np.testing.assert_array_equal(same["x"], window["x"])


def test_a_sharded_batch_is_split_without_moving_rows():
    """Case 215: the strided split of a batch sharded over 8 devices has no collective; a contiguous one has."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "data"))
    batch = jax.ShapeDtypeStruct((64, 3), jnp.float32, sharding=rows)
    collectives = ("all-to-all", "all-gather", "collective-permute", "all-reduce")

    def text(cut):
        return jax.jit(cut, out_shardings=split).lower(batch).compile().as_text()

    assert not any(name in text(lambda b: jaxacc.split_batch(b, accumulation_steps=4)) for name in collectives)
    assert any(name in text(lambda b: b.reshape(4, 16, 3)) for name in collectives)


@pytest.mark.parametrize("array", [np.asarray, jnp.asarray])
def test_padding(array):
    """A short batch is filled with copies of its last row that `row_mask` marks; an existing mask is extended."""
    batch = {"x": array(np.arange(1, 6)), "row_mask": np.array([1, 1, 0, 1, 1], bool)}
    window = jaxacc.split_batch(batch, accumulation_steps=4, pad=True)
    np.testing.assert_array_equal(window["x"], [[1, 5], [2, 5], [3, 5], [4, 5]])
    np.testing.assert_array_equal(window["row_mask"], [[1, 1], [1, 0], [0, 0], [1, 0]])
    assert window["row_mask"].dtype == bool
    traced = jax.jit(lambda b: jaxacc.split_batch(b, accumulation_steps=4, pad=True))(batch)
    np.testing.assert_array_equal(traced["row_mask"], window["row_mask"])
    full = jaxacc.split_batch({"x": array(np.arange(4))}, microbatch=2, pad=True)
    assert full["row_mask"].all()


def test_padding_to_a_stated_window():
    """With both stated a short batch fills exactly A x m rows: the last window, or the rows of a short process."""
    for rows in (1, 5, 6):
        window = jaxacc.split_batch({"x": np.arange(rows)}, accumulation_steps=3, microbatch=2, pad=True)
        assert window["x"].shape == window["row_mask"].shape == (3, 2)
        assert sorted(window["x"][window["row_mask"]]) == list(range(rows))
    none = jaxacc.split_batch({"x": np.ones(1), "row_mask": np.zeros(1, bool)}, accumulation_steps=3, microbatch=2, pad=True)
    assert not none["row_mask"].any()


@pytest.mark.parametrize(
    ("batch", "options", "message"),
    [
        (
            {"x": np.ones(10)},
            {"accumulation_steps": 4},
            r"effective_batch=10 is not divisible.*set effective_batch to 8 or 12.*pad=True",
        ),
        ({"x": np.ones(8), "y": np.ones(6)}, {"accumulation_steps": 2}, "leading dimension"),
        ({"x": np.float32(1)}, {"accumulation_steps": 2}, "leading dimension"),
        ({"x": np.ones((0, 3))}, {"accumulation_steps": 1}, "no rows"),
        ({"x": np.ones(8)}, {}, "exactly one of accumulation_steps and microbatch"),
        ({"x": np.ones(8)}, {"accumulation_steps": 2, "microbatch": 4}, "exactly one"),
        ({"x": np.ones(8)}, {"accumulation_steps": 0}, "accumulation_steps=0 is less than 1"),
        ({"x": np.ones(8)}, {"accumulation_steps": 0, "pad": True}, "accumulation_steps=0 is less than 1"),
        ({"x": np.ones(8)}, {"accumulation_steps": 2.0, "pad": True}, "not a whole number"),
        (np.ones(7), {"accumulation_steps": 2, "pad": True}, "must be a dict"),
        (
            {"x": np.ones(9)},
            {"accumulation_steps": 2, "microbatch": 4, "pad": True},
            r"9 rows, more than accumulation_steps 2 x microbatch 4 = 8\. Use more",
        ),
        ({"x": np.ones(9)}, {"accumulation_steps": 2, "microbatch": 0, "pad": True}, "microbatch=0 is less than 1"),
    ],
)
def test_batches_that_cannot_be_split(batch, options, message):
    """A clear error before anything is traced."""
    with pytest.raises(ValueError, match=message):
        jaxacc.split_batch(batch, **options)
