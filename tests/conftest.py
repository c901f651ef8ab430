"""Eight fake CPU devices, and compilations that are kept between runs."""

import os
from pathlib import Path

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_platforms", os.environ.get("JAX_PLATFORMS") or "cpu")
jax.config.update(
    "jax_compilation_cache_dir", os.environ.get("JAX_COMPILATION_CACHE_DIR") or str(Path(__file__).parents[1] / ".jax_cache")
)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@pytest.fixture
def strict():
    """Silent promotion is an error: of ranks and of dtypes."""
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture
def x64():
    """Float64 on, for comparisons with an oracle."""
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module")
def config(request, tmp_path_factory):
    """The path of a file that holds the test module's `CONFIG`."""
    path = tmp_path_factory.mktemp("config") / "tiny.toml"
    path.write_text(request.module.CONFIG)
    return str(path)
