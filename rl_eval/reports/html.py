"""HTML of a report: template, style, script and data in one text. A content security policy forbids connections.

Equal results give equal bytes: the output does not depend on the time, the machine or the process. Jinja2 escapes all
text. Markup characters in the JSON data are escaped. Only the script whose digest is in the security policy can run.

Each column of the episodes is a little-endian array. It has the smallest type that keeps seven digits of every number.
Its bytes are grouped by their position in the number, which improves the compression. Then they are encoded with zlib
and base64.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import math
import shlex
import zlib
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from rl_eval.errors.printable import printable
from rl_eval.errors.redaction import redact_text
from rl_eval.log.storage import absolute_place
from rl_eval.recording.video_selection import captions
from rl_eval.records.episode import Outcome
from rl_eval.reports.page import Table
from rl_eval.reports.pages import headlines
from rl_eval.reports.report import comparisons, overview, run_page
from rl_eval.results.files import RESULT_FILE
from rl_eval.results.metrics import episode_seconds
from rl_eval.results.result import EvalResult
from rl_eval.results.story import story
from rl_eval.results.text import counted, environment_name

if TYPE_CHECKING:
    import jinja2


_BEGINNING: Final = 2_000
"""Number of bytes at the start of a page that contain its generator tag."""
GENERATOR: Final = '<meta name="generator" content="rl-eval report">'
"""Element near the start of each page. It shows that a file is a report."""
_STATIC_ROWS: Final = 100
"""Number of episodes that are visible without JavaScript."""

_HEADINGS: Final = ("episode", "seed", "return", "length", "end", "success", "attempts", "runner", "seconds")
_FOLDER: Final = Path(__file__).parent
_MANY: Final = 3
"""Minimum number of environments for a heading that has their number instead of their names."""
_MOST_VIDEOS: Final = 1_000
_ESCAPES: Final = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}

_OWN: Final = "'self' file:"
"""Origin of videos, as in a content security policy: that of the page, also if it is opened from a disk."""
_MOST_ROWS: Final = 200_000
"""Maximum number of episodes of one result in the table. The numbers are computed from all episodes."""

_MOST_TEXT: Final = 1_700_000
"""Maximum length of the packed columns of one result. Info scalars that exceed it are omitted."""
_MOST_FAULTS: Final = 20_000
_MOST_TRACEBACKS: Final = 2_000_000
"""Maximum total length of the different tracebacks of one result."""
_UNSIGNED: Final = ("<u1", "<u2", "<u4")
_DIGITS: Final = 1e-7
"""Maximum relative error of packed numbers, which is not visible."""


class Source(NamedTuple):
    """Result, with its folder or URI."""

    path: str
    result: EvalResult
    videos: Mapping[int, str] = MappingProxyType({})
    """Links from the page to videos of episodes, by index."""


def is_report(path: Path, generator: str = GENERATOR) -> bool:
    """Return whether a file is a page that this module rendered with a generator tag.

    Raises:
        OSError: The file cannot be read.
    """
    with path.open("rb") as file:
        return generator.encode() in file.read(_BEGINNING)


def render(sources: Sequence[Source]) -> str:
    """Return a report of results.

    Args:
        sources: At least one result. The other results are compared with the first.
    """
    results, names = [source.result for source in sources], _names(sources)
    named = dict(zip(names, results, strict=True)) if len(sources) > 1 else {}
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
            "films": [(source.videos[i], text) for i, text in captions(source.result).items() if i in source.videos],
        }
        for position, (name, source) in enumerate(zip(names, sources, strict=True), 1)
    ]
    data = [
        {key: run[key] for key in ("path", "anchor", "videos")} | episodes
        for run, episodes in zip(runs, _data_of_all(results), strict=True)
    ]
    titles = list(dict.fromkeys(environment_name(result.provenance) or "evaluation" for result in results))
    heading = " and ".join(titles) if len(titles) < _MANY else f"{len(titles)} environments"
    head = headlines(results[0])[0]
    title = f"{heading}: {f'{len(named)} evaluations' if named else f'{head.label} {head.strong}'}"
    script = asset("table.js") + asset("report.js")
    several = (overview(named), comparisons(named)) if named else None
    return render_template("report.html.j2", script, data, runs=runs, heading=heading, title=title, several=several)


def _static_rows(result: EvalResult) -> Table:
    """Return the table of the first episodes, with seven digits of returns and three of times."""
    shown = _shown_rows(result)[:_STATIC_ROWS]
    rows = []
    for index, seconds in zip(shown.tolist(), episode_seconds(result.table.rows[shown]).tolist(), strict=True):
        record = result.table.record(index)
        value = "" if math.isnan(record.episode_return) else f"{record.episode_return + 0.0:.7g}"
        end = "failed" if record.outcome == "failed" else "terminated" if record.terminated else "truncated"
        success = {None: "", True: "yes", False: "no"}[record.success_at_end]
        runner = "" if record.runner < 0 else record.runner
        length, spent = ("-", "-") if end == "failed" else (record.length, f"{seconds:.3g}")
        cells = (index, record.seed, value, length, end, success, record.attempts, runner, spent)
        rows.append(list(map(str, cells)))
    return Table("Episodes", _HEADINGS, rows)


def render_template(
    template: str,
    script: str = "",
    data: Any = None,
    form: str = "'none'",
    generator: str = GENERATOR,
    **shown: Any,
) -> str:
    """Render a template of this folder with style, script and data inline.

    Args:
        template: File name of the template.
        script: Text of the only script that may run.
        data: JSON value for the script, in the element ``data``.
        form: Allowed target of forms, as in a content security policy.
        generator: Generator tag of the page; see :func:`is_report`.
        **shown: Variables of the template.
    """
    from markupsafe import Markup

    style, inert = asset("page.css"), json.dumps(data, separators=(",", ":"), allow_nan=False).translate(_ESCAPES)
    trusted = {"style": style, "script": script, "data": inert, "generator": generator}
    text = _environment().get_template(template).render(
        policy=_content_policy(style, script, form),
        **{name: Markup(value) for name, value in trusted.items()},  # noqa: S704  # Files of this folder, inert JSON.
        **shown,
    )  # fmt: skip
    return text.encode("utf-8", "replace").decode()  # File names and JSON may contain lone surrogates.


def _content_policy(style: str, script: str, form: str) -> str:
    """Return a content security policy that allows only one style, one script, and videos of the page's origin."""

    def digest(text: str) -> str:
        return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()

    allowed = f"style-src '{digest(style)}'" + (f"; script-src '{digest(script)}'" if script else "")
    return f"default-src 'none'; {allowed}; media-src {_OWN}; base-uri 'none'; form-action {form}"


