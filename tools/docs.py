"""Write what the documents take from the code: README's tables between their markers, and docs/claims.md.

python -m tools.docs           write them
python -m tools.docs --check   say which are out of step, and exit 1
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from runtime import claims, commands, errors, profiles
from runtime.engines import ENGINES

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
CLAIMS = ROOT / "docs" / "claims.md"
NODES = ROOT / "nodes"

CLAIMS_INTRO = """\
# What the write-ups claim

Three well-known write-ups tell how to run a 27B model fast on one card. Much of what they say is not so, or was so in
one version only. Here is each of their claims that can be checked, what is true, and what this pack does instead.
The same answers are in the shell: `python -m runtime doctor --claims flash-attn`.

This page is generated from `runtime/claims.json`.
"""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    cells = [head, ["---"] * len(head), *([_cell(text) for text in row] for row in rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def _cell(text: str) -> str:
    """Text that stays within its cell: no pipe ends it, and no tag is taken for HTML."""
    return re.sub(r"(?<!`)<(?=[|/a-z])", r"\\<", text).replace("|", "\\|").replace("\n", " ")


def engines() -> str:
    """The engines a user can choose."""
    rows = [
        (f"`{row.name}`", row.title, ", ".join(row.formats) or "what its server has", _code(row.install))
        for row in ENGINES
        if row.name != "scripted"
    ]
    return table(("engine", "what it is", "reads", "needs"), rows)


def _code(text: str) -> str:
    """A command as code, a sentence as it is."""
    return f"`{text}`" if text.startswith(("pip ", "python ")) else text


def error_tree() -> str:
    """Every error a node or a command can end with, and what it means."""
    classes = [one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, errors.ResidentError)]
    rows = [(f"`{one.__name__}`", one.__doc__ or "") for one in classes if one is not errors.ResidentError]
    return table(("error", "what it means"), rows)


def command_list() -> str:
    """The commands of `python -m runtime`."""
    return table(("command", "what it does"), [(f"`{name}`", commands.load(name).HELP) for name in commands.names()])


def profile_list() -> str:
    """The servers that a graph can name without any setting."""
    return table(("profile", "where"), [(f"`{one.name}`", one.address) for one in profiles.BUILT_IN])


def node_list() -> str:
    """The nodes, read from their schemas without ComfyUI, in the order in which they are registered."""
    found = {name: fields for file in sorted(NODES.glob("*.py")) for name, fields in _schemas(file)}
    order = [name for name in registered() if name in found]
    rows = [(found[name]["display_name"], f"`{found[name]['node_id']}`", found[name]["description"]) for name in order]
    return table(("node", "id", "what it does"), rows)


def _schemas(file: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """(class name, text fields of its schema) of each node class in a file."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ClassDef):
            continue
        for call in ast.walk(node):
            if isinstance(call, ast.Call) and any(keyword.arg == "node_id" for keyword in call.keywords):
                yield (
                    node.name,
                    {
                        keyword.arg: str(keyword.value.value)
                        for keyword in call.keywords
                        if keyword.arg and isinstance(keyword.value, ast.Constant)
                    },
                )


def registered() -> list[str]:
    """The class names in `NODES` of nodes/__init__.py, in order."""
    file = NODES / "__init__.py"
    if not file.exists():
        return []
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        target = node.target if isinstance(node, ast.AnnAssign) else None
        if isinstance(target, ast.Name) and target.id == "NODES" and isinstance(node.value, ast.Tuple):
            return [one.id for one in node.value.elts if isinstance(one, ast.Name)]
    return []


def claims_page() -> str:
    """docs/claims.md."""
    parts = [CLAIMS_INTRO]
    for write_up in claims.write_ups():
        rows = [(one.id, one.claim, claims.VERDICTS[one.verdict], one.truth, one.ours) for one in write_up.claims]
        parts.append(f"## {write_up.id}: {write_up.title}\n")
        parts.append(table(("id", "claim", "is", "what is true", "here"), rows) + "\n")
    return "\n".join(parts)


TABLES = {
    "engines": engines,
    "nodes": node_list,
    "profiles": profile_list,
    "commands": command_list,
    "errors": error_tree,
}


def with_tables(text: str) -> str:
    """The text with the part between each pair of markers, `<!-- NAME:begin -->` and its end, made anew."""
    for name, make in TABLES.items():
        begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->"
        if begin in text:
            before, _, rest = text.partition(begin)
            if end not in rest:
                raise ValueError(f"{begin.strip()} has no {end}")
            text = before + begin + make() + "\n" + end + rest.partition(end)[2]
    return text


def wanted() -> dict[Path, str]:
    """What each document must hold."""
    return {README: with_tables(README.read_text(encoding="utf-8")), CLAIMS: claims_page()}


def main(argv: Sequence[str]) -> int:
    """Write, or with --check only compare."""
    stale = [path for path, text in wanted().items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    if "--check" in argv:
        for path in stale:
            print(f"{path.relative_to(ROOT)} is out of step with the code. Run: python -m tools.docs", file=sys.stderr)
        return 1 if stale else 0
    for path in stale:
        path.write_text(wanted()[path], encoding="utf-8")
        print(f"wrote {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
