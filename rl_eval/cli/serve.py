"""``rl-eval serve``: serve a policy to evaluations and to openpi's clients."""

from __future__ import annotations

import os
import secrets
import socket
import stat
import tempfile
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from rl_eval.cli.evaluated import Evaluated, TrustPolicy
from rl_eval.cli.printing import AsJson, flush_results, print_either, print_note
from rl_eval.cli.settings import Assignments, Section, read_settings
from rl_eval.cli.shared import advanced, argument, option
from rl_eval.cli.signals import Interrupted
from rl_eval.errors import ConfigError, UsageError, needs_extra, summary_of
from rl_eval.errors.redaction import learn

KEY_VARIABLE: Final = "OPENPI_API_KEY"
"""Environment variable with the token."""
_LOOPBACK: Final = "127.0.0.1"


def serve(
    policy: Annotated[str | None, argument("POLICY", "Policy, as --policy of run.")] = None,
    config: Annotated[Path | None, option("CONFIG", "YAML config file; options override it.", "--config")] = None,
    section: Section = None,
    env: Annotated[
        str | None, option("ENV", "Environment whose spaces the policy has: a gymnasium id or pkg.module:attr.")
    ] = None,
    weights: Annotated[Path | None, option("FILE", "Weights file (.safetensors, .pt) for pkg.module:attr.")] = None,
    trust: TrustPolicy = False,
    assignments: Assignments = None,
    stochastic: Annotated[
        bool | None, advanced(None, "Sample actions, or use the most likely actions.", "--stochastic/--deterministic")
    ] = None,
    host: Annotated[
        str | None, option("HOST", "Address to listen on. [default: 127.0.0.1, for clients with a token]")
    ] = None,
    port: Annotated[int, option("PORT", "Port. [default: a free one]", min=0, max=65_535)] = 0,
    token_file: Annotated[
        Path | None,
        option("FILE", f"File of mode 600 with the token of the clients. [default: {KEY_VARIABLE}, or a new token]"),
    ] = None,
    rows: Annotated[int, advanced("N", "Most episodes at the same time. [default: 64]", min=16)] = 64,
    as_json: AsJson = False,
) -> None:
    """Serve a policy to evaluations with --policy openpi://HOST:PORT, and to clients of openpi. Stop it with Ctrl-C."""
    evaluated = Evaluated(env=env, policy=policy, weights=weights, stochastic=stochastic)
    if config is None:
        evaluated.check("serve", assignments)
    settings = read_settings(config, section, assignments, evaluated.keys(print_note, assignments, trust=trust))
    token = _token(token_file)
    if token is None and host not in (None, "localhost", _LOOPBACK, "::1"):
        problem, fix = f"--host {host} lets other machines connect", f"Set {KEY_VARIABLE}, or pass --token-file."
        raise ConfigError(problem, key="--host", value=host, fix=fix)
    with needs_extra("openpi", "rl-eval serve needs the packages msgpack and websockets"):
        from rl_eval.integrations.openpi.served import ServedPolicy
        from rl_eval.integrations.openpi.server import PolicyServer
    with ExitStack() as stack:
        listener = stack.enter_context(_listener(host or _LOOPBACK, port))
        if token is None and host is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="rl_eval-"))
            token_file, token = _new_token(Path(folder))
        if token is not None:
            learn({"api_key": token})
        server = stack.enter_context(closing(PolicyServer(ServedPolicy(settings, rows), listener, rows, token)))
        bound, port = listener.getsockname()[:2]
        _announce(f"[{bound}]:{port}" if ":" in bound else f"{bound}:{port}", token_file, server.greeting, as_json)
        try:
            server.serve_forever()
        except (Interrupted, KeyboardInterrupt) as stop:
            if (code := getattr(stop, "exit_code", 130)) != 130:
                raise typer.Exit(code) from None


def _announce(address: str, token_file: Path | None, greeting: dict[str, Any], as_json: bool) -> None:
    lines = [f"openpi://{address}   {greeting['name']}; stop with Ctrl-C"]
    if token_file is not None:
        lines.append(f"clients need the token: export {KEY_VARIABLE}=$(cat {token_file.absolute()})")
    described = {"address": address, "token_file": None if token_file is None else str(token_file)}
    print_either(as_json, {**described, "greeting": greeting}, "\n".join(lines))
    flush_results()


def _listener(host: str, port: int) -> socket.socket:
    """Return a listening socket.

    Raises:
        ConfigError: The port is taken, or the address is not one of this machine.
    """
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        problem = f"{host}:{port} cannot be used: {error.strerror or error}"
        fix = "Pass another --port, or omit it to use a free one. --host must be an address of this machine."
        raise ConfigError(problem, key="--port", value=port, fix=fix) from error


def _token(path: Path | None) -> str | None:
    """Return the token from a file that only its owner can read, or from the environment; None without one.

    Raises:
        ConfigError: Other users can read the file, or it is empty.
        UsageError: The file cannot be read.
    """
    if path is None:
        return os.environ.get(KEY_VARIABLE) or None
    try:
        mode, text = stat.S_IMODE(path.stat().st_mode), path.read_text().strip()
    except (OSError, ValueError) as error:
        problem = f"{path}, the file of --token-file, cannot be read: {summary_of(error)}"
        raise UsageError(problem, key="--token-file", value=str(path)) from error
    if mode & 0o077 or not text:
        # A path directly after --token-file would be masked as a secret.
        problem = f"{path}, the file of --token-file, {'can be read by other users' if text else 'is empty'}"
        raise ConfigError(problem, key="--token-file", value=str(path), fix=f"Write the token, and chmod 600 {path}.")
    return text


def _new_token(folder: Path) -> tuple[Path, str]:
    """Write a new token to a file in a private folder; return both."""
    path, token = folder / "token", secrets.token_urlsafe()
    path.touch(0o600)
    path.write_text(token)
    return path, token
