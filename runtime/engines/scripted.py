"""An engine that says what its spec tells it to: it tests the logic around engines, and is no model.

The spec's options steer it: `reply` (text; {prompt} stands for the user's words), `tokens_per_step`, `fail_at` (the
step that raises), `fail_on` (raise for prompts that hold this text), `load_steps`, `prefill_steps`, `step_s` (seconds
slept per step). A model folder with a config.json gives the options that the spec does not.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path

from ..errors import GenerationFailed
from ..events import Finish, LoadProgress
from ..request import ModelSpec, Prompt
from ..telemetry import Bytes
from .base import (
    Capabilities,
    Command,
    DecodeStep,
    Drop,
    Encoded,
    EngineInfo,
    FailedStep,
    Feed,
    Loading,
    PrefillStep,
    Reasoning,
    Steps,
    StopEntry,
    Work,
)

EOS = 0


class ScriptedEngine:
    """One character is one token; its id is the code point. Requests of a batch take turns."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self._is_closed = False
        self.num_live = 0
        self.info = EngineInfo(
            engine="scripted",
            model=spec.model,
            context_len=spec.context_len or 4096,
            device="cpu",
            dtype="none",
            attention="none",
            kv_cache="none",
            capabilities=Capabilities(can_batch=True),
        )

    @property
    def bytes(self) -> Bytes:
        return Bytes() if self._is_closed else footprint(self._spec)

    def encode(self, prompt: Prompt) -> Encoded:
        text = "".join(f"<{m.role}>{m.text}" for m in prompt.messages) + "<assistant>" + prompt.answer_prefix
        tags = prompt.thinking_tags or ("<think>", "</think>")
        return Encoded(
            prompt=prompt,
            token_ids=tuple(map(ord, text)),
            text=text,
            stop=(StopEntry(id=EOS, text="<eos>", source="script"),),
            reasoning=Reasoning(open_tag=tags[0], close_tag=tags[1], close_ids=tuple(map(ord, tags[1])))
            if prompt.thinking != "off"
            else None,
        )

    def generate(self, batch: Sequence[Work]) -> Steps:
        self.num_live += len(batch)
        try:
            for index, work in enumerate(batch):
                total = len(work.encoded.token_ids or ())
                num_steps_before = self._spec.whole_number("prefill_steps", 1, least=1)
                for number in range(1, num_steps_before + 1):
                    self._pause()
                    yield index, PrefillStep(num_done=total * number // num_steps_before, num_total=total)
            queues = {index: self._reply(work) for index, work in enumerate(batch)}
            spent = dict.fromkeys(queues, 0)
            num_steps = dict.fromkeys(queues, 0)
            while queues:
                for index in list(queues):
                    num_steps[index] += 1
                    if self._fails(num_steps[index], batch[index]):
                        del queues[index]
                        yield index, FailedStep(error=GenerationFailed(f"step {num_steps[index]} failed by script."))
                        continue
                    self._pause()
                    command = yield index, self._step(queues, spent, index, batch[index])
                    self._obey(command, queues, index)
        finally:
            self.num_live -= len(batch)

    def _pause(self) -> None:
        time.sleep(float(self._spec.option("step_s") or 0))

    def _fails(self, num_steps: int, work: Work) -> bool:
        text = self._spec.option("fail_on")
        return num_steps == self._spec.option("fail_at") or (bool(text) and str(text) in work.encoded.text)

    def _reply(self, work: Work) -> list[int]:
        user = work.encoded.prompt.messages[-1].text
        reply = str(self._spec.option("reply", "You said: {prompt}")).replace("{prompt}", user)
        return [*map(ord, reply), EOS]

    def _step(self, queues: dict[int, list[int]], spent: dict[int, int], index: int, work: Work) -> DecodeStep:
        size = self._spec.whole_number("tokens_per_step", 1, least=1)
        left = size if work.max_tokens is None else min(size, work.max_tokens - spent[index])
        ids, queues[index] = queues[index][:left], queues[index][left:]
        spent[index] += len(ids)
        finish = None
        if ids[-1] == EOS:
            finish = Finish(reason="stop", by="token", id=EOS, text="<eos>")
        elif spent[index] == work.max_tokens:
            finish = Finish(reason="length", by="max_tokens")
        if finish:
            del queues[index]
        return DecodeStep(text="".join(chr(i) for i in ids if i != EOS), token_ids=tuple(ids), finish=finish)

    @staticmethod
    def _obey(command: Command, queues: dict[int, list[int]], index: int) -> None:
        if isinstance(command, Drop):
            queues.pop(index, None)
        elif isinstance(command, Feed) and index in queues:
            queues[index] = [*command.token_ids, *queues[index]]

    def trim(self, num_bytes: int) -> int:
        return 0

    def close(self) -> None:
        self._is_closed = True


def footprint(spec: ModelSpec) -> Bytes:
    return Bytes(weights=spec.whole_number("weights_bytes", 1000))


def load(spec: ModelSpec) -> Loading:
    script = Path(spec.model) / "config.json"
    if script.is_file():
        options = {**json.loads(script.read_text(encoding="utf-8")), **dict(spec.options)}
        spec = dataclasses.replace(spec, options=tuple(options.items()))
    total = spec.whole_number("load_steps", 1, least=1)
    for done in range(1, total + 1):
        time.sleep(float(spec.option("step_s") or 0))
        yield LoadProgress(done=done, total=total, unit="steps")
    return ScriptedEngine(spec)
