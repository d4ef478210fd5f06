"""Requests as jobs of ExLlamaV2's dynamic generator: ids in, ids out; text is made by our own detokenizer."""

from __future__ import annotations

import contextlib
import logging
import math
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import GenerationFailed, ResidentError, release_frames
from ..events import Finish
from ..prompting.detokenize import Detokenizer
from ..request import Sampling
from .base import Command, DecodeStep, Drop, FailedStep, Feed, PrefillStep, Steps, Work
from .exllamav2_sdk import Sdk, host_stream_kept, translate_errors

log = logging.getLogger(__name__)


class IdTokenizer:
    """What the generator asks of a tokenizer, without any text: it then never holds ids back for the sake of it.

    Ids from `vocab_size` on have rows in the output head but no token; the sampler masks them.
    """

    def __init__(self, vocab_size: int, num_rows: int) -> None:
        self._vocab_size = min(vocab_size, num_rows)
        self._pieces = [""] * (num_rows + 32)

    def get_vocab_size(self) -> int:
        return self._vocab_size

    def get_id_to_piece_list(self, include_special_tokens: bool = False) -> list[str]:
        return self._pieces


def job_class(sdk: Sdk) -> type[Any]:
    """The SDK's job, with its own faults kept to itself: a bad one in a batch then leaves the others alone."""
    base: Any = sdk.generator.ExLlamaV2DynamicJob

    class Job(base):  # type: ignore[misc]
        fault: Exception | None = None

        def receive_logits(self, logits: torch.Tensor) -> Any:
            """What the SDK draws; it asks all jobs of a step at once, in threads."""
            try:
                return super().receive_logits(logits)
            except Exception as error:
                self.fault = error
                return torch.zeros((1, 1), dtype=torch.long), None, None, torch.zeros((1, 1)), False

        def receive_sample(self, logits: torch.Tensor, token: Any, *more: Any) -> Any:
            """Take what was drawn, in the one thread. A logit that is not finite is drawn or spoils the probability;
            to read them all would cost 2 % of a step."""
            if self.fault is None and not (math.isfinite(logits[0, -1, int(token)]) and math.isfinite(more[2])):
                self.fault = GenerationFailed("non-finite logits")
            return super().receive_sample(logits, token, *more)

    return Job


def settings_for(sdk: Sdk, sampling: Sampling) -> Any:
    """The SDK's sampler settings; its own defaults are not neutral (temperature 0.8, top_k 50, penalty 1.025)."""
    settings = sdk.generator.ExLlamaV2Sampler.Settings()
    is_greedy = sampling.temperature == 0
    settings.temperature = 1.0 if is_greedy else sampling.temperature
    settings.top_k = 1 if is_greedy else sampling.top_k
    settings.top_p = 0.0 if is_greedy else sampling.top_p
    settings.min_p = 0.0 if is_greedy else sampling.min_p
    settings.token_repetition_penalty = sampling.repetition_penalty
    return settings


@dataclass(eq=False)
class Running:
    """One request while it runs. ids: prompt, output and fed tokens, as the model has seen them."""

    index: int
    work: Work
    detokenizer: Detokenizer
    ids: list[int]
    job: Any = None
    random: Any = None
    fed: list[int] = field(default_factory=list)
    num_new: int = 0
    num_cached: int | None = None
    num_accepted: int = 0
    num_rejected: int = 0
    is_prefilled: bool = False

    @property
    def num_left(self) -> int:
        assert self.work.max_tokens is not None
        return self.work.max_tokens - self.num_new


