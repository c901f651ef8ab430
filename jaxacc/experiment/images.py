"""Images with a class per pixel: arrays in .npz files, folders of pictures, and generated shapes."""

from __future__ import annotations

import hashlib
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxacc.experiment.config import DataConfig, UserError
from jaxacc.experiment.rows import Corpus, hold_out
from jaxacc.experiment.shapes import SEED, SHAPES, VOID, draw_shapes, void_sizes


class Images(NamedTuple):
    """Images and masks that are read when they are asked for.

    Attributes:
      read: an item to its image `(H, W, C)` float32 and its mask `(H, W)` uint8.
      items: one per row: arrays, paths or a number.
      targets: labelled pixels of every row, `(R,)` int64.
      classes: labels are below it, or 255.
    """

    read: Callable[[Any], tuple[np.ndarray, np.ndarray]]
    items: Sequence[Any]
    targets: np.ndarray
    classes: int

    @property
    def fill(self) -> dict[str, int]:
        """Padding rows have no labels."""
        return {"labels": VOID}

    def batch(self, indices: Any) -> dict[str, np.ndarray]:
        """Rows as `images`, `(B, H, W, C)` float32, and `labels`, `(B, H, W)` uint8, 255 where a pixel has no label."""
        images, labels = zip(*(self.read(self.items[int(index)]) for index in indices), strict=True)
        return {"images": np.stack(images), "labels": np.stack(labels)}

    def label_counts(self) -> np.ndarray:
        """Pixels of every class, `(classes,)` int64. Reads all rows, one at a time."""
        return np.sum([_counts(self.read(item)[1], self.classes) for item in self.items], axis=0)


class Pair(NamedTuple):
    """An image and its mask, in memory or as the paths of pictures."""

    where: str
    image: np.ndarray | Path
    mask: np.ndarray | Path


class Found(NamedTuple):
    """What is known of a pair before the run: shape of the image, labelled pixels, digests of image and mask."""

    shape: tuple[int, ...]
    targets: int
    image: bytes
    mask: bytes


def load_images(config: DataConfig) -> Corpus:
    """`.npz` files and folders, every mask checked; held out by the digest of the image, so that equal ones stay together."""
    assert config.vocabulary is not None
    pairs = [pair for path in map(Path, config.paths) for pair in (_folder(path) if path.is_dir() else _arrays(path))]
    found = [_inspect(pair, config.vocabulary) for pair in pairs]
    for pair, (shape, *_) in zip(pairs, found, strict=True):
        if shape != found[0].shape:
            raise UserError(
                f"{pair.where} is {shape} (height, width, channels), {pairs[0].where} is {found[0].shape}. Resize or crop the "
                "images to one size."
            )
    kept = [index for index, each in enumerate(found) if each.targets]
    if not kept:
        raise UserError(
            f"data.paths: none of {len(pairs)} images has a labelled pixel. Give masks with other values than {VOID}."
        )
    single = "data: one image cannot be split into training and held-out images. Give more images."
    keys = [found[index].image for index in kept]
    held_out, repeated = hold_out(keys, config.held_out, sizes=[1] * len(kept), single=single)
    parts, digest = [], hashlib.sha256(str(config.vocabulary).encode())
    for part in (False, True):
        chosen = [kept[index] for index in np.flatnonzero(held_out == part).tolist()]
        targets = np.array([found[index].targets for index in chosen], np.int64)
        parts.append(Images(_read, [pairs[index] for index in chosen], targets, config.vocabulary))
        digest.update(b"".join([bytes([part]), *(found[index].image + found[index].mask for index in chosen)]))
    notes = []
    if len(kept) < len(pairs):
        notes.append(f"{len(pairs) - len(kept)} of {len(pairs)} images have no labelled pixel and were left out.")
    if repeated:
        notes.append(f"{repeated} of {len(kept)} images repeat an earlier one; they are kept, on the same side of the split.")
    return Corpus(parts[0], parts[1], digest.hexdigest(), config.vocabulary, tuple(notes))


def load_shapes(config: DataConfig) -> Corpus:
    """`data.examples` generated images, of which the last are held out; each is drawn when it is asked for."""
    held = min(max(1, round(config.held_out * config.examples)), config.examples - 1)
    strips, borders = void_sizes(config.size, np.arange(config.examples))
    targets = config.size**2 - strips * config.size - borders
    cut = config.examples - held
    read = partial(draw_shapes, config.size)
    train, held_out = (
        Images(read, range(begin, end), targets[begin:end], len(SHAPES)) for begin, end in ((0, cut), (cut, config.examples))
    )
    digest = hashlib.sha256(repr((SEED, config.size, config.examples, held)).encode())
    digest.update(train.batch([0])["labels"].tobytes())  # a numpy that draws other numbers
    return Corpus(train, held_out, digest.hexdigest(), len(SHAPES))


