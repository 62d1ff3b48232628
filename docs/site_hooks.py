"""Hooks of the documentation's site; see ``mkdocs.yml``."""

import re

_ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):(?=<code>)")


def on_page_content(html: str, **_: object) -> str:
    """Take the roles of Sphinx off the names in docstrings, which are in code style without them."""
    return _ROLE.sub("", html)
