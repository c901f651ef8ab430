"""What automatic microbatches got wrong elsewhere: the effective batch is kept, the largest is found, processes agree."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxacc
from jaxacc import _plan
from jaxacc._compiler import Compiled
from jaxacc._inspect import Memory
from jaxacc.experiment import planning

ROW = {"x": jax.ShapeDtypeStruct((4,), jnp.float32)}
PARAMS = jax.ShapeDtypeStruct((4,), jnp.float32)
GIB = 2**30


def loss_fn(params, microbatch, key):
    error = (microbatch["x"] @ params) ** 2
    return jaxacc.Mean(error, jnp.ones_like(error))


def plan(effective_batch, loss=loss_fn, **options):
    return jaxacc.plan(loss, optax.sgd(0.1), PARAMS, ROW, effective_batch=effective_batch, budget="1GiB", **options)


@pytest.fixture
def compiler(monkeypatch):
    """A compiler that runs out of memory above so many rows, and counts."""
    seen = []

    def install(limit):
        def compile_here(update, arguments, mesh, platform):
            seen.append(arguments[1]["x"].shape[1])
            fits = seen[-1] <= limit
            return Compiled(Memory(100 * seen[-1], 0, 0, 0, 0), ()) if fits else Compiled(None, (), "RESOURCE_EXHAUSTED")

        monkeypatch.setattr(_plan, "compile_here", compile_here)
        return seen

    return install


@pytest.mark.parametrize(
    ("effective", "limit", "microbatch"),
    [
        (96, 12, 12),
        (96, 13, 12),
        (96, 11, 8),
        (64, 12, 8),
        (32, 31, 16),
        (90, 63, 45),
        (97, 96, 1),
        (97, 97, 97),
        (5040, 12, 12),
    ],
)
def test_the_largest_below_a_wall_and_the_same_effective_batch(compiler, effective, limit, microbatch):
    """Not 1, not an overshoot, not 0.9 of it: the largest divisor, and the accumulation steps follow. Few are compiled."""
    seen = compiler(limit)
    found = plan(effective)
    assert found.split == (microbatch, effective // microbatch, 1)
    assert found.split.effective_batch == effective
    assert microbatch in seen
    assert len(seen) <= 10
    assert all(candidate.microbatch * candidate.accumulation_steps == effective for candidate in found.candidates)


def test_nothing_below_the_wall(compiler):
    compiler(0)
    with pytest.raises(ValueError, match="RESOURCE_EXHAUSTED"):
        plan(96)


def test_models_with_state_are_warned(compiler):
    """Batch statistics are of the microbatch, so that its size is not free to choose."""
    compiler(8)

    def with_state(params, state, microbatch, key):
        return loss_fn(params, microbatch, key), jnp.mean(microbatch["x"], axis=0)

    found = plan(8, with_state, has_state=True, model_state=jnp.zeros(4))
    assert "the microbatch matters" in found.notes[0]
    assert found.notes[0] in str(found)
    assert found.to_dict()["notes"] == list(found.notes)
    assert plan(8).notes == ()


def device(limit):
    return SimpleNamespace(memory_stats=lambda: None if limit is None else {"bytes_limit": limit})


def test_the_least_of_the_devices_here():
    """A device of another process does not say, and is not asked."""
    mesh = SimpleNamespace(local_devices=[device(3 * GIB), device(2 * GIB)])
    assert _plan.device_limit(mesh) == 2 * GIB
    assert _plan.device_limit(SimpleNamespace(local_devices=[device(None)])) is None
    assert _plan.device_limit(SimpleNamespace(local_devices=[])) is None


def test_processes_agree_on_the_budget(monkeypatch):
    """The least of all, whichever process asks; what is stated is taken as it is."""
    limits = [79 * GIB, 78 * GIB + 5]
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    gathered = lambda own: np.array([own, *(np.int32(limit // 2**20) for limit in limits)])
    monkeypatch.setattr(planning.multihost_utils, "process_allgather", gathered)

    def problem(limit, stated=None):
        batch = SimpleNamespace(budget=stated)
        mesh = SimpleNamespace(local_devices=[device(limit)])
        return SimpleNamespace(config=SimpleNamespace(batch=batch), options={"mesh": mesh})

    assert {planning._budget(problem(limit), None) for limit in limits} == {78 * GIB}
    assert planning._budget(problem(GIB, "20GiB"), None) == "20GiB"
    assert planning._budget(problem(GIB), "h100x8") is None
