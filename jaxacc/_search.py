"""What a plan may turn on to save memory, in the order of what it costs."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax

from jaxacc._contract import LossFn

Searchable = Literal["remat", "fold", "shard_optimizer"]
Setting = dict[str, Any]
POLICIES = {"dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable, "full": None}
"""What `jax.checkpoint` keeps: the results of matrix products with parameters, or nothing."""


def settings_of(search: Sequence[str], options: Mapping[str, Any], replicas: int) -> list[Setting]:
    """All that may be turned on: nothing first, then single things in the order of their cost, then several together."""
    choices: dict[str, tuple[Any, ...]] = {
        "remat": ("dots", "full"),
        "fold": ("carry",) if jax.__version_info__ >= (0, 11) else (),  # "auto" is in place where that is safe
        "shard_optimizer": (True,) if replicas > 1 else (),
    }
    if unknown := [name for name in search if name not in choices]:
        raise ValueError(f"search={tuple(search)}: {unknown[0]!r} is not known. Name some of {', '.join(choices)}.")
    if stated := [name for name in search if name in options]:
        raise ValueError(f"{stated[0]}={options[stated[0]]!r} is stated, and search names it too. Leave one of the two out.")
    named = [[(name, value) for value in choices[name]] for name in choices if name in search]
    together = (
        combined for count in range(len(named) + 1) for some in itertools.combinations(named, count)
        for combined in itertools.product(*some)
    )  # fmt: skip
    return [dict(combined) for combined in together]


def turn_on(setting: Setting, loss_fn: LossFn, options: Mapping[str, Any]) -> tuple[LossFn, dict[str, Any]]:
    """The loss and the options of `make_step` under a setting."""
    rest = {**options, **setting}
    remat = rest.pop("remat", None)
    return (loss_fn if remat is None else jax.checkpoint(loss_fn, policy=POLICIES[remat])), rest


def show_setting(setting: Setting) -> str:
    """`remat=dots, fold=carry`."""
    return ", ".join(f"{name}={value}" for name, value in setting.items())