@functools.cache
def asset(name: str) -> str:
    """Return the text of a file of this folder."""
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
        finalize=lambda value: printable(value) if type(value) is str else value,
    )
    environment.filters["counted"] = counted
    environment.filters["kind"] = lambda section: type(section).__name__
    return environment


def _names(sources: Sequence[Source]) -> list[str]:
    """Return the parts of the paths that distinguish the sources. Equal paths get a number."""
    parts = [_folder_of(source.path).parts for source in sources]
    if len(parts) == 1:
        return [parts[0][-1]]
    common = next((depth for depth, level in enumerate(zip(*parts, strict=False)) if len({*level}) > 1), 0)
    names = [str(Path(*each[common:])) for each in parts]
    return [f"{name} ({place})" if names.count(name) > 1 else name for place, name in enumerate(names, 1)]


def _folder_of(path: str) -> Path:
    """Return the folder of a result as a path that ends with the folder's name."""
    text = path.partition("?")[0]
    folder = Path(text).parent if Path(text).name == RESULT_FILE else Path(text)
    return folder if folder.name not in ("", "..") else Path(absolute_place(folder))


def _data_of_all(results: Sequence[EvalResult]) -> list[dict[str, Any]]:
    """Return the data of each result.

    Columns that are equal to those of the first result, such as seeds, are left out.
    """
    first, *others = map(episode_data, results)
    for other in others:
        columns = other["columns"].items()
        other["columns"] = {name: packed for name, packed in columns if packed != first["columns"][name]}
    return [first, *others]


