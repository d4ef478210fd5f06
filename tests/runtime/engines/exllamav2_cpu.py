"""ExLlamaV2 on a CPU, for the adapter's own logic: a model that computes from its KV cache, and two SDKs around it.

`scripted_sdk` is a small stand-in of the SDK's dynamic generator. `real_sdk` is the SDK's own Python code around a
stand-in of its compiled extension.
"""

import functools
import importlib
import itertools
import os
import random
import subprocess
import sys
import types
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import torch

from runtime.engines.base import Encoded, StopEntry
from runtime.engines.exllamav2_sdk import Sdk

PAGE = 256
VOCAB = 160
ROWS = 192
LAYERS, KV_HEADS, HEAD_DIM = 2, 2, 32


def mix(ids, strength=0):
    """A number for every prefix of `ids`, which depends on each id and its place."""
    mixed = 0
    for place, one in enumerate(ids):
        mixed = (mixed * 31 + one * 7 + place + strength) % 1_000_003
        yield mixed


def logits_of(mixed):
    """[ROWS] logits; the best token is any of the vocabulary, rows without a token are far below."""
    logits = torch.full((ROWS,), -65504.0)
    logits[:VOCAB] = -((torch.arange(VOCAB) - mixed % VOCAB) % VOCAB).float() / 7
    return logits


def next_logits(ids, strength=0):
    """What the model says after `ids`."""
    return logits_of([*mix(ids, strength)][-1])


def manual(ids, num, *, forced=None, strength=0):
    """What greedy decoding must give: `num` ids after `ids`; `forced` maps output places to ids fed there."""
    ids, out = list(ids), []
    while len(out) < num:
        token = (forced or {}).get(len(out))
        out.append([*mix(ids, strength)][-1] % VOCAB if token is None else token)
        ids.append(out[-1])
    return out


