"""Start JAX on several processes: from arguments, from the environment, from a cluster that JAX knows, or on one."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence

import jax

TRIPLE = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


def distributed_initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    local_device_ids: Sequence[int] | None = None,
    *,
    initialization_timeout: int = 300,
    heartbeat_timeout: int = 100,
    shutdown_timeout: int = 60,
) -> None:
    """Connect the processes of a run, before anything else uses JAX. Further calls do nothing.

    The first that is there counts: the arguments; the environment variables `JAX_COORDINATOR_ADDRESS`,
    `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID` (all three); what JAX detects by itself (Slurm under `srun`, Open MPI,
    Kubernetes, TPU pods). Otherwise this is a single process, and nothing happens.

    A process that dies does not leave the others hanging: they are ended with an error once its heartbeat has been
    missing for `heartbeat_timeout` seconds, or, where it raised an exception and waits to shut down,
    after `shutdown_timeout` seconds.

    Args:
      coordinator_address: `host:port` of process 0. Arguments left out beside it are detected by JAX.
      num_processes: how many processes there are.
      process_id: which of them this is, from 0.
      local_device_ids: the devices of this host that belong to this process. Under Slurm JAX gives each task the one
        GPU of its local number: name them all where one task per host is to use all of them.
      initialization_timeout: seconds to wait for all processes to connect.
      heartbeat_timeout: seconds without a sign of life after which a process counts as dead.
      shutdown_timeout: seconds to wait for the others at the end.

    Raises:
      ValueError: if only some of the three environment variables are set, or they are no numbers.
      RuntimeError: from JAX, if it has been used already, or if the processes cannot connect.
    """
    if jax.distributed.is_initialized():
        return
    timeouts = (initialization_timeout, heartbeat_timeout, shutdown_timeout)
    devices = tuple(local_device_ids) if local_device_ids is not None else None
    if coordinator_address is None and num_processes is None and process_id is None:
        coordinator_address, num_processes, process_id = _read_environment()
    if coordinator_address is None and num_processes is None and process_id is None:
        _detect(devices, timeouts)
    else:
        _initialize(coordinator_address, num_processes, process_id, devices, timeouts)


def _read_environment() -> tuple[str | None, int | None, int | None]:
    values = {name: os.environ.get(name) for name in TRIPLE}
    missing = [name for name, value in values.items() if not value]
    if len(missing) == len(TRIPLE):
        return None, None, None
    if missing:
        raise ValueError(
            f"of the environment variables {', '.join(TRIPLE)} some are set, but not {', '.join(missing)}. Set all three, "
            "or none to let JAX detect the cluster."
        )
    address, processes, process = (value or "" for value in values.values())
    if not (processes.isdecimal() and process.isdecimal()):
        raise ValueError(f"JAX_NUM_PROCESSES={processes!r} and JAX_PROCESS_ID={process!r} must be numbers.")
    return address, int(processes), int(process)


@functools.cache
def _detect(devices: tuple[int, ...] | None, timeouts: tuple[int, int, int]) -> None:
    """Let JAX detect the cluster. That there is none is remembered, for JAX refuses to be asked once it is in use."""
    try:
        _initialize(None, None, None, devices, timeouts)
    except ValueError as error:
        if "coordinator_address" not in str(error):
            raise


def _initialize(
    address: str | None,
    processes: int | None,
    process: int | None,
    devices: tuple[int, ...] | None,
    timeouts: tuple[int, int, int],
) -> None:
    initialization, heartbeat, shutdown = timeouts
    jax.distributed.initialize(
        address, processes, process, devices, initialization_timeout=initialization, heartbeat_timeout_seconds=heartbeat,
        shutdown_timeout_seconds=shutdown,
    )  # fmt: skip