def episode_data(result: EvalResult) -> dict[str, Any]:
    """Return the finished episodes of a result, with their faults, as JSON values.

    Returns:
        ``columns``: packed columns by name; ``infos``: names and columns of info scalars; ``infos_omitted``: number
        of omitted info scalars; ``faults``: packed text of a JSON object; ``omitted``: number of omitted episodes.
    """
    positions = _shown_rows(result)
    rows, infos = result.table.rows[positions], []
    ends = np.where(rows["terminated"], 0, np.maximum(rows["truncated_by"], 1))
    mantissas, exponents = np.frexp(episode_seconds(rows))  # Digits of noise do not compress.
    columns = {
        "index": rows["index"],
        "seed": rows["seed"],
        "return": rows["episode_return"],
        "length": rows["length"],
        "end": np.where(rows["outcome"] == Outcome.FAILED, 3, ends),
        "success": rows["success_at_end"].astype(np.int16) + 1,
        "attempts": rows["attempts"],
        "runner": rows["runner"].astype(np.int64) + 1,
        "seconds": np.ldexp(np.round(mantissas * 2**13) / 2**13, exponents),
        "counted": result.counted[positions],
    }
    packed = {name: pack(values) for name, values in columns.items()}
    left = _MOST_TEXT - sum(len(text) for _, _, text in packed.values())
    for name, values in zip(result.table.info_keys, result.table.infos.T, strict=True):
        column = pack(values[positions])
        left -= len(column[2])
        if left < 0:
            break
        infos.append([printable(name), column])
    return {
        "columns": packed,
        "infos": infos,
        "infos_omitted": len(result.table.info_keys) - len(infos),
        "faults": _compressed(json.dumps(_fault_data(result), separators=(",", ":"), allow_nan=False).encode("ascii")),
        "omitted": int(result.table.filled.sum()) - len(rows),
    }


def _shown_rows(result: EvalResult) -> npt.NDArray[np.intp]:
    """Return the indices of the episodes in the table: the first finished episodes."""
    return np.flatnonzero(result.table.filled)[:_MOST_ROWS]


def pack(values: npt.NDArray[Any]) -> list[Any]:
    """Return an array of numbers as ``[type, count, text]``."""
    small = _narrow(values)
    planes = small.view(np.uint8).reshape(len(small), small.itemsize).T
    return [small.dtype.str[1:], len(small), _compressed(planes.tobytes())]


def _narrow(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if values.dtype.kind in "biu":
        least, most = (int(values.min()), int(values.max())) if len(values) else (0, 0)
        fits = (kind for kind in _UNSIGNED if least >= 0 and most <= np.iinfo(kind).max)
        return np.ascontiguousarray(values, next(fits, "<f8"))
    wide = np.ascontiguousarray(values, "<f8")
    with np.errstate(over="ignore", under="ignore"):
        small = wide.astype("<f4")
        known = np.isfinite(wide)
        shows = bool((np.abs(small[known] - wide[known]) <= _DIGITS * np.abs(wide[known])).all())
    return small if shows else wide


def _fault_data(result: EvalResult) -> dict[str, Any]:
    """Return the faults as rows, and the list of different tracebacks.

    A row contains the position of its traceback in the list; -1 if the traceback is not in the list.
    """
    texts: dict[str, int] = {}
    left, rows = _MOST_TRACEBACKS, []
    events = (event for index in sorted(result.table.faults) for event in story(result, index))
    texts_of = ((event.fault, event.text) for event in events if event.fault is not None)
    for fault, text in islice(texts_of, _MOST_FAULTS):
        if fault.traceback not in texts and len(fault.traceback) <= left:
            left -= len(fault.traceback)
            texts[fault.traceback] = len(texts)
        rows.append([fault.index, fault.attempt, fault.runner, printable(text), texts.get(fault.traceback, -1)])
    return {"rows": rows, "tracebacks": list(map(printable, texts))}


def _compressed(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data, 9)).decode()
