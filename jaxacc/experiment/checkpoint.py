"""Orbax checkpoints of a training state: the only file that imports orbax."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp

from jaxacc._step import TrainState


class Checkpoints(NamedTuple):
    """The checkpoints of a run folder, by attempted windows.

    Each holds the items `params`, `opt_state`, `progress` (all else in the state: the position in the data is
    `ledger.examples`) and `meta` (JSON: the configuration, the fingerprint of the data).
    """

    manager: ocp.CheckpointManager

    def latest(self) -> int | None:
        """Attempted windows of the newest checkpoint, or None."""
        return self.manager.latest_step()

    def save(self, attempted: int, state: TrainState, meta: dict[str, Any]) -> None:
        """Begin an asynchronous, atomic save, unless there is one of this window. The state may be donated at once."""
        if attempted == self.latest():
            return
        save = ocp.args.StandardSave
        self.manager.save(
            attempted,
            args=ocp.args.Composite(
                params=save(state.params),
                opt_state=save(state.opt_state),
                progress=save(_progress(state)),
                meta=ocp.args.JsonSave(meta),
            ),
        )

    def meta(self, attempted: int) -> dict[str, Any]:
        """The `meta` of a checkpoint."""
        return self.manager.restore(attempted, args=ocp.args.Composite(meta=ocp.args.JsonRestore()))["meta"]

    def restore(self, attempted: int, like: TrainState) -> TrainState:
        """The saved state, with the tree, dtypes and placement of `like`."""
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        load = ocp.args.StandardRestore
        progress = _progress(abstract)
        items = self.manager.restore(
            attempted,
            args=ocp.args.Composite(params=load(abstract.params), opt_state=load(abstract.opt_state), progress=load(progress)),
        )
        return like._replace(params=items["params"], opt_state=items["opt_state"], **items["progress"])

    def close(self) -> None:
        """Wait for saves to be committed; raise what went wrong in them."""
        self.manager.wait_until_finished()
        self.manager.close()


def _progress(state: TrainState) -> dict[str, Any]:
    """What there is in the state beside parameters and optimizer state."""
    fields = state._replace(params=None, opt_state=None, layout=None)._asdict()
    return {name: value for name, value in fields.items() if value is not None}


def open_checkpoints(folder: Path, *, keep: int) -> Checkpoints:
    """Open or begin the checkpoints of a folder, of which the newest `keep` stay."""
    options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=True)
    return Checkpoints(ocp.CheckpointManager(folder.absolute(), options=options))
