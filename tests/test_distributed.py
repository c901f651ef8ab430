"""Two real processes on loopback give what one process with two devices gives; and a dead one ends the other."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxacc

WORKER = Path(__file__).parent / "distributed_worker.py"


@pytest.fixture
def start(tmp_path):
    """Start both processes, without the parent's devices; what still runs at the end is killed."""
    started = []

    def start_both(mode):
        with socket.socket() as free:
            free.bind(("localhost", 0))
            address = f"localhost:{free.getsockname()[1]}"
        paths = os.pathsep.join([str(WORKER.parents[1]), str(WORKER.parent), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": paths, "XLA_FLAGS": ""}
        for process in range(2):
            command = [sys.executable, str(WORKER), str(tmp_path / "out"), mode, address, str(process)]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            started.append(subprocess.Popen(command, env=environment, **pipes))
        return started

    yield start_both
    for process in started:
        process.kill()
        process.communicate()


def test_two_processes_equal_one(start, tmp_path):
    """Seven and six rows on two processes, each from its own data: the run of one process with two devices."""
    import distributed_worker

    processes = start("environment")
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,))

    def window_of(update):
        halves = [distributed_worker.window_of_process(update, process) for process in range(2)]
        return jax.tree.map(lambda *leaves: np.concatenate(leaves, axis=1), *halves)

    expected = distributed_worker.train(mesh, window_of)
    for process in processes:
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0, output
    results = [json.loads((tmp_path / f"out.{i}").read_text()) for i in range(2)]
    assert results[0] == results[1]
    assert (results[0]["examples"], results[0]["duplicates"]) == (39, 0)
    for name in ("examples", "tokens", "microbatches"):
        assert results[0][name] == expected[name]
    np.testing.assert_allclose(results[0]["losses"], expected["losses"], rtol=1e-5)
    np.testing.assert_allclose(results[0]["embed"], expected["embed"], rtol=1e-4, atol=1e-6)
    assert expected["losses"][0] != expected["losses"][2]


def test_a_dead_process_ends_the_other(start):
    """With a heartbeat of 10 s the survivor stops with an error instead of waiting for ever."""
    began = time.monotonic()
    survivor, dead = start("dies")
    output, _ = survivor.communicate(timeout=120)
    dead.communicate(timeout=10)
    assert dead.returncode == 1
    assert survivor.returncode != 0
    assert "updated 0" in output
    assert "updated 1" not in output
    assert time.monotonic() - began < 90


def test_a_single_process_needs_nothing():
    """Where nothing announces a cluster nothing happens, again after JAX has been used."""
    code = (
        "import jax, jaxacc; jaxacc.distributed_initialize(); print(jax.device_count() > 0); "
        "jaxacc.distributed_initialize(); print(jax.process_count(), jax.distributed.is_initialized())"
    )
    environment = {
        k: v for k, v in os.environ.items() if not k.startswith(("JAX_COORD", "JAX_NUM_P", "JAX_PROC", "SLURM", "OMPI"))
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env={**environment, "JAX_PLATFORMS": "cpu"}, capture_output=True, text=True
    )
    assert done.stdout.split() == ["True", "1", "False"], done.stderr


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"JAX_COORDINATOR_ADDRESS": "a:1"}, "not JAX_NUM_PROCESSES, JAX_PROCESS_ID"),
        ({"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"}, "not JAX_COORDINATOR_ADDRESS"),
        ({"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "two", "JAX_PROCESS_ID": "0"}, "must be numbers"),
    ],
)
def test_a_partial_environment_is_refused(variables, message, monkeypatch):
    """Half an announcement is a mistake, not a single process."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        jaxacc.distributed_initialize()