def _arrays(path: Path) -> Iterator[Pair]:
    """The pairs of an `.npz` file."""
    try:
        with np.load(path, allow_pickle=False) as file:
            if missing := {"images", "masks"} - set(file.files):
                raise UserError(
                    f"{path} has no array {' and no '.join(sorted(missing))}; it has {', '.join(sorted(file.files))}."
                )
            images, masks = file["images"], file["masks"]
    except OSError as error:
        raise UserError(f"data.paths: cannot read {path}: {error.strerror or error}.") from error
    except (ValueError, zipfile.BadZipFile, AttributeError, TypeError) as error:
        raise UserError(f"data.paths: {path} is not an .npz file: {error}.") from error
    images = images[..., None] if images.ndim == 3 else images
    if images.ndim != 4 or masks.shape != images.shape[:3]:
        raise UserError(
            f"{path}: images {images.shape}, masks {masks.shape}. Images must be (N, H, W) or (N, H, W, C), masks (N, H, W)."
        )
    if images.dtype != np.uint8 and images.dtype.kind != "f":
        raise UserError(
            f"{path}: images are {images.dtype}. Give uint8, which is divided by 255, or floating numbers, taken as is."
        )
    if masks.dtype.kind not in "iu":
        raise UserError(f"{path}: masks are {masks.dtype}. They must be integers: a class per pixel, or {VOID} for none.")
    if not images.size:
        raise UserError(f"data.paths: {path} is empty. Name files that contain images.")
    for index in range(len(images)):
        yield Pair(f"{path}, image {index}", images[index], masks[index])


def _folder(path: Path) -> Iterator[Pair]:
    """The pairs of a folder with `images/` and `masks/`; names are equal but for the ending."""
    names: dict[str, dict[str, Path]] = {}
    for part in ("images", "masks"):
        folder = path / part
        if not folder.is_dir():
            raise UserError(f"data.paths: {path} has no folder {part}. Give a folder with images/ and masks/, or an .npz file.")
        files = sorted(file for file in folder.iterdir() if file.is_file() and not file.name.startswith("."))
        if twice := [stem for stem, count in Counter(file.stem for file in files).items() if count > 1]:
            raise UserError(f"{folder} has several files named {twice[0]}. Names are compared without their ending.")
        names[part] = {file.stem: file for file in files}
    for one, other in (("images", "masks"), ("masks", "images")):
        if alone := sorted(names[one].keys() - names[other]):
            raise UserError(f"{names[one][alone[0]]} has no partner of that name in {path / other} ({len(alone)} such files).")
    if not names["images"]:
        raise UserError(f"data.paths: {path / 'images'} is empty. Name folders that contain images.")
    for stem, image in names["images"].items():
        yield Pair(str(image), image, names["masks"][stem])


def _inspect(pair: Pair, classes: int) -> Found:
    """What is to be known of a pair, or raise `UserError` for what is wrong with it. A picture is not decoded, its mask is."""
    if isinstance(pair.image, Path):
        shape = _picture(pair.image, lambda picture: (picture.height, picture.width, 3))
    else:
        shape = pair.image.shape
        if pair.image.dtype.kind == "f" and not np.isfinite(pair.image).all():
            raise UserError(f"{pair.where} has NaN or infinity. Remove it or repair it.")
    mask = _mask(pair)
    if mask.shape != shape[:2]:
        raise UserError(f"{pair.where} is {shape[:2]} (height, width), its mask is {mask.shape}. They must agree.")
    bad = (mask != VOID) & ((mask >= classes) | (mask < 0))
    if bad.any():
        y, x = np.argwhere(bad)[0]
        raise UserError(
            f"{pair.where}: the mask is {mask[y, x]} at row {y}, column {x}, and data.vocabulary is {classes} classes. "
            f"Labels are 0 to {classes - 1}, and {VOID} where there is none."
        )
    return Found(shape, int(np.sum(mask != VOID)), _digest(pair.image), _digest(pair.mask))


def _digest(source: np.ndarray | Path) -> bytes:
    content = source.read_bytes() if isinstance(source, Path) else np.ascontiguousarray(source).tobytes()
    return hashlib.sha256(content).digest()


def _read(pair: Pair) -> tuple[np.ndarray, np.ndarray]:
    """Image and mask as `Images.read` gives them; uint8 is divided by 255."""
    image = _picture(pair.image, _rgb) if isinstance(pair.image, Path) else pair.image
    scaled = image.astype(np.float32) / np.float32(255) if image.dtype == np.uint8 else image.astype(np.float32)
    return scaled, _mask(pair).astype(np.uint8)


def _mask(pair: Pair) -> np.ndarray:
    return _picture(pair.mask, _classes) if isinstance(pair.mask, Path) else pair.mask


def _picture(path: Any, use: Callable[[Any], Any]) -> Any:
    """What `use` makes of the picture in a file."""
    try:
        from PIL import Image
    except ImportError as error:
        raise UserError("data.paths: folders of images need the package Pillow. Run: pip install pillow") from error
    try:
        with Image.open(path) as picture:
            return use(picture)
    except OSError as error:
        raise UserError(f"{path} is not a picture that can be read: {error}.") from error
    except ValueError as error:
        raise UserError(f"{path} {error}") from error


def _rgb(picture: Any) -> np.ndarray:
    """`(H, W, 3)` uint8."""
    if picture.mode.startswith(("I", "F")):
        raise ValueError(f"has mode {picture.mode}. Save it with 8 bits per channel, or as floats in an .npz file.")
    return np.asarray(picture.convert("RGB"))


def _classes(picture: Any) -> np.ndarray:
    """`(H, W)` uint8."""
    if picture.mode not in ("1", "L", "P"):
        raise ValueError(
            f"has mode {picture.mode}. A mask holds a class per pixel: save it with 8 bits, grey or with a palette."
        )
    return np.asarray(picture).astype(np.uint8)


def _counts(mask: np.ndarray, classes: int) -> np.ndarray:
    return np.bincount(mask[mask != VOID], minlength=classes).astype(np.int64)
