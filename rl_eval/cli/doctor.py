"""``rl-eval doctor``: check a config before a long evaluation.

The checks continue after a problem if possible, so that one call shows all problems.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Final, final

import typer
from rich.console import Console
from rich.text import Text

from rl_eval.cli.evaluated import Evaluated, TrustPolicy, with_evaluated
from rl_eval.cli.exits import ExitCode
from rl_eval.cli.printing import AsJson, print_json, print_note, results
from rl_eval.cli.settings import Assignments, OptionalConfigPath, Section, find_modules_here, read_settings
from rl_eval.errors import ConfigError
from rl_eval.errors.redaction import redact_text
from rl_eval.results.text import counted
from rl_eval.supervision.caller import working_in

if TYPE_CHECKING:
    from rl_eval.cli.checks import Finding
    from rl_eval.config.settings import EvalSettings


_WIDTH: Final = 80
_INDENT: Final = len("  problem  ")
_STYLES: Final = {"ok": "green", "note": "dim", "warning": "yellow", "problem": "bold red"}


@with_evaluated
def doctor(
    evaluated: Evaluated,
    config: OptionalConfigPath = None,
    section: Section = None,
    trust: TrustPolicy = False,
    assignments: Assignments = None,
    ray: Annotated[bool, typer.Option("--ray", help="Also start the runners and run a few short episodes.")] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print problems only; print nothing if there are none.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check the machine, a config, its environment and its policy, and suggest a fix for each problem.

    Without CONFIG and options, only the machine is checked. With --env but no CONFIG, --policy or --set
    policy.policy, the policy is random.
    """
    from rl_eval.cli.checks import check_machine, note

    find_modules_here()
    report = _Report(quiet=quiet, as_json=as_json)
    given = config is not None or assignments or evaluated != Evaluated()
    named = evaluated.policy or any(text.startswith("policy.policy=") for text in assignments or ())
    if evaluated.env and config is None and not named:
        evaluated = replace(evaluated, policy="random")
    if given and config is None:
        evaluated.check("doctor", assignments)

    def read() -> EvalSettings:
        keys = evaluated.keys((lambda _: None) if quiet else print_note, assignments, trust=trust)
        return read_settings(config, section, assignments, keys)

    report.section("machine", check_machine())
    if given:
        _examine(report, read, ray=ray)
    else:
        report.section("config", [note("no config: only the machine is checked")])
    report.conclude()
    if report.levels["problem"]:
        raise typer.Exit(ExitCode.USAGE)


@final
class _Report:
    """Collector of findings. It prints each finding immediately, or all findings as JSON at the end.

    In quiet mode, it prints only problems.
    """

    def __init__(self, *, quiet: bool, as_json: bool) -> None:
        self._console = Console(file=results(), highlight=False, emoji=False)
        self._quiet, self._as_json = quiet, as_json
        self._findings: list[dict[str, str]] = []
        self.levels: Counter[str] = Counter()

    def section(self, title: str, findings: Iterable[Finding]) -> bool:
        """Add the findings of one section; return whether at least one of them is ``ok``."""
        before, begun = self.levels["ok"], len(self._findings)
        with working_in(None):  # An environment may change the working directory; the next section reads files.
            for finding in findings:
                self.levels[finding.level] += 1
                if not self._quiet or finding.level == "problem":
                    text, fix = redact_text(finding.text), redact_text(finding.fix)
                    self._findings.append({"section": title, "level": finding.level, "text": text, "fix": fix})
                    if not self._as_json:
                        self._print(finding.level, text, fix, title if len(self._findings) == begun + 1 else "")
        if len(self._findings) > begun and not self._as_json:
            self._console.print()
        return self.levels["ok"] > before

    def conclude(self) -> None:
        """Print the number of problems and warnings, or all findings as JSON."""
        problems, warnings = self.levels["problem"], self.levels["warning"]
        if self._as_json:
            print_json({"problems": problems, "warnings": warnings, "findings": self._findings})
        elif not self._quiet:
            style = _STYLES["problem" if problems else "warning" if warnings else "ok"]
            self._console.print(Text(f"{counted(problems, 'problem')}, {counted(warnings, 'warning')}", style=style))

    def _print(self, level: str, text: str, fix: str, title: str) -> None:
        """Print a finding with a hanging indent. A table of the library ``rich`` would add trailing blanks."""
        if title:
            self._console.print(Text(title, style="bold"))
        for label, style, words in ((level, _STYLES[level], text), ("fix", "dim", fix)):
            for position, line in enumerate(textwrap.wrap(words, _WIDTH - _INDENT)):
                shown = f"  {'' if position else label}".ljust(_INDENT)
                self._console.print(Text.assemble((shown, style), line), soft_wrap=True)


def _examine(report: _Report, read: Callable[[], EvalSettings], *, ray: bool) -> None:
    """Check the config, and then the environment, the policy and Ray as far as the earlier checks allow."""
    from rl_eval.cli.checks import check_address, check_cluster, check_policy, note, ok, problem
    from rl_eval.cli.progress import headline

    try:
        settings = read()
    except ConfigError as error:
        report.section("config", [problem(str(error))])
        return
    report.section("config", [ok(headline(settings))])
    from rl_eval.cli.examination import check_environment

    if report.section("environment", check_environment(settings)):
        report.section("policy", check_policy(settings))
    else:
        report.section("policy", [note("not checked, because building the policy needs an environment")])
    report.section("ray", (check_cluster if ray else check_address)(settings))
