"""``rl-eval watch``: the checkpoints of a training run become a learning curve, and the best of them is kept."""

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

from rl_eval.cli.evaluated import Evaluated, TrustPolicy, policy_source, with_evaluated
from rl_eval.cli.exits import Debug, ExitCode, reported
from rl_eval.cli.printing import AsJson, print_json, print_line, print_note
from rl_eval.cli.settings import Assignments, OptionalConfigPath, Section, find_modules_here, read_config
from rl_eval.cli.shared import argument, option
from rl_eval.cli.signals import Interruption
from rl_eval.config.model_files import library_of, loads_models
from rl_eval.config.policy_schemes import schemes
from rl_eval.errors import ConfigError
from rl_eval.redaction import redact_text

if TYPE_CHECKING:
    from rl_eval.watching import Watcher

__all__ = ["watch"]


@with_evaluated
def watch(
    evaluated: Evaluated,
    config: OptionalConfigPath = None,
    checkpoints: Annotated[
        list[str] | None,
        argument(
            "CHECKPOINTS",
            "Folder that a training run writes *.safetensors files to, or models of Stable-Baselines3, or a quoted "
            "glob of files or folders, such as 'runs/ppo/model_*.zip'. Without CONFIG a model of a library says "
            "itself what policy it is.",
        ),
    ] = None,
    section: Section = None,
    trust: TrustPolicy = False,
    assignments: Assignments = None,
    key: Annotated[
        str | None,
        option(
            "KEY",
            "Where a checkpoint's path goes in the config; policy.policy_kwargs.NAME gives it to the factory. By "
            "default policy.weights, and policy.policy_kwargs.path if the config's policy is a model of a library.",
            "--as",
        ),
    ] = None,
    step_pattern: Annotated[
        str | None, option("REGEX", "Its first group is the training step in a name; by default the last number is.")
    ] = None,
    output: Annotated[
        Path | None,
        option("DIR", "Folder for everything written; by default eval in the folder of CHECKPOINTS.", "--output", "-o"),
    ] = None,
    held_out: Annotated[
        int | None,
        option(
            "N",
            "Episodes of the best checkpoint's second test, which no choice has seen; by default as many as of "
            "the first, and 0 for none.",
            min=0,
        ),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Evaluate what is there, and exit.")] = False,
    poll_s: Annotated[
        float, typer.Option(metavar="S", min=0.01, help="Seconds between two looks at the folder.")
    ] = 5.0,
    retry_s: Annotated[
        float,
        typer.Option(
            metavar="S",
            min=0.0,
            help="Seconds after its last change for which a checkpoint that cannot be loaded is tried again.",
        ),
    ] = 60.0,
    retry_unreadable: Annotated[
        bool, typer.Option("--retry-unreadable", help="Try again what could not be loaded in earlier calls.")
    ] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Evaluate the checkpoints of a training run as they appear, each once; keep the curve and the best."""
    with Interruption() as interruption, reported(debug):
        config, checkpoints = _arguments(config, checkpoints)
        if evaluated.weights is not None:
            raise ConfigError(f"--weights {evaluated.weights}: a watch takes them from the checkpoints; leave it out")
        run_dir, glob_given = _folder_and_pattern(checkpoints)
        look_s = None if once else poll_s
        tell = partial(_tell, err=as_json)
        if config is None:
            evaluated.check(f"watch {checkpoints[0]!r}", assignments, needs_policy=False)
        if config is None and evaluated.policy is None:
            # What is wrong whatever the checkpoint is said before one is waited for.
            of_any = replace(evaluated, policy="random").keys(lambda _: None, assignments, trust=trust)
            read_config(None, section, assignments, of_any).build()
            evaluated = _with_policy(evaluated, run_dir, glob_given or "*", look_s, tell)
        # What the options say of one model is left out: there are many.
        read = read_config(config, section, assignments, evaluated.keys(lambda _: None, assignments, trust=trust))
        settings = read.build()
        key = key or _key_of(settings.policy.policy)
        pattern = glob_given or _pattern_of(settings.policy.policy)
        find_modules_here()
        from rl_eval.watching import Watcher, WatchOptions

        place = run_dir / "eval" if output is None else output
        _wait_for(run_dir, pattern, place, look_s, tell)
        options = WatchOptions(
            run_dir=run_dir,
            pattern=pattern,
            output=place,
            key=key,
            step_pattern=step_pattern,
            held_out=held_out,
            retry_s=retry_s,
        )
        watcher = Watcher(
            settings,
            options,
            tell,
            stopping=lambda: interruption.number is not None,
            submitted=lambda handle: interruption.defer(handle.flush),
        )
        with closing(watcher):
            interruption.defer(lambda _: None)  # Between two evaluations everything is in its file.
            if retry_unreadable:
                watcher.journal.forget_unreadable()
            if once:
                watcher.run_once(poll_s)
            else:
                watcher.run(poll_s)
            if as_json:
                print_json(watcher.curve)
            code = _exit_code(watcher, interruption)
            interruption.conclude(code)
        if code:
            raise typer.Exit(code)


def _arguments(config: Path | None, checkpoints: list[str] | None) -> tuple[Path | None, list[str]]:
    """Return CONFIG, if it is given, and CHECKPOINTS, which may be the only argument."""
    if config is not None and not checkpoints and config.suffix not in (".yaml", ".yml"):
        return None, [str(config)]
    if config is not None and checkpoints and config.is_dir():
        raise ConfigError(f"{config} is a folder: CONFIG comes first, as in rl-eval watch {checkpoints[0]} {config}")
    if not checkpoints:
        raise ConfigError("CHECKPOINTS is missing: give a folder, or a glob in quotes, such as 'runs/ppo/model_*.zip'")
    return config, checkpoints


def _with_policy(
    evaluated: Evaluated, folder: Path, pattern: str, poll_s: float | None, tell: Callable[[str], None]
) -> Evaluated:
    """Return options with a policy: of the kind of the first checkpoint there.

    Args:
        evaluated: The options.
        folder: Where checkpoints come.
        pattern: What is looked for there.
        poll_s: Seconds between two looks for the first one; None to look once.
        tell: Takes a line for the user.

    Raises:
        ConfigError: Nothing that is there says it.
    """
    waits, said = poll_s is not None and not any(folder.glob(pattern)), ""
    while isinstance(found := _first_known(folder, pattern), str):
        if not waits:
            if not any(folder.glob(pattern)):
                raise ConfigError(found if folder.is_dir() else f"{found}: there is no such folder")
            raise ConfigError(
                f"--policy is missing, and no checkpoint says what policy it is: {found}. Give pkg.module:attr of what "
                "makes the module whose weights they hold, or rl_eval.integrations.sb3:load_policy for models of "
                "Stable-Baselines3"
            )
        if found != said:
            tell(f"waiting for a checkpoint that says what policy it is: {found}")
            said = found
        time.sleep(poll_s or 0)
    path, kind = found
    print_note(f"policy: {kind}, and other checkpoints likewise")
    return replace(evaluated, policy=str(path))


def _first_known(folder: Path, pattern: str) -> tuple[Path, str] | str:
    """Return the first checkpoint that says what policy it is, with that in words, or why none does."""
    why = f"nothing in {str(folder.resolve())!r} matches {pattern!r} yet"
    for path in sorted(folder.glob(pattern)):
        try:
            source = policy_source(str(path))
        except ConfigError as error:
            why = str(error)
            continue
        return path, source.said
    return why


def _pattern_of(factory: object) -> str:
    """Return what is a checkpoint where only a folder is given."""
    scheme = schemes().get(library_of(factory))
    return f"*{scheme.suffix if scheme and scheme.suffix else '.safetensors'}"


def _key_of(factory: object) -> str:
    """Return where checkpoints go by default: to what loads them, or to the module that a factory makes."""
    loads = loads_models(factory) and str(factory).endswith(":load_policy")
    return "policy.policy_kwargs.path" if loads else "policy.weights"


def _folder_and_pattern(checkpoints: list[str]) -> tuple[Path, str]:
    """Return the folder to look in, which need not exist yet, and the glob that is given, if one is."""
    if len(checkpoints) > 1:
        raise ConfigError(
            f"{len(checkpoints)} CHECKPOINTS are given, {checkpoints[0]} the first: give one folder, or one glob in "
            "quotes, such as 'runs/ppo/*.safetensors', which also finds what comes later"
        )
    path = Path(checkpoints[0]).expanduser()
    if path.is_file():
        return path.parent, glob.escape(path.name)
    if path.is_dir() or not glob.has_magic(str(path)):
        return path, ""
    first = next(place for place, part in enumerate(path.parts) if glob.has_magic(part))
    return Path(*path.parts[:first]), str(Path(*path.parts[first:]))


def _wait_for(folder: Path, pattern: str, output: Path, poll_s: float | None, tell: Callable[[str], None]) -> None:
    """Wait for the folder of a training run where the output is to go into it: made for that, it may be misspelt.

    Args:
        folder: The folder.
        pattern: What is looked for there.
        output: Where the output goes.
        poll_s: Seconds between two looks; None to look once.
        tell: Takes a line for the user.

    Raises:
        ConfigError: It is not there, and only what is there is to be evaluated.
    """
    if folder.is_dir() or not output.resolve().is_relative_to(folder.resolve()):
        return
    if poll_s is None:
        raise ConfigError(f"nothing in {str(folder.resolve())!r} matches {pattern!r}: there is no such folder")
    tell(f"waiting for {folder}, which is not there yet")
    while not folder.is_dir():
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
