"""A model's tokenizer and chat template: prompts to ids, ids to text. No weights are loaded."""

from __future__ import annotations

import dataclasses
import re
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

from ..engines.base import Encoded, Reasoning, StopEntry
from ..errors import TemplateFailed
from ..request import Message, Option, Prompt
from .chat_template import ChatTemplate, end_of_turn
from .control_tokens import ControlTokens, Mark
from .detokenize import Detokenizer
from .reasoning import CHANNELS, FINAL_CHANNEL, find_tags, marks_of
from .template_choice import resolve
from .tokenizer import ModelTokenizer, TokenizerCache, read_vocabulary

_CACHE = TokenizerCache(size=4)
"""Reading a tokenizer takes seconds where it must be converted, and a graph may ask for it on every run."""

_SWITCHES = ("enable_thinking", "thinking")
"""What chat templates call their switch for thinking."""

NUM_RECENT = 8
"""Encoded prompts that a prompter remembers."""
CLOCK = "strftime_now"
"""A template with it gives another text at another time."""


class Prompter:
    """Turns prompts into ids, and ids into text, for one model."""

    def __init__(self, model: ModelTokenizer) -> None:
        self._model = model
        self._tokenizer = model.tokenizer
        self._control = ControlTokens(model.tokenizer)
        self._added = model.tokenizer.get_added_tokens_decoder()
        self._ids = {token.content: one for one, token in self._added.items()}
        self._templates: dict[str | None, ChatTemplate] = {}
        self._tails: dict[str, int | None] = {}
        self._recent: OrderedDict[Prompt, Encoded] = OrderedDict()
        self._tags = find_tags("".join(model.templates.values()), self._ids)
        self.vocab_size = model.vocab_size

    @classmethod
    def load(cls, model: str) -> Prompter:
        """The prompter of a model folder or a GGUF file; raises ModelNotFound, ModelLoadFailed, ModelUnsupported."""
        return cls(_CACHE.get(Path(model)))

    @classmethod
    def of_header(cls, file: str) -> Prompter:
        """The prompter of a GGUF file's header: its texts and stop tokens are true, its ids are not."""
        return cls(read_vocabulary(Path(file)))

    def encode(self, prompt: Prompt) -> Encoded:
        """The prompt's ids, its rendered text, and what ends its answer; raises TemplateFailed.

        The last few are remembered: a graph that runs again need not encode a long prompt again.
        """
        if (known := self._recent.get(prompt)) is not None:
            return known
        template = self._template(prompt.template)
        encoded = self._encode(prompt, template)
        if CLOCK not in template.source:
            self._recent[prompt] = encoded
            while len(self._recent) > NUM_RECENT:
                self._recent.popitem(last=False)
        return encoded

    def _encode(self, prompt: Prompt, template: ChatTemplate) -> Encoded:
        tags = prompt.thinking_tags or self._tags
        options = _options(prompt, template)
        notes = list(self._unknown_marks(prompt, template))
        shown, prompt_used = _with_system(template, prompt, options, tags[0], notes)
        turns = [(message.role, message.text) for message in prompt_used.messages]
        opening, is_open = _opening(shown, prompt, tags, notes)

        def render(mark: Mark) -> str:
            marked = [(role, mark(text)) for role, text in turns]
            return template.render(marked, options) + opening + mark(prompt.answer_prefix)

        user_texts = [*(text for _, text in turns), prompt.answer_prefix]
        text, ids = self._control.encode(render, user_texts, template.source + opening)
        return Encoded(
            prompt=prompt,
            token_ids=ids,
            text=text,
            stop=tuple(self._stop(template, tags)),
            reasoning=Reasoning(
                open_tag=tags[0], close_tag=tags[1], is_open=is_open, close_ids=tuple(self._close_ids(tags))
            ),
            notes=tuple(notes),
        )

    def detokenizer(self, encoded: Encoded | None = None) -> Detokenizer:
        """A new detokenizer, for one answer; control tokens give no text, marks of thinking do.

        encoded: the prompt that is answered: its stop tokens and tags count, and an answer that goes on from a prefix
                 keeps its first space
        """
        tags, stop, begins = self._tags, list(self._model.end_ids), True
        if encoded is not None:
            begins = not encoded.prompt.answer_prefix
            stop += [entry.id for entry in encoded.stop]
            if encoded.reasoning is not None:
                tags = (encoded.reasoning.open_tag, encoded.reasoning.close_tag)
        shown = {self._ids[mark] for mark in marks_of(tags) if mark in self._ids}
        hidden = {one for one, token in self._added.items() if token.special} | set(stop)
        return Detokenizer(self._tokenizer, frozenset(hidden - shown), begins=begins)

    def _template(self, wanted: str | None) -> ChatTemplate:
        if wanted not in self._templates:
            source = resolve(wanted, self._model.templates)
            self._templates[wanted] = ChatTemplate(source, self._model.special_tokens, _title(wanted, source))
        return self._templates[wanted]

    def _unknown_marks(self, prompt: Prompt, template: ChatTemplate) -> Iterator[str]:
        """A note where a template that is not the model's own writes control tokens that the model does not have."""
        if prompt.template is None or prompt.template in self._model.templates:
            return
        written = re.findall(r"<\|\w+\|>|<(?:start|end)_of_turn>", template.source)
        unknown = [mark for mark in dict.fromkeys(written) if mark not in self._ids]
        if unknown:
            yield (
                f"The chat template writes {', '.join(unknown)}, which this model reads as plain characters. "
                "Choose the template that the model was trained with."
            )

    def _stop(self, template: ChatTemplate, tags: tuple[str, str]) -> Iterator[StopEntry]:
        """The control tokens that end an answer: from configs, tokenizer and the template's own end of turn."""
        sources = {one: list(names) for one, names in self._model.end_ids.items()}
        if template.source not in self._tails:
            self._tails[template.source] = self._end_of_turn(template)
        tail = self._tails[template.source]
        if tail is not None and self._control.texts[tail] not in tags[0] + tags[1]:
            sources.setdefault(tail, []).append("chat template")
        for one, names in sorted(sources.items()):
            text = self._tokenizer.id_to_token(one)
            yield StopEntry(id=one, text=f"<{one}>" if text is None else text, source=", ".join(names))

    def _end_of_turn(self, template: ChatTemplate) -> int | None:
        """The control token that the template puts right behind an assistant's turn."""
        tail = self._tokenizer.encode(end_of_turn(template.render).lstrip(), add_special_tokens=False).ids
        return tail[0] if tail and tail[0] in self._control.texts else None

    def _close_ids(self, tags: tuple[str, str]) -> Iterator[int]:
        """What closes a thinking block by force: the mark by its id, in the white space that models write around it."""
        if tags == CHANNELS:
            yield from self._tokenizer.encode(tags[1], add_special_tokens=False).ids
            return
        yield from self._control.plain("\n")
        if tags[1] in self._ids:
            yield self._ids[tags[1]]
        else:
            yield from self._control.plain(tags[1])
        yield from self._control.plain("\n\n")


