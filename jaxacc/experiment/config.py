"""What an experiment is told: frozen dataclasses read from TOML, every fault reported at once, before anything runs."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

import cattrs
from cattrs.errors import ClassValidationError, ForbiddenExtraKeysError, IterableValidationError

from jaxacc._bytes import parse_bytes
from jaxacc._sizes import Policy, Unit, parse_schedule
from jaxacc._split import Split, solve_split

DURATIONS = ("updates", "epochs", "tokens")
QUANTITIES = ("effective", "microbatch", "accumulation_steps", "schedule", "tokens")
MESH_AXES = ("data", "model")


class UserError(ValueError):
    """Bad input: the command line prints the message alone, without a traceback, and exits with status 2."""


def _number(default: Any, **bounds: float) -> Any:
    """A field with bounds: `minimum` (inclusive), `above` and `below` (exclusive)."""
    return field(default=default, metadata=bounds)


@dataclass(frozen=True)
class BatchConfig:
    """Rows behind one update. State two of effective, microbatch and accumulation_steps; the third follows. With a schedule
    state the microbatch alone; with a budget of tokens the microbatch, and the accumulation steps as the most of a window.
    """

    effective: int | None = _number(None, minimum=1)
    """Effective batch: rows behind one update."""
    microbatch: int | Literal["auto"] | None = _number(None, minimum=1)
    """Rows of one forward and backward pass on one replica. "auto": the most that fit, of those that give `effective`."""
    accumulation_steps: int | None = _number(None, minimum=1)
    """Microbatches per window, A."""
    schedule: str | None = None
    """Effective batches from thresholds on, as in "0:64 1000:128". Every distinct one is compiled once."""
    schedule_by: Unit = "updates"
    """What the thresholds count: updates, examples or (supervised) tokens."""
    budget: str | None = None
    """Memory of one device that a planned microbatch may fill, as in "20GiB". Left out: all that the device says it has."""
    tokens: int | None = _number(None, minimum=1)
    """Windows end with the first microbatch by which they hold so many supervised tokens."""
    last: Policy = "carry"
    """What becomes of rows that do not fill the last window of an epoch: "carry" into the next one (and a short window at
    the end of the run), "process" as a short window with its own denominator, "drop", or "error".
    """


@dataclass(frozen=True)
class TrainConfig:
    """How long, and from which seed. State exactly one duration."""

    updates: int | None = _number(None, minimum=1)
    """Duration in updates (windows attempted)."""
    epochs: int | None = _number(None, minimum=1)
    """Duration in passes over the training rows; the last window may be short."""
    tokens: int | None = _number(None, minimum=1)
    """Duration in supervised tokens: as many updates as reach them."""
    seed: int = _number(0, minimum=0, below=2**32)
    """Seed of the parameters, of the order of the rows and of dropout."""
    eval_every: int = _number(0, minimum=0)
    """Updates between evaluations on the held-out documents; 0: at the end only."""


@dataclass(frozen=True)
class DataConfig:
    """Where the rows come from. Without a word: byte tokens of the English help texts that ship with Python."""

    source: Literal["text", "jsonl", "tokens", "images", "shapes", "hf"] = "text"
    """text: UTF-8 files. jsonl: prompts and responses, of which the responses are supervised. tokens: .npy or .bin files of
    token ids. images: .npz files, or folders with images/ and masks/. shapes: generated images. hf: a Hugging Face dataset."""
    paths: tuple[str, ...] = ()
    """Your own files; for hf one name or folder. text without paths: the help texts."""
    documents: Literal["file", "paragraph"] = "file"
    """What a document is in text files: the file, or each part between blank lines. Rows never cross documents."""
    context: int = _number(128, minimum=2)
    """Most tokens in a row. Documents go on in the next row; responses are cut."""
    held_out: float = _number(0.1, above=0, below=1)
    """Share held out for evaluation: whole documents, examples or images by their digest; of tokens and shapes the last."""
    packing: bool = False
    """Several whole sequences in a row, told apart by segment ids (text, jsonl, hf)."""
    tokenizer: str = ""
    """A Hugging Face tokenizers JSON file (text, jsonl, hf; extra [bpe]). Empty: bytes."""
    boundary_token: str = ""
    """The tokenizer's token around documents. Empty: found by name, as <|endoftext|>."""
    begin_token: str = ""
    """The tokenizer's token before a message. Empty: found by name, as <|im_start|>."""
    end_token: str = ""
    """The tokenizer's token after a message. Empty: found by name, as <|im_end|>."""
    vocabulary: int | None = _number(None, minimum=2, below=2**31)
    """tokens: token ids are below it. images: the number of classes."""
    token_dtype: Literal["uint16", "uint32"] | None = None
    """What a .bin file holds, little-endian (tokens)."""
    split: str = "train"
    """The split of a Hugging Face dataset (hf)."""
    examples: int = _number(512, minimum=2)
    """Generated images (shapes)."""
    size: int = _number(256, minimum=8, below=2**14)
    """Height and width of generated images in pixels (shapes)."""


