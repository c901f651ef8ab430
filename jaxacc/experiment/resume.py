"""Continue a run: from which checkpoint, as which experiment, and with what changed."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from typing import Any

import jax

from jaxacc._step import TrainState
from jaxacc.experiment.checkpoint import Checkpoints
from jaxacc.experiment.config import UserError, to_tree
from jaxacc.experiment.prepare import Experiment

Tell = Callable[[str], None]

FREE_TO_CHANGE = (
    "train.updates", "train.epochs", "train.tokens", "train.eval_every", "checkpoint.every", "checkpoint.keep",
    "checkpoint.keep_best", "checkpoint.keep_every", "input.prefetch", "input.workers", "numerics.raise_after", "batch.budget",
)  # fmt: skip
"""What a resumed run may state differently without more ado."""
SPLIT = ("batch.effective", "batch.microbatch", "batch.accumulation_steps")


def meta_of(experiment: Experiment) -> dict[str, Any]:
    """What a checkpoint says of the run that wrote it."""
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "optax", "flax", "orbax-checkpoint")}
    return {
        "config": to_tree(experiment.config), "split": experiment.split._asdict(), "versions": versions,
        "fingerprint": experiment.corpus.fingerprint,
    }  # fmt: skip


def restore(
    experiment: Experiment, checkpoints: Checkpoints, wanted: str, tell: Tell, *, allow_change: bool
) -> tuple[int, TrainState]:
    """Attempted windows and state of the newest good checkpoint, or of the one `wanted`; the beginning where there is none.

    Raises:
      UserError: for another experiment, a checkpoint that is not there, or none that can be read.
    """

    def check(attempted: int, meta: dict[str, Any]) -> None:
        _check_same(meta, experiment, checkpoints, allow_change, tell)
        if attempted > experiment.plan.updates:
            raise UserError(
                f"{checkpoints.folder.parent} has run {attempted} updates already, and the duration is "
                f"{experiment.plan.updates}. State a longer one."
            )

    steps = candidates(checkpoints, wanted, "--resume-from")
    if not steps:
        tell(f"no checkpoint in {checkpoints.folder.parent} yet: starting from update 0")
        return 0, experiment.state
    restored = checkpoints.newest_of(steps, experiment.state, check, tell)
    _check_position(experiment, restored.attempted, restored.state, checkpoints)
    checkpoints.set_aside_after(restored.attempted, tell)
    tell(f"resuming after update {restored.attempted} of {experiment.plan.updates}")
    return restored.attempted, restored.state


def candidates(checkpoints: Checkpoints, wanted: str, option: str) -> list[int]:
    """The checkpoints to try, in this order, as the option says: latest, best, or a number of updates."""
    there = checkpoints.steps()
    if wanted == "latest":
        return there[::-1]
    best = checkpoints.best()
    chosen = str(best) if wanted == "best" and best is not None else wanted
    if chosen not in map(str, there):
        raise UserError(
            f"{option} {wanted}: there is no such checkpoint in {checkpoints.folder}. There are those of update "
            f"{', '.join(map(str, there)) or '(none)'}; write one of them, latest or best."
        )
    return [int(chosen)]


def _check_position(experiment: Experiment, attempted: int, state: TrainState, checkpoints: Checkpoints) -> None:
    planned, consumed = experiment.plan.counts(attempted)["examples"], int(jax.device_get(state.ledger).examples)
    if planned != consumed:
        raise UserError(
            f"{checkpoints.folder.parent} has consumed {consumed} rows in {attempted} updates, and a run as it is configured "
            f"now {planned}: the effective batch is another, or the last window of a shorter duration was a short one. State "
            "those of the run, or begin a new one."
        )


def _check_same(meta: dict[str, Any], experiment: Experiment, checkpoints: Checkpoints, allow_change: bool, tell: Tell) -> None:
    """Refuse to continue a run as another one, unless that is allowed; other data never are."""
    saved, now = _flat(meta["config"]), _flat(to_tree(experiment.config))
    changed = [name for name in sorted(saved.keys() | now) if saved.get(name) != now.get(name) and name not in FREE_TO_CHANGE]
    changes = [f"{name}: {saved.get(name)!r} in the run, {now.get(name)!r} now" for name in changed]
    if meta["split"] != experiment.split._asdict():
        changes.append(f"split: {meta['split']} in the run, {experiment.split._asdict()} now")
    if meta["fingerprint"] != experiment.corpus.fingerprint:
        raise UserError(
            f"{checkpoints.folder.parent} was run on other data: their fingerprint is not the one of the run. Give it its own."
        )
    if changes and not allow_change:
        remedy = "repeat its own, allow it with --allow-change, or begin a new run:"
        raise UserError("\n  ".join([f"{checkpoints.folder.parent} was run with another configuration; {remedy}", *changes]))
    for change in changes:
        tell(f"changed: {change}")


def _flat(tree: dict[str, Any]) -> dict[str, Any]:
    """`{section.key: value}` without the quantities that the split stands for; tuples as JSON's lists."""
    pairs = ((f"{section}.{key}", value) for section, keys in tree.items() for key, value in keys.items())
    kept = ((name, value) for name, value in pairs if name not in SPLIT)
    return {name: list(value) if isinstance(value, tuple) else value for name, value in kept}
