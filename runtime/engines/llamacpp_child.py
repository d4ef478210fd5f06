"""The process that llama.cpp runs in. It is started by path, without the pack, and imports nothing heavy.

One line of JSON on stdin says what to do; lines of JSON on what was stdout answer. Everything that llama.cpp itself
writes goes to stderr. The end of stdin ends the process.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

PR_SET_PDEATHSIG = 1


def take_stdout() -> int:
    """A file descriptor for answers; what other code writes to stdout goes to stderr from now on."""
    answers = os.dup(1)
    os.dup2(2, 1)
    return answers


def end_with(parent: int) -> None:
    """Have Linux kill this process with the thread that started it: while a file loads, nothing here sees stdin end."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def serve(xllamacpp: Any, order: dict[str, Any]) -> Any:
    """The running server; raises what xllamacpp raises."""
    params = xllamacpp.CommonParams()
    params.model.path = order["file"]
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = order["threads"]
    params.cache_type_k = params.cache_type_v = getattr(xllamacpp.ggml_type, f"GGML_TYPE_{order['kv_type']}")
    if order["kv_type"] != "F16":  # quantised values need it
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_ENABLED
    for name, value in order["params"].items():
        setattr(params, name, value)
    return xllamacpp.Server(params)


def main() -> None:
    answers = take_stdout()
    order = json.loads(sys.stdin.buffer.readline())
    end_with(order["parent"])
    sys.path.append(order["packages"])
    told: dict[str, object] = {}
    try:
        import xllamacpp

        if order["do"] == "serve":
            server = serve(xllamacpp, order)
            told["address"] = server.listening_address
        else:
            told["devices"] = [str(device["type"]) for device in xllamacpp.get_device_info()]
    except Exception as error:
        told["error"] = str(error) or type(error).__name__
    os.write(answers, json.dumps(told).encode() + b"\n")
    sys.stdin.buffer.read()
    os._exit(0)


if __name__ == "__main__":
    main()