_TEXTUAL = {"paths", "context", "packing", "tokenizer"}
_OPTIONS = {
    "text": _TEXTUAL | {"documents", "boundary_token"},
    "jsonl": _TEXTUAL | {"begin_token", "end_token"},
    "hf": _TEXTUAL | {"boundary_token", "begin_token", "end_token", "split"},
    "tokens": {"paths", "context", "vocabulary", "token_dtype"},
    "images": {"paths", "vocabulary"},
    "shapes": {"examples", "size"},
}
"""Options of `[data]` that belong to each source, besides `source` and `held_out`."""


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer with tied embedding and scanned layers, or a U-Net with GroupNorm for segmentation."""

    name: Literal["transformer", "unet"] = "transformer"
    """The model: a transformer for text, a U-Net for images."""
    layers: int = _number(4, minimum=1)
    """Transformer layers; of a U-Net how often it halves the image."""
    width: int = _number(128, minimum=1)
    """Width of the residual stream; of a U-Net the channels at full size, which double with every halving."""
    heads: int = _number(4, minimum=1)
    """Attention heads; they divide the width (transformer)."""
    hidden: int = _number(512, minimum=1)
    """Width of the feed-forward layer (transformer)."""
    dropout: float = _number(0.0, minimum=0, below=1)
    """Dropout on both branches of a layer, or after every block of a U-Net."""
    remat: bool = False
    """Compute activations again in the backward pass instead of keeping them."""
    precision: Literal["float32", "bfloat16", "bfloat16_params", "float16"] = "float32"
    """Of the computation. Sums are float32, and parameters too but for bfloat16_params; float16 goes with a loss scale."""


@dataclass(frozen=True)
class OptimizerConfig:
    """The Optax transformation."""

    name: Literal["adamw", "sgd", "adafactor"] = "adamw"
    """The optimizer."""
    learning_rate: float = _number(1e-3, above=0)
    """Peak learning rate."""
    schedule: Literal["constant", "cosine", "linear"] = "cosine"
    """From the peak down to a tenth of it over the run, or constant. It counts applied updates."""
    warmup: int = _number(0, minimum=0)
    """Updates of linear warmup, the first at peak / warmup."""
    clip: float = _number(1.0, minimum=0)
    """Largest global gradient norm; 0: no clipping."""
    weight_decay: float = _number(0.1, minimum=0)
    """Decoupled weight decay of matrices, not of norm scales (adamw)."""
    b1: float = _number(0.9, minimum=0, below=1)
    """First-moment decay of adamw; momentum of sgd."""
    b2: float = _number(0.95, minimum=0, below=1)
    """Second-moment decay (adamw)."""
    sharded: bool = False
    """Keep a D-th of the optimizer state on each of the D replicas."""


@dataclass(frozen=True)
class NumericsConfig:
    """What keeps the numbers right."""

    row_keys: bool = False
    """Dropout by row, not by microbatch: the same for every split of the effective batch."""
    nonfinite: Literal["skip_window", "drop_microbatch"] = "skip_window"
    """What goes when a loss is not finite: its whole window, or its microbatch."""
    raise_after: int = _number(100, minimum=0)
    """Stop after so many skipped windows in a row; 0: never."""
    loss_scale: float = _number(2.0**15, above=0)
    """The first loss scale (precision float16)."""
    loss_scale_growth: int = _number(2000, minimum=1)
    """Good windows in a row that double it (precision float16)."""
    noise_scale: Literal["off", "replicas", "microbatches"] = "off"
    """From what to estimate the gradient noise scale. microbatches takes one gradient tree of memory."""


@dataclass(frozen=True)
class CheckpointConfig:
    """Orbax checkpoints."""

    every: int = _number(100, minimum=0)
    """Updates between checkpoints; 0: at the end only."""
    keep: int = _number(2, minimum=1)
    """Newest checkpoints kept."""
    keep_best: int = _number(1, minimum=0)
    """Checkpoints of the lowest evaluation loss kept beside them; those without an evaluation do not compete."""
    keep_every: int = _number(0, minimum=0)
    """Checkpoints of every so many updates kept too; 0: none."""


@dataclass(frozen=True)
class InputConfig:
    """How windows reach the devices."""

    prefetch: int = _number(2, minimum=0)
    """Windows that are read and placed on the devices ahead of their use; 0: none."""
    workers: int = _number(0, minimum=0)
    """Processes that read; 0: threads, which is enough unless reading is slow Python. Each holds the data."""


@dataclass(frozen=True)
class Config:
    """An experiment."""

    batch: BatchConfig = BatchConfig()
    train: TrainConfig = TrainConfig()
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    numerics: NumericsConfig = NumericsConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    input: InputConfig = InputConfig()
    mesh: dict[str, int] = field(default_factory=dict)
    """Sizes of the mesh axes: `data` (replicas) and `model` (tensor parallel); empty: one device."""

    @property
    def replicas(self) -> int:
        """`D`: the size of the axis `data`."""
        return self.mesh.get("data", 1)


def load(path: Path) -> Config:
    """Read a TOML file, or a run's `config.json`, or raise one `UserError` that lists everything wrong with keys and types."""
    kind, loads = ("JSON", json.loads) if path.suffix == ".json" else ("TOML", tomllib.loads)
    try:
        tree = loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read the config {path}: {error.strerror}. Give the path of a TOML file.") from error
    except ValueError as error:
        raise UserError(f"{path} is not {kind}: {error}") from error
    sections = {item.name for item in dataclasses.fields(Config)}
    if flat := [
        f"{name}: {tree[name]!r} is not a table. Write [{name}]."
        for name in sections & set(tree)
        if not isinstance(tree[name], dict)
    ]:
        raise UserError(_listing(str(path), flat))
    try:
        return _converter().structure(tree, Config)
    except ClassValidationError as error:
        raise UserError(_listing(str(path), _faults(error, Config, ""))) from error


