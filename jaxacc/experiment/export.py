"""The trained parameters out of a run, for other programs."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import jax

from jaxacc.experiment.checkpoint import open_checkpoints, save_tree
from jaxacc.experiment.config import UserError
from jaxacc.experiment.resume import candidates


def export(run_dir: Path, out: Path, *, checkpoint: str = "latest") -> int:
    """Write the parameters of a run's checkpoint to `out`; gives the update that they are of.

    A name that ends in .safetensors is one file, with a tensor per parameter by its path (`layers/up/kernel`); any other is
    a folder for Orbax.

    Raises:
      UserError: no run, no such checkpoint, a damaged one, an `out` that exists, or safetensors is not installed.
    """
    if not (run_dir / "checkpoints").is_dir():
        raise UserError(f"{run_dir} has no checkpoints. Give the folder of a run.")
    if out.exists():
        raise UserError(f"{out} exists. Give another name.")
    with closing(open_checkpoints(run_dir / "checkpoints", best=1, read_only=True)) as checkpoints:
        steps = candidates(checkpoints, checkpoint, "--checkpoint")
        if not steps:
            raise UserError(f"{run_dir} has no checkpoint yet.")
        params = checkpoints.params(steps[0])
    if out.suffix == ".safetensors":
        _save_safetensors(out, params)
    else:
        save_tree(out, params)
    return steps[0]


def _save_safetensors(out: Path, params: object) -> None:
    try:
        from safetensors.flax import save_file  # pyright: ignore[reportMissingImports] (optional)
    except ImportError as error:
        raise UserError(f"{out.name} needs the package safetensors. Run: pip install 'jaxacc[hf]'") from error
    named = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in jax.tree.leaves_with_path(params)}
    save_file(named, str(out))
