"""Flax Linen models and their loss functions: a decoder-only transformer, and a U-Net for segmentation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from jaxacc._mean import Mean
from jaxacc.experiment.config import ModelConfig
from jaxacc.losses import causal_lm, segmentation


def compute_dtype(config: ModelConfig) -> Any:
    """The dtype of activations. Parameters are cast to it where they are used, inside the layer: see `build`."""
    return jnp.dtype(config.precision.removesuffix("_params"))


class Layer(nn.Module):
    """Causal self-attention and a feed-forward layer, both on normed inputs of a residual stream."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x: jax.Array, deterministic: bool, visible: jax.Array | None) -> jax.Array:
        """Map `(m, T, width)` to the same shape. `visible` (bool, `(m, 1, T, T)`) limits what a token sees, if given."""
        config, dtype = self.config, compute_dtype(self.config)
        drop = nn.Dropout(config.dropout, deterministic=deterministic)
        dense = partial(nn.DenseGeneral, use_bias=False, dtype=dtype)

        normed = nn.RMSNorm(dtype=dtype, name="attention_norm")(x)
        heads = (3, config.heads, config.width // config.heads)
        q, k, v = jnp.moveaxis(dense(heads, name="qkv")(normed), -3, 0)
        if dtype == jnp.float16:  # JAX states an algorithm for its backward pass that CPUs and TPUs do not have
            q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
        mixed = jax.nn.dot_product_attention(q, k, v, mask=visible, is_causal=True)
        x = x + drop(dense(config.width, name="out", axis=(-2, -1))(mixed))

        normed = nn.RMSNorm(dtype=dtype, name="feed_forward_norm")(x)
        hidden = nn.gelu(dense(config.hidden, name="up")(normed))
        return x + drop(dense(config.width, name="down")(hidden))


class Transformer(nn.Module):
    """Token and position embeddings, scanned layers, and the token embedding again as the readout.

    In packed rows a token sees its own segment only, and positions count from its segment's start, so that a sequence gives
    the same logits wherever it is packed.
    """

    config: ModelConfig
    vocabulary: int
    context: int

    @nn.compact
    def __call__(self, tokens: jax.Array, segments: jax.Array | None, deterministic: bool) -> jax.Array:
        """Logits `(m, T, vocabulary)` of tokens `(m, T)`, with segment ids `(m, T)` or None."""
        config, dtype = self.config, compute_dtype(self.config)
        init = nn.initializers.normal(0.02)
        embed = nn.Embed(self.vocabulary, config.width, dtype=dtype, embedding_init=init, name="embed")
        positions = self.param("positions", init, (self.context, config.width)).astype(dtype)
        placed = positions[: tokens.shape[-1]] if segments is None else positions[_places(segments)]
        x = nn.Dropout(config.dropout, deterministic=deterministic)(embed(tokens) + placed)

        visible = None if segments is None else (segments[:, None, :, None] == segments[:, None, None, :])
        body = lambda layer, x, _: (layer(x, deterministic, visible), None)
        body = nn.remat(body, prevent_cse=False) if config.remat else body
        scan = nn.scan(body, variable_axes={"params": 0}, split_rngs={"params": True, "dropout": True}, length=config.layers)
        x, _ = scan(Layer(config, name="layers"), x, None)
        return embed.attend(nn.RMSNorm(dtype=dtype, name="norm")(x))


def _places(segments: jax.Array) -> jax.Array:
    """How far every token is from the start of its segment, `(m, T)`."""
    column = jnp.broadcast_to(jnp.arange(segments.shape[-1]), segments.shape)
    starts = jnp.concatenate([jnp.ones_like(segments[:, :1], bool), segments[:, 1:] != segments[:, :-1]], axis=-1)
    return column - jax.lax.cummax(jnp.where(starts, column, jnp.zeros_like(column)), axis=1)


class UNet(nn.Module):
    """Convolutions down `layers` scales and up again, with skips: the channels begin with `width` and double with each scale.

    GroupNorm, so that rows do not see each other and the microbatch may be as small as one image.
    """

    config: ModelConfig
    classes: int

    @nn.compact
    def __call__(self, images: jax.Array, deterministic: bool) -> jax.Array:
        """Logits `(m, H, W, classes)` of images `(m, H, W, C)`; `2^layers` divides H and W."""
        config, dtype = self.config, compute_dtype(self.config)
        conv = partial(nn.Conv, use_bias=False, dtype=dtype)
        block = nn.remat(_Block, static_argnums=(2,)) if config.remat else _Block
        x, skips = images.astype(dtype), []
        for scale in range(config.layers):
            x = block(config, config.width * 2**scale)(x, deterministic)
            skips.append(x)
            x = conv(config.width * 2 ** (scale + 1), (2, 2), strides=2)(x)
        x = block(config, config.width * 2**config.layers)(x, deterministic)
        for scale in reversed(range(config.layers)):
            x = nn.ConvTranspose(config.width * 2**scale, (2, 2), strides=(2, 2), use_bias=False, dtype=dtype)(x)
            x = block(config, config.width * 2**scale)(jnp.concatenate([x, skips[scale]], axis=-1), deterministic)
        return nn.Conv(self.classes, (1, 1), dtype=dtype)(x)


class _Block(nn.Module):
    """Two normed 3x3 convolutions."""

    config: ModelConfig
    channels: int

    @nn.compact
    def __call__(self, x: jax.Array, deterministic: bool) -> jax.Array:
        dtype = compute_dtype(self.config)
        for _ in range(2):
            x = nn.Conv(self.channels, (3, 3), use_bias=False, dtype=dtype)(x)
            x = nn.gelu(nn.GroupNorm(num_groups=min(8, self.channels), dtype=dtype)(x))
        return nn.Dropout(self.config.dropout, deterministic=deterministic)(x)


SHARDED_OVER_MODEL = {
    "qkv": P(None, None, None, "model"),
    "out": P(None, "model"),
    "up": P(None, None, "model"),
    "down": P(None, "model"),
}
"""Kernels that the mesh axis `model` shards, by heads and by hidden units; dimension 0 is the layer."""


def specs(params: Any) -> Any:
    """One `PartitionSpec` per parameter, for a mesh with the axis `model`."""
    return jax.tree.map_with_path(
        lambda path, _: SHARDED_OVER_MODEL.get(getattr(path[-2], "key", ""), P()) if len(path) > 1 else P(), params
    )


def build(
    config: ModelConfig, *, vocabulary: int, row: dict[str, Any]
) -> tuple[Callable[[jax.Array], Any], Callable[..., Mean]]:
    """`(init, loss_fn)`: `init(key)` gives the parameters, `loss_fn` is what `jaxacc.make_step` takes.

    Casts of parameters happen inside the scanned layer, so that what the backward pass of its scan makes is float32 as the
    parameters are and goes straight into their sum. With one key per row every row is a model call of its own.

    Args:
      config: names the model.
      vocabulary: token ids, or classes, are below it.
      row: a batch of one row, for its shapes.
    """
    if config.name == "unet":
        model: nn.Module = UNet(config, vocabulary)
        inputs = lambda microbatch: (microbatch["images"],)
        loss_of = lambda logits, microbatch: segmentation(logits, microbatch["labels"])
    else:
        model = Transformer(config, vocabulary, row["tokens"].shape[1])
        inputs = lambda microbatch: (microbatch["tokens"], microbatch.get("segment_ids"))
        loss_of = lambda logits, microbatch: causal_lm(logits, microbatch["labels"], segment_ids=microbatch.get("segment_ids"))

    def init(key: jax.Array) -> Any:
        params = model.init({"params": key}, *inputs(row), deterministic=True)["params"]
        return optax.tree.cast(params, jnp.bfloat16) if config.precision == "bfloat16_params" else params

    def logits_of(params: Any, arrays: tuple[Any, ...], key: jax.Array | None) -> Any:
        rngs = {} if key is None or config.dropout == 0 else {"dropout": key}
        return model.apply({"params": params}, *arrays, deterministic=not rngs, rngs=rngs)

    def row_logits_of(params: Any, row: tuple[Any, ...], key: jax.Array) -> Any:
        return logits_of(params, jax.tree.map(lambda leaf: leaf[None], row), key)[0]

    def loss_fn(params: Any, microbatch: dict[str, jax.Array], key: jax.Array | None) -> Mean:
        if key is None or key.ndim == 0:
            return loss_of(logits_of(params, inputs(microbatch), key), microbatch)
        logits = jax.vmap(row_logits_of, in_axes=(None, 0, 0))(params, inputs(microbatch), key)
        return loss_of(logits, microbatch)

    return init, loss_fn
