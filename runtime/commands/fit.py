"""Which context and KV precision fit on which card."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict

from ..benchmark.fit import ceilings, fit_table, fits, fits_here
from ..errors import InvalidValue
from ..models.info import read_model

HELP = "Compute which context and KV precision of a model fit on common cards."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a model folder or a .gguf file")
    parser.add_argument(
        "--beside", type=float, default=0, metavar="GB", help="size of a diffusion model beside it, in GB"
    )
    parser.add_argument("--tokens", type=int, default=2048, help="tokens in the cache, for the ceiling; default: 2048")
    parser.add_argument("--json", action="store_true", help="print one object instead of lines")


def run(args: argparse.Namespace) -> int:
    if not (math.isfinite(args.beside) and args.beside >= 0):
        raise InvalidValue(f"--beside is {args.beside}; it is a size in GB, from 0 on.")
    if args.tokens < 0:
        raise InvalidValue(f"--tokens is {args.tokens}; it starts at 0.")
    info = read_model(args.model)
    if args.json:
        rows = [asdict(one) for one in fits(info, beside_bytes=args.beside * 1e9)]
        known = {"fits": rows, "here": fits_here(info), "ceilings": ceilings(info, num_tokens=args.tokens)}
        print(json.dumps({"computed": True, **known}))
    else:
        print(fit_table(info, beside_bytes=args.beside * 1e9, num_tokens=args.tokens))
    return 0
