"""Everything an experiment needs, made before anything is written: data, plan, mesh, model, optimizer, state, update."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxacc._ledger import Ledger
from jaxacc._split import Split
from jaxacc._step import Step, StepInfo, TrainState, make_step
from jaxacc._tree import PyTree
from jaxacc.experiment import data, optimizers
from jaxacc.experiment.config import Config, check
from jaxacc.experiment.planning import choose, settled
from jaxacc.experiment.problem import problem_of
from jaxacc.experiment.rows import Corpus


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


def prepare(config: Config, *, say: Callable[[str], None] = lambda _: None) -> Experiment:
    """Check the config, read the data, plan the windows, build model, optimizer and the initial state.

    A microbatch "auto" is planned first, which `say` is told; the config of the experiment then states the one chosen.
    """
    split = check(config)
    problem = problem_of(config)
    if config.batch.microbatch == "auto":
        chosen = choose(problem, say)
        config, split = settled(config, chosen), chosen.split
    plan = data.plan_run(config, split, problem.corpus.train)
    tx, rate = optimizers.build(config.optimizer, plan.updates)
    params_key, key = jax.random.split(jax.random.key(config.train.seed))
    step = make_step(problem.loss_fn, tx, **problem.options)
    state = step.init(jax.jit(problem.init)(params_key), key=key)
    return Experiment(config, split, problem.corpus, plan, problem.options["mesh"], step, rate, state)


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
