"""Readers: files, the help topics and Hugging Face datasets to documents and conversations, every line checked."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxacc.experiment.config import DataConfig, UserError
from jaxacc.experiment.tokens import Message


def help_topics() -> list[str]:
    """The sections of all help topics; topics repeat each other, so a paragraph is taken where it first occurs."""
    from pydoc_data.topics import topics

    seen: set[str] = set()
    sections = []
    for section in (part for name in sorted(topics) for part in re.split(r"\n{3,}", topics[name])):
        fresh = [part.strip("\n") for part in _paragraphs(section) if part.strip() not in seen]
        seen.update(part.strip() for part in fresh)
        if fresh:
            sections.append("\n\n".join(fresh))
    return sections


def _paragraphs(text: str) -> list[str]:
    return [part for part in re.split(r"\n\s*\n", text) if part.strip()]


def read_files(config: DataConfig) -> list[str]:
    """The documents of the text files of a config, none of them empty."""
    documents = []
    for path in map(Path, config.paths):
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise UserError(f"data.paths: cannot read {path}: {error.strerror}.") from error
        except UnicodeDecodeError as error:
            raise UserError(f"data.paths: {path} is not UTF-8 text: {error}.") from error
        parts = [text] if config.documents == "file" else _paragraphs(text)
        found = [part.strip() for part in parts if part.strip()]
        if not found:
            raise UserError(f"data.paths: {path} is empty. Name files that contain text.")
        documents += found
    return documents


def read_jsonl(path: Path) -> Iterator[tuple[Message, ...]]:
    """The examples of a file, one a line; blank lines are none."""
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield chat(_parse(line, f"{path}, line {number}"), f"{path}, line {number}")
    except OSError as error:
        raise UserError(f"data.paths: cannot read {path}: {error.strerror}.") from error


def _parse(line: bytes, where: str) -> Any:
    try:
        return json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise UserError(f"{where} is not UTF-8 text: {error}.") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not JSON: {error}. A line holds one object.") from error


def chat(entry: Any, where: str) -> tuple[Message, ...]:
    """Either `messages`, or `prompt` and `response` as those of a user and the assistant."""
    keys = set(entry) & {"messages", "prompt", "response"} if isinstance(entry, dict) else set()
    if keys == {"prompt", "response"}:
        for key in ("prompt", "response"):
            check_text(entry[key], f"{where}: {key}")
        return (("user", entry["prompt"]), ("assistant", entry["response"]))
    if keys != {"messages"}:
        found = (
            f"the keys {', '.join(sorted(entry)) or 'of nothing'}" if isinstance(entry, dict) else f"a {type(entry).__name__}"
        )
        raise UserError(f'{where} holds {found}. It must hold either "prompt" and "response", or "messages".')
    messages = entry["messages"]
    if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
        raise UserError(f'{where}: messages must be a list of {{"role": ..., "content": ...}}, one at least.')
    for index, message in enumerate(messages):
        for key in ("role", "content"):
            check_text(message.get(key), f"{where}: {key} of message {index}")
    return tuple((message["role"], message["content"]) for message in messages)


def check_text(value: Any, where: str) -> None:
    """Raise `UserError` for what is not a string, or is none that can be encoded."""
    if not isinstance(value, str):
        raise UserError(f"{where} is {'missing' if value is None else f'a {type(value).__name__}'}. It must be a string.")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{where} holds half of a surrogate pair, which is not text: {error}.") from error


def open_table(config: DataConfig) -> Any:
    """A split of a Hugging Face dataset: of a folder that `save_to_disk` wrote, or what `load_dataset` finds by the name."""
    try:
        import datasets  # pyright: ignore[reportMissingImports] (optional)
    except ImportError as error:
        raise UserError("data.source = \"hf\" needs the package datasets. Run: pip install 'jaxacc[hf]'") from error
    name, folder = config.paths[0], Path(config.paths[0])
    saved = any((folder / file).exists() for file in ("state.json", "dataset_dict.json"))
    try:
        table = datasets.load_from_disk(name) if saved else datasets.load_dataset(name, split=config.split)
    except (OSError, ValueError) as error:
        raise UserError(f"data.paths: cannot load the dataset {name}, split {config.split}: {error}") from error
    if isinstance(table, dict):
        if config.split not in table:
            raise UserError(f"{name} has no split {config.split!r}; it has {', '.join(map(str, table))}. State data.split.")
        table = table[config.split]
    return table