def to_tree(config: Config) -> dict[str, Any]:
    """The config as JSON-able values, None included."""
    return cattrs.Converter().unstructure(config)


def override(config: Config, given: Config) -> Config:
    """The file's config with the quantities of the command line put in their place.

    `given` is the command line's config, in which a batch quantity or duration that was not stated is None. A duration
    replaces the file's, whatever its unit. Overriding the microbatch or the accumulation steps drops the other one and
    keeps the effective batch; overriding the effective batch keeps the file's microbatch or accumulation steps.
    """
    return dataclasses.replace(
        given,
        train=_override_duration(config.train, given.train),
        batch=_override_batch(config.batch, given.batch),
    )


def without_quantities(config: Config) -> Config:
    """The config without batch quantities and durations: what the command line starts from."""
    batch = dataclasses.replace(config.batch, **dict.fromkeys(QUANTITIES))
    return dataclasses.replace(config, batch=batch, train=dataclasses.replace(config.train, **dict.fromkeys(DURATIONS)))


def check(config: Config) -> Split:
    """Check every value and return the split, or raise one `UserError` that lists everything wrong."""
    faults = list(_bound_faults(config, ""))
    faults += _model_faults(config)
    faults += _data_faults(config.data)
    if config.input.workers and config.data.source == "tokens":
        faults.append("input.workers: every process would hold the whole token files, which threads map. Leave it out.")
    faults += _mesh_faults(config)
    durations = {name: getattr(config.train, name) for name in DURATIONS}
    stated = [f"{name}={value}" for name, value in durations.items() if value is not None]
    if len(stated) != 1:
        faults.append(
            f"[train] states {' and '.join(stated) or 'no duration'}. State exactly one of updates, epochs and tokens."
        )
    try:
        split = _split(config.batch, config.replicas)
    except ValueError as error:
        faults.append(f"[batch] {error}")
        split = None
    if faults or split is None:
        raise UserError(_listing("the configuration", faults))
    return split


def _split(batch: BatchConfig, replicas: int) -> Split:
    """The split of the largest window."""
    microbatch = 1 if batch.microbatch == "auto" else batch.microbatch
    stated = {
        "effective_batch": batch.effective,
        "microbatch": microbatch,
        "accumulation_steps": batch.accumulation_steps,
    }
    given = {name for name, value in stated.items() if value is not None}
    if batch.budget is not None:
        parse_bytes(batch.budget)
    varying = batch.schedule is not None or batch.tokens is not None
    if batch.microbatch == "auto" and (given != {"effective_batch", "microbatch"} or varying):
        raise ValueError('microbatch="auto" is planned for an effective batch. Beside it state effective and nothing else.')
    if batch.schedule is not None:
        if given != {"microbatch"} or batch.tokens is not None:
            raise ValueError("schedule states the effective batches. Beside it state microbatch and nothing else.")
        effective = [rows for _, rows in parse_schedule(batch.schedule, by=batch.schedule_by).steps]
        splits = [solve_split(effective_batch=rows, microbatch=microbatch, replicas=replicas) for rows in effective]
        return max(splits, key=lambda split: split.accumulation_steps)
    if batch.tokens is not None and given != {"microbatch", "accumulation_steps"}:
        raise ValueError(
            "with tokens the windows vary. Beside it state microbatch, and accumulation_steps as the most of a window."
        )
    return solve_split(**stated, replicas=replicas)


