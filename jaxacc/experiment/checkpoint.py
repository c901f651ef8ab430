"""Orbax checkpoints of a training state: the only file that imports orbax."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from orbax.checkpoint import checkpoint_managers as managers

from jaxacc._step import TrainState
from jaxacc._tree import PyTree
from jaxacc.experiment.checksum import checksums, describe, differences
from jaxacc.experiment.config import UserError

FORMAT = 1
"""Of the checkpoints written here; newer ones are refused."""


class BadCheckpointError(Exception):
    """A checkpoint that cannot be read, or does not hold what was saved."""


@dataclass
class Retention:
    """Which checkpoints stay: those that `policy` keeps among the good ones, by eval loss too; and the bad ones.

    Attributes:
      policy: Orbax's. The metrics that it sees are the eval losses.
      losses: eval loss by attempted windows.
      bad: checkpoints that could not be read. They neither count nor go.
    """

    policy: managers.PreservationPolicy
    losses: dict[int, float] = field(default_factory=dict)
    bad: set[int] = field(default_factory=set)

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """As Orbax asks it."""
        good = [
            dataclasses.replace(info, metrics={"loss": self.losses[info.step]} if info.step in self.losses else None)
            for info in checkpoints
            if info.step not in self.bad
        ]
        flags = self.policy.should_preserve(good, context=context) if good else []
        kept = {info.step for info, flag in zip(good, flags, strict=True) if flag}
        return [info.step in self.bad or info.step in kept for info in checkpoints]


class Restored(NamedTuple):
    """A checkpoint that was read."""

    attempted: int
    state: TrainState


class Checkpoints(NamedTuple):
    """The checkpoints of a run folder, by attempted windows.

    Each holds the items `params`, `opt_state`, `progress` (all else of the state, the ledger for one) and `meta`: JSON
    that says what was saved, with the name, shape, dtype and checksum of every leaf.
    """

    folder: Path
    manager: ocp.CheckpointManager
    retention: Retention

    def steps(self) -> list[int]:
        """Attempted windows of the checkpoints, but for those that could not be read, in order."""
        return [attempted for attempted in sorted(self.manager.all_steps()) if attempted not in self.retention.bad]

    def best(self) -> int | None:
        """Attempted windows of the checkpoint with the lowest eval loss, or None."""
        evaluated = [attempted for attempted in self.steps() if attempted in self.retention.losses]
        return min(evaluated, key=self.retention.losses.__getitem__, default=None)

    def save(self, attempted: int, state: TrainState, meta: dict[str, Any], *, eval_loss: float | None = None) -> None:
        """Begin an asynchronous, atomic save, unless there is one of this window. The state may be donated at once.

        A save that fails is reported by the next one or by `close`.
        """
        if attempted in self.steps():
            return
        parts = _parts(state)
        leaves = {name: [*what, sums] for (name, what), sums in zip(describe(parts).items(), checksums(parts), strict=True)}
        meta = _signed({**meta, "format": FORMAT, "attempted": attempted, "eval_loss": eval_loss, "leaves": leaves})
        items = {name: ocp.args.StandardSave(part) for name, part in parts.items()}
        if eval_loss is not None:
            self.retention.losses[attempted] = eval_loss
        with _told(self.folder):
            if attempted in self.retention.bad:
                self._rename(attempted, "bad")
            self.manager.save(attempted, args=ocp.args.Composite(**items, meta=ocp.args.JsonSave(meta)), force=True)

    def meta(self, attempted: int) -> dict[str, Any]:
        """What a checkpoint says that it holds."""
        args = ocp.args.Composite(meta=ocp.args.JsonRestore())
        meta = _attempt(lambda: self.manager.restore(attempted, args=args)["meta"])
        if not isinstance(meta, dict) or meta != _signed(meta):
            raise BadCheckpointError("its meta data are not what was saved")
        if meta["format"] > FORMAT:
            raise UserError(
                f"{self.folder / str(attempted)} has format {meta['format']}, and this jaxacc reads {FORMAT} at most. Use the "
                "jaxacc that wrote it, or a newer one."
            )
        return meta

    def restore(self, attempted: int, like: TrainState, meta: dict[str, Any]) -> TrainState:
        """The saved state, with the placement of `like`, whose leaves may be abstract; checked against `meta`."""
        if differ := self.differences(like, meta):
            raise UserError("\n  ".join([f"{self.folder / str(attempted)} is of another model or optimizer:", *differ]))
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, _parts(like))
        args = ocp.args.Composite(**{name: ocp.args.StandardRestore(part) for name, part in abstract.items()})
        items = _attempt(lambda: dict(self.manager.restore(attempted, args=args).items()))
        self._check_sums(items, meta["leaves"])
        progress = items.pop("progress")
        return like._replace(**items, **progress)

    def differences(self, like: TrainState, meta: dict[str, Any]) -> list[str]:
        """One line per leaf in which a state differs from the one saved."""
        return differences({name: leaf[:2] for name, leaf in meta["leaves"].items()}, describe(_parts(like)))

    def params(self, attempted: int) -> PyTree:
        """The parameters of a checkpoint alone, whole, on the first device.

        Raises:
          UserError: if it is damaged.
        """
        try:
            leaves = self.meta(attempted)["leaves"]
            metadata = self.manager.item_metadata(attempted)["params"]
            device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
            like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device), metadata)
            args = ocp.args.Composite(params=ocp.args.StandardRestore(like))
            params = _attempt(lambda: self.manager.restore(attempted, args=args)["params"])
            self._check_sums({"params": params}, leaves)
        except BadCheckpointError as error:
            raise UserError(f"checkpoint {self.folder / str(attempted)} is damaged: {error}. Name another one.") from error
        return params

    def newest_of(
        self, steps: Sequence[int], like: TrainState, check: Callable[[int, dict[str, Any]], None], tell: Callable[[str], None]
    ) -> Restored:
        """The first of these checkpoints that is good, placed like `like`, whose arrays go. Bad ones are told and left alone.

        Raises:
          UserError: none of them can be read, or `check` of its meta data refuses it.
        """
        for attempted in steps:
            try:
                meta = self.meta(attempted)
                check(attempted, meta)
                state, reason = self.restore(attempted, like, meta), ""
            except BadCheckpointError as error:
                state, reason = None, str(error)
            if _everywhere(state is not None) and state is not None:
                return Restored(attempted, state)
            reason = reason or "another process says so"
            tell(f"checkpoint {self.folder / str(attempted)} is damaged, and left in place: {reason}")
            self.retention.bad.add(attempted)
        raise UserError(
            f"none of the checkpoints in {self.folder} can be read ({', '.join(map(str, steps))}). Bring one back from a copy, "
            "or begin a new run in another --run-dir."
        )

    def set_aside_after(self, attempted: int, tell: Callable[[str], None]) -> None:
        """Rename the good checkpoints of later windows, which the run is about to write anew."""
        for later in [step for step in self.steps() if step > attempted]:
            tell(f"checkpoint {self.folder / str(later)} is later, and renamed to {later}.aside")
            self._rename(later, "aside")

    def wait(self) -> None:
        """Wait for saves to be committed; raises UserError for what went wrong in them."""
        with _told(self.folder):
            self.manager.wait_until_finished()

    def close(self) -> None:
        """Wait for saves to be committed and let go of the folder; raises as `wait`."""
        try:
            self.wait()
        finally:
            self.manager.close()

    def _check_sums(self, tree: PyTree, leaves: dict[str, list[Any]]) -> None:
        for name, found in zip(describe(tree), checksums(tree), strict=True):
            if leaves[name][2] != found:
                raise BadCheckpointError(f"the leaf {name} is not what was saved")

    def _rename(self, attempted: int, suffix: str) -> None:
        """Give up the place of a checkpoint, not what it holds."""
        if jax.process_index() == 0:
            taken = self.folder / str(attempted)
            names = [f"{attempted}.{suffix}", *(f"{attempted}.{suffix}{number}" for number in range(2, 100))]
            taken.rename(next(path for path in map(taken.with_name, names) if not path.exists()))
        multihost_utils.sync_global_devices("checkpoint renamed")
        self.retention.bad.discard(attempted)
        self.retention.losses.pop(attempted, None)
        self.manager.reload()


def save_tree(folder: Path, tree: PyTree) -> None:
    """A new folder that holds a tree of arrays, for `orbax.checkpoint.StandardCheckpointer().restore`."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder.absolute(), tree)


