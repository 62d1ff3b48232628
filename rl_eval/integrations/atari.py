"""Atari games with the usual preprocessing, set up for evaluation: sticky actions, whole games, raw scores.

This module needs ``pip install 'rl-eval[atari]'``.
"""

from __future__ import annotations

import inspect
from typing import Any

import gymnasium as gym

from rl_eval.errors import ConfigError, nearest, needs_extra
from rl_eval.protocols import EnvContext


def atari(context: EnvContext) -> gym.Env[Any, Any]:
    """Build an Atari game, from the ``env_kwargs`` of the config.

    Actions are sticky, as in Machado et al., "Revisiting the Arcade Learning Environment" (2018). The emulator repeats
    the last action with a probability of 0.25 in each frame, so a memorized sequence of actions does not score. An
    episode is a whole game with all lives, of at most 30 minutes at 60 frames per second. Rewards are the game's own
    score, not clipped. Sticky actions replace no-op starts.

    Args:
        context: ``game``, such as ``"Pong"`` or ``"ALE/Pong-v5"``, and any of ``frame_stack`` (screens in an
            observation, by default 4; 1 for no stack), ``frame_skip`` (frames per step, 4), ``screen_size`` (84),
            ``grayscale`` (True), ``repeat_action_probability`` (0.25), ``full_action_space`` (False), ``noop_max`` (0),
            ``max_frames`` (108000), ``render_mode``.

    Returns:
        An environment with observations of dtype uint8. The shape is (frame_stack, screen_size, screen_size). With
        ``frame_stack`` 1, the first dimension is missing; with colours, there is a last dimension of 3.

    Raises:
        ConfigError: The game or an argument is unknown, or the extra is not installed.
    """
    known = inspect.signature(_build).parameters
    if unknown := [name for name in context if name not in known]:
        problem = f"environment.env_kwargs: unknown key {unknown[0]!r}; {nearest(unknown[0], known)}"
        raise ConfigError(problem, key="environment.env_kwargs", value=unknown[0])
    if "game" not in context:
        raise ConfigError(
            "environment.env_kwargs has no game",
            key="environment.env_kwargs.game",
            fix='Set game, as in {"game": "Pong"}.',
        )
    return _build(**context)


def _build(
    game: str,
    *,
    frame_stack: int = 4,
    frame_skip: int = 4,
    screen_size: int = 84,
    grayscale: bool = True,
    repeat_action_probability: float = 0.25,
    full_action_space: bool = False,
    noop_max: int = 0,
    max_frames: int = 108_000,
    render_mode: str | None = None,
) -> gym.Env[Any, Any]:
    env: gym.Env[Any, Any] = _make(
        game,
        frameskip=1,  # The preprocessing skips, so that it can take the maximum of the last two frames.
        repeat_action_probability=repeat_action_probability,
        full_action_space=full_action_space,
        max_num_frames_per_episode=max_frames,
        render_mode=render_mode,
    )
    env = gym.wrappers.AtariPreprocessing(
        env,
        noop_max=noop_max,
        frame_skip=frame_skip,
        screen_size=screen_size,
        terminal_on_life_loss=False,
        grayscale_obs=grayscale,
    )
    return env if frame_stack == 1 else gym.wrappers.FrameStackObservation(env, frame_stack)


def _make(game: str, **kwargs: Any) -> gym.Env[Any, Any]:
    with needs_extra("atari", "the Atari games are not installed"):
        import ale_py
        import cv2  # noqa: F401  # The preprocessing uses it to resize.
    gym.register_envs(ale_py)
    name = game if "/" in game else f"ALE/{game}-v5"
    games = [known for known in gym.registry if known.startswith("ALE/")]
    if name not in games:
        problem = f"environment.env_kwargs: unknown game {game!r}; {nearest(name, games)}"
        raise ConfigError(problem, key="environment.env_kwargs.game", value=game)
    return gym.make(name, disable_env_checker=True, **kwargs)