def check_data(data: DataConfig) -> None:
    """Check `[data]` alone, or raise one `UserError` that lists everything wrong."""
    if faults := [*_bound_faults(data, "data."), *_data_faults(data)]:
        raise UserError(_listing("the configuration", faults))


def _override_duration(file: TrainConfig, given: TrainConfig) -> TrainConfig:
    if any(getattr(given, name) is not None for name in DURATIONS):
        return given
    return dataclasses.replace(given, **{name: getattr(file, name) for name in DURATIONS})


def _override_batch(file: BatchConfig, given: BatchConfig) -> BatchConfig:
    old, new = ({name: getattr(batch, name) for name in QUANTITIES} for batch in (file, given))
    stated = {name: value for name, value in new.items() if value is not None}
    if "schedule" in stated:
        stated = {"microbatch": file.microbatch, **stated}
    elif "tokens" in stated or ((file.schedule or file.tokens) and "effective" not in stated):
        kept = {name: old[name] for name in ("microbatch", "accumulation_steps", "tokens", "schedule")}
        stated = {**kept, **stated, **({"schedule": None} if "tokens" in stated else {})}
    elif not stated:
        stated = old
    elif len(stated) == 1:
        stated = _override_one(file, **stated)
    return dataclasses.replace(given, **{**dict.fromkeys(QUANTITIES), **stated})


def _override_one(
    file: BatchConfig, *, effective: int | None = None, microbatch: Any = None, accumulation_steps: int | None = None
) -> dict[str, Any]:
    """The two quantities that hold when one of the split is overridden."""
    if effective is not None:
        steps = file.accumulation_steps if file.microbatch is None else None
        return {"effective": effective, "microbatch": file.microbatch, "accumulation_steps": steps}
    effective = file.effective
    if effective is None and isinstance(file.microbatch, int) and file.accumulation_steps is not None:
        effective = file.microbatch * file.accumulation_steps
    return {"effective": effective, "microbatch": microbatch, "accumulation_steps": accumulation_steps}


def _model_faults(config: Config) -> Iterator[str]:
    model, source = config.model, config.data.source
    if (model.name == "unet") != (source in ("images", "shapes")):
        wanted = "unet" if source in ("images", "shapes") else "transformer"
        yield f'model.name="{model.name}" cannot read data.source="{source}". Use the {wanted}, or another source.'
    if model.name == "transformer" and model.width % model.heads:
        yield f"model.width={model.width} is not divisible by model.heads={model.heads}."
    if model.name == "unet" and "model" in config.mesh:
        yield "mesh.model shards the transformer; a U-Net has nothing for it. Leave it out."


def _mesh_faults(config: Config) -> Iterator[str]:
    for axis, size in config.mesh.items():
        if axis not in MESH_AXES:
            yield f"mesh.{axis}: unknown axis{_did_you_mean(axis, MESH_AXES)}. Known: {', '.join(MESH_AXES)}."
        elif size < 1:
            yield f"mesh.{axis}={size} must be at least 1."
        elif axis == "model" and (config.model.heads % size or config.model.hidden % size):
            yield f"mesh.model={size} must divide model.heads={config.model.heads} and model.hidden={config.model.hidden}."
    if config.optimizer.sharded and config.replicas < 2:
        yield "optimizer.sharded needs replicas to shard over: state mesh.data."


