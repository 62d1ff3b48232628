"""Page of a report: template, style and script in one text, with a policy that forbids every connection.

Equal results give equal bytes: nothing here knows the time, the machine or the process. Jinja2 escapes all text, data
are JSON whose markup characters are escaped as well, and nothing runs but the one script whose digest the page names.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from rl_eval.log.storage import absolute_place
from rl_eval.results.page.columns import data_of_all
from rl_eval.results.page.relations import overview, pairs
from rl_eval.results.page.sections import Run, run_section
from rl_eval.results.report.files import RESULT_FILE
from rl_eval.results.result import EvalResult

if TYPE_CHECKING:
    import jinja2
    from markupsafe import Markup

__all__ = ["GENERATOR", "Source", "content_policy", "page_of", "render", "served_policy"]

GENERATOR: Final = '<meta name="generator" content="rl-eval report">'
"""Element near the beginning of each page by which a file is known as one."""

_FOLDER: Final = Path(__file__).parent
_PART_END: Final = re.compile(r"[/:](?=\w)|[._-](?=[^\W\d])|[^\W_]{20}(?=[^\W_])")
"""Not inside of times, versions and numbered names; endless words have ends as well."""
_MANY: Final = 3
"""Environments that a heading counts and does not name."""
_ESCAPES: Final = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}


class Source(NamedTuple):
    """A result, with the folder or URI that it was read from."""

    path: str
    result: EvalResult
    videos: Mapping[int, str] = MappingProxyType({})
    """Links to videos of its episodes, as the page has them, by index."""


def render(sources: Sequence[Source]) -> str:
    """Return a page about results.

    Args:
        sources: At least one; the first is what the others are compared with.
    """
    results = [source.result for source in sources]
    runs = [
        run_section(source.result, position, name, source.path, source.videos)
        for position, (source, name) in enumerate(zip(sources, _names(sources), strict=True), 1)
    ]
    data = [
        {"path": run.path, "anchor": run.anchor, "videos": dict(run.videos), **episodes}
        for run, episodes in zip(runs, data_of_all(results), strict=True)
    ]
    return page_of(
        "report.html.j2", script=_asset("report.js"), data=data, runs=runs, overview=overview(runs, results),
        pairs=pairs(runs, results), heading=_heading(runs), title=_title(runs),
    )  # fmt: skip


def page_of(template: str, *, script: str = "", data: Any = None, form_action: str = "'none'", **shown: Any) -> str:
    """Return what a template of this folder makes, with style, script and data inside.

    Args:
        template: Its file name.
        script: The one script that may run.
        data: Value that the script finds in the element ``data``.
        form_action: Where a form may lead, as a source of the policy.
        **shown: What the template uses.
    """
    from markupsafe import Markup

    style = _asset("page.css")
    text = _environment().get_template(template).render(
        policy=content_policy(style, script, form_action),
        style=Markup(style),  # noqa: S704  # Files of this folder.
        script=Markup(script),  # noqa: S704
        data=Markup(json_text(data)),  # noqa: S704  # Nothing in it can end its element.
        generator=Markup(GENERATOR),  # noqa: S704
        **shown,
    )  # fmt: skip
    return text.encode("utf-8", "replace").decode()  # Names of files and JSON can hold half a character.


def content_policy(style: str, script: str, form_action: str = "'none'") -> str:
    """Return a content security policy: this style and this script, and nothing from anywhere."""
    allowed = f"style-src '{_digest(style)}'" + (f"; script-src '{_digest(script)}'" if script else "")
    return f"default-src 'none'; {allowed}; base-uri 'none'; form-action {form_action}"


def served_policy() -> str:
    """Return the policy of a server of pages: what any of them needs, and no frame around them."""
    policy = content_policy(_asset("page.css"), _asset("report.js"), "'self'")
    return f"{policy}; media-src 'self'; frame-ancestors 'none'"


def json_text(value: Any) -> str:
    """Return a value as JSON that is inert inside of HTML."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).translate(_ESCAPES)


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


@functools.cache
def _asset(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


@functools.cache
def _environment() -> jinja2.Environment:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["breakable"] = _breakable
    return environment


def _breakable(name: str) -> Markup:
    """Return a name in which a line may end between its parts; browsers see none in ``seed_1/best_model``."""
    from markupsafe import Markup, escape

    return Markup(_PART_END.sub(r"\g<0><wbr>", str(escape(name))))  # noqa: S704  # No entity has such a character.


def _names(sources: Sequence[Source]) -> list[str]:
    """Return the last parts of paths, as many of each as tell them apart; equal paths get a number."""
    parts = [_folder_of(source.path).parts for source in sources]
    longest = max(map(len, parts))
    for depth in range(1, longest + 1):
        names = ["/".join(part[-depth:]) or "result" for part in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{name} ({position})" for position, name in enumerate(names, 1)]


def _folder_of(path: str) -> Path:
    """Return the folder of a result, by a path that ends in its name."""
    text = path.partition("?")[0]
    folder = Path(text).parent if Path(text).name == RESULT_FILE else Path(text)
    return folder if folder.name not in ("", "..") else Path(absolute_place(folder))


def _heading(runs: Sequence[Run]) -> str:
    """Return the environments' names, or how many there are."""
    names = list(dict.fromkeys(run.title for run in runs))
    return " and ".join(names) if len(names) < _MANY else f"{len(names)} environments"


def _title(runs: Sequence[Run]) -> str:
    what = f"mean return {runs[0].headline.value}" if len(runs) == 1 else f"{len(runs)} evaluations"
    return f"{_heading(runs)}: {what}"
