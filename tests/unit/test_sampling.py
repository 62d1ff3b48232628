"""Trajectories and batches of them: what an episode was, bit by bit, in every layout and as many as were asked for."""

from __future__ import annotations

import errno
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn
from torch.distributions import Bernoulli, Categorical, Normal

from rl_eval import EvalConfig, EvalRunnerGroup
from rl_eval.errors import ConfigError, EvalError, UsageError
from rl_eval.scheduling.plan import EpisodePlan
from tests.refused import refused
from tests.unit.games_world import duel_config
from tests.unit.test_runners import Walk, calm, seeded, steer, troubled, walk, weighted


def config(lanes: int = 3, env: Any = walk, **evaluation: Any) -> EvalConfig:
    made = EvalConfig().environment(env).policy(steer).runners(num_envs_per_runner=lanes)
    return made.evaluation(**{"num_episodes": 12, "info_keys": ["speed"], "seed": 5, **evaluation})


def inline(made: EvalConfig) -> EvalRunnerGroup:
    return EvalRunnerGroup(made, threaded=False)


def episode_of(seed: int) -> dict[str, list[Any]]:
    """Run one episode of Walk in a plain loop."""
    env = Walk()
    observation, _ = env.reset(seed=seed)
    ran: dict[str, list[Any]] = {"observation": [observation]}
    while True:
        action = steer(ran["observation"][-1][None])[0]
        observation, reward, terminated, truncated, info = env.step(action)
        after = {"reward": reward, "terminated": terminated, "truncated": truncated, "info.speed": info["speed"]}
        row = {"action": action, "observation": observation, **{f"next.{key}": value for key, value in after.items()}}
        for key, value in row.items():
            ran.setdefault(key, []).append(value)
        if terminated or truncated:
            return ran


def test_a_batch_is_what_a_plain_loop_sees() -> None:
    """Frames, flags and labels of episodes in plan order are those of gymnasium's own loop over the plan's seeds."""
    with inline(config()) as group:
        batch = group.sample(5, as_arrays=True)
    plan = EpisodePlan(5, 5)
    loops = [episode_of(int(seed)) for seed in plan.seeds]
    lengths = [len(one["action"]) for one in loops]
    assert batch["observation"].dtype == np.float32
    due = {key: np.concatenate([one[key] for one in loops]) for key in loops[0] if key != "observation"}
    due |= {
        "observation": np.concatenate([one["observation"][:-1] for one in loops]),
        "next.observation": np.concatenate([one["observation"][1:] for one in loops]),
        "collector.traj_ids": np.repeat(range(5), lengths),
        "collector.seed": np.repeat(plan.seeds, lengths),
        "collector.step": np.concatenate([range(length) for length in lengths]),
        "next.done": due["next.terminated"] | due["next.truncated"],
        **dict.fromkeys(("done", "terminated", "truncated"), np.zeros(sum(lengths), bool)),
        "collector.attempt": np.ones(sum(lengths)),
    }
    for key, array in due.items():
        np.testing.assert_array_equal(batch[key], array, err_msg=key)
    assert "action_log_prob" not in batch


@pytest.mark.parametrize("lanes", [1, 8])
def test_the_returns_are_those_of_the_table_and_attempts_those_that_counted(lanes: int) -> None:
    """Through attempts that fail halfway, each return is the record's to the last bit, in both layouts."""
    made = config(lanes, env=troubled(seeded("raise")))
    with inline(made) as group:
        batch = group.sample(12, as_arrays=True)
        result = group.evaluate()
    assert not result.artifacts
    assert result.num_retried > 0
    for record in result.episodes:
        mine = batch["collector.index"] == record.index
        assert np.cumsum(batch["next.reward"][mine])[-1] == record.episode_return
        assert mine.sum() == record.length
        assert set(batch["collector.attempt"][mine]) == {record.attempts}


