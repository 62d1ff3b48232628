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
