"""`train`: prepare everything that can fail, then run windows, records, evaluations and checkpoints to the sheet."""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console

from jaxacc._ledger import check_skipped
from jaxacc._mean import Mean, merge
from jaxacc._step import Outcome, Step, TrainState
from jaxacc._tree import PyTree
from jaxacc.experiment import sheet
from jaxacc.experiment.checkpoint import Checkpoints, open_checkpoints
from jaxacc.experiment.config import Config, UserError, to_tree
from jaxacc.experiment.prepare import Experiment, Given, Update, prepare
from jaxacc.experiment.progress import Report, progress
from jaxacc.experiment.records import Records, write_json

FREE_TO_CHANGE = (
    "train.updates", "train.epochs", "train.tokens", "train.eval_every", "checkpoint.every", "checkpoint.keep",
    "input.prefetch", "input.workers",
)  # fmt: skip
"""What a resumed run may state differently."""
SPLIT = ("batch.effective", "batch.microbatch", "batch.accumulation_steps")


def train(config: Config, run_dir: Path, *, resume: bool) -> dict[str, Any]:
    """Run an experiment to its end in `run_dir`, and return its sheet.

    Of several processes, all run the windows and save checkpoints; process 0 alone prints and writes the rest.

    Raises:
      UserError: for bad input, before anything is compiled or written.
    """
    writes = jax.process_index() == 0
    console = Console(quiet=not writes)
    _check_folder(run_dir, resume)
    experiment = prepare(config, say=lambda text: console.print(text, soft_wrap=True, highlight=False))
    config = experiment.config
    start, state = 0, experiment.state
    if resume:
        start, state = _restore(experiment, run_dir, console)
    update = Update(experiment)
    update.compile(state, experiment.window(min(start, experiment.plan.updates - 1)))
    multihost_utils.sync_global_devices("every process has checked its input")
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the run folder {run_dir}: {error.strerror}. Give another --run-dir.") from error
    console.print(f"run folder {run_dir}", soft_wrap=True)
    for note in experiment.corpus.notes:
        console.print(f"note: {note}", soft_wrap=True, highlight=False)
    if writes:
        write_json(run_dir / "config.json", to_tree(config))
    checkpoints = open_checkpoints(run_dir / "checkpoints", keep=config.checkpoint.keep)
    records, evals = (Records(run_dir / f"{name}.jsonl", upto=start, writes=writes) for name in ("records", "evals"))
    try:
        state = _loop(experiment, state, start, update, checkpoints, records, evals, console)
    finally:
        checkpoints.close()
        records.close()
        evals.close()
    result = _sheet(experiment, state, update.largest, records, evals)
    if writes:
        write_json(run_dir / "sheet.json", result)
    sheet.show(result, console)
    console.print(f"run folder {run_dir}", soft_wrap=True)
    return result


class Recorder:
    """Reads what an update gave while the next one runs, so that the device does not wait for the host."""

    def __init__(self, records: Records, report: Report, raise_after: int):
        self._records, self._report, self._raise_after = records, report, raise_after
        self._pending: tuple[Given, float] | None = None
        self._seconds, self._tokens = 0.0, 0
        self._tokens_before: int = (records.last or {}).get("tokens", 0)
        self.restart_clock()

    def push(self, given: Given, waited: float) -> None:
        """Take an update that was just dispatched, after so many seconds of waiting for its window; record the one before."""
        before, self._pending = self._pending, (given, waited)
        if before is not None:
            self._record(*before)

    def flush(self) -> None:
        """Wait for the last update and record it."""
        if self._pending is not None:
            self._record(*self._pending)
            self._pending = None

    def restart_clock(self) -> None:
        """Leave the time since the last update out of the next one's seconds."""
        self._clock = time.perf_counter()

    def _record(self, given: Given, waited: float) -> None:
        info, ledger, lr = jax.device_get(given)
        seconds = time.perf_counter() - self._clock
        self.restart_clock()
        counts = {name: int(getattr(ledger, name)) for name in ("attempted", "applied", "microbatches", "examples", "tokens")}
        record = {
            **counts, "loss": float(info.loss), "grad_norm": float(info.grad_norm), "lr": float(lr), "seconds": seconds,
            "waited": waited, "outcome": Outcome(int(info.outcome)).name, "dropped": int(info.dropped),
        }  # fmt: skip
        optional = {"loss_scale": info.loss_scale, "noise_scale": info.noise_scale}
        record |= {name: float(value) for name, value in optional.items() if value is not None}
        self._seconds += seconds
        self._tokens, self._tokens_before = self._tokens + counts["tokens"] - self._tokens_before, counts["tokens"]
        self._records.append(record)
        self._report(record, self._tokens / self._seconds)
        if self._raise_after:
            check_skipped(ledger, raise_after=self._raise_after)