def open_checkpoints(folder: Path, *, keep: int = 1, best: int = 0, every: int = 0, read_only: bool = False) -> Checkpoints:
    """Open or begin the checkpoints of a folder: the newest `keep` stay, the `best` by eval loss, and every n-th.

    `read_only` neither makes the folder nor cleans it up: a run may be saving there.
    """
    policies: list[Any] = [managers.LatestN(keep)]
    if best:
        lowest = managers.BestN(get_metric_fn=lambda metrics: -metrics["loss"], n=best, keep_checkpoints_without_metrics=False)
        policies.append(lowest)
    if every:
        policies.append(managers.EveryNSteps(every))
    retention = Retention(managers.AnyPreservationPolicy(policies))
    options = ocp.CheckpointManagerOptions(
        preservation_policy=retention, enable_async_checkpointing=True, cleanup_tmp_directories=not read_only,
        read_only=read_only, create=not read_only, lightweight_initialize=True,
    )  # fmt: skip
    try:
        manager = ocp.CheckpointManager(folder.absolute(), options=options)
    except OSError as error:
        raise UserError(f"cannot write checkpoints in {folder}: {error}. Give a folder that can be written.") from error
    checkpoints = Checkpoints(folder, manager, retention)
    if best:
        retention.losses.update(_losses(checkpoints))
    return checkpoints


