"""``rl-eval watch``: learning curve of the checkpoints of a training run, and its best checkpoint."""

from __future__ import annotations

import glob
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rl_eval.adapters import loader_of
from rl_eval.cli.evaluated import Evaluated, TrustPolicy, policy_source, with_evaluated
from rl_eval.cli.exits import ExitCode
from rl_eval.cli.printing import AsJson, print_json, print_line, print_note
from rl_eval.cli.settings import Assignments, OptionalConfigPath, Section, find_modules_here, read_config, read_settings
from rl_eval.cli.shared import advanced, argument, option
from rl_eval.cli.signals import Interruption
from rl_eval.config.policy_sources import schemes
from rl_eval.errors import ConfigError
from rl_eval.errors.redaction import redact_text

if TYPE_CHECKING:
    from rl_eval.training.watching import Watcher


@with_evaluated
def watch(
    ctx: typer.Context,
    evaluated: Evaluated,
    config: OptionalConfigPath = None,
    checkpoints: Annotated[
        list[str] | None,
        argument("CHECKPOINTS", "Folder of weights or models, or a quoted glob, such as 'runs/ppo/model_*.zip'."),
    ] = None,
    section: Section = None,
    trust: TrustPolicy = False,
    assignments: Assignments = None,
    key: Annotated[
        str | None,
        advanced(
            "KEY", "Config key that receives the checkpoint path. [default: the key that fits the policy]", "--as"
        ),
    ] = None,
    step_pattern: Annotated[
        str | None,
        advanced(
            "REGEX",
            "Regular expression for file names. Its first group is the training step. [default: the last number in the "
            "name]",
        ),
    ] = None,
    output: Annotated[
        Path | None, option("DIR", "Folder for all files. [default: CHECKPOINTS/eval]", "--output", "-o")
    ] = None,
    held_out: Annotated[
        int | None,
        option(
            "N",
            "Number of held-out episodes for a second evaluation of the best checkpoint. "
            "[default: as many as --num-episodes]",
            min=0,
        ),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Evaluate the checkpoints that exist, and exit.")] = False,
    poll_s: Annotated[float, advanced("S", "Seconds between two scans of the folder. [default: 5]", min=0.01)] = 5.0,
    retry_s: Annotated[
        float,
        advanced("S", "Time to retry a checkpoint that cannot be read, since its last change. [default: 60]", min=0.0),
    ] = 60.0,
    retry_unreadable: Annotated[
        bool, advanced(None, "Retry checkpoints that earlier calls could not load.", "--retry-unreadable")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Evaluate each new checkpoint of a training run; write a learning curve, and keep the best checkpoint."""
    interruption: Interruption = ctx.obj
    config, folder, pattern = _places(config, checkpoints or [])
    if evaluated.weights is not None:
        weights, problem = str(evaluated.weights), "watch takes the weights from the checkpoints"
        raise ConfigError(f"--weights {weights}: {problem}", key="--weights", value=weights, fix="Omit --weights.")
    look_s, tell = None if once else poll_s, partial(_tell, err=as_json)
    if config is None:
        evaluated.check(f"watch '{folder / pattern}'", assignments, needs_policy=False)
    if config is None and evaluated.policy is None:
        # Check the other options before waiting for a checkpoint.
        of_any = replace(evaluated, policy="random").keys(lambda _: None, assignments, trust=trust)
        read_settings(None, section, assignments, of_any)
        evaluated = replace(evaluated, policy=_first_policy(folder, pattern or "*", look_s, tell))
    # Drop notes about a single model, because there are many checkpoints.
    read = read_config(config, section, assignments, evaluated.keys(lambda _: None, assignments, trust=trust))
    settings = read.build()
    factory = settings.policy.policy
    library = loader_of(factory)
    scheme = schemes().get(library.name) if library else None
    loads = library is not None and str(factory).endswith(":load_policy")
    find_modules_here()
    from rl_eval.training.watching import Watcher, WatchOptions

    options = WatchOptions(
        folder,
        pattern=pattern or f"*{scheme.suffix if scheme and scheme.suffix else '.safetensors'}",
        output=output or folder / "eval",
        key=key or ("policy.policy_kwargs.path" if loads else "policy.weights"),
        step_pattern=step_pattern,
        held_out=held_out,
        retry_s=retry_s,
    )
    if options.output.resolve().is_relative_to(folder.resolve()):
        # Do not create the folder for the output: its name may be misspelt.
        _wait(lambda: "" if folder.is_dir() else f"folder {str(folder.resolve())!r} does not exist", look_s, tell)
    watcher = Watcher(
        settings,
        options,
        tell,
        stopping=lambda: interruption.number is not None,
        submitted=lambda handle: interruption.defer(handle.flush),
    )
    with closing(watcher):
        interruption.defer(lambda _: None)  # Between two evaluations all results are saved, so no flush is needed.
        if retry_unreadable:
            watcher.journal.drop_unreadable()
        if not once:
            tell(f"waiting for {options.pattern} in {folder}, until Ctrl-C; --once evaluates only the existing files")
        watcher.run(poll_s, once=once)
        if as_json:
            print_json(watcher.curve)
        code = _exit_code(watcher, interruption)
        interruption.conclude(code)
    if code:
        raise typer.Exit(code)


def _places(config: Path | None, checkpoints: list[str]) -> tuple[Path | None, Path, str]:
    """Return CONFIG or None, and the folder and the glob in CHECKPOINTS; the glob may be empty."""
    if config is not None and not checkpoints and config.suffix not in (".yaml", ".yml"):
        config, checkpoints = None, [str(config)]  # CHECKPOINTS is the only argument.
    if config is not None and checkpoints and config.is_dir():
        fix = f"Pass CONFIG first, as in `rl-eval watch {checkpoints[0]} {config}`."
        raise ConfigError(f"CONFIG {config} is a folder", key="CONFIG", value=str(config), fix=fix)
    if len(checkpoints) != 1:
        fix = "Pass one folder, or one glob in quotes, such as 'runs/ppo/model_*.zip'."
        problem = f"CHECKPOINTS has {len(checkpoints)} values"
        raise ConfigError(problem, key="CHECKPOINTS", value=" ".join(checkpoints), fix=fix)
    path = Path(checkpoints[0]).expanduser()
    if path.is_file():
        return config, path.parent, glob.escape(path.name)
    if path.is_dir() or not glob.has_magic(str(path)):
        return config, path, ""
    first = next(place for place, part in enumerate(path.parts) if glob.has_magic(part))
    return config, Path(*path.parts[:first]), str(Path(*path.parts[first:]))


def _first_policy(folder: Path, pattern: str, poll_s: float | None, tell: Callable[[str], None]) -> str:
    """Return the path of the first checkpoint whose type shows the policy.

    Args:
        folder: Folder of the checkpoints.
        pattern: Glob of the checkpoints.
        poll_s: Seconds between two scans of an empty folder; None to scan once.
        tell: Prints a line to the user.

    Raises:
        ConfigError: No checkpoint shows the policy, and either ``poll_s`` is None or checkpoints exist at the start.
    """
    found: list[str] = []

    def missing() -> str:
        gone = "" if folder.is_dir() else ": the folder does not exist"
        why = f"nothing in {str(folder.resolve())!r} matches {pattern!r} yet{gone}"
        for path in sorted(folder.glob(pattern)):
            try:
                print_note(f"policy: {policy_source(str(path)).said}; other checkpoints are loaded in the same way")
                found.append(str(path))
            except ConfigError as error:  # noqa: PERF203 - few files
                why = str(error)
            else:
                return ""
        return (
            f"--policy is missing, and no checkpoint shows the policy: {why.rstrip('.')}. Pass --policy "
            "pkg.module:attr, the name of a function that either builds the module for these weights or loads a "
            "checkpoint"
        )

    _wait(missing, None if any(folder.glob(pattern)) else poll_s, tell)
    return found[0]


def _wait(missing: Callable[[], str], poll_s: float | None, tell: Callable[[str], None]) -> None:
    """Wait until ``missing`` returns an empty text; if ``poll_s`` is None, raise an error with the text instead.

    Args:
        missing: Returns a description of the missing thing.
        poll_s: Seconds between checks; None to check once.
        tell: Prints a line to the user.
    """
    printed = ""
    while why := missing():
        if poll_s is None:
            raise ConfigError(why, key="CHECKPOINTS")
        if why != printed:
            tell(f"waiting: {why}")
        printed = why
        time.sleep(poll_s)


def _tell(line: str, *, err: bool) -> None:
    print_line(redact_text(line), err=err)


def _exit_code(watcher: Watcher, interruption: Interruption) -> int:
    if interruption.number is not None:
        return 128 + interruption.number
    statuses = {entry.selection.status for entry in watcher.journal.curve}
    if statuses <= {"complete"}:
        return ExitCode.PARTIAL if watcher.unfinished else ExitCode.COMPLETE
    return ExitCode.PARTIAL if statuses & {"complete", "partial"} else ExitCode.FAILED
