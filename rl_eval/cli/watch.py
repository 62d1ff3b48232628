"""``rl-eval watch``: the checkpoints of a training run become a learning curve, and the best of them is kept."""

from __future__ import annotations

import glob
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from rl_eval.cli.exits import Debug, ExitCode, reported
from rl_eval.cli.printing import AsJson, print_json
from rl_eval.cli.settings import Assignments, ConfigPath, Section, find_modules_here, read_config
from rl_eval.cli.shared import argument, option
from rl_eval.cli.signals import Interruption
from rl_eval.config.model_files import file_digests, loads_models
from rl_eval.config.policy_schemes import named_source
from rl_eval.errors import ConfigError
from rl_eval.redaction import redact_text

if TYPE_CHECKING:
    from rl_eval.watching import Watcher

__all__ = ["watch"]

_IN_A_FOLDER: Final = "*.safetensors"
"""What is a checkpoint where only a folder is given."""


def watch(
    config: ConfigPath,
    checkpoints: Annotated[
        list[str],
        argument(
            "CHECKPOINTS",
            "Folder that a training run writes *.safetensors files to, or a quoted glob of files or folders, such "
            "as 'runs/ppo/model_*.zip'.",
        ),
    ],
    section: Section = None,
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
        run_dir, pattern = _folder_and_pattern(checkpoints)
        read = read_config(config, section, assignments)
        settings = read.build()
        key = key or _key_of(settings.policy.policy)
        _check_policy(read.to_dict().get("policy", {}).get("policy"), key)
        find_modules_here()
        from rl_eval.watching import Watcher, WatchOptions

        place = run_dir / "eval" if output is None else output
        tell = partial(_tell, err=as_json)
        _wait_for(run_dir, pattern, place, None if once else poll_s, tell)
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


def _key_of(factory: object) -> str:
    """Return where checkpoints go by default: to what loads them, or to the module that a factory makes."""
    loads = loads_models(factory) and str(factory).endswith(":load_policy")
    return "policy.policy_kwargs.path" if loads else "policy.weights"


def _check_policy(policy: object, key: str) -> None:
    """Refuse a policy that is one model with other files, such as its normalizer: these would go with every checkpoint.

    Raises:
        ConfigError: It is one, and checkpoints go into its factory's arguments.
    """
    source = named_source(policy, ()) if isinstance(policy, str) and key.startswith("policy.policy_kwargs.") else None
    others = set(file_digests(source.factory, source.kwargs)) - {key.rpartition(".")[2]} if source else ()
    if source and others:
        raise ConfigError(
            f"policy.policy is {policy!r}, one model with its own {' and '.join(sorted(others))}, which every "
            f"checkpoint would be given: name the factory instead, as policy: {source.factory}, and in policy_kwargs "
            "what is meant for all"
        )


def _folder_and_pattern(checkpoints: list[str]) -> tuple[Path, str]:
    """Return the folder to look in, which need not exist yet, and the glob of what is looked for there."""
    if len(checkpoints) > 1:
        raise ConfigError(
            f"{len(checkpoints)} CHECKPOINTS are given, {checkpoints[0]} the first: give one folder, or one glob in "
            "quotes, such as 'runs/ppo/*.safetensors', which also finds what comes later"
        )
    path = Path(checkpoints[0]).expanduser()
    if path.is_file():
        return path.parent, glob.escape(path.name)
    if path.is_dir() or not glob.has_magic(str(path)):
        return path, _IN_A_FOLDER
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
    typer.echo(redact_text(line), err=err)


def _exit_code(watcher: Watcher, interruption: Interruption) -> int:
    if interruption.number is not None:
        return 128 + interruption.number
    statuses = {entry.selection.status for entry in watcher.journal.curve}
    if statuses <= {"complete"}:
        return ExitCode.PARTIAL if watcher.unfinished else ExitCode.COMPLETE
    return ExitCode.PARTIAL if statuses & {"complete", "partial"} else ExitCode.FAILED