def evaluate(step: Step, state: TrainState, windows: Iterable[Any]) -> Mean:
    """The undivided loss over all windows, merged as Python numbers: exact counts, float64 sums."""
    total = Mean(0.0, 0)
    for window in windows:
        loss = jax.device_get(step.evaluate(state, window).loss)
        total = merge(total, Mean(float(loss.total), int(loss.weight)))
    return total


def _loop(
    experiment: Experiment, state: TrainState, start: int, update: Update, checkpoints: Checkpoints, records: Records,
    evals: Records, console: Console,
) -> TrainState:  # fmt: skip
    """Run the windows from the state's position to the end of the plan."""
    config, plan = experiment.config, experiment.plan
    meta = _meta(experiment)

    def evaluation(attempted: int) -> None:
        loss = evaluate(experiment.step, state, experiment.held_out_windows())
        evals.append({"attempted": attempted, "loss": loss.total / loss.weight, "tokens": loss.weight})

    with progress(console, done=start, updates=plan.updates) as report:
        recorder = Recorder(records, report, config.numerics.raise_after)
        for attempted, (window, waited) in enumerate(_timed(experiment.windows(start)), start + 1):
            state, given = update(state, window)
            recorder.push(given, waited)
            due = [every > 0 and attempted % every == 0 for every in (config.train.eval_every, config.checkpoint.every)]
            if any(due) or attempted == plan.updates:
                recorder.flush()
                if due[0] or attempted == plan.updates:
                    evaluation(attempted)
                if due[1] or attempted == plan.updates:
                    checkpoints.save(attempted, state, meta)
                recorder.restart_clock()
    return state


def _timed(windows: Iterator[PyTree]) -> Iterator[tuple[PyTree, float]]:
    """Every window, with the seconds that it was waited for."""
    while True:
        asked = time.perf_counter()
        window = next(windows, None)
        if window is None:
            return
        yield window, time.perf_counter() - asked


def _check_folder(run_dir: Path, resume: bool) -> None:
    if resume and not (run_dir / "config.json").exists():
        raise UserError(f"{run_dir} is not a run folder (it has no config.json). Leave out --resume to begin a run there.")
    if run_dir.exists() and not run_dir.is_dir():
        raise UserError(f"{run_dir} is a file. Give a folder.")
    if not resume and run_dir.exists() and any(run_dir.iterdir()):
        raise UserError(f"{run_dir} exists and is not empty. Give another --run-dir, or --resume to continue the run in it.")


def _restore(experiment: Experiment, run_dir: Path, console: Console) -> tuple[int, TrainState]:
    """Attempted windows and state of the newest checkpoint; the beginning where there is none yet."""
    folder = run_dir / "checkpoints"
    checkpoints = open_checkpoints(folder, keep=experiment.config.checkpoint.keep) if folder.exists() else None
    attempted = checkpoints.latest() if checkpoints else None
    if checkpoints is None or attempted is None:
        console.print(f"no checkpoint in {run_dir} yet: starting from update 0", soft_wrap=True)
        return 0, experiment.state
    _check_same(checkpoints.meta(attempted), experiment, run_dir)
    if attempted > experiment.plan.updates:
        raise UserError(
            f"{run_dir} has run {attempted} updates already, and the duration is {experiment.plan.updates}. State a longer one."
        )
    state = checkpoints.restore(attempted, experiment.state)
    checkpoints.close()
    planned, consumed = experiment.plan.counts(attempted)["examples"], int(jax.device_get(state.ledger).examples)
    if planned != consumed:
        raise UserError(
            f"{run_dir} has consumed {consumed} rows in {attempted} updates, and a run of this duration {planned}: the last "
            "window of the shorter run was a short one. State the duration of the run, or begin a new one."
        )
    console.print(f"resuming after update {attempted} of {experiment.plan.updates}", soft_wrap=True)
    return attempted, state