@dataclass(frozen=True, kw_only=True)
class Generation:
    """Drives one generator of the SDK for one batch.

    label: "ExLlamaV2, <attention>", for errors
    """

    sdk: Sdk
    generator: Any
    label: str
    draft: str | None
    num_draft_tokens: int
    context_len: int

    def run(self, batch: Sequence[Work], detokenizers: Sequence[Detokenizer]) -> Steps:
        """All requests at once, as far as pages allow; after a failed forward pass one by one, to find the bad one."""
        make_job = job_class(self.sdk)
        waiting = deque(
            Running(index=index, work=work, detokenizer=detokenizer, ids=list(work.encoded.token_ids or ()))
            for index, (work, detokenizer) in enumerate(zip(batch, detokenizers))
        )
        live: list[Running] = []
        is_alone = is_poisoned = False
        for one in [
            one for one in waiting if not one.ids
        ]:  # the SDK refuses it by an assertion, which would end the whole batch
            waiting.remove(one)
            error = GenerationFailed("The prompt came to no tokens at all. Write something into it.")
            yield one.index, FailedStep(error=error)
        try:
            while waiting or live:
                while waiting and not (is_alone and live):
                    live.append(self._enqueue(make_job, waiting.popleft()))
                for one in [one for one in live if one.job is None]:
                    live.remove(one)
                    yield one.index, self._end_of_fed(one)
                if not live:
                    continue
                try:
                    with host_stream_kept(must_wait=False), translate_errors(self.label):
                        results = self.generator.iterate()
                except ResidentError as error:
                    release_frames(error)
                    self._reset()
                    if len(live) == 1:
                        [failed] = live
                        live.clear()
                        yield failed.index, FailedStep(error=error)
                    else:
                        log.warning(
                            "%s: a forward pass of %d requests failed; each runs alone now", self.label, len(live)
                        )
                        is_alone = True
                        waiting.extendleft(reversed(live))
                        live.clear()
                    continue
                for one in list(live):
                    if one.job.fault is not None:
                        is_poisoned = True
                        live.remove(one)
                        self.generator.cancel(one.job)
                        yield one.index, FailedStep(error=self._fault(one))
                        continue
                    mine = [result for result in results if result["job"] is one.job]
                    command = yield from self._take(one, mine, live)
                    if one in live:
                        self._obey(make_job, command, one, live)
        finally:
            with host_stream_kept():
                for one in live:
                    if one.job is not None:
                        self.generator.cancel(one.job)
            if is_poisoned and not self.generator.num_remaining_jobs():
                self.generator.reset_page_table()

    def _enqueue(self, make_job: type[Any], one: Running) -> Running:
        stops = {entry.id for entry in one.work.encoded.stop}
        job = make_job(
            input_ids=torch.tensor([one.ids], dtype=torch.long),
            max_new_tokens=one.num_left + self.num_draft_tokens,
            gen_settings=settings_for(self.sdk, one.work.sampling),
            seed=one.work.seed,
            stop_conditions=sorted(stops),
        )
        if one.random is not None:
            job.rng = one.random
        one.job, one.random = job, job.rng
        with host_stream_kept(), translate_errors(self.label):
            self.generator.enqueue(job)
        return one

    def _reset(self) -> None:
        """Forget every job and page, whatever state a failed pass left them in."""
        with host_stream_kept(), contextlib.suppress(Exception):
            self.generator.clear_queue()
        self.generator.active_jobs.clear()
        self.generator.pending_jobs.clear()
        self.generator.reset_page_table()

    def _fault(self, one: Running) -> GenerationFailed:
        step = one.num_new + 1
        error = GenerationFailed(
            f"{self.label}: {one.job.fault} at output token {step}. Try kv_cache fp16, or attention eager."
        )
        error.__cause__ = one.job.fault
        return error

    def _take(
        self, one: Running, results: list[dict[str, Any]], live: list[Running]
    ) -> Generator[tuple[int, PrefillStep | DecodeStep], Command, Command]:
        """Yield what one pass of the generator brought this request, as one step of each kind."""
        prompt_len = len(one.work.encoded.token_ids or ())
        decoded = [result for result in results if result["stage"] == "streaming"]
        if not one.is_prefilled:
            if decoded:
                one.is_prefilled = True
                yield (
                    one.index,
                    PrefillStep(num_done=prompt_len, num_total=prompt_len, num_cached=self._cached(one, prompt_len)),
                )
            for result in results:
                if result["stage"] == "prefill" and not decoded:
                    done = min(result["curr_progress"], prompt_len)
                    yield (
                        one.index,
                        PrefillStep(
                            num_done=done, num_total=prompt_len, num_cached=min(done, self._cached(one, prompt_len))
                        ),
                    )
        if not decoded and not one.fed:
            return None
        step = self._step(one, decoded)
        if step.finish is not None:
            live.remove(one)
        elif not step.token_ids:
            return None
        return (yield one.index, step)

    def _cached(self, one: Running, prompt_len: int) -> int:
        page = self.generator.page_size
        one.num_cached = min(prompt_len - 1, one.job.cached_pages * page + one.job.cached_tokens)
        return one.num_cached

    def _step(self, one: Running, decoded: list[dict[str, Any]]) -> DecodeStep:
        """New ids and their text. Ids that the SDK withheld come with the stop token, under `held`."""
        ids, end = list(one.fed), None
        one.fed.clear()
        for result in decoded:
            new = _ids(result) + (_ids(result.get("held", {})) if result["eos"] else [])
            ids += new
            one.ids += new
            one.num_new += len(new)
            if result["eos"]:
                end = result
        if end is None:
            return DecodeStep(text=one.detokenizer.push(ids), token_ids=tuple(ids))
        finish = self._finish(one, end)
        visible = ids[:-1] if finish.by == "token" else ids
        text = one.detokenizer.push(visible) + one.detokenizer.flush()
        one.num_accepted += end.get("accepted_draft_tokens", 0)
        one.num_rejected += end.get("rejected_draft_tokens", 0)
        return DecodeStep(text=text, token_ids=tuple(ids), finish=finish, details=self._details(one))

    def _end_of_fed(self, one: Running) -> DecodeStep:
        """The last step of a request whose fed ids took all that was left of its output."""
        ids = tuple(one.fed)
        text = one.detokenizer.push(ids) + one.detokenizer.flush()
        finish = Finish(reason="length", by="max_tokens")
        return DecodeStep(text=text, token_ids=ids, finish=finish, details=self._details(one))

    def _finish(self, one: Running, end: dict[str, Any]) -> Finish:
        if end["eos_reason"] == "stop_token":
            token = int(end["eos_triggering_token_id"])
            text = next((entry.text for entry in one.work.encoded.stop if entry.id == token), None)
            return Finish(reason="stop", by="token", id=token, text=text)
        prompt_len = len(one.work.encoded.token_ids or ())
        is_full = prompt_len + one.num_new >= self.context_len
        return Finish(reason="length", by="context" if is_full else "max_tokens")

    def _details(self, one: Running) -> dict[str, object]:
        details: dict[str, object] = {"num_cached_tokens": one.num_cached}
        if self.draft:
            details["draft"] = {
                "kind": self.draft,
                "num_drafted_tokens": one.num_accepted + one.num_rejected,
                "num_accepted_tokens": one.num_accepted,
            }
        return details

    def _obey(self, make_job: type[Any], command: Command, one: Running, live: list[Running]) -> None:
        if isinstance(command, Drop):
            live.remove(one)
            with host_stream_kept():
                self.generator.cancel(one.job)
        elif isinstance(command, Feed) and one.num_left > 0:
            one.num_accepted += getattr(one.job, "accepted_draft_tokens", 0)
            one.num_rejected += getattr(one.job, "rejected_draft_tokens", 0)
            with host_stream_kept():
                self.generator.cancel(one.job)
            fed = list(command.token_ids)[: one.num_left]
            one.fed += fed
            one.ids += fed
            one.num_new += len(fed)
            one.job = None
            if one.num_left:
                self._enqueue(make_job, one)


def _ids(result: dict[str, Any]) -> list[int]:
    ids = result.get("token_ids")
    return [] if ids is None else [int(one) for one in ids[0].tolist()]
