"""Helpers for options and arguments, the shared options, and the command line that adds them to every command."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from rl_eval.cli.exits import VERBOSE, reported
from rl_eval.cli.printing import ADVANCED, reserved_stdout
from rl_eval.cli.signals import Interruption
from rl_eval.errors import nearest_words

Function = TypeVar("Function", bound=Callable[..., Any])


def option(metavar: str | None, text: str, *names: str, **more: Any) -> Any:
    """Return an option without a generated default in its help text."""
    return typer.Option(*names, metavar=metavar, show_default=False, help=text, **more)


advanced: Final = partial(option, rich_help_panel=ADVANCED)
"""Return an option that few users need."""


def argument(metavar: str, text: str, **more: Any) -> Any:
    """Return an argument without a generated default in its help text."""
    return typer.Argument(metavar=metavar, show_default=False, help=text, **more)


def absolute_path(text: str) -> Path:
    """Return a local path as absolute, since user code may change the working directory in the meantime."""
    return Path(text).absolute()


def absolute_place(text: str) -> str:
    """Return a folder or URI as absolute, since user code may change the working directory in the meantime."""
    from rl_eval.log import storage

    return storage.absolute_place(text)


def shown(place: str | os.PathLike[str]) -> str:
    """Return a path or URI for a message; a path below the working directory is shown relative to it."""
    from rl_eval.log.storage import shown_place

    return shown_place(place)


FolderOfRuns = Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of results and evaluation logs.")]


def _without_color(wanted: bool) -> None:
    if wanted:
        os.environ["NO_COLOR"] = "1"  # rich reads it, in this process and in child processes.


def _with_traceback(ctx: typer.Context, wanted: bool) -> None:
    ctx.meta[VERBOSE] = wanted or ctx.meta.get(VERBOSE, False)  # All commands share this mapping.


_shared = typer.Typer(add_completion=False)
_flag = partial(option, None, expose_value=False)


@_shared.command()
def _options(
    verbose: Annotated[
        bool,
        _flag(
            "Print all numbers of a result, and the traceback of any error.",
            "--verbose",
            "-v",
            envvar=VERBOSE,
            callback=_with_traceback,
        ),
    ] = False,
    no_color: Annotated[
        bool,
        _flag(
            "Print without colours, like NO_COLOR=1.",
            "--no-color",
            callback=_without_color,
            is_eager=True,
            rich_help_panel=ADVANCED,
        ),
    ] = False,
) -> None:
    """Define the shared options; this command is never called."""


def _with_shared(params: list[Any]) -> list[Any]:
    """Return the parameters of a command, followed by the shared options."""
    return params + typer.main.get_command(_shared).params


_REMOVED: Final = {
    "--episodes": "Pass -n N for the number of episodes, or --indices I,J-K for some episodes of the plan.",
    "--log-dir": "Use --output (-o): the folder of a run always has a log.",
    "--fresh": "Pass another --output (-o), or omit it for a new folder.",
    "--no-fresh": "Omit it: the same command continues a run.",
}
"""Advice for options of earlier versions."""
_COMMANDS: Final = {"list": "show", "ls": "show", "evaluate": "run", "eval": "run", "test": "run", "video": "replay"}
"""Commands by their names in earlier versions and in other programs."""
_UsageError: Final[Any] = typer.BadParameter.__mro__[1]


def _key(option: str) -> str:
    """Return an option as a config key would be written, such as ``num_episodes``."""
    return option.lstrip("-").replace("-", "_")


class _Command(TyperCommand):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "params": _with_shared(kwargs.pop("params"))})

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the options; reject those of earlier versions with advice, and unknown ones with the nearest."""
        try:
            return super().parse_args(ctx, args)
        except _UsageError as error:
            from rl_eval.records.plain import in_our_words

            if (errors := getattr(error.__cause__, "errors", None)) is not None:  # Of pydantic, which typer uses.
                text, value = in_our_words(errors()[0]["msg"]), repr(errors()[0]["input"])
                error.message = text if value in text else f"{value}: {text}"
            if "extra argument" in error.message and any("--output" in param.opts for param in self.params):
                error.message += " To name the output, pass --output (-o)."
            if not hasattr(error, "possibilities"):
                raise
            name = str(vars(error)["option_name"])
            advice = _REMOVED.get(name) or self._meant(name) or f"See {ctx.command_path} --help."
            raise _UsageError(f"No such option: {name}. {advice}", ctx=ctx) from None

    def _meant(self, option: str) -> str:
        """Return advice with the nearest options, and the nearest keys if the command has ``--set``."""
        from rl_eval.config.settings import SECTIONS

        known = {_key(opt): param.opts for param in self.params for opt in param.opts}
        sections = SECTIONS.items() if "set" in known else ()
        known = {key: [f"--set {name}.{key}=VALUE"] for name, one in sections for key in one.model_fields} | known
        near = nearest_words(_key(option), sorted(known))
        close = dict.fromkeys(", ".join(sorted(known[word], key=lambda opt: opt[:2] == "--")) for word in near)
        return f"Did you mean {' or '.join(close)}?" if close else ""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, the options that many users need, and all others."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": [], ADVANCED: []}
        for param in self.get_params(ctx):
            default = "Arguments" if param.param_type_name == "argument" else "Options"
            if record := param.get_help_record(ctx):
                sections[getattr(param, "rich_help_panel", None) or default].append(record)
        for heading, records in sections.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)

    def invoke(self, ctx: Any) -> Any:
        """Run the command with stdout reserved for its result; turn errors and signals into messages and exit codes."""
        with reserved_stdout(), Interruption() as ctx.obj, reported(ctx.meta[VERBOSE]):
            return super().invoke(ctx)


class _Commands(TyperGroup):
    """Group of commands, with headings in the help."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command; suggest the one that another program or an earlier version names differently."""
        name = "run" if Path(args[0]).suffix in {".yaml", ".yml"} else args[0]
        if args[0] not in self.commands and (meant := _COMMANDS.get(name, name)) in self.commands:
            rest = f" {args[0]}" if name != args[0] else ""
            ctx.fail(f"No such command {args[0]!r}. Use {ctx.command_path} {meant}{rest}.")
        return super().resolve_command(ctx, args)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "params": _with_shared(kwargs.pop("params"))})

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write one section per heading, in the order of the commands."""
        width, groups = max(map(len, self.commands)), dict[Any, list[Any]]()
        for command in self.commands.values():
            groups.setdefault(vars(command)["rich_help_panel"], []).append(command)
        for heading, commands in groups.items():
            with formatter.section(heading if isinstance(heading, str) else "Commands"):
                formatter.write_dl([(f"{one.name:{width}}", one.get_short_help_str(200)) for one in commands])


class CommandLine(typer.Typer):
    """Command line that adds the shared options to every command."""

    def __init__(self, **given: Any) -> None:
        super().__init__(cls=_Commands, **given)

    def command(self, *args: Any, **kwargs: Any) -> Callable[[Function], Function]:
        """Register a command like ``typer.Typer.command``."""
        return super().command(*args, cls=_Command, **kwargs)
