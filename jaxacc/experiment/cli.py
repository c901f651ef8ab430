"""`jaxacc train CONFIG` and `jaxacc plan CONFIG`: the command line."""

from __future__ import annotations

import dataclasses
import datetime
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from jaxacc.experiment.config import Config, UserError, load, override, without_quantities


@dataclass(frozen=True)
class Processes:
    """How several processes find each other. Left out: from JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, or
    by what JAX detects (Slurm, Open MPI, Kubernetes), else a single process.
    """

    coordinator_address: str | None = None
    """host:port of process 0."""
    num_processes: int | None = None
    """How many there are."""
    process_id: int | None = None
    """Which one this is, from 0."""
    local_device_ids: tuple[int, ...] | None = None
    """This host's devices of this process. Under Slurm a task gets one GPU by itself: name all for one task per host."""


def main(argv: list[str], *, connect: Callable[..., None] = lambda **_: None) -> int:
    """Run the command line and return its exit status: 0; 2 after one message about bad input; 1 after one about too
    many skipped windows; 75 (SIGTERM, time limit) or 130 (SIGINT) after a run was saved before its end.

    `connect` is called with the fields of `Processes` once the options are read, before JAX is used.
    """
    try:
        app = _app(_named_config(argv), connect)
        return app.cli(args=argv, prog="jaxacc", description="Exact gradient accumulation for JAX.", registry=_registry())
    except UserError as error:
        print(f"jaxacc: {error}", file=sys.stderr)
        return 2
    except FloatingPointError as error:
        print(f"jaxacc: {error}", file=sys.stderr)
        return 1


def _named_config(argv: list[str]) -> Config | None:
    """The config that `train` or `plan` names, read before the options are: it holds their defaults."""
    return load(Path(argv[1])) if len(argv) > 1 and argv[0] in ("train", "plan") and not argv[1].startswith("-") else None


def _app(file: Config | None, connect: Callable[..., None]) -> tyro.extras.SubcommandApp:
    app = tyro.extras.SubcommandApp()
    defaults = without_quantities(file or Config())

    @app.command
    def train(
        config_file: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="CONFIG")],
        config: Annotated[Config, tyro.conf.arg(name="")] = defaults,
        run_dir: Path | None = None,
        resume: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
        resume_from: str = "latest",
        allow_change: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
        stop_after: str | None = None,
        processes: Processes = Processes(),
    ) -> int:
        """Train a model by exact gradient accumulation.

        Args:
            config_file: A TOML file. It comes first; every option after it replaces what the file says.
            config: The experiment.
            run_dir: A new folder for records, checkpoints and the sheet. Default: one under runs/, named by the time.
            resume: Continue the run in --run-dir. RUN_DIR/config.json is a CONFIG that repeats all its options.
            resume_from: The checkpoint to continue from: latest, best (by evaluation loss), or a number of updates.
            allow_change: Continue though the configuration is another, such as on another mesh or microbatch.
            stop_after: Save and stop after this time, as in 3h50m.
            processes: How several processes find each other.
        """
        import jax

        from jaxacc.experiment.run import StoppedError
        from jaxacc.experiment.run import train as run
        from jaxacc.experiment.stop import parse_duration

        if file is None:
            raise UserError(f"the config comes before the options: jaxacc train {config_file} ...")
        if resume and run_dir is None:
            raise UserError("--resume needs the --run-dir of the run to continue.")
        try:
            connect(**dataclasses.asdict(processes))
        except ValueError as error:
            raise UserError(str(error)) from error
        if run_dir is None and jax.process_count() > 1:
            raise UserError("several processes need one folder that they share: state --run-dir.")
        seconds = None if stop_after is None else parse_duration(stop_after)
        try:
            run(
                override(file, config), run_dir or _fresh_folder(config_file), resume=resume, resume_from=resume_from,
                allow_change=allow_change, stop_after=seconds,
            )  # fmt: skip
        except StoppedError as error:
            return error.reason.status
        return 0

    @app.command
    def plan(
        config_file: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="CONFIG")],
        config: Annotated[Config, tyro.conf.arg(name="")] = defaults,
        target: str | None = None,
        budget: str | None = None,
        effective: int | None = None,
        write: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
        output: Path | None = None,
    ) -> int:
        """Find the largest microbatch that fits into memory, by compiling; nothing is run.

        Args:
            config_file: A TOML file. It comes first; every option after it replaces what the file says.
            config: The experiment.
            target: Devices that need not be here, as in v5e:2x2 or h100x8. Default: those that are.
            budget: Memory of one device, as in 20GiB. Default: what the device has.
            effective: The effective batch. Default: the one the config states.
            write: Put what is chosen into the config file.
            output: A file for the whole plan as JSON.
        """
        from rich.console import Console

        from jaxacc.experiment import planning
        from jaxacc.experiment.records import write_json

        if file is None:
            raise UserError(f"the config comes before the options: jaxacc plan {config_file} ...")
        console = Console()
        wanted = planning.for_planning(override(file, config), effective=effective, budget=budget)
        chosen = planning.plan_config(wanted, console, target=target)
        planning.show(chosen, console)
        if output is not None:
            write_json(output, chosen.to_dict())
        if write:
            planning.write(config_file, chosen)
            console.print(f"written to {config_file}", soft_wrap=True)
        return 0

    @app.command
    def export(
        run_dir: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN_DIR")],
        out: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="OUT")],
        checkpoint: str = "latest",
    ) -> int:
        """Write the trained parameters of a run to a new folder for Orbax, or to a file OUT.safetensors.

        Args:
            run_dir: The folder of the run.
            out: Where to write; it must not exist.
            checkpoint: latest, best (by evaluation loss), or a number of updates.
        """
        from jaxacc.experiment.export import export as write

        print(f"parameters after update {write(run_dir, out, checkpoint=checkpoint)} in {out}")
        return 0

    return app


def _registry() -> tyro.constructors.ConstructorRegistry:
    """How `--mesh data=4 model=2` is read."""
    registry = tyro.constructors.ConstructorRegistry()

    def sizes(arguments: list[str]) -> dict[str, int]:
        pairs = [argument.partition("=") for argument in arguments]
        if bad := [name for name, _, size in pairs if not size.isdecimal()]:
            raise ValueError(f"{bad[0]!r} has no size. Write AXIS=SIZE, as in data=4.")
        return {name: int(size) for name, _, size in pairs}

    @registry.primitive_rule
    def mesh(info: tyro.constructors.PrimitiveTypeInfo) -> tyro.constructors.PrimitiveConstructorSpec | None:
        if info.type != dict[str, int]:
            return None
        return tyro.constructors.PrimitiveConstructorSpec(
            nargs="*", metavar="AXIS=SIZE", instance_from_str=sizes, is_instance=lambda value: isinstance(value, dict),
            str_from_instance=lambda value: [f"{name}={size}" for name, size in value.items()],
        )  # fmt: skip

    return registry


def _fresh_folder(config: Path) -> Path:
    """`runs/CONFIG-DATE-TIME`, numbered where that exists."""
    base = Path("runs") / f"{config.stem}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    candidates = [base, *(base.with_name(f"{base.name}-{number}") for number in range(2, 100))]
    return next(folder for folder in candidates if not folder.exists())