class Model:
    """Keeps each token's id as its key, reads the whole sequence back through the page table to compute logits."""

    def __init__(self, config):
        self.config = config
        self.cache_map = {}
        self.device_context = [SimpleNamespace(scratch=torch.zeros(10), sin=[torch.zeros(4)], cos=None)]
        self.is_causal = True
        self.poison = None
        self.nan_after = None
        self.num_forwards = 0

    def load_autosplit_gen(self, cache, callback_gen):
        for layer in range(LAYERS):
            self.cache_map[layer] = "cpu"
            yield from callback_gen(layer, LAYERS)
        cache.update_cache_tensors()
        yield from callback_gen(LAYERS, LAYERS)

    def unload(self):
        self.device_context = []
        self.config = None

    @torch.inference_mode()
    def forward(self, ids, cache):
        params = SimpleNamespace(past_len=cache.current_seq_len)
        out = self.forward_chunk(input_ids=ids, cache=cache, attn_params=params)["logits"]
        cache.current_seq_len += ids.shape[1]
        return out

    def forward_chunk(self, *, input_ids, cache, attn_params, preprocess_only=False, loras=None, **_):
        self.num_forwards += 1
        if loras is not None:
            _ = loras[0]  # the SDK's output head looks at the first of them, even if there is none
        strength = sum(lora.strength for lora in loras or ())
        rows = []
        for row, ids in enumerate(input_ids.tolist()):
            if self.poison in ids:
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            places, past = self._places(attn_params, row, len(ids))
            keys = cache.key_states[0][0, :, 0, 0]
            for place, one in zip(places[past:], ids):
                keys[place] = one
            history = [int(keys[place]) for place in places]
            mixed = [*mix(history, strength)]
            outputs = [logits_of(one) for one in (mixed[past:] if self.is_causal else mixed[-1:] * len(ids))]
            if self.nan_after is not None and history[: len(self.nan_after)] == self.nan_after:
                outputs[-1][:] = float("nan")
            rows.append(torch.stack(outputs))
        return {} if preprocess_only else {"logits": torch.stack(rows)}

    @staticmethod
    def _places(params, row, num):
        if hasattr(params, "block_index"):
            past = int(params.cache_seqlens[row])
            pages = params.block_index[row].tolist()
            return [pages[at // PAGE] * PAGE + at % PAGE for at in range(past + num)], past
        return list(range(params.past_len + num)), params.past_len


class Config:
    """The attributes of the SDK's config that are read or set."""

    def __init__(self, folder):
        self.model_dir = folder
        self.num_attention_heads, self.num_key_value_heads, self.head_dim = 4, KV_HEADS, HEAD_DIM
        self.num_hidden_layers, self.vocab_size = LAYERS, ROWS
        self.rotary_embedding_base, self.alt_rope_method, self.scale_pos_emb = 10000.0, None, 1.0
        self.no_flash_attn = self.no_sdpa = self.no_xformers = False
        self.max_seq_len, self.max_input_len, self.max_batch_size = 512, 2048, 1
        self.disables_flash = False
        self.arch = SimpleNamespace(lm=SimpleNamespace(mrope=False))

    def arch_compat_overrides(self, quiet=False):
        self.no_flash_attn = self.no_flash_attn or self.disables_flash


class Cache:
    """Layout and sizes of the SDK's caches; `quantised` keeps bytes and scales, and ids stay exact."""

    widths, quantised = (1, 1), False

    def __init__(self, model, batch_size=1, max_seq_len=-1, lazy=False):
        self.model, self.max_seq_len, self.batch_size, self.current_seq_len = model, max_seq_len, batch_size, 0
        self.key_states, self.value_states = [None] * LAYERS, [None] * LAYERS
        self.key_scales, self.value_scales = ([None] * LAYERS, [None] * LAYERS) if self.quantised else ([], [])
        if self.quantised:
            self.temp_tensors = {}

    def update_cache_tensors(self):
        dtype = torch.uint8 if self.quantised else torch.float16
        shape = (1, self.max_seq_len, KV_HEADS)
        for layer in self.model.cache_map:
            if self.key_states[layer] is None:
                self.key_states[layer] = torch.zeros((*shape, HEAD_DIM // self.widths[0]), dtype=dtype)
                self.value_states[layer] = torch.zeros((*shape, HEAD_DIM // self.widths[1]), dtype=dtype)
                if self.quantised:
                    self.key_scales[layer] = torch.zeros((*shape, HEAD_DIM // 32), dtype=torch.float16)
                    self.value_scales[layer] = torch.zeros((*shape, HEAD_DIM // 32), dtype=torch.float16)
        if self.quantised and not self.temp_tensors:
            self.temp_tensors["cpu"] = tuple(torch.zeros((*shape, HEAD_DIM), dtype=torch.float16) for _ in "kv")

    def all_tensors(self):
        return [*self.key_states, *self.value_states, *self.key_scales, *self.value_scales]

    def copy_states(self, target, start, length, to_start, to_length, *_):
        for layer in range(LAYERS):
            for mine in (self.key_states, self.value_states):
                mine[layer][:, to_start : to_start + to_length] = mine[layer][:, start : start + length].clone()


class Q8(Cache):
    quantised = True


class Q6(Cache):
    widths, quantised = (1, 2), True


class Q4(Cache):
    widths, quantised = (2, 2), True


class Lora:
    def __init__(self, model, config_path, weights_path, strength):
        self.strength = strength


def package(config=Config, caches=(Cache, Q8, Q6, Q4)):
    fp16, q8, q6, q4 = caches
    return SimpleNamespace(
        ExLlamaV2=Model,
        ExLlamaV2Config=config,
        ExLlamaV2Cache=fp16,
        ExLlamaV2Cache_Q8=q8,
        ExLlamaV2Cache_Q6=q6,
        ExLlamaV2Cache_Q4=q4,
        ExLlamaV2Lora=Lora,
    )


def paged_attention(*, q, k_cache, v_cache, cache_seqlens, block_table, causal, softmax_scale, is_causal=True):
    """What flash_attn_with_kvcache computes, from its definition."""
    num_keys, num_queries = int(cache_seqlens[0]), q.shape[1]
    keys, values = (one[block_table[0].long()].flatten(0, 1)[:num_keys].float() for one in (k_cache, v_cache))
    out = torch.zeros(q.shape)
    for at in range(num_queries):
        last = num_keys - num_queries + at + 1 if is_causal else num_keys
        for head in range(q.shape[2]):
            group = head * k_cache.shape[2] // q.shape[2]
            scores = keys[:last, group] @ q[0, at, head].float() * softmax_scale
            out[0, at, head] = scores.softmax(0) @ values[:last, group]
    return out.half()


def draw(logits, settings, number):
    """One token: temperature, top-k, top-p, min-p, then the place of `number` in what is left."""
    probabilities = (logits.float() / settings.temperature).softmax(-1)
    order = probabilities.sort(descending=True)
    kept = order.values.clone()
    if settings.top_k:
        kept[settings.top_k :] = 0
    if 0 < settings.top_p < 1:
        kept[1:][kept.cumsum(0)[:-1] >= settings.top_p] = 0
    kept[kept < settings.min_p * kept[0]] = 0
    at = int((kept.cumsum(0) / kept.sum() < number).sum())
    return int(order.indices[min(at, int((kept > 0).sum()) - 1)])


class Settings:
    """The sampler's defaults, which are not neutral."""

    def __init__(self):
        self.temperature, self.top_k, self.top_p, self.min_p = 0.8, 50, 0.8, 0.0
        self.token_repetition_penalty = 1.025


class Job:
    """The stand-in's job; it holds the ids of a step back when `hold` says so, as the SDK does."""

    hold = staticmethod(lambda new: False)

    def __init__(self, *, input_ids, max_new_tokens, gen_settings, seed, stop_conditions):
        self.ids = input_ids[0].tolist()
        self.prompt_len, self.max_new_tokens, self.settings = len(self.ids), max_new_tokens, gen_settings
        self.rng = random.Random(seed)
        self.stops = set(stop_conditions)
        self.held, self.new_tokens, self.pages, self.kv = [], 0, [], 0
        self.cached_pages = self.cached_tokens = 0
        self.accepted_draft_tokens = self.rejected_draft_tokens = 0

    def receive_logits(self, logits):
        logits[..., self.vocab_size :] = float("-inf")
        token = draw(logits[0, 0], self.settings, self.rng.random())
        return torch.tensor([[token]]), None, None, logits[0].softmax(-1)[:, token : token + 1], False

    def receive_sample(
        self, logits, token, top_tokens, top_probabilities, probability, filter_eos, results, first=True
    ):
        token = int(token)
        self.ids.append(token)
        self.held.append(token)
        self.kv += 1
        self.new_tokens += 1
        return token in self.stops, token


class DynamicGenerator:
    """Pages with reuse of whole equal ones, chunked prefill, drafting by repeating the last id; one pass an iterate."""

    def __init__(
        self, *, model, cache, tokenizer, max_batch_size, max_chunk_size, paged, num_draft_tokens=4, **options
    ):
        self.model, self.cache, self.tokenizer, self.options = model, cache, tokenizer, options
        self.max_batch_size, self.max_chunk_size, self.paged = max_batch_size, max_chunk_size, paged
        is_drafting = options.get("use_ngram_draft") or "draft_model" in options
        self.num_draft_tokens = num_draft_tokens if is_drafting else 0
        self.page_size = PAGE if paged else cache.max_seq_len
        self.max_pages = cache.max_seq_len // self.page_size
        self.pending_jobs, self.active_jobs, self.current_loras = [], [], None
        self.reset_page_table()

    def reset_page_table(self):
        self.contents = [None] * self.max_pages
        self.order = deque(range(self.max_pages))
        self.last_ids = []

    @property
    def num_free_pages(self):
        return self.max_pages - sum(len(job.pages) for job in self.active_jobs)

    def num_remaining_jobs(self):
        return len(self.pending_jobs) + len(self.active_jobs)

    def set_loras(self, loras):
        assert not self.num_remaining_jobs()
        self.current_loras = loras or []

    def enqueue(self, job):
        assert -(-(len(job.ids) + job.max_new_tokens) // self.page_size) <= self.max_pages
        self.pending_jobs.append(job)

    def cancel(self, job):
        for jobs in (self.pending_jobs, self.active_jobs):
            if job in jobs:
                jobs.remove(job)

    def clear_queue(self):
        self.pending_jobs.clear()
        self.active_jobs.clear()

    def _start(self):
        for job in list(self.pending_jobs):
            num = -(-(len(job.ids) + job.max_new_tokens) // self.page_size)
            if len(self.active_jobs) >= self.max_batch_size or num > self.num_free_pages:
                return
            in_use = {page for other in self.active_jobs for page in other.pages}
            for at in range((len(job.ids) - 1) // self.page_size):
                wanted = tuple(job.ids[: (at + 1) * self.page_size])
                found = [page for page in self.order if self.contents[page] == wanted and page not in in_use]
                if not found or len(job.pages) < at:
                    break
                job.pages.append(found[0])
                job.cached_pages += 1
            fresh = [page for page in self.order if page not in in_use and page not in job.pages]
            job.pages += fresh[: num - len(job.pages)]
            for page in job.pages[job.cached_pages :]:
                self.contents[page] = None
                self.order.remove(page)
                self.order.append(page)
            job.kv = job.cached_pages * self.page_size
            if not self.paged:
                job.kv = job.cached_tokens = self._num_common(job.ids[:-1])
            self.pending_jobs.remove(job)
            self.active_jobs.append(job)

    def _num_common(self, ids):
        return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(ids, self.last_ids)))

    def _forward(self, job, ids, **more):
        params = SimpleNamespace(past_len=job.kv)
        if self.paged:
            params = SimpleNamespace(block_index=torch.tensor([job.pages]), cache_seqlens=torch.tensor([job.kv]))
        out = self.model.forward_chunk(
            input_ids=torch.tensor([ids]), cache=self.cache, attn_params=params, loras=self.current_loras, **more
        )
        return out.get("logits")

    @torch.inference_mode()
    def iterate(self):
        self._start()
        results = [self._prefill(job) for job in self.active_jobs if job.kv < len(job.ids) - 1]
        for job in list(self.active_jobs):
            if job.kv == len(job.ids) - 1:
                results += self._decode(job)
        return results

    def _prefill(self, job):
        ids = job.ids[job.kv : min(job.kv + self.max_chunk_size, len(job.ids) - 1)]
        self._forward(job, ids, preprocess_only=True)
        job.kv += len(ids)
        for at in range(job.kv // self.page_size):
            self.contents[job.pages[at]] = tuple(job.ids[: (at + 1) * self.page_size])
        return {"job": job, "stage": "prefill", "eos": False, "curr_progress": job.kv}

    def _decode(self, job):
        guesses = [job.ids[-1]] * self.num_draft_tokens
        logits = self._forward(job, [job.ids[-1], *guesses])
        job.vocab_size = self.tokenizer.get_vocab_size()
        for at in range(len(guesses) + 1):
            own = logits[:, at : at + 1]
            is_stop, token = job.receive_sample(own, *job.receive_logits(own), [], at == 0)
            if is_stop:
                end = {"eos_reason": "stop_token", "eos_triggering_token_id": token}
                yield self._end(job, end, held={"token_ids": torch.tensor([job.held])})
                return
            if job.new_tokens >= job.max_new_tokens - self.num_draft_tokens:
                yield self._end(job, {"eos_reason": "max_new_tokens"}, token_ids=torch.tensor([job.held]))
                return
            if job.hold(job.new_tokens):
                yield {"job": job, "stage": "streaming", "eos": False}
            else:
                yield {"job": job, "stage": "streaming", "eos": False, "token_ids": torch.tensor([job.held])}
                job.held = []
            if at < len(guesses) and guesses[at] != token:
                job.rejected_draft_tokens += len(guesses) - at
                return
            job.accepted_draft_tokens += at < len(guesses)

    def _end(self, job, end, **more):
        self.active_jobs.remove(job)
        self.last_ids = job.ids[: job.kv]
        drafts = {}
        if self.num_draft_tokens:
            drafts = {
                "accepted_draft_tokens": job.accepted_draft_tokens,
                "rejected_draft_tokens": job.rejected_draft_tokens,
            }
        return {"job": job, "stage": "streaming", "eos": True, **end, **more, **drafts}


def scripted_sdk():
    generator = SimpleNamespace(
        ExLlamaV2DynamicGenerator=DynamicGenerator,
        ExLlamaV2DynamicJob=Job,
        ExLlamaV2Sampler=SimpleNamespace(Settings=Settings),
    )
    attention = SimpleNamespace(flash_attn_with_kvcache=paged_attention)
    return Sdk(package=package(), generator=generator, attention=attention, version="0.3.2", flash_fault=None)


@functools.cache
def real_folder():
    """Where the package lies unpacked: (folder, None), or (None, why it does not)."""
    if named := os.environ.get("RESIDENT_TEST_EXLLAMAV2"):
        return Path(named), None
    tool = Path(__file__).parents[3] / "tools" / "fetch_exllamav2.py"
    fetched = subprocess.run([sys.executable, tool], capture_output=True, text=True)
    return (None, fetched.stderr.strip()) if fetched.returncode else (Path(fetched.stdout.strip()), None)


def real_sdk():
    """The SDK's Python code with this file's model under it; its own cache classes."""
    if "exllamav2" not in sys.modules:
        sys.modules["exllamav2_ext"] = _extension()
        folder = str(real_folder()[0])
        sys.path.insert(0, folder)
        try:
            importlib.import_module("exllamav2.generator")
        finally:
            sys.path.remove(folder)
            del sys.modules["exllamav2_ext"]
    sdk, attention = sys.modules["exllamav2"], sys.modules["exllamav2.attn"]
    attention.has_flash_attn_with_paged = True
    caches = [sdk.ExLlamaV2Cache, sdk.ExLlamaV2Cache_Q8, sdk.ExLlamaV2Cache_Q6, sdk.ExLlamaV2Cache_Q4]
    return Sdk(
        package=package(caches=caches),
        generator=sys.modules["exllamav2.generator"],
        attention=SimpleNamespace(flash_attn_with_kvcache=paged_attention),
        version="0.3.2",
        flash_fault=None,
    )


def _extension():
    """The few compiled functions that the generator and the sampler call."""
    module = types.ModuleType("exllamav2_ext")

    def count_match(a, b, limit):
        return next((at for at in range(min(limit, b.shape[-1])) if a[0, at] != b[0, at]), min(limit, b.shape[-1]))

    def sample_basic(logits, temperature, top_k, top_p, _a, min_p, _tfs, _typical, number, tokens, probs, *_):
        settings = SimpleNamespace(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        tokens[0, 0] = draw(logits[0, 0], settings, number)
        probs[0, 0] = 1.0
        return []

    def cache_rotate(cache, order, buffer):
        order = order.tolist()
        last = cache[order[0]].clone()
        for target, source in itertools.pairwise(order):
            cache[target] = cache[source]
        cache[order[-1]] = last

    module.count_match, module.sample_basic, module.cache_rotate = count_match, sample_basic, cache_rotate
    return module


class Detokenizer:
    """Every id is one character."""

    def push(self, ids):
        return "".join(chr(0x4E00 + one) for one in ids)

    def flush(self):
        return ""


class Prompter:
    """The prompt's user text is its ids, as numbers; the only stop is `stop_ids`."""

    vocab_size = VOCAB

    def __init__(self, stop_ids=()):
        self.stop_ids = stop_ids

    def encode(self, prompt):
        ids = tuple(int(word) for word in prompt.messages[-1].text.split())
        stop = tuple(StopEntry(id=one, text=f"<{one}>", source="test") for one in self.stop_ids)
        return Encoded(prompt=prompt, token_ids=ids, text=prompt.messages[-1].text, stop=stop)

    def detokenizer(self, encoded=None):
        return Detokenizer()
