"""The README runs, and every test and file that it names exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_python_blocks_run():
    """All blocks, one after the other, in one namespace."""
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) >= 3
    exec(compile("\n".join(blocks), "README.md", "exec"), {})


def test_named_tests_exist():
    """A claim names the test that shows it."""
    defined = set(re.findall(r"def (test_\w+)", "\n".join(path.read_text() for path in (ROOT / "tests").glob("*.py"))))
    named = set(re.findall(r"`(test_\w+)`", README))
    assert len(named) > 10
    assert named <= defined, named - defined


@pytest.mark.parametrize("path", sorted(set(re.findall(r"\]\(((?!http)[\w/.]+)\)|\b(configs/\w+\.toml)", README))))
def test_named_files_exist(path):
    """Links and configs lead somewhere."""
    assert (ROOT / (path[0] or path[1])).exists()


def test_exactly_two_set_up_commands():
    """One line runs the main job on a fresh machine, one the tests."""
    commands = [line for line in README.splitlines() if line.startswith("pip install")]
    assert commands == [
        'pip install -e ".[run]" && jaxacc train configs/quickstart.toml',
        'pip install -e ".[dev]" && python -m pytest',
    ]
