"""Write what the documents take from the code: tables between markers, and docs/claims.md, in both languages.

Chinese cells come from tools/zh.json, by the English text; a test fails where one is missing.

python -m tools.docs           write them
python -m tools.docs --check   say which are out of step, and exit 1
"""

from __future__ import annotations

import ast
import functools
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from runtime import claims, commands, errors, profiles
from runtime.engines import ENGINES
from runtime.models.suggestions import SUGGESTIONS
from tools import figures

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
README_ZH = ROOT / "README.zh-CN.md"
CLAIMS = ROOT / "docs" / "claims.md"
CLAIMS_ZH = ROOT / "docs" / "claims.zh-CN.md"
ZH = Path(__file__).with_name("zh.json")
CLAIMS_DATA_ZH = Path(__file__).with_name("claims_zh.json")
LOCALES = ROOT / "locales"
NODES = ROOT / "nodes"
WORKFLOWS = ROOT / "workflows"
NUMBER = re.compile(r"\d[\d.]*|fp16|q[468]")

CLAIMS_INTRO = """\
# What the write-ups claim

Three well-known write-ups tell how to run a 27B model fast on one card. Much of what they say is not so, or was so in
one version only. Here is each of their claims that can be checked, what is true, and what this pack does instead.
The same answers are in the shell: `python -m runtime doctor --claims flash-attn`.

This page is generated from `runtime/claims.json`.
"""
CLAIMS_HEAD = ("id", "claim", "is", "what is true", "here")


Table = tuple[Sequence[str], Sequence[Sequence[str]]]
"""Head and rows, in English."""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    cells = [head, ["---"] * len(head), *([_cell(text) for text in row] for row in rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


@functools.cache
def chinese() -> dict[str, str]:
    """English text -> Chinese text, of all cells that are prose; what nodes say of themselves is in locales."""
    words: dict[str, str] = json.loads(ZH.read_text(encoding="utf-8"))
    english, twin = (
        json.loads((LOCALES / name / "nodeDefs.json").read_text(encoding="utf-8")) for name in ("en", "zh")
    )
    return words | {one["description"]: twin[node]["description"] for node, one in english.items()}


def translated(text: str, language: str) -> str:
    """A cell in that language; what has no translation stays as it is. "#" stands for each number of a figure."""
    if language == "en" or text in chinese():
        return text if language == "en" else chinese()[text]
    template = chinese().get(NUMBER.sub("#", text))
    if template is None:
        return text
    return functools.reduce(lambda made, number: made.replace("#", number, 1), NUMBER.findall(text), template)


def _cell(text: str) -> str:
    """Text that stays within its cell: no pipe ends it, and no tag is taken for HTML."""
    return re.sub(r"(?<!`)<(?=[|/a-z])", r"\\<", text).replace("|", "\\|").replace("\n", " ")


def engines() -> Table:
    """The engines a user can choose."""
    rows = [
        (f"`{row.name}`", row.title, ", ".join(row.formats) or "what its server has", _code(row.install))
        for row in ENGINES
        if row.name != "scripted"
    ]
    return ("engine", "what it is", "reads", "needs"), rows


def _code(text: str) -> str:
    """A command as code, a sentence as it is."""
    return f"`{text}`" if text.startswith(("pip ", "python ")) else text


def error_tree() -> Table:
    """Every error a node or a command can end with, and what it means."""
    classes = [one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, errors.ResidentError)]
    rows = [(f"`{one.__name__}`", one.__doc__ or "") for one in classes if one is not errors.ResidentError]
    return ("error", "what it means"), rows


def command_list() -> Table:
    """The commands of `python -m runtime`."""
    return ("command", "what it does"), [(f"`{name}`", commands.load(name).HELP) for name in commands.names()]


def profile_list() -> Table:
    """The servers that a graph can name without any setting."""
    return ("profile", "where"), [(f"`{one.name}`", one.address) for one in profiles.BUILT_IN]


def node_list() -> Table:
    """The nodes, read from their schemas without ComfyUI, in the order in which they are registered."""
    found = {name: fields for file in sorted(NODES.glob("*.py")) for name, fields in _schemas(file)}
    order = [name for name in registered() if name in found]
    rows = [(found[name]["display_name"], f"`{found[name]['node_id']}`", found[name]["description"]) for name in order]
    return ("node", "id", "what it does"), rows


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


def workflow_list() -> Table:
    """The workflows, by the title of the note in each."""
    rows = []
    for file in sorted(WORKFLOWS.glob("*.json")):
        nodes = json.loads(file.read_text(encoding="utf-8"))["nodes"]
        title = next(one["title"] for one in nodes if one["type"] in ("Note", "MarkdownNote") and one.get("title"))
        rows.append((f"`{file.stem}`", title))
    return ("workflow", "what it shows"), rows


def suggestion_list() -> Table:
    """Models to begin with, and what fetches them."""
    rows = [
        (f"`{one.arguments}`", f"about {one.num_bytes / 1e9:.1f} GB", one.runs_in or "transformers or a server")
        for one in SUGGESTIONS
    ]
    return ("model", "size", "runs in"), rows


def figure_list() -> Table:
    """What was measured, with its conditions; one row that says so where nothing was."""
    rows: list[tuple[str, str]] = []
    for measured in (figures.residency(), figures.exllamav2(), figures.through_the_node()):
        if measured:
            about, found = measured
            rows += [(f"**{about}**", ""), *found]
    return ("measured", "figure"), rows or [("No results lie in `bench/results` yet.", "")]


def claims_page(language: str = "en") -> str:
    """docs/claims.md, or its Chinese twin."""
    head = [translated(one, language) for one in CLAIMS_HEAD]
    twins: dict[str, list[str]] = {} if language == "en" else json.loads(CLAIMS_DATA_ZH.read_text(encoding="utf-8"))
    parts = [translated(CLAIMS_INTRO, language)]
    for write_up in claims.write_ups():
        rows = []
        for one in write_up.claims:
            claim, truth, ours = twins.get(one.id, (one.claim, one.truth, one.ours))
            rows.append((one.id, claim, translated(claims.VERDICTS[one.verdict], language), truth, ours))
        parts.append(f"## {write_up.id}: {translated(write_up.title, language)}\n")
        parts.append(table(head, rows) + "\n")
    return "\n".join(parts)


TABLES: dict[str, Callable[[], Table]] = {
    "engines": engines,
    "nodes": node_list,
    "profiles": profile_list,
    "commands": command_list,
    "errors": error_tree,
    "workflows": workflow_list,
    "suggestions": suggestion_list,
    "figures": figure_list,
}


def with_tables(text: str, language: str = "en") -> str:
    """The text with the part between each pair of markers, `<!-- NAME:begin -->` and its end, made anew."""
    for name, make in TABLES.items():
        begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->"
        if begin in text:
            before, _, rest = text.partition(begin)
            if end not in rest:
                raise ValueError(f"{begin.strip()} has no {end}")
            head, rows = make()
            made = table(*_in(language, head, rows))
            text = before + begin + made + "\n" + end + rest.partition(end)[2]
    return text


def _in(language: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    return [translated(one, language) for one in head], [[translated(one, language) for one in row] for row in rows]


def wanted() -> dict[Path, str]:
    """What each document must hold."""
    pages = {README: with_tables(README.read_text(encoding="utf-8")), CLAIMS: claims_page()}
    if README_ZH.exists():
        pages[README_ZH] = with_tables(README_ZH.read_text(encoding="utf-8"), "zh")
    if CLAIMS_DATA_ZH.exists():
        pages[CLAIMS_ZH] = claims_page("zh")
    return pages


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