def _losses(checkpoints: Checkpoints) -> dict[int, float]:
    """The eval losses that the checkpoints tell; bad ones are found when they are to be restored."""
    losses = {}
    for attempted in checkpoints.steps():
        try:
            losses[attempted] = checkpoints.meta(attempted)["eval_loss"]
        except (BadCheckpointError, UserError):
            continue
    return {attempted: loss for attempted, loss in losses.items() if loss is not None}


def _parts(state: TrainState) -> dict[str, PyTree]:
    """The items of a checkpoint: parameters, optimizer state, and everything else that has arrays."""
    fields = {name: value for name, value in state._asdict().items() if name != "layout" and jax.tree.leaves(value)}
    own = {name: fields.pop(name) for name in ("params", "opt_state") if name in fields}
    return {**own, "progress": fields}


def _signed(meta: dict[str, Any]) -> dict[str, Any]:
    """With the digest of its content."""
    content = json.loads(json.dumps({name: value for name, value in meta.items() if name != "digest"}))
    return {**content, "digest": hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()}


def _attempt(read: Callable[[], Any]) -> Any:
    """What `read` gives. Orbax has an exception of its own for every kind of damage."""
    try:
        return read()
    except jax.errors.JaxRuntimeError:  # no memory, no device: not the checkpoint's fault
        raise
    except Exception as error:
        first = next(iter(str(error).splitlines()), "")
        raise BadCheckpointError(f"{type(error).__name__}: {first[:300]}") from error


def _everywhere(flag: bool) -> bool:
    """Whether it is so in all processes."""
    return flag if jax.process_count() == 1 else bool(multihost_utils.process_allgather(jax.numpy.array(flag)).all())


@contextmanager
def _told(folder: Path) -> Iterator[None]:
    """Say what failed in a save, and which checkpoints are there all the same."""
    try:
        yield
    except (UserError, jax.errors.JaxRuntimeError):
        raise
    except Exception as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)[:300]
        left = sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal()) if folder.exists() else []
        raise UserError(
            f"cannot save a checkpoint in {folder}: {reason}. Those of update {', '.join(map(str, left)) or '(none)'} are "
            "there. Make room, or make the folder writable, and continue with --resume."
        ) from error
