"""The command line, `jaxacc` or `python -m jaxacc`."""

from __future__ import annotations

import importlib.util
import sys

REQUIRED = ("tyro", "cattrs", "grain", "rich")


def main() -> None:
    """Run `jaxacc.experiment.cli`, or say which extra is missing."""
    missing = [name for name in REQUIRED if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"jaxacc: the command line needs {', '.join(missing)}. Install the extra: pip install 'jaxacc[run]'")
    from jaxacc._distributed import distributed_initialize
    from jaxacc.experiment.cli import main as run

    sys.exit(run(sys.argv[1:], connect=distributed_initialize))


if __name__ == "__main__":
    main()
