"""Compile the step for a TPU v5e 2x4 slice and for 8 H100s, without having either: where is the reduction?

python -m benchmarks.topologies

Needs libtpu (`jax[tpu]`) for the one, and jax-cuda13-pjrt, nvidia-cuda-nvcc and nvidia-nvvm for the other; says what is
missing otherwise. NVIDIA's compiler runs in a subprocess, because it ends the process where ptxas is not found.
"""

import importlib.util
import os
import subprocess
import sys

import jax
from jax.experimental import topologies

import jaxacc
from benchmarks import layouts

TARGETS = ("tpu", "cuda")
H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535 memory_bandwidth: 3352000000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84942979072 shared_memory_per_block_optin: 232448 cuda_compute_capability { major: 9 }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


def missing(target):
    """Why a target cannot be compiled for here, or None."""
    modules = {"tpu": ("libtpu",), "cuda": ("jax_plugins.xla_cuda13", "nvidia.cu13")}[target]
    absent = [name for name in modules if not _exists(name)]
    return f"not installed: {', '.join(absent)}" if absent else None


def _exists(module):
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def mesh_for(target):
    """Eight devices that are not there, on one axis."""
    if target == "tpu":
        topology = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4")
    else:
        topology = topologies.get_topology_desc("", platform="cuda", target_config=H100, topology="1x1x8")
    return layouts.mesh_of(8, topology.devices)


def report(target, steps=4):
    """Compile the layouts for one target and print where their collectives are."""
    mesh = mesh_for(target)
    for layout in layouts.LAYOUTS:
        compiled, state = layouts.compile_step(layout, steps, mesh)
        found = jaxacc.inspect_collectives(compiled, mesh=mesh)
        size = layouts.gradient_bytes(state)
        reduced, gathered = (
            sum(c.bytes for c in found if c.kind in kinds and not c.in_loop) / size
            for kinds in (("all-reduce", "reduce-scatter"), ("all-gather",))
        )
        looping = sum(c.in_loop for c in found)
        print(f"{target:<6}{layout:<17}{reduced:>10.3f}{gathered:>10.3f}{looping:>10}", flush=True)
        if layout != "FSDP":
            jaxacc.check_reduction(compiled, state.params, mesh=mesh)


def run(target):
    """`report` in a process of its own; its output, or why there is none."""
    reason = missing(target)
    if reason:
        return f"{target:<6}{reason}"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "benchmarks.topologies", target]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return done.stdout.rstrip() if done.returncode == 0 else f"{target:<6}failed with {done.returncode}: {done.stderr[-2000:]}"


def main():
    """Print the table, of one target if named."""
    if sys.argv[1:]:
        report(sys.argv[1])
        return
    print(f"jax {jax.__version__}, 8 devices, A = 4: gradient trees reduced and gathered once, collectives inside loops")
    print(f"{'':<6}{'layout':<17}{'reduced':>10}{'gathered':>10}{'in loops':>10}")
    for target in TARGETS:
        print(run(target))


if __name__ == "__main__":
    main()