def _title(wanted: str | None, source: str) -> str:
    """How a message names the template."""
    if wanted is None:
        return "The model's own chat template"
    return "The chat template" if wanted == source else f"The chat template {wanted!r}"


def _options(prompt: Prompt, template: ChatTemplate) -> dict[str, Option]:
    options: dict[str, Option] = {}
    if prompt.thinking != "auto":
        options = {name: prompt.thinking == "on" for name in _SWITCHES if name in template.variables}
    return options | dict(prompt.template_options)


def _with_system(
    template: ChatTemplate, prompt: Prompt, options: dict[str, Option], open_tag: str, notes: list[str]
) -> tuple[str, Prompt]:
    """The rendered text, with open tags of the user's made unreadable, and the prompt, folded where asked and needed.

    Raises TemplateFailed where the template refuses the messages.
    """

    def show(one: Prompt) -> str:
        return template.render([(m.role, m.text.replace(open_tag, "\ue000")) for m in one.messages], options)

    system = prompt.messages[0].text.strip() if prompt.messages[0].role == "system" else ""
    try:
        shown = show(prompt)
    except TemplateFailed as error:
        if not system:
            raise
        if not prompt.fold_system:
            raise TemplateFailed(
                f"{error} If it refuses the system message, turn on fold_system: the first user message then begins "
                "with the system text."
            ) from error
        is_kept = False
    else:
        is_kept = system.replace(open_tag, "\ue000") in shown
    if is_kept:
        return shown, prompt
    if not prompt.fold_system:
        notes.append("The chat template leaves the system message out. Turn on fold_system to keep its text.")
        return shown, prompt
    prompt = fold_system(prompt)
    notes.append("The chat template takes no system message: its text begins the first user message.")
    return show(prompt), prompt


def fold_system(prompt: Prompt) -> Prompt:
    """The prompt with its system text at the start of the first user message."""
    system, *rest = prompt.messages
    at = next((i for i, message in enumerate(rest) if message.role == "user"), None)
    if at is None:
        rest.insert(0, Message.of("user", system.text))
    else:
        rest[at] = Message.of("user", f"{system.text}\n\n{rest[at].text}")
    return dataclasses.replace(prompt, messages=tuple(rest))


def _opening(shown: str, prompt: Prompt, tags: tuple[str, str], notes: list[str]) -> tuple[str, bool]:
    """What to write behind the rendered template so that the answer begins where it should, and whether it
    begins inside a thinking block."""
    skips = prompt.thinking == "off" or bool(prompt.answer_prefix)
    if tags == CHANNELS:
        return (FINAL_CHANNEL if skips and shown.endswith("<|start|>assistant") else ""), False
    if not shown.rstrip().endswith(tags[0]):
        return "", False
    if not skips:
        return "", True
    why = "thinking is off" if prompt.thinking == "off" else "the answer prefix begins the answer"
    notes.append(f"The chat template opens a thinking block; it is closed at once, because {why}.")
    return ("" if shown.endswith("\n") else "\n") + f"\n{tags[1]}\n\n", False
