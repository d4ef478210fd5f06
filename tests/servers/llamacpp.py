"""A real llama.cpp server of its own for tests, as a user would start one: nothing of this pack is in its process."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.runtime.test_engine_contract import gap_by_llamacpp
from tests.servers.process import ServerProcess

NUM_SLOTS = 4
"""Requests at once."""

SERVE = """
import json, signal, sys
import xllamacpp
file, name, key, port, num_slots, context_len, template = json.loads(sys.argv[1])
params = xllamacpp.CommonParams()
params.model.path, params.model_alias, params.api_keys = file, [name], [key]
params.hostnames, params.port = ["127.0.0.1"], port
params.n_parallel, params.n_ctx = num_slots, num_slots * context_len
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
params.endpoint_metrics, params.ui = True, False
if template:
    params.chat_template = template
server = xllamacpp.Server(params)
signal.pause()
"""


class LlamaCpp(ServerProcess):
    """llama.cpp with the GGUF file. template: a chat template instead of the file's own."""

    title = "llama.cpp"
    model = "smollm2"
    key = "test-key-of-llamacpp"
    endpoint = "native"
    tells_folder = False
    context_len = 1024
    gap = staticmethod(gap_by_llamacpp)

    def __init__(self, file: Path, log: Path, template: str | None = None) -> None:
        super().__init__(log)
        self._file = file
        self._template = template

    def command(self) -> list[str]:
        told = [str(self._file), self.model, self.key, self.port, NUM_SLOTS, self.context_len, self._template]
        return [sys.executable, "-c", SERVE, json.dumps(told)]
