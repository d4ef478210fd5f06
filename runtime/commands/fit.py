"""Which context and KV precision fit on which card."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from ..benchmark.fit import ceilings, fit_table, fits
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
    info = read_model(args.model)
    if args.json:
        rows = [asdict(one) for one in fits(info, beside_bytes=args.beside * 1e9)]
        print(json.dumps({"computed": True, "fits": rows, "ceilings": ceilings(info, num_tokens=args.tokens)}))
    else:
        print(fit_table(info, beside_bytes=args.beside * 1e9, num_tokens=args.tokens))
    return 0
