"""The Optax transformation and learning-rate schedule of a config."""

from __future__ import annotations

from typing import Any

import jax
import optax

from jaxacc.experiment.config import OptimizerConfig


def build(config: OptimizerConfig, updates: int) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """The transformation, and the learning rate as a function of applied updates, for a run of `updates`."""
    rate = _schedule(config, updates)
    if config.name == "adamw":
        core = optax.adamw(rate, b1=config.b1, b2=config.b2, weight_decay=config.weight_decay, mask=_is_matrix)
    elif config.name == "sgd":
        core = optax.sgd(rate, momentum=config.b1 or None)
    else:
        core = optax.adafactor(rate)
    clip = [optax.clip_by_global_norm(config.clip)] if config.clip else []
    return optax.chain(*clip, core), rate


def _schedule(config: OptimizerConfig, updates: int) -> optax.Schedule:
    peak, rest = config.learning_rate, max(updates - config.warmup, 1)
    decay = {
        "constant": optax.constant_schedule(peak),
        "cosine": optax.cosine_decay_schedule(peak, rest, alpha=0.1),
        "linear": optax.linear_schedule(peak, peak / 10, rest),
    }[config.schedule]
    if config.warmup == 0:
        return decay
    rise = optax.linear_schedule(peak / config.warmup, peak, max(config.warmup - 1, 1))
    return optax.join_schedules([rise, decay], [config.warmup])


def _is_matrix(params: Any) -> Any:
    """Decay everything but biases and the scales of norms (which the layer scan stacks to two dimensions)."""
    return jax.tree.map_with_path(lambda path, _: getattr(path[-1], "key", None) not in ("scale", "bias"), params)
