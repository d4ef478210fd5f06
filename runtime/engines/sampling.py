"""From logits to the next token, with a random generator of its own: no global random state is read or changed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ..request import Sampling

COLDEST = 1e-30
"""Below this the likeliest token is taken: quotients of logits would exceed fp32."""


class Sampler:
    """Draws the tokens of one request.

    The order is that of transformers' own logits processors - repetition penalty, temperature, top_k, top_p,
    min_p - so that equal settings and an equal generator give equal tokens.
    """

    def __init__(self, sampling: Sampling, seed: int, prompt_ids: Sequence[int], device: torch.device) -> None:
        self._sampling = sampling
        self._generator = torch.Generator(device=device).manual_seed(seed)
        self._seen: torch.Tensor | None = None
        self._prompt_ids = prompt_ids

    def draw(self, logits: torch.Tensor) -> int | None:
        """The next token from logits [vocab] of fp32; None if one of them is not finite."""
        if not math.isfinite(logits.sum().item()):
            return None
        sampling = self._sampling
        if sampling.repetition_penalty != 1:
            logits = self._penalise(logits)
        if sampling.temperature < COLDEST:
            token = int(logits.argmax())
        else:
            token = int(torch.multinomial(self.probabilities(logits), 1, generator=self._generator))
        self.saw(token)
        return token

    def saw(self, token: int) -> None:
        """Count a token that was fed, not drawn, as output too."""
        if self._seen is not None:
            self._seen[token] = True

    def _penalise(self, logits: torch.Tensor) -> torch.Tensor:
        """Divide what speaks for a token that was there before (Keskar et al. 2019, arXiv:1909.05858)."""
        if self._seen is None:
            self._seen = torch.zeros_like(logits, dtype=torch.bool)
            self._seen[torch.tensor(self._prompt_ids, device=logits.device, dtype=torch.long)] = True
        penalty = self._sampling.repetition_penalty
        return torch.where(self._seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)

    def probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        """The distribution [vocab] that is drawn from."""
        sampling = self._sampling
        out = float("-inf")
        logits = logits / sampling.temperature
        if 0 < sampling.top_k < logits.numel():
            logits = logits.masked_fill(logits < logits.topk(sampling.top_k).values[-1], out)
        if sampling.top_p < 1:
            ascending, order = logits.sort()
            is_out = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1 - sampling.top_p
            is_out[-1] = False
            logits = logits.masked_fill(is_out.scatter(0, order, is_out), out)
        if sampling.min_p > 0:
            shares = logits.softmax(dim=-1)
            is_out = shares < sampling.min_p * shares.max()
            is_out[shares.argmax()] = False
            logits = logits.masked_fill(is_out, out)
        return logits.softmax(dim=-1)