def test_batches_go_on_in_the_plan_whatever_their_sizes() -> None:
    """Batches by episodes and by steps, one after the other, are the frames of one long batch, in other groups too."""
    with inline(config(8)) as group:
        group.sampler.restart(seed=9, index=4)
        long = group.sample(40, as_arrays=True)
        group.sampler.restart(index=4)
        parts = [group.sample(2, as_arrays=True)]
        parts += [group.sample(num_env_steps=n, mode="truncate_episodes", as_arrays=True) for n in (1, 50, 7)]
        state = group.sampler.state_dict()
    with EvalRunnerGroup(config(1)) as other:
        other.sampler.load_state_dict(state)
        stream = other.iter_samples(num_env_steps=30, num_batches=3, mode="truncate_episodes", as_arrays=True)
        parts += list(stream)
        whole = other.sample(num_env_steps=60, as_arrays=True)  # As few whole episodes as have so many steps.
    assert [len(part["action"]) for part in parts[1:]] == [1, 50, 7, 30, 30, 30]
    ids = whole["collector.traj_ids"]
    assert len(ids) >= 60 > (ids != ids[-1]).sum()
    assert whole["next.done"].sum() == len(set(ids))
    assert set(long["collector.seed"]) == set(EpisodePlan(40, 9, 4).seeds)
    for key, whole in long.items():
        joined = np.concatenate([part[key] for part in parts])
        np.testing.assert_array_equal(joined, whole[: len(joined)], err_msg=key)


def test_rows_of_episodes_are_padded_and_masked() -> None:
    with inline(config()) as group:
        flat = group.sample(4, as_arrays=True)
        group.sampler.restart()
        rows = group.sample(4, as_arrays=True, split_trajs=True)
    mask = rows.pop("collector.mask")
    assert mask.shape[0] == 4
    assert mask.any(0).all()
    assert not (mask[:, 1:] > mask[:, :-1]).any()
    for key, array in rows.items():
        np.testing.assert_array_equal(array[mask], flat[key], err_msg=key)
        assert not array[~mask].any()


def test_first_ready_order_has_the_same_episodes_and_says_so() -> None:
    with inline(config(4)) as group:
        planned = group.sample(9, as_arrays=True)
        group.sampler.restart()
        ready = group.sample(9, as_arrays=True, order="first_ready")
    assert "collector.arrival" not in planned
    assert (np.diff(ready["collector.arrival"]) >= 0).all()
    assert (np.diff(ready["collector.index"]) < 0).any()  # Short episodes end before longer ones of lower indices.
    sort = np.argsort(ready["collector.index"], kind="stable")
    np.testing.assert_array_equal(ready["next.reward"][sort], planned["next.reward"])


