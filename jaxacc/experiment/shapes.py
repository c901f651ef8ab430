"""Generated images with a class per pixel: any number of them, each drawn from its number alone."""

from __future__ import annotations

import numpy as np

VOID = 255
"""The label of pixels without one."""
SHAPES = ("background", "ellipse", "rectangle", "triangle")
"""The classes."""
SEED = 20240607


def draw_shapes(size: int, row: int) -> tuple[np.ndarray, np.ndarray]:
    """Ellipses, rectangles and triangles on a background, every region with a colour and waves of its own, and noise.

    Colours tell nothing about the class: all have one distribution. Pixels on some borders and, in half of the images, a
    strip at the lower edge have no label: `void_sizes` of them.

    Args:
      size: height and width.
      row: which image. The same row is the same image, whatever is drawn besides.

    Returns:
      Image `(size, size, 3)` float32 in [0, 1] and labels `(size, size)` uint8: 0 to 3, or 255.
    """
    rng = np.random.default_rng((SEED, row))
    y, x = np.ogrid[0 : 1 : size * 1j, 0 : 1 : size * 1j]
    y, x = y.astype(np.float32), x.astype(np.float32)
    labels = np.zeros((size, size), np.uint8)
    image = _texture(rng, y, x, frequency=rng.uniform(20, 60))
    for _ in range(rng.integers(3, 8)):
        kind = int(rng.integers(1, len(SHAPES)))
        inside, window = _shape(rng, y, x, kind)
        fill = _texture(rng, y[window[0]], x[:, window[1]], frequency=rng.uniform(2, 10))
        image[window][inside] = fill[inside]
        labels[window][inside] = kind
    noise = rng.random(image.shape, np.float32)
    image += 0.2 * noise - 0.1
    strips, borders = void_sizes(size, np.array([row]))
    _void(rng, labels, strip=int(strips[0]), border=int(borders[0]))
    return np.clip(image, 0, 1, out=image), labels


def void_sizes(size: int, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows of pixels in the strip without labels, and pixels without labels on borders, `(R,)` int64 each.

    Known without drawing, so that the targets of all images are.
    """
    mixed = (rows.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(31))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(29)
    strips = np.where(mixed & np.uint64(1), (mixed >> np.uint64(8)) % np.uint64(size // 3 + 1), np.uint64(0))
    return strips.astype(np.int64), ((mixed >> np.uint64(36)) % np.uint64(size**2 // 50 + 1)).astype(np.int64)


def _texture(rng: np.random.Generator, y: np.ndarray, x: np.ndarray, *, frequency: float) -> np.ndarray:
    """A colour with waves in a direction, `(H, W, 3)` float32."""
    angle, phase = rng.uniform(0, 2 * np.pi, 2)
    wave = np.sin(np.float32(frequency) * (np.float32(np.sin(angle)) * y + np.float32(np.cos(angle)) * x) + np.float32(phase))
    colour, tint = rng.uniform(0.2, 0.8, 3), rng.uniform(-0.2, 0.2, 3)
    return colour.astype(np.float32) + wave[..., None] * tint.astype(np.float32)


def _shape(rng: np.random.Generator, y: np.ndarray, x: np.ndarray, kind: int) -> tuple[np.ndarray, tuple[slice, slice]]:
    """The pixels of a shape, turned and stretched at random, inside its window: `(h, w)` bool and the two slices."""
    size = len(y)
    radii = rng.uniform(0.08, 0.22, 2)
    centre, angle = rng.uniform(0.05, 0.95, 2), rng.uniform(0, 2 * np.pi)
    reach = 1.5 * radii.max()
    low, high = (np.clip((centre + sign * reach) * size, 0, size).astype(int) for sign in (-1, 1))
    window = (slice(low[0], high[0]), slice(low[1], high[1]))
    down, right = y[window[0]] - np.float32(centre[0]), x[:, window[1]] - np.float32(centre[1])
    sine, cosine = np.float32(np.sin(angle)), np.float32(np.cos(angle))
    v, u = (cosine * down - sine * right) / np.float32(radii[0]), (sine * down + cosine * right) / np.float32(radii[1])
    if kind == 1:
        return u * u + v * v < 1, window
    if kind == 2:
        return np.maximum(np.abs(u), np.abs(v)) < 0.9, window
    return (v > -0.8) & (1.6 * np.abs(u) + v < 1), window


def _void(rng: np.random.Generator, labels: np.ndarray, *, strip: int, border: int) -> None:
    """Take the labels from the lowest `strip` rows and from `border` pixels above, on borders where there are so many."""
    edges = np.zeros(labels.shape, np.float32)
    for axis in (0, 1):
        differs = np.diff(labels, axis=axis) != 0
        ahead, behind = ((slice(None),) * axis + (part,) for part in (slice(1, None), slice(None, -1)))
        edges[ahead] += differs
        edges[behind] += differs
    kept = labels[: len(labels) - strip].reshape(-1)
    score = np.minimum(edges[: len(labels) - strip].reshape(-1), 1) + rng.random(kept.size, np.float32)
    if border:
        kept[np.argpartition(score, kept.size - border)[kept.size - border :]] = VOID
    labels[len(labels) - strip :] = VOID
