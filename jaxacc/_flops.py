"""Floating-point operations of matrix products and convolutions, counted in a traced program, loops included."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

from jax.extend.core import Literal


def matrix_flops(jaxpr: Any) -> int:
    """Operations of all devices, two per multiplication and addition.

    The compiler's own count takes the body of a loop once. Here scans count their length, a branch is its most expensive
    one, the body of a `shard_map` counts once per replica, and what no result needs does not count, as it is not computed.
    """
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    return _live_flops(inner, [True] * len(inner.outvars))


def _live_flops(jaxpr: Any, wanted: Iterable[bool]) -> int:
    live = {var for var, want in zip(jaxpr.outvars, wanted, strict=True) if want and not _is_literal(var)}
    total = 0
    for eqn in reversed(jaxpr.eqns):
        outputs = [var in live for var in eqn.outvars]
        if any(outputs) or eqn.effects:
            total += _flops_of(eqn, outputs)
            live.update(var for var in eqn.invars if not _is_literal(var))
    return total


def _is_literal(var: Any) -> bool:
    return isinstance(var, Literal)


def _flops_of(eqn: Any, outputs: list[bool]) -> int:
    name, params = eqn.primitive.name, eqn.params
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        shape = eqn.invars[0].aval.shape
        return 2 * eqn.outvars[0].aval.size * math.prod(shape[d] for d in contracted)
    if name == "conv_general_dilated":
        kernel, spec = eqn.invars[1].aval.shape, params["dimension_numbers"].rhs_spec
        return 2 * eqn.outvars[0].aval.size * math.prod(kernel) // kernel[spec[0]]
    if name == "scan":
        body = getattr(params["jaxpr"], "jaxpr", params["jaxpr"])
        pairs = zip(body.outvars, eqn.outvars, outputs, strict=True)
        wanted = [want or inner.aval.ndim == outer.aval.ndim for inner, outer, want in pairs]  # carries have no more axes
        return params["length"] * _live_flops(body, wanted)
    inner = list(_jaxprs(params.values()))
    flops = [_live_flops(j, outputs if len(j.outvars) == len(outputs) else [True] * len(j.outvars)) for j in inner]
    if name == "cond":
        return max(flops, default=0)
    copies = math.prod(params["mesh"].shape[axis] for axis in params["newly_manual_axes"]) if name == "shard_map" else 1
    return copies * sum(flops)


def _jaxprs(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, tuple | list):
            yield from _jaxprs(value)
        elif hasattr(value, "eqns") or hasattr(value, "jaxpr"):
            yield getattr(value, "jaxpr", value)
