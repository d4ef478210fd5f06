"""Who imports whom in this pack, read from the source without importing anything."""

import ast
import functools
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("runtime", "nodes")


@dataclass(frozen=True)
class Import:
    """One import: by which module, of what (dotted, `runtime.errors` for our own), where it stands.

    is_lazy: inside a function, or only for type checkers: not run when the module is imported
    """

    by: str
    of: str
    line: int
    is_lazy: bool
    is_relative: bool

    @property
    def top(self):
        return self.of.partition(".")[0]

    @property
    def is_ours(self):
        return self.is_relative

    def __str__(self):
        return f"{self.by}:{self.line} imports {self.of}"


def files():
    """The pack's Python files: its root and its two packages."""
    return [ROOT / "__init__.py", *sorted(file for name in PACKAGES for file in (ROOT / name).rglob("*.py"))]


def name_of(file):
    """The dotted name of a file inside the pack: "" for the root, "runtime.engines.base" ..."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def imports():
    """Every import of every file."""
    return tuple(one for file in files() for one in _imports_of(file))


def _imports_of(file):
    name = name_of(file)
    package = name.split(".") if file.name == "__init__.py" else name.split(".")[:-1]
    tree = ast.parse(file.read_text(encoding="utf-8"))
    lazy = {id(inner) for node in ast.walk(tree) if _is_lazy(node) for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(name, alias.name, node.lineno, id(node) in lazy, False)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join(part for part in (*base, node.module or "") if part)
            for alias in node.names:
                inner = f"{module}.{alias.name}".strip(".")
                of = inner if node.level and _is_module(inner) else module
                yield Import(name, of, node.lineno, id(node) in lazy, bool(node.level))


def _is_lazy(node):
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
        return True
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def _is_module(dotted):
    path = ROOT.joinpath(*dotted.split("."))
    return path.is_dir() or path.with_suffix(".py").exists()


def is_standard(top):
    return top in sys.stdlib_module_names
