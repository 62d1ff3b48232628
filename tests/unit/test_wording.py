"""Snapshot of the wording: every sentence that the package can print stands in ``wording.txt``, for a person to review.

``python -m tests.unit.test_wording`` writes it anew. No other test asserts the wording of a message.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "rl_eval"
SNAPSHOT = Path(__file__).with_name("wording.txt")


def docstrings(tree: ast.AST) -> set[ast.AST]:
    """Return the strings that are statements: docstrings, and descriptions of attributes."""
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}


def template(node: ast.AST) -> str | None:
    """Return the text of a string; a value in it is shown as the expression."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            part.value if isinstance(part, ast.Constant) else f"{{{ast.unparse(part.value)}}}"  # type: ignore[attr-defined]
            for part in node.values
        )
    return None


def sentences(path: Path) -> Iterator[str]:
    """Yield the texts of a file that have two words or more, in its order."""
    tree = ast.parse(path.read_text())
    inside = {part for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)} - {
        node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)
    }
    hidden = docstrings(tree) | inside
    for node in ast.walk(tree):
        text = None if node in hidden else template(node)
        if text and len([word for word in text.split() if word.strip("{}()[]").isalpha()]) > 1:
            yield " ".join(text.split())


def wording() -> str:
    """Return the snapshot: a section for each file."""
    found = {path.relative_to(ROOT).as_posix(): sorted({*sentences(path)}) for path in sorted(PACKAGE.rglob("*.py"))}
    return "\n".join("\n".join([f"[{name}]", *texts, ""]) for name, texts in found.items() if texts)


def test_the_wording_was_reviewed() -> None:
    assert wording() == SNAPSHOT.read_text(), "run: python -m tests.unit.test_wording, and read the difference"


if __name__ == "__main__":
    SNAPSHOT.write_text(wording())
