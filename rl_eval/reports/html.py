"""HTML of a report: template, style and script in one text, with a policy that forbids every connection.

Equal results give equal bytes: nothing here knows the time, the machine or the process. Jinja2 escapes all text, data
are JSON whose markup characters are escaped as well, and nothing runs but the one script whose digest the page names.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import math
import shlex
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from rl_eval.errors.redaction import redact_text
from rl_eval.log.storage import absolute_place
from rl_eval.reports.episodes import data_of_all, shown_rows
from rl_eval.reports.page import Table
from rl_eval.reports.pages import headline
from rl_eval.reports.report import overview, pair_pages, run_page
from rl_eval.results.files import RESULT_FILE
from rl_eval.results.metrics import episode_seconds
from rl_eval.results.result import EvalResult
from rl_eval.results.text import environment_name

if TYPE_CHECKING:
    import jinja2

__all__ = ["GENERATOR", "Source", "content_policy", "render", "render_template"]

GENERATOR: Final = '<meta name="generator" content="rl-eval report">'
"""Element near the beginning of each page by which a file is known as one."""
STATIC_ROWS: Final = 100
"""Episodes that are readable without JavaScript."""

_HEADINGS: Final = ("episode", "seed", "return", "length", "end", "success", "attempts", "runner", "seconds")
_FOLDER: Final = Path(__file__).parent
_MANY: Final = 3
"""Environments that a heading counts and does not name."""
_MOST_VIDEOS: Final = 1_000
_ESCAPES: Final = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}


class Source(NamedTuple):
    """A result, with the folder or URI that it was read from."""

    path: str
    result: EvalResult
    videos: Mapping[int, str] = MappingProxyType({})
    """Links to videos of its episodes, as the page has them, by index."""


def render(sources: Sequence[Source]) -> str:
    """Return a report of results.

    Args:
        sources: At least one; the first is the one that the others are compared with.
    """
    results, names = [source.result for source in sources], _names(sources)
    runs = [
        {
            "number": position,
            "anchor": "" if position == 1 else f"run-{position}-",
            "name": name,
            "path": shlex.quote(redact_text(source.path)),
            "page": run_page(source.result),
            "episodes": _static_rows(source.result),
            "num_finished": len(source.result.episodes),
            "videos": dict(islice(source.videos.items(), _MOST_VIDEOS)),
        }
        for position, (name, source) in enumerate(zip(names, sources, strict=True), 1)
    ]
    data = [
        {key: run[key] for key in ("path", "anchor", "videos")} | episodes
        for run, episodes in zip(runs, data_of_all(results), strict=True)
    ]
    titles = list(dict.fromkeys(environment_name(result.provenance) or "evaluation" for result in results))
    heading = " and ".join(titles) if len(titles) < _MANY else f"{len(titles)} environments"
    pages = [overview(names, results), *pair_pages(names, results)] if len(runs) > 1 else []
    what = f"{len(runs)} evaluations" if pages else f"mean return {headline(results[0]).strong}"
    title = f"{heading}: {what}"
    script = _asset("report.js")
    return render_template("report.html.j2", script, data, runs=runs, pages=pages, heading=heading, title=title)


def _static_rows(result: EvalResult) -> Table:
    """Return the first episodes, with seven digits of their returns and three of their seconds."""
    shown = shown_rows(result)[:STATIC_ROWS]
    rows = []
    for index, seconds in zip(shown.tolist(), episode_seconds(result.table.rows[shown]).tolist(), strict=True):
        record = result.table.record(index)
        value = "" if math.isnan(record.episode_return) else f"{record.episode_return + 0.0:.7g}"
        end = "failed" if record.outcome == "failed" else "terminated" if record.terminated else "truncated"
        success = {None: "", True: "yes", False: "no"}[record.success_at_end]
        runner = "" if record.runner < 0 else record.runner
        cells = (index, record.seed, value, record.length, end, success, record.attempts, runner, f"{seconds:.3g}")
        rows.append(list(map(str, cells)))
    return Table("Episodes", _HEADINGS, rows)


def render_template(template: str, script: str = "", data: Any = None, form: str = "'none'", **shown: Any) -> str:
    """Return the text that a template of this folder makes, with style, script and data inside.

    Args:
        template: Its file name.
        script: The one script that may run.
        data: Value that the script finds in the element ``data``.
        form: Where a form may lead, as a source of the policy.
        **shown: Names that the template uses.
    """
    from markupsafe import Markup

    style, inert = _asset("page.css"), json.dumps(data, separators=(",", ":"), allow_nan=False).translate(_ESCAPES)
    trusted = {"style": style, "script": script, "data": inert, "generator": GENERATOR}
    text = _environment().get_template(template).render(
        policy=content_policy(style, script, form),
        **{name: Markup(value) for name, value in trusted.items()},  # noqa: S704  # Files of this folder, inert JSON.
        **shown,
    )  # fmt: skip
    return text.encode("utf-8", "replace").decode()  # Names of files and JSON can hold half a character.


def content_policy(style: str, script: str, form: str = "'none'") -> str:
    """Return a content security policy: this style and this script, and nothing from anywhere."""

    def digest(text: str) -> str:
        return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()

    allowed = f"style-src '{digest(style)}'" + (f"; script-src '{digest(script)}'" if script else "")
    return f"default-src 'none'; {allowed}; base-uri 'none'; form-action {form}"


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
    environment.filters["kind"] = lambda section: type(section).__name__
    return environment


def _names(sources: Sequence[Source]) -> list[str]:
    """Return the parts of paths that tell them apart; equal paths get a number."""
    parts = [_folder_of(source.path).parts for source in sources]
    if len(parts) == 1:
        return [parts[0][-1]]
    common = next((depth for depth, level in enumerate(zip(*parts, strict=False)) if len({*level}) > 1), 0)
    names = [str(Path(*each[common:])) for each in parts]
    return [f"{name} ({place})" if names.count(name) > 1 else name for place, name in enumerate(names, 1)]


def _folder_of(path: str) -> Path:
    """Return the folder of a result, by a path that ends in its name."""
    text = path.partition("?")[0]
    folder = Path(text).parent if Path(text).name == RESULT_FILE else Path(text)
    return folder if folder.name not in ("", "..") else Path(absolute_place(folder))
