"""`train`: prepare everything that can fail, then run windows, records, evaluations and checkpoints to the sheet."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
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
from jaxacc.experiment.config import Config, to_tree
from jaxacc.experiment.folder import check_folder, locked
from jaxacc.experiment.memory import Meter
from jaxacc.experiment.memory import read as read_memory
from jaxacc.experiment.prepare import Experiment, Given, Update, prepare
from jaxacc.experiment.progress import Report, progress
from jaxacc.experiment.records import Records, write_json
from jaxacc.experiment.resume import meta_of, restore
from jaxacc.experiment.stop import Agreement, Reason, Stop, stopping


class StoppedError(Exception):
    """A run that ended before its end, saved: `reason` says why, and with which exit status."""

    def __init__(self, reason: Reason, attempted: int):
        super().__init__(f"stopped by {reason.text} after update {attempted}, saved.")
        self.reason = reason


def train(
    config: Config,
    run_dir: Path,
    *,
    resume: bool,
    resume_from: str = "latest",
    allow_change: bool = False,
    stop_after: float | None = None,
) -> dict[str, Any]:
    """Run an experiment to its end in `run_dir`, and return its sheet.

    Of several processes, all run the windows and save checkpoints; process 0 alone prints and writes the rest.

    Raises:
      UserError: for bad input, before anything is compiled or written.
      StoppedError: after a signal, or `stop_after` seconds.
    """
    console = Console(quiet=jax.process_index() != 0)
    tell = partial(console.print, soft_wrap=True, highlight=False)
    check_folder(run_dir, resume)
    with ExitStack() as stack:
        stop = stack.enter_context(stopping(stop_after))
        checkpoints = stack.enter_context(_opened(run_dir, config)) if resume else None
        meter = Meter(tell, slack=config.input.prefetch)
        meter.mark("baseline")
        experiment = prepare(config, say=tell)
        meter.mark("after_init")
        start, state = 0, experiment.state
        if checkpoints is not None:
            start, state = restore(experiment, checkpoints, resume_from, tell, allow_change=allow_change)
        update = Update(experiment)
        update.compile(state, experiment.window(min(start, experiment.plan.updates - 1)))
        multihost_utils.sync_global_devices("every process has checked its input")
        checkpoints = checkpoints or stack.enter_context(_opened(run_dir, config))
        tell(f"run folder {run_dir}")
        for note in experiment.corpus.notes:
            tell(f"note: {note}")
        agreement = Agreement(stop, experiment.mesh)
        return _run(experiment, run_dir, state, start, update, checkpoints, agreement, meter, console)


@contextmanager
def _opened(run_dir: Path, config: Config) -> Iterator[Checkpoints]:
    """The run folder made and locked, and its checkpoints."""
    keep, folder = config.checkpoint, run_dir / "checkpoints"
    with locked(run_dir):
        opened = open_checkpoints(folder, keep=keep.keep, best=keep.keep_best, every=keep.keep_every)
        with closing(opened) as checkpoints:
            yield checkpoints


def _run(
    experiment: Experiment, run_dir: Path, state: TrainState, start: int, update: Update, checkpoints: Checkpoints, stop: Stop,
    meter: Meter, console: Console,
) -> dict[str, Any]:  # fmt: skip
    """Run the windows that are left, and write what the run folder holds."""
    writes = jax.process_index() == 0
    if writes:
        write_json(run_dir / "config.json", to_tree(experiment.config))
    files = (Records(run_dir / f"{name}.jsonl", upto=start, writes=writes) for name in ("records", "evals"))
    with closing(next(files)) as records, closing(next(files)) as evals:
        state, reason, attempted = _loop(experiment, state, start, update, checkpoints, records, evals, stop, meter, console)
        checkpoints.wait()
        if reason is not None:
            config = run_dir / "config.json"
            hint = f"Continue: jaxacc train {config} --run-dir {run_dir} --resume"
            console.print(f"stopped by {reason.text} after update {attempted}, saved. {hint}", soft_wrap=True, highlight=False)
            raise StoppedError(reason, attempted)
        result = _sheet(experiment, state, update.largest, records, evals)
        result["measured_memory"] = meter.measured_in(run_dir)
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
        held = read_memory()
        record |= {"memory_bytes": held.in_use, "memory_source": held.source}
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
    evals: Records, stop: Stop, meter: Meter, console: Console,
) -> tuple[TrainState, Reason | None, int]:  # fmt: skip
    """Run the windows from the state's position to the end of the plan, or to a reason to stop."""
    config, plan = experiment.config, experiment.plan
    meta, attempted, reason = meta_of(experiment), start, None

    def evaluation() -> float:
        loss = evaluate(experiment.step, state, experiment.held_out_windows())
        evals.append({"attempted": attempted, "loss": loss.total / loss.weight, "tokens": loss.weight})
        return loss.total / loss.weight

    with progress(console, done=start, updates=plan.updates) as report:
        recorder = Recorder(records, report, config.numerics.raise_after)
        for attempted, (window, waited) in enumerate(_timed(experiment.windows(start)), start + 1):
            state, given = update(state, window)
            recorder.push(given, waited)
            if attempted == start + 1:
                recorder.flush()
                meter.mark("first_window")
            meter.window()
            ends = attempted == plan.updates
            reason = None if ends else stop(attempted)
            periods = config.train.eval_every, config.checkpoint.every
            evaluates, saves = (every > 0 and attempted % every == 0 for every in periods)
            if evaluates or saves or ends or reason:
                recorder.flush()
                eval_loss = evaluation() if evaluates or ends else None
                if saves or ends or reason:
                    checkpoints.save(attempted, state, meta, eval_loss=eval_loss)
                recorder.restart_clock()
            if reason:
                break
    return state, reason, attempted


def _timed(windows: Iterator[PyTree]) -> Iterator[tuple[PyTree, float]]:
    """Every window, with the seconds that it was waited for."""
    while True:
        asked = time.perf_counter()
        window = next(windows, None)
        if window is None:
            return
        yield window, time.perf_counter() - asked


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
