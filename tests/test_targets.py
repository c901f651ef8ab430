"""Plans for devices that are not here: names, what is missing, the child process and what it leaves on disk."""

import importlib.util
import json

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxacc
from jaxacc import _targets
from jaxacc._compiler import Compiled
from jaxacc._inspect import Collective, Memory

ROW = {"x": jax.ShapeDtypeStruct((16,), jnp.float32)}
PARAMS = jax.ShapeDtypeStruct((16, 16), jnp.float32)


def loss_fn(params, microbatch, key):
    error = jnp.mean((jnp.tanh(microbatch["x"] @ params) - 1) ** 2, axis=-1)
    return jaxacc.Mean(error, jnp.ones_like(error))


def plan(**options):
    return jaxacc.plan(loss_fn, optax.sgd(0.1), PARAMS, ROW, effective_batch=8, **options)


@pytest.mark.parametrize(
    ("name", "platform", "devices"),
    [
        ("v5e:2x2", "tpu", 4),
        ("v5p:2x2x1", "tpu", 4),
        ("tpu7x:2x2x1", "tpu", 8),
        ("h100x8", "cuda", 8),
        ("a100-80x4", "cuda", 4),
        ("cpux3", "cpu", 3),
    ],
)
def test_names(name, platform, devices, monkeypatch):
    monkeypatch.setattr(_targets, "missing_for", lambda _: [])
    target = _targets.target_of(name)
    assert (target.name, target.platform, target.devices) == (name, platform, devices)
    assert (target.limit is None) == (platform == "cpu")


def test_limits(monkeypatch):
    """What the TPU compiler refuses to exceed; three quarters of a GPU, as JAX takes them."""
    monkeypatch.setattr(_targets, "missing_for", lambda _: [])
    assert _targets.target_of("v5e:2x2").limit == 15.75 * 2**30
    assert 0.7 * 80e9 < _targets.target_of("h100x8").limit < 0.75 * 86e9
    assert "core_count: 132" in _targets.GPUS["h100"].description()


@pytest.mark.parametrize(("name", "near"), [("h10x8", "h100x8"), ("v5e:4", "v5e:4x4"), ("h100x0", "h100x8"), ("", "v5e:2x2")])
def test_unknown_names(name, near):
    with pytest.raises(ValueError, match=f"is not known. Nearest: .*{near}"):
        plan(target=name)


def test_what_to_install(monkeypatch):
    """The exact command, for each compiler."""
    monkeypatch.setattr(_targets, "_exists", lambda _: False)
    with pytest.raises(ValueError, match=r"Run: pip install libtpu flatbuffers \(or take target='cpux4'"):
        plan(target="v5e:2x2")
    with pytest.raises(ValueError, match="Run: pip install jax-cuda13-pjrt nvidia-cuda-nvcc nvidia-nvvm flatbuffers"):
        plan(target="h100x8")


def test_a_mesh_of_another_size(monkeypatch):
    monkeypatch.setattr(_targets, "missing_for", lambda _: [])
    with pytest.raises(ValueError, match="target='h100x8' has 8 devices, the mesh 2"):
        plan(target="h100x8", mesh=jax.sharding.AbstractMesh((2,), ("data",)))


def test_a_compiler_that_runs_out_of_memory(monkeypatch):
    """Its refusal is a candidate that does not fit, and of the smallest it is the message."""
    monkeypatch.setattr(_targets, "missing_for", lambda _: [])

    def compile_for(target, update, arguments, mesh):
        rows = arguments[1]["x"].shape[1] // mesh.size
        found = (Collective("all-reduce", 4, False, ("data",), "sum"),)
        return Compiled(Memory(1000 * rows, 0, 0, 0, 7), found) if rows <= limit else Compiled(None, (), "Used 16G of 15G hbm.")

    monkeypatch.setattr("jaxacc._plan.compile_for", compile_for)
    limit = 2
    found = plan(target="v5e:1x2")
    assert found.split == (2, 2, 2)
    assert [(c.microbatch, c.total, c.fits) for c in found.candidates] == [(1, 1007, True), (2, 2007, True), (4, None, False)]
    assert "out of memory too large" in str(found)
    assert json.loads(json.dumps(found.to_dict()))["budget"] == 15.75 * 2**30
    limit = 0
    with pytest.raises(ValueError, match=r"do not fit the device: Used 16G of 15G hbm\. What can help"):
        plan(target="v5e:1x2")


def test_a_process_of_its_own(tmp_path, monkeypatch):
    """The CPU compiler in a child says what it says here, reduces once, and is not asked twice."""
    if importlib.util.find_spec("flatbuffers") is None:
        pytest.skip("needs flatbuffers")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,))
    there, here = plan(target="cpux2", budget="1MiB"), plan(mesh=mesh, budget="1MiB")
    assert there.split == here.split == (4, 1, 2)
    assert there.total == pytest.approx(here.total, rel=0.01)
    assert here.total > 16 * 16 * 4
    assert [(c.kind, c.bytes, c.in_loop) for c in there.collectives] == [(c.kind, c.bytes, c.in_loop) for c in here.collectives]
    assert there.collectives
    (kept,) = (tmp_path / "jaxacc" / "plans").glob("*.json")
    changed = json.loads(kept.read_text())
    changed["memory"][3] += 1000
    kept.write_text(json.dumps(changed))
    assert plan(target="cpux2", budget="1MiB").total == there.total + 1000
