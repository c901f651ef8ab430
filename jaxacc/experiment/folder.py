"""The folder of a run: whether it may be used, and that one process at a time uses it."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxacc.experiment.config import UserError

UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""What file systems say that have no locks."""


def check_folder(run_dir: Path, resume: bool) -> None:
    """Refuse a folder that a run cannot begin or go on in.

    Raises:
      UserError: if it is no run folder, or one that is used already.
    """
    if resume and not (run_dir / "config.json").exists():
        raise UserError(f"{run_dir} is not a run folder (it has no config.json). Leave out --resume to begin a run there.")
    if run_dir.exists() and not run_dir.is_dir():
        raise UserError(f"{run_dir} is a file. Give a folder.")
    if not resume and run_dir.exists() and any(run_dir.iterdir()):
        raise UserError(f"{run_dir} exists and is not empty. Give another --run-dir, or --resume to continue the run in it.")


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Make the folder where there is none and hold its lock, which ends with the process. Of several processes the first does.

    Raises:
      UserError: in all of them, if another run holds it, or the folder cannot be written.
    """
    descriptor, fault = _lock(run_dir) if jax.process_index() == 0 else (None, "process 0 could not lock the run folder.")
    if not _first_says(descriptor is not None):
        raise UserError(fault)
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _lock(run_dir: Path) -> tuple[int | None, str]:
    """The open lock file, or None and why not."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(run_dir / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        return None, f"cannot write in the run folder {run_dir}: {error.strerror}. Give another --run-dir."
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            os.close(descriptor)
            return None, f"another process runs in {run_dir}. Wait for its end, or give another --run-dir."
    return descriptor, ""


def _first_says(flag: bool) -> bool:
    return flag if jax.process_count() == 1 else bool(multihost_utils.broadcast_one_to_all(np.array(flag)))
