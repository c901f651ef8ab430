"""Compile a step for a target in a process of its own, which a compiler may end, and keep what was learned on disk.

python -m jaxacc._compiler REQUEST PROGRAM RESULT
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import export
from jax.experimental import topologies
from jax.sharding import AbstractMesh, AxisType, Mesh

from jaxacc._inspect import Collective, Memory, inspect_collectives, memory_of
from jaxacc._targets import GPUS, Target, versions_for

_LOCATIONS = re.compile(r'^#loc.*\n| loc\((?:#loc\d*|"[^"]*")\)', re.MULTILINE)
"""Places in source files: the same program called from another line is the same program."""


class Compiled(NamedTuple):
    """What is read from a compiled program; the memory is None where the compiler ran out of it."""

    memory: Memory | None
    collectives: tuple[Collective, ...]
    refusal: str = ""


def compile_here(update: Any, arguments: tuple[Any, ...], mesh: Mesh | None, platform: str) -> Compiled:
    """Compile for the devices of this process."""
    return _read(update.lower(*arguments), mesh, platform)


def compile_for(target: Target, update: Callable[..., Any], arguments: tuple[Any, ...], mesh: AbstractMesh | None) -> Compiled:
    """Compile `update(*arguments)`, which donates its first argument, for a target, or read what that gave before."""
    program = _export(target, update, arguments)
    text = _LOCATIONS.sub("", program.mlir_module())
    axes = {"data": 1} if mesh is None else dict(mesh.shape)
    request = {
        "target": target._asdict(), "axes": axes, "donated": len(jax.tree.leaves(arguments[0])),
        "versions": versions_for(target.platform),
    }  # fmt: skip
    name = hashlib.sha256(json.dumps(request, sort_keys=True).encode() + text.encode()).hexdigest()
    kept = _folder() / f"{name}.json"
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        _run(target, request, bytes(program.serialize()), kept)
    found = json.loads(kept.read_text())
    memory = None if found["memory"] is None else Memory(*found["memory"])
    collectives = tuple(Collective(**{**c, "axes": tuple(c["axes"])}) for c in found["collectives"])
    return Compiled(memory, collectives, found["refusal"])


def _export(target: Target, update: Callable[..., Any], arguments: tuple[Any, ...]) -> export.Exported:
    """The program for a platform, with flat arguments and results: no class of ours has to be known where it is compiled."""
    leaves, structure = jax.tree.flatten(arguments)
    flat = lambda *leaves: tuple(jax.tree.leaves(update(*jax.tree.unflatten(structure, leaves))))
    donated = tuple(range(len(jax.tree.leaves(arguments[0]))))
    return export.export(jax.jit(flat, donate_argnums=donated), platforms=[target.platform])(*leaves)


def _folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxacc" / "plans"


def _run(target: Target, request: dict[str, Any], program: bytes, kept: Path) -> None:
    """The child process; its result appears whole or not at all."""
    with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
        paths = [Path(folder) / name for name in ("request.json", "program", "result.json")]
        paths[0].write_text(json.dumps(request))
        paths[1].write_bytes(program)
        flags = f"--xla_force_host_platform_device_count={target.devices}" if target.platform == "cpu" else ""
        environment = {
            **os.environ, "JAX_PLATFORMS": "cpu", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_SKIP_MDS_QUERY": "1",
            "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip(),
        }  # fmt: skip
        environment.pop("JAX_NUM_CPU_DEVICES", None)
        command = [sys.executable, "-m", "jaxacc._compiler", *map(str, paths)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode or not paths[2].exists():
            last = done.stderr.strip().splitlines()[-3:]
            raise RuntimeError(f"the compiler for target={target.name!r} ended with status {done.returncode}: {' '.join(last)}")
        paths[2].replace(kept)


def _compile(request: dict[str, Any], program: bytes) -> Compiled:
    """In the child: the program on devices that are not there."""
    target, axes = Target(**request["target"]), request["axes"]
    exported = export.deserialize(bytearray(program))
    devices = np.array(_devices(target)[: exported.nr_devices]).reshape(tuple(axes.values()))
    mesh = Mesh(devices, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))
    shardings = exported.in_shardings_jax(mesh)
    replicated = jax.NamedSharding(mesh, jax.P())
    specs = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding or replicated)
        for aval, sharding in zip(exported.in_avals, shardings, strict=True)
    ]
    call = jax.jit(exported.call, donate_argnums=tuple(range(request["donated"])))
    return _read(call.lower(*specs), mesh if mesh.size > 1 else None, target.platform)


def _read(lowered: Any, mesh: Mesh | None, platform: str) -> Compiled:
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return Compiled(None, (), str(error).strip().partition("\n")[0][:300])
    found = () if mesh is None else tuple(inspect_collectives(compiled, mesh=mesh))
    return Compiled(memory_of(compiled, platform=platform), found)


def _devices(target: Target) -> Any:
    if target.platform == "cpu":
        return jax.devices()
    if target.platform == "tpu":
        return topologies.get_topology_desc(platform="tpu", topology_name=target.name).devices
    gpu = GPUS[target.name.rpartition("x")[0]]
    shape = f"1x1x{target.devices}"
    return topologies.get_topology_desc("", platform="cuda", target_config=gpu.description(), topology=shape).devices


def _main(request: str, program: str, result: str) -> None:
    found = _compile(json.loads(Path(request).read_text()), Path(program).read_bytes())
    told = {
        "memory": found.memory and list(found.memory), "collectives": [c._asdict() for c in found.collectives],
        "refusal": found.refusal,
    }  # fmt: skip
    Path(result).write_text(json.dumps(told))


if __name__ == "__main__":
    _main(*sys.argv[1:])
