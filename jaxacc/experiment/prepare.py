"""Everything an experiment needs, made before anything is written: data, plan, mesh, model, optimizer, state, update."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType

from jaxacc._ledger import Ledger
from jaxacc._scaling import LossScale
from jaxacc._split import Split
from jaxacc._step import Step, StepInfo, TrainState, make_step
from jaxacc._tree import PyTree
from jaxacc.experiment import data, models, optimizers
from jaxacc.experiment.config import Config, UserError, check
from jaxacc.experiment.rows import Corpus
from jaxacc.experiment.sources import load


class Experiment(NamedTuple):
    """All that a run needs."""

    config: Config
    split: Split
    corpus: Corpus
    plan: data.RunPlan
    mesh: jax.sharding.Mesh | None
    step: Step
    rate: optax.Schedule
    state: TrainState

    def windows(self, start: int) -> Iterator[PyTree]:
        """The training windows after the first `start` ones, on the devices."""
        numbers = range(start, self.plan.updates)
        return data.read_ahead(self._reader(), numbers, data.window_sharding(self.mesh), self.config.input)

    def window(self, number: int) -> PyTree:
        """One training window, on the devices."""
        return data.place(self._reader()(number), data.window_sharding(self.mesh))

    def held_out_windows(self) -> Iterator[PyTree]:
        """The held-out windows, on the devices."""
        rows, sharding = self.corpus.held_out, data.window_sharding(self.mesh)
        plan = data.held_out_plan(rows, self.split)
        reader = data.reader(rows, range(len(rows.targets)), plan, self.split, sharding)
        return data.read_ahead(reader, range(plan.updates), sharding, self.config.input)

    def _reader(self) -> data.Reader:
        rows, sequence = self.corpus.train, data.order(len(self.corpus.train.targets), self.config.train.seed)
        least = self.split.accumulation_steps if self.config.batch.tokens is not None else 1  # budgets: one shape for all
        return data.reader(rows, sequence, self.plan, self.split, data.window_sharding(self.mesh), steps=least)


def prepare(config: Config) -> Experiment:
    """Check the config, read the data, plan the windows, build model, optimizer and the initial state."""
    split = check(config)
    mesh = _mesh(config)
    corpus = load(config.data)
    plan = data.plan_run(config, split, corpus.train)
    row = corpus.train.batch(np.array([0]))
    _check_images(config, row)
    init, loss_fn = models.build(config.model, vocabulary=corpus.vocabulary, row=row)
    tx, rate = optimizers.build(config.optimizer, plan.updates)
    params_key, key = jax.random.split(jax.random.key(config.train.seed))
    params = jax.jit(init)(params_key)
    step = make_step(
        loss_fn, tx, mesh=mesh, params_specs=models.specs(params) if "model" in config.mesh else None,
        shard_optimizer=config.optimizer.sharded, **step_options(config),
    )  # fmt: skip
    return Experiment(config, split, corpus, plan, mesh, step, rate, step.init(params, key=key))


def step_options(config: Config) -> dict[str, Any]:
    """What `[numerics]` and the precision say to `make_step`."""
    numerics = config.numerics
    scale = LossScale(
        numerics.loss_scale, numerics.loss_scale_growth, floor=min(1.0, numerics.loss_scale),
        ceiling=max(2.0**24, numerics.loss_scale),
    )  # fmt: skip
    return {
        "row_keys": numerics.row_keys, "nonfinite": numerics.nonfinite,
        "loss_scale": scale if config.model.precision == "float16" else None,
        "noise_scale": None if numerics.noise_scale == "off" else numerics.noise_scale,
    }  # fmt: skip


def _check_images(config: Config, row: dict[str, np.ndarray]) -> None:
    if config.model.name == "unet":
        height, width = row["images"].shape[1:3]
        factor = 2**config.model.layers
        if height % factor or width % factor:
            raise UserError(
                f"images of {height} x {width} pixels cannot be halved model.layers={config.model.layers} times. State fewer "
                f"layers, or give images of a multiple of {factor} pixels."
            )


class Given(NamedTuple):
    """What an update gives besides the new state, in buffers of its own: the next update donates the state."""

    info: StepInfo
    ledger: Ledger
    lr: jax.Array


class Update:
    """`update(state, window) -> (state, Given)`, compiled once for every number of accumulation steps."""

    def __init__(self, experiment: Experiment):
        def update(state: TrainState, window: PyTree) -> tuple[TrainState, Given]:
            lr = jnp.asarray(experiment.rate(state.ledger.applied.low.astype(jnp.int32)))
            state, info = experiment.step.update(state, window)
            return state, Given(info, state.ledger, lr)

        self._update = jax.jit(update, donate_argnums=0)
        self._compiled: dict[int, Any] = {}

    def compile(self, state: TrainState, window: PyTree) -> Callable[..., tuple[TrainState, Given]]:
        """The program for windows of this many accumulation steps."""
        steps = jax.tree.leaves(window)[0].shape[0]
        if steps not in self._compiled:
            self._compiled[steps] = self._update.lower(state, window).compile()
        return self._compiled[steps]

    def __call__(self, state: TrainState, window: PyTree) -> tuple[TrainState, Given]:
        """One update. The arrays of `state` are gone."""
        return self.compile(state, window)(state, window)

    @property
    def largest(self) -> Any:
        """The program of the largest windows so far."""
        return self._compiled[max(self._compiled)]


def _mesh(config: Config) -> jax.sharding.Mesh | None:
    if not config.mesh:
        if jax.process_count() > 1:
            raise UserError(
                f"{jax.process_count()} processes run, but no mesh is stated. Add --mesh data={jax.device_count()}."
            )
        return None
    axes = {"data": 1, **config.mesh}
    wanted, found = math.prod(axes.values()), jax.device_count()
    if wanted > found or (jax.process_count() > 1 and wanted != found):
        stated = " x ".join(f"{name} {size}" for name, size in axes.items())
        raise UserError(
            f"mesh {stated} needs {wanted} devices; there are {found} in {jax.process_count()} processes. State a mesh of "
            f"{found}; for CPU devices set JAX_NUM_CPU_DEVICES={wanted}."
        )
    types = (AxisType.Auto,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), devices=jax.devices()[:wanted], axis_types=types)