def _data_faults(data: DataConfig) -> Iterator[str]:
    known = _OPTIONS[data.source]
    for item in dataclasses.fields(data):
        value, name = getattr(data, item.name), item.name
        if name not in known | {"source", "held_out"} and value != item.default:
            owners = " and ".join(f'"{source}"' for source, options in _OPTIONS.items() if name in options)
            yield f'data.{name}={value!r} does not belong to data.source="{data.source}", but to {owners}. Leave it out.'
    if data.source not in ("text", "shapes") and not data.paths:
        yield f'data.source="{data.source}" needs data.paths.'
    if data.source == "hf" and len(data.paths) > 1:
        yield f"data.paths names {len(data.paths)} datasets. State one name or folder."
    if "vocabulary" in known and data.vocabulary is None:
        what = "number of classes" if data.source == "images" else "number that token ids are below"
        yield f'data.source="{data.source}" needs data.vocabulary, the {what}.'
    if data.source == "images" and data.vocabulary is not None and data.vocabulary > 255:
        yield f"data.vocabulary={data.vocabulary} classes do not fit into 8 bits, of which 255 is no label. Use at most 255."
    if data.source == "tokens" and data.token_dtype is None and any(path.endswith(".bin") for path in data.paths):
        yield "data.token_dtype is needed for a .bin file: uint16 or uint32."
    if not data.tokenizer:
        for name in ("boundary_token", "begin_token", "end_token"):
            if name in known and getattr(data, name):
                yield f"data.{name} is a token of data.tokenizer, which is not stated. Byte tokens have their own."


def _bound_faults(node: Any, prefix: str) -> Iterator[str]:
    for item in dataclasses.fields(node):
        value, name = getattr(node, item.name), f"{prefix}{item.name}"
        if dataclasses.is_dataclass(value):
            yield from _bound_faults(value, f"{name}.")
        elif isinstance(value, int | float) and item.metadata:
            bounds = item.metadata
            if not math.isfinite(value):
                yield f"{name}={value} must be a finite number."
                continue
            if value < bounds.get("minimum", value):
                yield f"{name}={value} must be at least {bounds['minimum']}."
            if "above" in bounds and value <= bounds["above"]:
                yield f"{name}={value} must be greater than {bounds['above']}."
            if "below" in bounds and value >= bounds["below"]:
                yield f"{name}={value} must be less than {bounds['below']}."


def _converter() -> cattrs.Converter:
    """Structure without coercion: 8.7 is no int, "8" neither, true is no number."""
    converter = cattrs.Converter(forbid_extra_keys=True, detailed_validation=True)

    def strict(*accepted: type) -> Any:
        def hook(value: Any, target: type) -> Any:
            if type(value) not in accepted:
                raise TypeError(f"{value!r} is a {type(value).__name__}, expected {target.__name__}")
            return target(value)

        return hook

    def choice(value: Any, target: Any) -> Any:
        if value not in get_args(target):
            known = get_args(target)
            raise TypeError(f"{value!r} is not one of {', '.join(map(repr, known))}{_did_you_mean(value, known)}")
        return value

    def rows(value: Any, _: Any) -> int | str:
        if type(value) is not int and value != "auto":
            raise TypeError(f"{value!r} is neither a whole number nor 'auto'")
        return value

    def strings(value: Any, _: Any) -> tuple[str, ...]:
        if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
            raise TypeError(f"{value!r} is not a list of strings")
        return tuple(value)

    for target, accepted in {int: (int,), float: (float, int), bool: (bool,), str: (str,)}.items():
        converter.register_structure_hook(target, strict(*accepted))
    converter.register_structure_hook_func(lambda target: getattr(target, "__origin__", None) is Literal, choice)
    converter.register_structure_hook_func(lambda target: target == tuple[str, ...], strings)
    converter.register_structure_hook_func(lambda target: target == int | Literal["auto"] | None, rows)
    return converter


def _faults(error: BaseException, target: Any, prefix: str) -> Iterator[str]:
    """One sentence per fault inside a (nested) structuring error."""
    if isinstance(error, ForbiddenExtraKeysError):
        known = [item.name for item in dataclasses.fields(target)]
        for key in sorted(error.extra_fields):
            yield f"{prefix}{key}: unknown key{_did_you_mean(key, known)}. Known here: {', '.join(known)}."
    elif isinstance(error, ClassValidationError):
        with_notes, without = error.group_exceptions()
        for cause, note in with_notes:
            yield from _faults(cause, get_type_hints(target)[note.name], f"{prefix}{note.name}.")
        for cause in without:
            yield from _faults(cause, target, prefix)
    elif isinstance(error, IterableValidationError):
        yield f"{prefix.rstrip('.')}: {error.exceptions[0]}."
    else:
        yield f"{prefix.rstrip('.')}: {error}."


def _did_you_mean(word: Any, known: Any) -> str:
    near = difflib.get_close_matches(str(word), list(known), n=1)
    return f", did you mean {near[0]!r}?" if near else ""


def _listing(where: str, faults: Any) -> str:
    faults = list(faults)
    return f"{where}: {faults[0]}" if len(faults) == 1 else "\n  ".join([f"{where} has {len(faults)} faults:", *faults])
