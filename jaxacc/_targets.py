"""Devices that need not be here, by name: TPU slices and NVIDIA GPUs, and the compilers for them."""

from __future__ import annotations

import difflib
import importlib.metadata
import importlib.util
import math
import re
from pathlib import Path
from typing import NamedTuple

GIB = 1024**3
TPU_LIMITS = {"v5e": 15.75, "v6e": 31.24, "v5p": 95.73, "tpu7x": 94.74}
"""GiB of a device that a program may take: what the compiler itself refuses to exceed."""
DEVICES_PER_CHIP = {"tpu7x": 2}
TPU_EXAMPLES = ("v5e:2x2", "v5e:4x4", "v5p:2x2x1", "v6e:2x4")
GPU_SHARE = 0.75
"""What JAX takes of a GPU's memory, unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise."""


class Gpu(NamedTuple):
    """Public facts about a GPU, as far as the compiler asks: sizes in bytes, rates per second."""

    name: str
    capability: tuple[int, int]
    cores: int
    memory: int
    bandwidth: int
    l2: int
    clock_ghz: float
    shared_per_core: int
    shared_per_block: int
    threads_per_core: int = 2048
    fpus_per_core: int = 128

    def description(self) -> str:
        """A GpuTargetConfig in text."""
        major, minor = self.capability
        return f"""
            gpu_device_info {{
              threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
              shared_memory_per_core: {self.shared_per_core} shared_memory_per_block_optin: {self.shared_per_block}
              threads_per_core_limit: {self.threads_per_core} core_count: {self.cores} fpus_per_core: {self.fpus_per_core}
              block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
              memory_bandwidth: {self.bandwidth} l2_cache_size: {self.l2} clock_rate_ghz: {self.clock_ghz}
              device_memory_size: {self.memory} cuda_compute_capability {{ major: {major} minor: {minor} }}
            }}
            platform_name: "CUDA"
            dnn_version_info {{ major: 9 minor: 8 }}
            device_description_str: "{self.name}"
        """


HOPPER = {"clock_ghz": 1.98, "shared_per_core": 233472, "shared_per_block": 232448}
AMPERE = {"clock_ghz": 1.41, "shared_per_core": 167936, "shared_per_block": 166912, "fpus_per_core": 64}
CONSUMER = {"shared_per_core": 102400, "shared_per_block": 101376, "threads_per_core": 1536}
MIB = 1024**2
GPUS = {
    "h100": Gpu("NVIDIA H100 80GB HBM3", (9, 0), 132, 84942979072, 3352 * 10**9, 50 * MIB, **HOPPER),
    "h200": Gpu("NVIDIA H200", (9, 0), 132, 150110011392, 4800 * 10**9, 50 * MIB, **HOPPER),
    "a100-40": Gpu("NVIDIA A100-SXM4-40GB", (8, 0), 108, 42297786368, 1555 * 10**9, 40 * MIB, **AMPERE),
    "a100-80": Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108, 84986691584, 2039 * 10**9, 40 * MIB, **AMPERE),
    "l4": Gpu("NVIDIA L4", (8, 9), 58, 23580639232, 300 * 10**9, 48 * MIB, 2.04, **CONSUMER),
    "l40s": Gpu("NVIDIA L40S", (8, 9), 142, 47681896448, 864 * 10**9, 96 * MIB, 2.52, **CONSUMER),
    "a10g": Gpu("NVIDIA A10G", (8, 6), 80, 23600000000, 600 * 10**9, 6 * MIB, 1.71, **CONSUMER),
    "rtx3090": Gpu("NVIDIA GeForce RTX 3090", (8, 6), 82, 25300000000, 936 * 10**9, 6 * MIB, 1.70, **CONSUMER),
    "rtx4090": Gpu("NVIDIA GeForce RTX 4090", (8, 9), 128, 25386352640, 1008 * 10**9, 72 * MIB, 2.52, **CONSUMER),
}
"""Memory is what the driver reports, a little less than the name says."""


class Target(NamedTuple):
    """What to compile for.

    Attributes:
      name: as it was given.
      platform: "tpu", "cuda" or "cpu".
      devices: how many.
      limit: bytes that a program may take on each, None where that is not known.
    """

    name: str
    platform: str
    devices: int
    limit: int | None


NEEDS = {
    "tpu": {"libtpu": "libtpu", "flatbuffers": "flatbuffers"},
    "cuda": {
        "jax_plugins.xla_cuda13": "jax-cuda13-pjrt", "nvidia.cu13.bin.ptxas": "nvidia-cuda-nvcc",
        "nvidia.cu13.nvvm.libdevice": "nvidia-nvvm", "flatbuffers": "flatbuffers",
    },
    "cpu": {"flatbuffers": "flatbuffers"},
}  # fmt: skip
"""What each compiler takes: modules or files of packages, and the distributions that bring them."""


def target_of(name: str) -> Target:
    """A target by name, or the `ValueError` that lists the nearest ones, or what to install."""
    target = _parse(name)
    if target is None:
        known = [*TPU_EXAMPLES, *(f"{gpu}x{count}" for gpu in GPUS for count in (1, 8)), "cpux8"]
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.3) or known[:3]
        raise ValueError(
            f"target={name!r} is not known. Nearest: {', '.join(near)}. TPU slices are named as in v5e:4x4, GPUs of "
            f"{', '.join(GPUS)} with their number as in h100x8, and CPU devices, for an estimate, as in cpux8."
        )
    missing = missing_for(target.platform)
    if missing:
        raise ValueError(
            f"target={name!r} needs a compiler that is not installed. Run: pip install {' '.join(missing)}"
            + ("" if target.platform == "cpu" else f" (or take target='cpux{target.devices}', an estimate).")
        )
    return target


def _parse(name: str) -> Target | None:
    slice_ = re.fullmatch(r"(v\d+[a-z]?|tpu7x):(\d+(?:x\d+){1,2})", name)
    if slice_ is not None and slice_.group(1) in TPU_LIMITS:
        chips = math.prod(int(side) for side in slice_.group(2).split("x"))
        devices = chips * DEVICES_PER_CHIP.get(slice_.group(1), 1)
        return Target(name, "tpu", devices, round(TPU_LIMITS[slice_.group(1)] * GIB)) if chips else None
    counted = re.fullmatch(r"([\w-]+)x([1-9]\d*)", name)
    if counted is not None and counted.group(1) in GPUS:
        return Target(name, "cuda", int(counted.group(2)), round(GPU_SHARE * GPUS[counted.group(1)].memory))
    if counted is not None and counted.group(1) == "cpu":
        return Target(name, "cpu", int(counted.group(2)), None)
    return None


def missing_for(platform: str) -> list[str]:
    """Distributions to install before that platform can be compiled for."""
    return [distribution for module, distribution in NEEDS[platform].items() if not _exists(module)]


def _exists(module: str) -> bool:
    """Whether there is such a module, or (`nvidia.cu13.bin.ptxas`) such a file or folder in a namespace package."""
    try:
        if importlib.util.find_spec(module) is not None:
            return True
        parent, _, name = module.rpartition(".")
        places = importlib.util.find_spec(parent) if parent else None
    except ModuleNotFoundError:
        return False
    return places is not None and any((Path(place) / name).exists() for place in places.submodule_search_locations or ())


def versions_for(platform: str) -> dict[str, str]:
    """The versions that decide what the compiler makes."""
    distributions = ["jax", "jaxlib", *(name for name in NEEDS[platform].values() if name != "flatbuffers")]
    return {name: importlib.metadata.version(name) for name in distributions}