def _check_same(meta: dict[str, Any], experiment: Experiment, run_dir: Path) -> None:
    """Refuse to continue a run as another one."""
    saved, now = _flat(meta["config"]), _flat(to_tree(experiment.config))
    changed = [name for name in sorted(saved.keys() | now) if saved.get(name) != now.get(name)]
    refused = [
        f"{name}: {saved.get(name)!r} in the run, {now.get(name)!r} now" for name in changed if name not in FREE_TO_CHANGE
    ]
    if meta["split"] != experiment.split._asdict():
        refused.append(f"split: {meta['split']} in the run, {experiment.split._asdict()} now")
    if meta["fingerprint"] != experiment.corpus.fingerprint:
        refused.append("the data itself: its fingerprint is not the one of the run")
    if refused:
        raise UserError(
            "\n  ".join([f"{run_dir} was run with another configuration; repeat its own, or begin a new run:", *refused])
        )


def _meta(experiment: Experiment) -> dict[str, Any]:
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "optax", "flax", "orbax-checkpoint")}
    return {
        "config": to_tree(experiment.config), "split": experiment.split._asdict(), "versions": versions,
        "fingerprint": experiment.corpus.fingerprint,
    }  # fmt: skip


def _flat(tree: dict[str, Any]) -> dict[str, Any]:
    """`{section.key: value}` without the quantities that the split stands for; tuples as JSON's lists."""
    pairs = ((f"{section}.{key}", value) for section, keys in tree.items() for key, value in keys.items())
    kept = ((name, value) for name, value in pairs if name not in SPLIT)
    return {name: list(value) if isinstance(value, tuple) else value for name, value in kept}


def _whole(params: PyTree, mesh: jax.sharding.Mesh | None) -> PyTree:
    """The parameters with every leaf whole in every process."""
    return params if mesh is None else jax.jit(lambda leaves: leaves, out_shardings=NamedSharding(mesh, P()))(params)


def _sheet(experiment: Experiment, state: TrainState, compiled: Any, records: Records, evals: Records) -> dict[str, Any]:
    split, plan, ledger = experiment.split, experiment.plan, jax.device_get(state.ledger)
    config, counts = experiment.config, plan.counts(int(ledger.attempted))
    peak, source = sheet.peak_memory(compiled)
    first, last, evaluated = records.first or {}, records.last or {}, evals.last or {}
    counted = "labelled pixels" if config.model.name == "unet" else "supervised tokens"
    return {
        "microbatch": split.microbatch, "accumulation_steps": split.accumulation_steps, "replicas": split.replicas,
        "effective_batch": split.effective_batch, "attempted": int(ledger.attempted), "applied": int(ledger.applied),
        "skipped": int(ledger.attempted) - int(ledger.applied),
        "microbatches": int(ledger.microbatches), "examples": int(ledger.examples),
        "supervised_tokens": int(ledger.tokens),
        "precision": sheet.PRECISION[config.model.precision],
        "loss_scale": last.get("loss_scale", "none"), "dropped_microbatches": int(ledger.dropped),
        "noise_scale": "not asked for" if state.noise is None else last.get("noise_scale") or "unavailable",
        "normalization": f"{counted} of the window",
        "windows": config.batch.schedule or (f"{config.batch.tokens} tokens" if config.batch.tokens else "all alike"),
        "last_window": config.batch.last, "examples_dropped": counts["dropped"], "examples_carried": counts["carried"],
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(state.params)),
        "peak_memory_bytes": peak, "peak_memory_source": source,
        "first_loss": first.get("loss"), "final_loss": last.get("loss"), "eval_loss": evaluated.get("loss"),
        "unigram_entropy": sheet.entropy(experiment.corpus.held_out.label_counts()),
        "data_fingerprint": experiment.corpus.fingerprint, "params_sha256": sheet.digest(_whole(state.params, experiment.mesh)),
    }  # fmt: skip
