"""A module imports only from modules above it (the map of the house)."""

import ast
from pathlib import Path

import pytest

import jaxacc

PACKAGE = Path(jaxacc.__file__).parent
ORDER = [
    "_tree", "_mean", "_ledger", "_split", "_keys", "_scaling", "_noise", "_contract", "_model_state", "_fold", "_accumulate",
    "_two_pass", "_mesh", "_stream",
    "_step", "_inspect", "_targets", "_compiler", "_bytes", "_flops", "_fit", "_search", "_plan", "_distributed", "losses",
    "_sizes", "_rows", "windows", "streaming", "experiment", "__init__",
    "__main__",
]  # fmt: skip

SOURCES = ["config", "pieces", "rows", "tokens", "shapes", "images", "readers", "sources"]
"""The data sources of the experiment runner, in the same sense."""


def module_of(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "jaxacc":
            parts = node.module.split(".")
            yield from [parts[1]] if len(parts) > 1 else [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            yield from (alias.name.split(".")[1] for alias in node.names if alias.name.startswith("jaxacc."))


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_up(path):
    """Every import of the package names a module of a strictly higher row."""
    module = module_of(path)
    assert module in ORDER, f"{module} has no place in ORDER"
    for name in imports(path):
        if module == name == "experiment":
            continue
        if module == "experiment" and name not in ORDER:
            continue  # the public face
        assert ORDER.index(name) < ORDER.index(module), f"{path.name} imports {name}"


@pytest.mark.parametrize("module", SOURCES)
def test_sources_import_sources_above(module):
    """And no other part of the runner."""
    for node in ast.walk(ast.parse((PACKAGE / "experiment" / f"{module}.py").read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jaxacc.experiment"):
            assert node.module.split(".")[2] in SOURCES[: SOURCES.index(module)]


def test_only_the_checkpoint_imports_orbax():
    """One place for Orbax; and importing jaxacc imports no part of the runner."""
    users = [path.name for path in PACKAGE.rglob("*.py") if "import orbax" in path.read_text()]
    assert set(users) <= {"checkpoint.py"}
    assert "experiment" not in set(imports(PACKAGE / "__init__.py"))
