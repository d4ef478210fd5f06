"""A checkpoint that ComfyUI takes for Stable Diffusion 1: random weights, every tensor set, a file of a few megabytes.

ComfyUI recognises the family by its UNet: 320 channels and a context of 768 must be, the number of levels and blocks is
free. So this one has a single level with one attention block and no middle; the tiny autoencoder (TAESD) stands for the
VAE. The text encoder is as large as CLIP-L, because its shape is fixed in ComfyUI; its tensors are overlapping windows
of one random buffer, and a `.ckpt` file stores each buffer once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import torch

Shape = tuple[int, ...]

CHANNELS, TIME, CONTEXT, VOCAB, MLP, NUM_LAYERS = 320, 1280, 768, 49408, 3072, 12
UNET, CLIP, VAE = "model.diffusion_model.", "cond_stage_model.transformer.text_model.", "first_stage_model."


def _layer(name: str, *shape: int) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", shape
    yield f"{name}.bias", shape[:1]


def _res_block(name: str, num_in: int) -> Iterator[tuple[str, Shape]]:
    yield from _layer(f"{name}.in_layers.0", num_in)
    yield from _layer(f"{name}.in_layers.2", CHANNELS, num_in, 3, 3)
    yield from _layer(f"{name}.emb_layers.1", CHANNELS, TIME)
    yield from _layer(f"{name}.out_layers.0", CHANNELS)
    yield from _layer(f"{name}.out_layers.3", CHANNELS, CHANNELS, 3, 3)
    if num_in != CHANNELS:
        yield from _layer(f"{name}.skip_connection", CHANNELS, num_in, 1, 1)


def _transformer(name: str) -> Iterator[tuple[str, Shape]]:
    yield from _layer(f"{name}.norm", CHANNELS)
    yield from _layer(f"{name}.proj_in", CHANNELS, CHANNELS, 1, 1)
    yield from _layer(f"{name}.proj_out", CHANNELS, CHANNELS, 1, 1)
    block = f"{name}.transformer_blocks.0"
    for attention, width in (("attn1", CHANNELS), ("attn2", CONTEXT)):
        yield f"{block}.{attention}.to_q.weight", (CHANNELS, CHANNELS)
        yield f"{block}.{attention}.to_k.weight", (CHANNELS, width)
        yield f"{block}.{attention}.to_v.weight", (CHANNELS, width)
        yield from _layer(f"{block}.{attention}.to_out.0", CHANNELS, CHANNELS)
    yield from _layer(f"{block}.ff.net.0.proj", 8 * CHANNELS, CHANNELS)
    yield from _layer(f"{block}.ff.net.2", CHANNELS, 4 * CHANNELS)
    for index in (1, 2, 3):
        yield from _layer(f"{block}.norm{index}", CHANNELS)


def _unet() -> Iterator[tuple[str, Shape]]:
    yield from _layer("time_embed.0", TIME, CHANNELS)
    yield from _layer("time_embed.2", TIME, TIME)
    yield from _layer("input_blocks.0.0", CHANNELS, 4, 3, 3)
    yield from _res_block("input_blocks.1.0", CHANNELS)
    yield from _transformer("input_blocks.1.1")
    yield from _res_block("output_blocks.0.0", 2 * CHANNELS)
    yield from _res_block("output_blocks.1.0", 2 * CHANNELS)
    yield from _layer("out.0", CHANNELS)
    yield from _layer("out.2", 4, CHANNELS, 3, 3)


def _clip() -> Iterator[tuple[str, Shape]]:
    yield "embeddings.token_embedding.weight", (VOCAB, CONTEXT)
    yield "embeddings.position_embedding.weight", (77, CONTEXT)
    for index in range(NUM_LAYERS):
        layer = f"encoder.layers.{index}"
        for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
            yield from _layer(f"{layer}.self_attn.{part}", CONTEXT, CONTEXT)
        yield from _layer(f"{layer}.layer_norm1", CONTEXT)
        yield from _layer(f"{layer}.layer_norm2", CONTEXT)
        yield from _layer(f"{layer}.mlp.fc1", MLP, CONTEXT)
        yield from _layer(f"{layer}.mlp.fc2", CONTEXT, MLP)
    yield from _layer("final_layer_norm", CONTEXT)


def _taesd(name: str, kinds: str, first: int, last: int) -> Iterator[tuple[str, Shape]]:
    """Layers by letter: i, o first and last convolution, c one without bias, b a residual block, - no weights."""
    for index, kind in enumerate(kinds):
        if kind in "io":
            yield from _layer(f"{name}.{index}", *((64, first) if kind == "i" else (last, 64)), 3, 3)
        elif kind == "c":
            yield f"{name}.{index}.weight", (64, 64, 3, 3)
        elif kind == "b":
            for conv in (0, 2, 4):
                yield from _layer(f"{name}.{index}.conv.{conv}", 64, 64, 3, 3)


def _vae() -> Iterator[tuple[str, Shape]]:
    yield from _taesd("taesd_encoder", "ibcbbbcbbbcbbbo", 3, 4)
    yield from _taesd("taesd_decoder", "-i-bbb-cbbb-cbbb-cbo", 4, 3)
    yield "vae_scale", ()
    yield "vae_shift", ()


def shapes() -> dict[str, Shape]:
    """Every tensor of the checkpoint and its shape."""
    parts = ((UNET, _unet()), (CLIP, _clip()), (VAE, _vae()))
    return {prefix + name: shape for prefix, part in parts for name, shape in part}


ROW_STEP = 7
"""Numbers between the starts of two rows in the buffer that they are windows of."""


def _noise(shape: Shape, generator: torch.Generator) -> torch.Tensor:
    """Noise of variance 1 / fan-in; its rows are overlapping windows of one buffer."""
    fan_in = math.prod(shape[1:])
    buffer = torch.randn(shape[0] * ROW_STEP + fan_in, generator=generator) / math.sqrt(fan_in)
    inner = [math.prod(shape[axis + 1 :]) for axis in range(1, len(shape))]
    return buffer.as_strided(shape, (ROW_STEP, *inner))


def _filled(name: str, shape: Shape, generator: torch.Generator) -> torch.Tensor:
    """Noise for what multiplies, ones for the scales of norms, zeros for biases."""
    if len(shape) > 1:
        return _noise(shape, generator)
    is_one = name.endswith((".weight", "vae_scale"))
    return torch.full((), float(is_one)).expand(shape)


def write_checkpoint(folder: Path, name: str = "tiny-sd1.ckpt") -> Path:
    """Write the checkpoint, with the same weights each time; its path."""
    generator = torch.Generator().manual_seed(1)
    weights = {key: _filled(key, shape, generator) for key, shape in shapes().items()}
    path = folder / name
    torch.save({"state_dict": weights}, path)
    return path
