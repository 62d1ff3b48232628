"""Docstrings as the documentation's site shows them; see ``mkdocs.yml``."""

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):(?=`)")


class PlainDocstrings(griffe.Extension):
    """Docstrings without the roles of Sphinx, whose examples are code."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of a class, function, attribute or module."""
        if obj.docstring is not None:
            plain = _ROLE.sub("", obj.docstring.value)
            obj.docstring.value = re.sub(r"^( *)Example:$", r"\1Examples:", plain, flags=re.MULTILINE)


_SEARCH: dict[str, dict[str, float]] = {
    "api": {"boost": 0.2},
    "benchmarks.md": {"boost": 0.2},
    "benchmarks/": {"exclude": True},
    "configuration": {"boost": 2},
    "decisions/": {"boost": 0.2},
}
"""How the site's search treats pages, by the start of their paths: a guide comes before what it links to."""


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Set a page's weight in the search; called by MkDocs."""
    for start, weight in _SEARCH.items():
        if page.file.src_uri.startswith(start):
            page.meta["search"] = weight
    return markdown
