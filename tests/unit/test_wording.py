"""Snapshot of the wording: every sentence that the package can print stands in ``wording.txt``, for a person to review.

The file is sorted and names no module or variable, so moving or renaming code does not change it.
``python -m tests.unit.test_wording`` writes it anew. No other test asserts the wording of a message.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "rl_eval"
SNAPSHOT = Path(__file__).with_name("wording.txt")


def docstrings(tree: ast.AST) -> set[ast.AST]:
    """Return the strings that are statements: docstrings, and descriptions of attributes."""
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}


def template(node: ast.AST) -> str | None:
    """Return the text of a string, with ``{}`` for each value in it."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    return None


def sentences(source: str) -> Iterator[str]:
    """Yield the texts of a module that have two words or more."""
    tree = ast.parse(source)
    hidden = docstrings(tree) | {
        part for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values
    }
    for node in ast.walk(tree):
        text = None if node in hidden else template(node)
        words = [word for word in (text or "").replace("{}", "value").split() if word.strip("()[]").isalpha()]
        if text and len(words) > 1:
            yield " ".join(text.split())


def wording() -> str:
    """Return the snapshot: one text per line."""
    found = {text for path in PACKAGE.rglob("*.py") for text in sentences(path.read_text())}
    return "\n".join([*sorted(found), ""])


def test_moved_functions_and_renamed_variables_change_no_text() -> None:
    before = 'def of(name):\n    return f"episode {name} has failed"\n\ndef other():\n    return "nothing has failed"\n'
    after = 'def other():\n    return "nothing has failed"\n\ndef of(i):\n    return f"episode {i} has failed"\n'
    assert {*sentences(before)} == {*sentences(after)} == {"episode {} has failed", "nothing has failed"}


OF_COMMANDS = ("__main__.py", "cli", "training/watching")
"""Modules whose texts appear only on the command line."""
COMMAND = re.compile(r"`?(rl-eval|ray|git) [a-z ]*.*")
IN_BRACKETS = re.compile(r"\([^()]*\)")


def only_for_commands(text: str) -> bool:
    """Whether a text names an option outside of brackets, and not as part of a command."""
    return bool(re.search(r"(?<![\w-])--[a-z]", COMMAND.sub("", IN_BRACKETS.sub("", text))))


def test_texts_that_python_shows_name_its_arguments() -> None:
    """Options of the command line are in brackets, after the key or the argument: ``trust=True (--trust)``."""
    assert only_for_commands("Pass --trust.")
    assert not only_for_commands("Pass trust=True (--trust), or use rl-eval replay --video.")
    modules = [path for path in PACKAGE.rglob("*.py") if not str(path.relative_to(PACKAGE)).startswith(OF_COMMANDS)]
    texts = {text for path in modules for text in sentences(path.read_text())}
    assert sorted(filter(only_for_commands, texts)) == []


def test_the_wording_was_reviewed() -> None:
    assert wording() == SNAPSHOT.read_text(), "run: python -m tests.unit.test_wording, and read the difference"


if __name__ == "__main__":
    SNAPSHOT.write_text(wording())