class Gaussian(nn.Module):
    """Mean and width of a Box action depend on the observation."""

    def forward(self, seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean = seen[:, 1:].tanh()
        return mean, mean * 0.5


class Logits(nn.Module):
    """Logits of any number of parts, which depend on the observation."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, seen: torch.Tensor) -> torch.Tensor:
        return torch.sin(seen[:, 1:2] + torch.arange(self.count))


def reference(space: gym.Space[Any], seen: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
    """Return log-probabilities by torch's own distributions."""
    match space:
        case gym.spaces.Discrete():
            return Categorical(logits=Logits(int(space.n))(seen)).log_prob(actions - int(space.start))
        case gym.spaces.MultiDiscrete():
            parts = Logits(5)(seen).split([2, 3], 1)
            each = [Categorical(logits=part).log_prob(actions[:, place]) for place, part in enumerate(parts)]
            return torch.stack(each).sum(0)
        case gym.spaces.MultiBinary():
            return Bernoulli(logits=Logits(4)(seen)).log_prob(actions.float()).sum(1)
        case _:
            mean, log_std = Gaussian()(seen)
            return Normal(mean, log_std.exp()).log_prob(actions).sum(1)


@pytest.mark.parametrize("lanes", [3, 20])
@pytest.mark.parametrize(
    ("space", "module"),
    [
        (gym.spaces.Discrete(3, start=5), Logits(3)),
        (gym.spaces.MultiDiscrete([2, 3]), Logits(5)),
        (gym.spaces.MultiBinary(4), Logits(4)),
        (gym.spaces.Box(-np.inf, np.inf, (2,), np.float32), Gaussian()),
    ],
)
def test_log_probabilities_are_those_of_the_actions(space: Any, module: nn.Module, lanes: int) -> None:
    """Torch's distributions give the same, also where a batch of lanes takes several forward passes."""

    made = config(lanes, env=lambda context: Walk(space)).policy(module, deterministic=False)
    with inline(made) as group:
        batch = group.sample(25)
    expected = reference(space, batch["observation"], batch["action"])
    torch.testing.assert_close(batch["action_log_prob"], expected.double(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("lanes", [1, 3, 20])
def test_whole_sweeps_and_single_steps_are_recorded_alike(lanes: int) -> None:
    """Without info keys whole sweeps are recorded, with them step by step: the same frames, through failed attempts."""
    batches = []
    for keys in ((), ("speed",)):
        made = config(lanes, env=troubled(seeded("raise")), info_keys=keys).policy(Logits(3), deterministic=False)
        with inline(made) as group:
            first = group.sample(num_env_steps=77, mode="truncate_episodes", as_arrays=True)
            second = group.sample(25, as_arrays=True)
            batches.append((first, second))
    for swept, stepped in zip(*batches, strict=True):
        assert "action_log_prob" in swept
        assert stepped.pop("next.info.speed") is not None
        assert swept.keys() == stepped.keys()
        for key, array in stepped.items():
            np.testing.assert_array_equal(swept[key], array, err_msg=key)


def test_images_may_be_compressed_on_their_way() -> None:
    """Nothing of an image changes, over several blocks."""

    class Film(Walk):
        def __init__(self) -> None:
            super().__init__(length=50)
            self.observation_space = gym.spaces.Box(0, 255, (4, 5, 3), np.uint8)

        def observation(self) -> Any:
            return np.resize(np.frombuffer(super().observation().tobytes(), np.uint8), (4, 5, 3))

    made = config(env=lambda context: Film()).policy(lambda images: images[:, 0, 0, 0] % 3)
    with inline(made) as group:
        plain = group.sample(4, as_arrays=True)
        group.sampler.restart()
        again = group.sample(4, as_arrays=True, compress_images=True)
    assert len(plain["action"]) > 4 * 40
    for key, array in plain.items():
        np.testing.assert_array_equal(again[key], array)


def test_an_action_is_recorded_as_it_was_given() -> None:
    """An environment that changes the action in place changes nothing that was recorded."""

    class Spoils(Walk):
        def step(self, action: Any) -> Any:
            action[:] = 0.25
            return super().step(action)

    made = config(env=lambda context: Spoils(gym.spaces.Box(-1, 1, (2,), np.float32)))
    with inline(made.policy(lambda seen: np.full((len(seen), 2), 0.5, np.float32))) as group:
        assert (group.sample(2, as_arrays=True)["action"] == 0.5).all()


# ------------------------------------------------------------------------------ what goes wrong


def test_an_episode_that_failed_is_named_or_left_out() -> None:
    """By default it is an error once, and what came in is not lost; else others take its place."""

    class Breaks(Walk):
        def step(self, action: Any) -> Any:
            if self.length % 4 == 0:
                raise RuntimeError("the simulator broke")
            return super().step(action)

    made = config(env=lambda context: Breaks()).fault_tolerance(max_attempts_per_episode=1, fail_fast=False)
    lengths = [len(episode_of(int(seed))["action"]) for seed in EpisodePlan(40, 5).seeds]
    good = [index for index, length in enumerate(lengths) if length % 4]
    bad = next(index for index, length in enumerate(lengths) if length % 4 == 0)
    with inline(made) as group:
        with refused(EvalError, episode=2):
            group.sample(bad + 1, as_arrays=True)
        batch = group.sample(bad + 1, as_arrays=True, skip_failed=True)
        assert list(dict.fromkeys(batch["collector.index"])) == good[: bad + 1]


def test_a_failure_of_former_weights_says_nothing_about_the_new_ones() -> None:
    """Episodes that ran ahead and failed run again once weights were sent, as those that completed do."""

    class Fragile(Walk):
        def step(self, action: Any) -> Any:
            if action == 2 and self.length % 2 == 0:
                raise RuntimeError("too fast")
            return super().step(action)

    made = config(8, env=lambda context: Fragile()).fault_tolerance(max_attempts_per_episode=1, fail_fast=False)
    with EvalRunnerGroup(made, weighted([0.0, 0.0, 1.0]), threaded=False) as group:
        # Eight episodes run at once; those after the first few wait, or have failed.
        group.sample(num_env_steps=1, as_arrays=True)
        group.sync_weights(weighted([0.0, 1.0, 0.0]))
        batch = group.sample(7, as_arrays=True)
    assert list(dict.fromkeys(batch["collector.index"])) == list(range(1, 8))
    assert set(batch["collector.weights_version"]) == {1}


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({}, "num_episodes"),
        ({"num_episodes": 2, "num_env_steps": 5}, "num_episodes"),
        ({"num_episodes": 0}, "num_episodes"),
        ({"num_episodes": 2, "mode": "truncate_episodes"}, "mode"),
        ({"num_episodes": 2, "mode": "truncate"}, "mode"),
        ({"num_episodes": 2, "order": "random"}, "order"),
        ({"num_episodes": 2, "as_arrays": True, "storage": "x"}, "as_arrays"),
    ],
)
def test_requests_that_make_no_sense_are_refused(options: dict[str, Any], key: str) -> None:
    with inline(config(env=troubled(calm))) as group, refused(ConfigError, key):
        group.sample(**options)


def test_storage_holds_the_batch_and_is_never_overwritten(tmp_path: Any, monkeypatch: Any) -> None:
    """A folder that exists is refused, a full disk is said, and the batch can be asked for again."""
    from tensordict import TensorDict

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with inline(config()) as group:
        expected = group.sample(3)
        group.sampler.restart()
        with monkeypatch.context() as patch:
            patch.setattr("os.posix_fallocate", full)
            with refused(UsageError, "storage", value=str(tmp_path / "a")):
                group.sample(3, storage=tmp_path / "a")
        assert not (tmp_path / "a").exists()
        batch = group.sample(3, storage=tmp_path / "a")
        with refused(ConfigError, "storage", value=str(tmp_path / "a")):
            group.sample(3, storage=tmp_path / "a")
    assert batch.is_memmap()
    assert (TensorDict.load_memmap(tmp_path / "a") == expected).all()


def test_a_folder_that_appears_while_episodes_run_is_left_alone(tmp_path: Any) -> None:
    """It belongs to another process."""

    class Meanwhile(Walk):
        def reset(self, **given: Any) -> Any:
            (tmp_path / "a").mkdir(exist_ok=True)
            (tmp_path / "a" / "data").write_text("of another process")
            return super().reset(**given)

    with inline(config(env=Meanwhile)) as group, refused(UsageError, "storage", value=str(tmp_path / "a")):
        group.sample(3, storage=tmp_path / "a")
    assert (tmp_path / "a" / "data").read_text() == "of another process"


# ------------------------------------------------------------------------------ one batch after the other


class Counted(Walk):
    """Counts the episodes that were begun in this process."""

    begun = 0

    def reset(self, **options: Any) -> Any:
        Counted.begun += 1
        return super().reset(**options)


@pytest.mark.parametrize("taken", [1, 3])
def test_a_slow_consumer_has_one_wave_ahead_and_no_more(taken: int) -> None:
    """However long it looks at a batch, what was begun beyond it is one batch."""
    Counted.begun = 0
    with EvalRunnerGroup(config(4, env=lambda context: Counted())) as group:
        batches = group.iter_samples(5, as_arrays=True)
        ids = [next(batches)["collector.traj_ids"] for _ in range(taken)]
        group.foreach_runner(type)
        assert group.sampler._ahead is not None
        group.sampler._ahead[2].result(30)
        assert Counted.begun == 5 * (taken + 1)
        batches.close()  # type: ignore[attr-defined]
    assert list(dict.fromkeys(np.concatenate(ids).tolist())) == list(range(5 * taken))


def test_a_consumer_that_goes_costs_no_episode_and_no_wait() -> None:
    """An iterator that is dropped ends what runs ahead; evaluations run, and the next batch follows the last."""
    with EvalRunnerGroup(config(4)) as group:
        first = next(group.iter_samples(3, as_arrays=True))  # The iterator is garbage at once.
        assert group.sampler._ahead is None
        assert group.evaluate().status == "complete"
        second = group.sample(3, as_arrays=True)
    assert set(first["collector.index"]) == {0, 1, 2}
    assert set(second["collector.index"]) == {3, 4, 5}


def test_new_weights_act_in_all_that_comes_after_them() -> None:
    """What ran ahead with the old ones runs again, and the rest of an episode that was cut says what it ran with."""
    modules = [nn.Linear(3, 3) for _ in range(2)]
    options: dict[str, Any] = {"num_env_steps": 50, "mode": "truncate_episodes", "as_arrays": True}
    with EvalRunnerGroup(config(8), policy=modules[0]) as group:
        first = group.sample(**options)
        cut = group.sampler.state_dict()
        group.sync_weights(modules[1], version=7)
        second = group.sample(**options)
        group.sampler.restart(index=cut["index"] + 1)
        fresh = group.sample(**options)
    assert set(first["collector.weights_version"]) == {0}
    rest = second["collector.index"] == cut["index"]
    assert rest.any() == bool(cut["step"])
    assert set(second["collector.weights_version"][rest]) <= {0}
    assert set(second["collector.weights_version"][~rest]) == {7}
    count = int((~rest).sum())
    np.testing.assert_array_equal(second["next.reward"][~rest], fresh["next.reward"][:count])
    np.testing.assert_array_equal(second["action"][~rest], fresh["action"][:count])


@pytest.mark.parametrize("renews", [True, False])
def test_with_new_weights_for_each_batch_little_more_runs_than_is_asked_for(renews: bool) -> None:
    """With the same weights a wave fills all slots, as the rest begins the next batch; else it would be dropped."""
    ran = [0]
    with inline(config(40).policy(nn.Linear(3, 3))) as group:
        for version in range(1, 4):
            if renews:
                group.sync_weights(nn.Linear(3, 3), version=version)
            group.sample(num_env_steps=20, mode="truncate_episodes")
            (metrics,) = group.foreach_runner(lambda runner: runner.metrics())
            ran.append(metrics["episodes"])
    first, *others = np.diff(ran)
    assert first == 40
    assert all(0 < count < 20 for count in others) if renews else others == [0, 0]


def test_an_episode_whose_steps_cannot_be_recorded_is_an_error_of_the_sample() -> None:
    """What cannot be written is said with its place, and the record of the episode is unaffected."""

    class Late(Walk):
        def step(self, action: Any) -> Any:
            observation, reward, terminated, truncated, info = super().step(action)
            over = terminated or truncated
            return np.zeros(2) if over else observation, reward, terminated, truncated, info

    with inline(config(env=lambda context: Late(), info_keys=())) as group:
        with refused(EvalError, "episodes"):
            group.sample(2)
        assert group.evaluate().status == "complete"


def test_long_episodes_outgrow_their_arrays() -> None:
    for keys in ((), ("speed",)):
        with inline(config(env=lambda context: Walk(length=700), info_keys=keys)) as group:
            batch = group.sample(2, as_arrays=True)
        np.testing.assert_array_equal(batch["observation"][:, 0], [*range(700)] * 2)
        np.testing.assert_array_equal(batch["next.observation"][:, 0], [*range(1, 701)] * 2)


# ------------------------------------------------------------------------------ what cannot be sampled


@pytest.mark.parametrize("state", [{}, {"seed": 0, "index": 0}, {"seed": 0, "index": 0, "step": -1}, {"seed": "a"}])
def test_a_position_that_no_sampler_returned_is_refused(state: Any) -> None:
    with inline(config()) as group, refused(UsageError, "state"):
        group.sampler.load_state_dict(state)


def test_a_position_behind_the_end_of_an_episode_is_refused() -> None:
    """Other weights may have made it shorter. The next episode is still there."""
    with inline(config()) as group:
        group.sampler.load_state_dict({"seed": 5, "index": 0, "step": 10_000})
        with refused(UsageError, "step", value=10_000):
            group.sample(num_env_steps=3, mode="truncate_episodes")
        group.sampler.skip_rest()
        batch = group.sample(num_env_steps=3, mode="truncate_episodes", as_arrays=True)
    assert batch["collector.index"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("last", [None, np.zeros(7), np.zeros(1), "nothing"])
@pytest.mark.parametrize("info_keys", [[], ["speed"]])
def test_a_last_observation_that_does_not_fit_is_an_error(last: Any, info_keys: list[str]) -> None:
    """The policy never sees it, so a record does not need it, but a trajectory does."""

    class Ends(Walk):
        def step(self, action: Any) -> Any:
            observation, reward, terminated, truncated, info = super().step(action)
            return last if terminated or truncated else observation, reward, terminated, truncated, info

    with inline(config(env=Ends, info_keys=info_keys)) as group:
        assert group.evaluate().status == "complete"
        with refused(EvalError, "episodes"):
            group.sample(2)


def test_a_batch_of_matchups_has_the_episodes_of_the_plan() -> None:
    """A wave has whole turns, although the batch does not need them."""
    for lanes in (1, 3):
        made = duel_config({"a": 0, "b": 1, "c": 2}, "round_robin", 12, symmetric=True)
        with inline(made.runners(num_envs_per_runner=lanes)) as group:
            batches = [group.sample(num_env_steps=5, as_arrays=True) for _ in range(2)]
            batches.append(group.sample(1, as_arrays=True))
        assert np.concatenate([batch["collector.index"] for batch in batches]).tolist() == list(range(11))


@pytest.mark.parametrize("start", range(8))
def test_a_batch_can_start_within_a_turn_of_matchups(start: int) -> None:
    made = duel_config({"a": 0, "b": 1, "c": 2}, "round_robin", 12, symmetric=True)
    with inline(made.runners(num_envs_per_runner=2)) as group:
        group.sampler.restart(index=start)
        batches = [group.sample(1, as_arrays=True) for _ in range(9)]
        group.sampler.restart(index=0)
        batches.append(group.sample(num_env_steps=5, as_arrays=True))
    indices = np.concatenate([np.unique(batch["collector.index"]) for batch in batches[:9]])
    assert indices.tolist() == list(range(start, start + 9))


def test_keys_that_are_equal_when_they_are_joined_are_an_error() -> None:
    part = gym.spaces.Box(0, 1, (1,))
    space = gym.spaces.Dict({"a.b": part, "a": gym.spaces.Dict({"b": part})})

    class Nested(Walk):
        def __init__(self) -> None:
            super().__init__()
            self.observation_space = space

        def reset(self, **given: Any) -> Any:
            super().reset(**given)
            return space.sample(), {}

        def step(self, action: Any) -> Any:
            return space.sample(), *super().step(action)[1:]

    with inline(EvalConfig().environment(Nested).policy("random")) as group:
        assert {"a.b", ("a", "b")} <= {*group.sample(1).keys(include_nested=True)}
        with refused(ConfigError, "a.b"):
            group.sample(1, as_arrays=True)


@pytest.mark.parametrize("outputs", [{"entropy": 0.5}, {"value": np.zeros(1)}, [np.zeros(3)], {0: np.zeros(3)}])
@pytest.mark.parametrize("env", [walk, "nested"])
def test_outputs_without_a_row_for_each_observation_are_the_policys_fault(outputs: Any, env: Any) -> None:
    class Tells:
        def __init__(self) -> None:
            self.outputs = outputs

        def act(self, observations: Any, state: Any, live: Any, noise: Any) -> tuple[Any, None]:
            return np.zeros(len(live), np.int64), None

    made = EvalConfig().environment("rl_eval.testing:dict_observation" if env == "nested" else "CartPole-v1")
    made.evaluation(num_episodes=2, max_episode_steps=5).fault_tolerance(max_attempts_per_episode=1)
    with EvalRunnerGroup(made.runners(num_envs_per_runner=3), Tells(), threaded=False) as group:
        assert group.evaluate().status == "complete"
        with refused(EvalError) as caught:
            group.sample(2)
    assert "outputs of the policy" in str(caught.value)
