"""Plans for a config: the microbatch that fits, found by compiling what `train` runs, before anything is allocated."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils
from rich.console import Console
from rich.table import Table

from jaxacc._bytes import show_bytes
from jaxacc._plan import Candidate, Plan, device_limit, plan
from jaxacc._rows import ROW_POSITION
from jaxacc._split import ROW_MASK
from jaxacc.experiment import optimizers
from jaxacc.experiment.config import BatchConfig, Config, UserError, check
from jaxacc.experiment.problem import Problem, problem_of


def for_planning(config: Config, *, effective: int | None, budget: str | None) -> Config:
    """The config with a microbatch that is left to the plan, for the effective batch it states or another one."""
    batch = config.batch
    if batch.schedule is not None or batch.tokens is not None:
        raise UserError("a plan is for one effective batch, and [batch] sizes its windows by schedule or tokens.")
    rows = effective if effective is not None else check(config).effective_batch
    return dataclasses.replace(
        config, batch=BatchConfig(effective=rows, microbatch="auto", last=batch.last, budget=budget or batch.budget)
    )


def plan_config(config: Config, console: Console, *, target: str | None = None) -> Plan:
    """Plan a config whose microbatch is "auto", for a target or what is here, showing candidates as they are compiled."""
    check(config)
    with console.status("reading the data") as status:
        problem = problem_of(config, devices=target is None)
        status.update("compiling candidates")
        return choose(problem, lambda text: console.print(text, highlight=False), target=target)


def choose(problem: Problem, say: Callable[[str], None], *, target: str | None = None) -> Plan:
    """The plan of a problem."""
    config = problem.config
    tx, _ = optimizers.build(config.optimizer, updates=1000)  # how many changes numbers in the schedule, not the program
    flag, place = jax.ShapeDtypeStruct((), np.bool_), jax.ShapeDtypeStruct((), np.int32)
    row = {name: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) for name, leaf in problem.row.items()}

    def told(candidate: Candidate) -> None:
        size = "more than the compiler allows" if candidate.total is None else show_bytes(candidate.total)
        fits = "fits" if candidate.fits else "does not fit"
        say(f"compiled microbatch {candidate.microbatch} x {candidate.accumulation_steps}: {size}, {fits}")

    try:
        chosen = plan(
            problem.loss_fn, tx, problem.params, {**row, ROW_MASK: flag, ROW_POSITION: place},
            effective_batch=config.batch.effective or 0, budget=_budget(problem, target), target=target,
            key=jax.random.key(0), on_candidate=told, **problem.options,
        )  # fmt: skip
    except (ValueError, RuntimeError) as error:
        raise UserError(f"[batch] {error}") from error
    m, steps, replicas = chosen.split
    say(
        f"planned microbatch {m} x accumulation steps {steps} x replicas {replicas} = {chosen.split.effective_batch}: "
        f"{show_bytes(chosen.total)} of {show_bytes(chosen.budget)} per device ({chosen.compiler})"
    )
    return chosen


def _budget(problem: Problem, target: str | None) -> int | str | None:
    """What is stated, or what the device with the least memory has, of all processes: they must choose alike."""
    stated = problem.config.batch.budget
    if stated is not None or target is not None or jax.process_count() == 1:
        return stated
    mebibytes = np.int32((device_limit(problem.options["mesh"]) or 0) // 2**20)  # 64 bits do not cross
    least = int(np.min(multihost_utils.process_allgather(mebibytes)))
    return least * 2**20 if least else None


def settled(config: Config, chosen: Plan) -> Config:
    """The config with the microbatch of the plan."""
    return dataclasses.replace(config, batch=dataclasses.replace(config.batch, microbatch=chosen.split.microbatch))


def write(path: Path, chosen: Plan) -> None:
    """Put effective batch and microbatch of the plan into the `[batch]` of a TOML file; the rest stays as it is."""
    lines = path.read_text(encoding="utf-8").splitlines()
    headers = [i for i, line in enumerate(lines) if re.match(r"\s*\[", line)]
    start = next((i for i in headers if re.match(r"\s*\[\s*batch\s*\]", lines[i])), None)
    if start is None:
        lines, start, headers = [*lines, "", "[batch]"], len(lines) + 1, headers
    end = next((i for i in headers if i > start), len(lines))
    replaced = re.compile(r"\s*(effective|microbatch|accumulation_steps)\s*=")
    m, steps, replicas = chosen.split
    planned = [
        f"effective = {chosen.split.effective_batch}",
        f"microbatch = {m}  # planned: {steps} accumulation steps on {replicas} replica{'s' * (replicas > 1)}",
    ]
    kept = [line for line in lines[start + 1 : end] if not replaced.match(line)]
    path.write_text("\n".join([*lines[: start + 1], *planned, *kept, *lines[end:]]) + "\n", encoding="utf-8")


def show(chosen: Plan, console: Console) -> None:
    """Print the plan as tables."""
    m, steps, replicas = chosen.split
    sizes = {**chosen.bytes, "total": chosen.total, "budget": chosen.budget, "headroom": chosen.headroom}
    table = Table("quantity", "value", title="plan, bytes per device", caption=f"figures: {chosen.compiler}")
    table.add_row("effective batch", f"microbatch {m} x accumulation steps {steps} x replicas {replicas}")
    for name, size in sizes.items():
        table.add_row(name, show_bytes(size))
    table.add_row("flops per window", f"{chosen.flops:.3g}")
    for found in chosen.collectives:
        table.add_row(f"{found.kind} over {' '.join(found.axes)}", f"{show_bytes(found.bytes)}{' in a loop' * found.in_loop}")
    console.print(table)
    tried = Table("microbatch", "accumulation steps", "bytes", "", title="candidates")
    for c in chosen.candidates:
        size = "too much to compile" if c.total is None else show_bytes(c.total)
        tried.add_row(
            str(c.microbatch), str(c.accumulation_steps), size,
            f"{'compiled' if c.compiled else 'interpolated'}, {'fits' if c.fits else 'does not fit'}",
        )  # fmt: skip
    console.print(tried)
