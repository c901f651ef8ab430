"""What an experiment trains and on what, before it is decided how an effective batch is cut: nothing is allocated."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType

from jaxacc._contract import LossFn
from jaxacc._scaling import LossScale
from jaxacc._tree import PyTree
from jaxacc.experiment import models
from jaxacc.experiment.config import Config, UserError
from jaxacc.experiment.rows import Corpus
from jaxacc.experiment.sources import load


class Problem(NamedTuple):
    """Data and model of a config.

    Attributes:
      config: the config.
      corpus: its rows.
      row: a batch of one row.
      init: `init(key)` gives the parameters.
      loss_fn: what `make_step` takes.
      params: shapes of the parameters.
      options: what else `make_step` takes.
    """

    config: Config
    corpus: Corpus
    row: dict[str, np.ndarray]
    init: Callable[[jax.Array], PyTree]
    loss_fn: LossFn
    params: PyTree
    options: dict[str, Any]


def problem_of(config: Config, *, devices: bool = True) -> Problem:
    """Read the data and describe the model, on the devices that are here or (`devices=False`) on none."""
    mesh = _mesh(config) if devices else _abstract_mesh(config)
    corpus = load(config.data)
    row = corpus.train.batch(np.array([0]))
    _check_images(config, row)
    init, loss_fn = models.build(config.model, vocabulary=corpus.vocabulary, row=row)
    params = jax.eval_shape(init, jax.random.key(0))
    options = {
        "mesh": mesh, "params_specs": models.specs(params) if "model" in config.mesh else None,
        "shard_optimizer": config.optimizer.sharded, **step_options(config),
    }  # fmt: skip
    return Problem(config, corpus, row, init, loss_fn, params, options)


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


def _abstract_mesh(config: Config) -> jax.sharding.AbstractMesh | None:
    axes = {"data": 1, **config.mesh}
    return jax.sharding.AbstractMesh(tuple(axes.values()), tuple(axes)) if config.mesh else None


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
