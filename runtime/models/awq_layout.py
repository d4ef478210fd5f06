"""4-bit layouts as numpy arrays: AutoAWQ "gemm" and compressed-tensors "pack-quantized" to what ExLlamaV2 reads.

Every layout packs eight 4-bit numbers into one 32-bit word. w is the weight, q its 4-bit code, z the zero point of
its group and column, s their scale; `group` consecutive inputs share z and s:

    AutoAWQ gemm        qweight [in, out/8], nibble i of word c is column 8c + AWQ_ORDER[i]    w = (q - z) s
    pack-quantized      weight_packed [out, in/8], nibble i of word c is input 8c + i          w = (q - z) s
    ExLlamaV2 (GPTQ)    qweight [in/8, out], nibble i of word r is input 8r + i                w = (q - (stored + 1)) s

ExLlamaV2's kernels add 1 to the stored nibble, so they hold z = 1 ... 16 while AWQ has 0 ... 15. A zero point of 0 is
written as its mirror image: (q - 0) s = ((15 - q) - 15) (-s), exactly, because negating a float is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.int32]
Nibbles = npt.NDArray[np.uint8]
Half = npt.NDArray[np.float16]

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Nibble i of an AutoAWQ word holds column AWQ_ORDER[i] of its eight."""

IN_ORDER = (0, 1, 2, 3, 4, 5, 6, 7)


def unpack_columns(words: Words, order: Sequence[int] = IN_ORDER) -> Nibbles:
    """[rows, 8 n] numbers 0 ... 15 from [rows, n] words packed along the columns.

    >>> unpack_columns(np.array([[0x76543210]], np.int32)).tolist()
    [[0, 1, 2, 3, 4, 5, 6, 7]]
    >>> unpack_columns(np.array([[0x75316420]], np.int32), AWQ_ORDER).tolist()
    [[0, 1, 2, 3, 4, 5, 6, 7]]
    """
    unsigned = words.view(np.uint32)
    out = np.empty((words.shape[0], words.shape[1] * 8), np.uint8)
    for nibble, column in enumerate(order):
        out[:, column::8] = (unsigned >> np.uint32(4 * nibble)) & np.uint32(15)
    return out


def pack_columns(numbers: Nibbles, order: Sequence[int] = IN_ORDER) -> Words:
    """[rows, n] words from [rows, 8 n] numbers 0 ... 15: the inverse of `unpack_columns`."""
    out = np.zeros((numbers.shape[0], numbers.shape[1] // 8), np.uint32)
    for nibble, column in enumerate(order):
        out |= numbers[:, column::8].astype(np.uint32) << np.uint32(4 * nibble)
    return out.view(np.int32)


def unpack_rows(words: Words) -> Nibbles:
    """[8 n, columns] numbers from [n, columns] words packed along the rows."""
    unsigned = words.view(np.uint32)
    out = np.empty((words.shape[0] * 8, words.shape[1]), np.uint8)
    for nibble in range(8):
        out[nibble::8] = (unsigned >> np.uint32(4 * nibble)) & np.uint32(15)
    return out


def pack_rows(numbers: Nibbles) -> Words:
    """[n, columns] words from [8 n, columns] numbers: the inverse of `unpack_rows`."""
    out = np.zeros((numbers.shape[0] // 8, numbers.shape[1]), np.uint32)
    for nibble in range(8):
        out |= numbers[nibble::8].astype(np.uint32) << np.uint32(4 * nibble)
    return out.view(np.int32)


@dataclass(frozen=True, kw_only=True)
class Codes:
    """One linear layer, unpacked: codes [in, out], zero points and scales [groups, out]."""

    codes: Nibbles
    zeros: Nibbles
    scales: Half

    @property
    def group(self) -> int:
        """Inputs that share a zero point and a scale."""
        return int(self.codes.shape[0]) // int(self.zeros.shape[0])

    def dequantise(self) -> Half:
        """[in, out] weights in fp16, (q - z) rounded once when multiplied by s; -0 counts as 0."""
        centred = self.codes.astype(np.int8) - np.repeat(self.zeros.astype(np.int8), self.group, axis=0)
        weights: Half = centred.astype(np.float16) * np.repeat(self.scales, self.group, axis=0)
        weights += np.float16(0)
        return weights


@dataclass(frozen=True, kw_only=True)
class Packed:
    """One linear layer as ExLlamaV2 reads it, and how many (group, column) pairs are stored as mirror images."""

    qweight: Words
    qzeros: Words
    scales: Half
    num_mirrored: int = 0

    def unpack(self) -> Codes:
        """What ExLlamaV2's kernels make of it: the stored zero point plus one."""
        return Codes(
            codes=unpack_rows(self.qweight), zeros=unpack_columns(self.qzeros) + np.uint8(1), scales=self.scales
        )


def read_awq_gemm(qweight: Words, qzeros: Words, scales: Half) -> Codes:
    """Unpack AutoAWQ's gemm layout: qweight [in, out/8], qzeros [groups, out/8], scales [groups, out]."""
    return Codes(codes=unpack_columns(qweight, AWQ_ORDER), zeros=unpack_columns(qzeros, AWQ_ORDER), scales=scales)


def read_pack_quantized(weight_packed: Words, weight_scale: Half, weight_zero_point: Words | None) -> Codes:
    """Unpack compressed-tensors: packed [out, in/8], scale [out, groups], zero point [out/8, groups] or none (8)."""
    scales = np.ascontiguousarray(weight_scale.T)
    if weight_zero_point is None:
        zeros = np.full(scales.shape, 8, np.uint8)
    else:
        zeros = unpack_columns(np.ascontiguousarray(weight_zero_point.T))
    return Codes(codes=unpack_rows(np.ascontiguousarray(weight_packed.T)), zeros=zeros, scales=scales)


def pack_for_exllamav2(source: Codes) -> Packed:
    """Pack for ExLlamaV2 without loss. `source.codes` is changed in place where a zero point is 0."""
    codes, zeros, scales = source.codes, source.zeros, source.scales
    is_zero = zeros == 0
    for at in np.flatnonzero(is_zero.any(axis=1)):
        codes[at * source.group : (at + 1) * source.group, is_zero[at]] ^= np.uint8(15)
    mirrored = np.where(is_zero, -scales, scales)
    stored = np.where(is_zero, np.uint8(15), zeros) - np.uint8(1)
    return Packed(
        qweight=pack_rows(codes),
        qzeros=pack_columns(stored),
        scales=np.ascontiguousarray(mirrored),
        num_mirrored=int(is_zero.sum()),
    )


def half_from_raw(raw: npt.NDArray[np.uint16] | npt.NDArray[np.float32], dtype: str) -> tuple[Half, int]:
    """fp16 values of F16, BF16 or F32 data, and how many changed on the way.

    numpy has no bfloat16: a BF16 number is the upper half of a float32.
    """
    if dtype == "F16":
        return raw.view(np.float16), 0
    exact = (raw.astype(np.uint32) << np.uint32(16)).view(np.float32) if dtype == "BF16" else raw.astype(np.float32)
    with np.errstate(over="ignore"):
        half = exact.astype(np.float16)
    is_changed = (half.astype(np.float32) != exact) & ~np.isnan(exact)
    return half, int(is_changed.sum())
