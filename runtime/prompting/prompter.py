"""A model's tokenizer and chat template: prompts to ids, ids to text. No weights are loaded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..engines.base import Encoded, Reasoning, StopEntry
from ..errors import ModelNotFound, TemplateFailed
from ..request import Prompt
from .detokenize import Detokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class Prompter:
    """Turns prompts into ids, and ids into text, for one model."""

    def __init__(self, tokenizer: Tokenizer, wrapped: Any) -> None:
        self._tokenizer = tokenizer
        self._wrapped = wrapped
        added = tokenizer.get_added_tokens_decoder()
        self._hidden = frozenset(one for one, token in added.items() if token.special)
        self.vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    @classmethod
    def load(cls, model: str) -> Prompter:
        """The prompter of a model folder or a GGUF file; raises ModelNotFound."""
        path = Path(model)
        if not path.exists():
            raise ModelNotFound(f"There is no model at {model}. Pick another one in the loader.")
        from transformers import AutoTokenizer

        if path.is_file():
            wrapped = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
        else:
            wrapped = AutoTokenizer.from_pretrained(path, local_files_only=True)
        return cls(wrapped.backend_tokenizer, wrapped)

    def encode(self, prompt: Prompt) -> Encoded:
        """The prompt's ids, its rendered text, and what ends its answer; raises TemplateFailed."""
        if not self._wrapped.chat_template:
            raise TemplateFailed("The model has no chat template. Set `template` in LLM Prompt.")
        messages = [{"role": m.role, "content": m.text} for m in prompt.messages]
        options: dict[str, Any] = dict(prompt.template_options)
        if prompt.thinking != "auto":
            options["enable_thinking"] = prompt.thinking == "on"
        text = self._wrapped.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)
        text += prompt.answer_prefix
        ids = tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)
        eos = self._wrapped.eos_token_id
        stop = (StopEntry(id=eos, text=self._wrapped.eos_token, source="tokenizer"),) if eos is not None else ()
        open_tag, close_tag = prompt.thinking_tags or ("<think>", "</think>")
        close = self._tokenizer.token_to_id(close_tag)
        reasoning = Reasoning(
            open_tag=open_tag,
            close_tag=close_tag,
            is_open=text.rstrip().endswith(open_tag),
            close_ids=() if close is None else (close,),
        )
        return Encoded(prompt=prompt, token_ids=ids, text=text, stop=stop, reasoning=reasoning)

    def detokenizer(self) -> Detokenizer:
        """A new detokenizer, for one answer."""
        return Detokenizer(self._tokenizer, self._hidden)
