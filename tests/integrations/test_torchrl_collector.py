"""TorchRL's ``RayCollector``: its calls and layout, with exactly the frames that were asked for.

That its arguments are TorchRL's is tested in ``test_torchrl_evaluator.py``.
"""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from typing import Any

import pytest

pytest.importorskip("torchrl")

import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.data import Binary, Bounded, LazyTensorStorage, ReplayBuffer
from torchrl.envs import (
    Compose,
    GymEnv,
    InitTracker,
    RenameTransform,
    RewardSum,
    StepCounter,
    TransformedEnv,
    VecNormV2,
)
from torchrl.modules import LSTMModule, OneHotCategorical, ProbabilisticActor, QValueActor, RandomPolicy

from rl_eval.errors import EvalError
from rl_eval.integrations.torchrl import RayCollector
from rl_eval.integrations.torchrl.arguments import ArgumentError
from tests.cluster.waiting import eventually
from tests.integrations.torchrl_worlds import Steps, constant, weights_of
from tests.refused import refused

pytestmark = pytest.mark.filterwarnings("ignore:Exception ignored in.*socket")  # Which torchrl opens on import.

KEYS: dict[str, Any] = {"include_nested": True, "leaves_only": True}


def cartpole() -> GymEnv:
    return GymEnv("CartPole-v1")


def leaning() -> Any:
    """A stochastic actor for CartPole, with the log-probabilities of its one-hot actions."""
    torch.manual_seed(0)
    net = TensorDictModule(nn.Linear(4, 2), in_keys=["observation"], out_keys=["logits"])
    draws = {"distribution_class": OneHotCategorical, "return_log_prob": True, "default_interaction_type": "random"}
    return ProbabilisticActor(net, in_keys=["logits"], **draws)


def collector(env: Any = cartpole, policy: Any = None, **options: Any) -> RayCollector:
    options = {"frames_per_batch": 100, "num_collectors": 0, "num_workers_per_collector": 4, **options}
    return RayCollector(env, policy, **options)


def test_batches_have_the_keys_and_shapes_of_a_rollout() -> None:
    """What ``env.rollout`` writes is in a batch, in the same shape and dtype, and a loss may be computed from it."""
    policy = leaning()
    rollout = cartpole().rollout(20, policy, break_when_any_done=False)
    with collector(policy=policy, total_frames=300) as frames:
        batches = list(frames)
    assert [batch.batch_size for batch in batches] == [torch.Size([100])] * 3
    batch = batches[0]
    expected = {key: (leaf.shape[1:], leaf.dtype) for key, leaf in rollout.items(**KEYS)}
    found = {key: (leaf.shape[1:], leaf.dtype) for key, leaf in batch.items(**KEYS)}
    assert expected.items() <= found.items()
    assert ("collector", "traj_ids") in found
    log_probs = OneHotCategorical(logits=batch["logits"]).log_prob(batch["action"])
    torch.testing.assert_close(batch["action_log_prob"], log_probs)
    # Inside a trajectory the next observation is the observation of the next frame, also over the end of a batch.
    data = torch.cat(batches)
    same = data["collector", "traj_ids"].diff() == 0
    assert torch.equal(data["next", "observation"][:-1][same], data["observation"][1:][same])
    assert torch.equal(data["next", "done"][:-1].squeeze(-1), ~same)


@pytest.mark.parametrize("layout", ["slots", pytest.param("actors", marks=pytest.mark.ray)])
def test_one_set_of_frames_in_every_layout(layout: str, request: pytest.FixtureRequest) -> None:
    """In one slot or eight, and from two actors of Ray."""
    others: dict[str, Any] = {"num_workers_per_collector": 8}
    if layout == "actors":
        request.getfixturevalue("ray_cluster")
        others = {"num_collectors": 2, "remote_configs": {"num_cpus": 1, "num_gpus": 0, "memory": 2**20}}
    batches = []
    for options in ({"num_workers_per_collector": 1}, others):
        with collector(policy=leaning(), total_frames=200, seed=3, **options) as frames:
            batches.append(torch.cat(list(frames)))
    for (key, one), (_, other) in zip(batches[0].items(**KEYS), batches[1].items(**KEYS), strict=True):
        assert torch.equal(one, other), key


def test_a_trajectory_ends_after_max_frames() -> None:
    """Its steps are counted as by a ``StepCounter``, with 0 in padding."""
    options: dict[str, Any] = {"max_frames_per_traj": 4}
    with collector(lambda: Steps(length=9), constant(), **options) as frames:
        batch = frames.next()
    assert batch["next", "truncated"].sum() == 25
    assert not batch["next", "terminated"].any()
    assert batch["step_count"].flatten().tolist() == [0, 1, 2, 3] * 25
    assert batch["next", "step_count"].flatten().tolist() == [1, 2, 3, 4] * 25
    with collector(lambda: Steps(length=9), constant(), frames_per_batch=6, split_trajs=True, **options) as frames:
        batch = frames.next()
    assert batch["next", "step_count"].squeeze(-1).tolist() == [[1, 2, 3, 4], [1, 2, 0, 0]]
    assert batch["step_count"].dtype == torch.int64
    assert batch.names[-1] == "time"


def test_weights_act_from_the_next_episode_on() -> None:
    """Every frame has the action of the version that it names."""
    with collector(lambda: Steps(length=7), policy := constant(1.0), frames_per_batch=10) as frames:
        batches = [frames.next()]
        frames.update_policy_weights_(weights_of(5.0))
        batches.append(frames.next())
        policy.module.weight.data.fill_(9.0)
        frames.update_policy_weights_()
        batches.append(frames.next())
    data = torch.cat(batches)
    for version, value in enumerate((1.0, 5.0, 9.0)):
        mine = data["collector", "weights_version"] == version
        assert mine.any()
        assert (data["action"][mine] == value).all()
        assert (data["next", "reward"][mine] == value).all()
    assert data["next", "reward"].dtype == torch.float32
    whole = data["collector", "weights_version"].diff().nonzero().flatten()
    assert data["next", "done"][whole].all()


@pytest.mark.parametrize(("every", "expected"), [({"update_after_each_batch": True}, [1.0, 2.0, 3.0]), ({}, [1.0] * 3)])
def test_weights_may_be_sent_after_each_batch(every: dict[str, Any], expected: list[float]) -> None:
    with collector(lambda: Steps(length=5), policy := constant(1.0), frames_per_batch=10, **every) as frames:
        seen = []
        for _ in expected:
            seen.append(float(frames.next()["action"][-1]))
            policy.module.weight.data.add_(1.0)
    assert seen == expected


def test_random_frames_come_first() -> None:
    """Their actions are not the policy's; afterwards they are, with the weights that were sent meanwhile."""
    with collector(policy=leaning(), init_random_frames=150, seed=1) as frames:
        batches = [frames.next() for _ in range(3)]
    assert ["action_log_prob" in batch for batch in batches] == [False, False, True]
    assert torch.equal(batches[0]["action"].sum(-1), torch.ones(100, dtype=torch.int64))
    with collector(lambda: Steps(length=5), constant(1.0), init_random_frames=10, frames_per_batch=10) as frames:
        assert frames.next()["action"].unique().numel() == 10
        frames.update_policy_weights_(weights_of(4.0))
        assert (frames.next()["action"] == 4.0).all()


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (cartpole, (2,)),
        (lambda: GymEnv("CartPole-v1", categorical_action_encoding=True), ()),
        (lambda: GymEnv("Pendulum-v1"), (1,)),
        (lambda: Judged(Binary(1, shape=(1,))), (1,)),
    ],
)
@pytest.mark.parametrize("given", ["nothing", "spec", "key"])
def test_random_actions_are_of_the_spec(make: Any, shape: tuple[int, ...], given: str) -> None:
    """In the shape and dtype that TorchRL's collectors have them."""
    spec = make().action_spec
    policy = {"nothing": None, "spec": RandomPolicy(spec), "key": RandomPolicy(make().full_action_spec)}[given]
    with collector(make, policy, frames_per_batch=64) as frames:
        actions = frames.next()["action"]
    assert actions.shape == (64, *shape)
    assert actions.dtype == spec.dtype
    assert all(spec.is_in(action) for action in actions)
    assert len(actions.unique(dim=0)) > 1


def test_what_transforms_and_recurrent_modules_write_is_in_a_batch() -> None:
    """Every key of ``env.rollout``, with its values, also where a batch begins within an episode."""
    lstm = LSTMModule(input_size=4, hidden_size=3, in_key="observation", out_key="embedded")
    head = QValueActor(nn.Linear(3, 2), in_keys=["embedded"], action_space="one_hot")
    policy = TensorDictSequential(lstm, head)

    def make() -> Any:
        transforms = RewardSum(), StepCounter(), InitTracker(), lstm.make_tensordict_primer()
        return TransformedEnv(GymEnv("CartPole-v1"), Compose(*transforms))

    with collector(make, policy, frames_per_batch=5) as frames:
        check_first_episode(frames.next(), make(), policy)
        batch = frames.next()
    assert batch["collector", "step"][0]
    check_first_episode(batch, make(), policy)


def check_first_episode(batch: Any, env: Any, policy: Any) -> None:
    """Compare the frames of the first episode of a batch with ``env.rollout``."""
    mine = batch[batch["collector", "traj_ids"] == batch["collector", "traj_ids"][0]]
    env.set_seed(int(mine["collector", "seed"][0]), static_seed=True)
    with torch.no_grad():
        rollout = env.rollout(1000, policy)[int(mine["collector", "step"][0]) :][: len(mine)]
    for key, expected in rollout.items(**KEYS):
        torch.testing.assert_close(mine[key], expected, msg=f"{key}")


def test_actions_are_not_judged() -> None:
    """The environment gets what the policy wrote, inside its spec or not."""
    for spec in (Binary(1, shape=(1,)), Bounded(-1.0, 1.0, shape=(1,))):
        with collector(lambda spec=spec: Judged(spec), constant(9.0), frames_per_batch=4) as frames:
            batch = frames.next()
        assert batch["next", "reward"].flatten().tolist() == [9.0] * 4
        assert batch["action"].flatten().tolist() == [9.0] * 4


class Judged(Steps):
    """The reward is the action, of another spec."""

    def __init__(self, spec: Any) -> None:
        super().__init__()
        self.action_spec = spec


def test_a_single_observation_keeps_its_key() -> None:
    def make() -> Any:
        return TransformedEnv(GymEnv("CartPole-v1"), RenameTransform(["observation"], ["pixels"]))

    with collector(make, None, frames_per_batch=10) as frames:
        assert frames.next()["next", "pixels"].shape == (10, 4)


def test_an_endless_episode_ends_with_the_frames() -> None:
    """Exactly ``total_frames`` come, none of them an end; a limit of the trajectory goes on holding."""
    for limit, ends in ((-1, 0), (40, 2)):
        options: dict[str, Any] = {"frames_per_batch": 25, "total_frames": 100, "max_frames_per_traj": limit}
        with collector(lambda: Steps(length=10**9), constant(), **options) as frames:
            data = torch.cat(list(frames))
        assert len(data) == 100
        assert data["next", "done"].sum() == ends


def test_devices_may_be_repeated() -> None:
    """For each collector, and in its arguments."""
    options: dict[str, Any] = {"device": ["cpu", "cpu"], "storing_device": [torch.device("cpu")]}
    with collector(collector_kwargs=[{"device": "cpu", "storing_device": None}], env_device="cpu", **options) as frames:
        assert frames.next().numel() == 100


def test_the_buffer_is_filled_in_the_background() -> None:
    """Nothing is collected during a pause; weights that are sent meanwhile act from the next episode on."""
    buffer = ReplayBuffer(storage=LazyTensorStorage(10**6))
    with collector(lambda: Steps(length=5), constant(1.0), frames_per_batch=10, replay_buffer=buffer) as frames:
        frames.start()
        assert eventually(lambda: len(buffer) >= 20)
        with frames.pause():
            held = len(buffer)
            frames.start()  # It runs already.
            frames.update_policy_weights_(weights_of(4.0))
        assert eventually(lambda: bool((buffer[:]["action"][held:] == 4.0).any()))
    assert (buffer[:]["action"][:held] == 1.0).all()
    assert not any(one.name == "rl_eval collector" for one in threading.enumerate())


def test_an_error_in_the_background_is_raised_by_the_next_call() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(100))
    frames = collector(lambda: Steps(fails_at=2), constant(), frames_per_batch=10, replay_buffer=buffer)
    frames.start()
    assert eventually(lambda: not any(one.name == "rl_eval collector" for one in threading.enumerate()))
    with refused(EvalError, episode=0):
        frames.shutdown()


def test_batches_of_whole_trajectories_split_and_begun_anew() -> None:
    make = partial(Steps, length=6)
    with collector(make, constant(), frames_per_batch=20, split_trajs=True) as frames:
        batch = frames.next()
        assert batch.batch_size == (4, 6)
        assert batch["collector", "mask"].sum(1).tolist() == [6, 6, 6, 2]
    with collector(make, constant(), trajs_per_batch=5) as frames:
        assert frames.next().batch_size == (30,)
        assert frames.next().names == ["time"]
    with collector(make, constant(), frames_per_batch=8, reset_at_each_iter=True) as frames:
        assert [frames.next()["collector", "step"].tolist() for _ in range(2)] == [[*range(6), 0, 1]] * 2


def test_what_is_done_with_a_batch() -> None:
    """Hooks, ``postproc`` and a replay buffer get it; a hook may send weights, and does not wait for itself."""
    calls: list[Any] = []
    buffer = ReplayBuffer(storage=LazyTensorStorage(1000))

    def after(batch: Any) -> None:
        calls.append(("done" in batch, float(batch["action"][0])))
        frames.update_policy_weights_(weights_of(3.0))

    with collector(
        lambda: Steps(length=5),
        constant(1.0),
        frames_per_batch=10,
        total_frames=20,
        postproc=lambda batch: batch.exclude("done"),
        pre_collect_hook=lambda: calls.append("before"),
        post_collect_hook=after,
        replay_buffer=buffer,
    ) as frames:
        assert list(frames) == [None, None]
    assert calls == ["before", (False, 1.0), "before", (False, 3.0)]
    assert len(buffer) == 20


@pytest.mark.parametrize("random", [0, 10])
def test_its_state_is_taken_up_by_another(random: int) -> None:
    """In the middle of an episode, with the weights; also after random frames, at whose end weights were sent."""
    options: dict[str, Any] = {"frames_per_batch": 33, "init_random_frames": random}
    with collector(policy=leaning(), **options) as frames:
        for _ in range(2):
            frames.next()
        state = frames.state_dict()
        expected = frames.next()
    assert state["sampler"]["step"]
    other = leaning()
    other[0].module.weight.data.zero_()
    with collector(policy=other, num_workers_per_collector=1, **options) as frames:
        frames.load_state_dict(state)
        again = frames.next()
    for key in ("action", "observation", ("collector", "step")):
        assert torch.equal(again[key], expected[key])


@pytest.mark.parametrize("random", [0, 20])
@pytest.mark.parametrize("source", ["policy", "policy_factory"])
def test_the_state_has_the_weights_in_use(source: str, random: int) -> None:
    """Those that were sent, not those of construction; also if random frames still go on, and for a factory."""

    def made() -> RayCollector:
        policy = constant(1.0) if source == "policy" else partial(constant, 1.0)
        options: dict[str, Any] = {"frames_per_batch": 10, "init_random_frames": random, source: policy}
        return collector(lambda: Steps(length=5), **options)

    with made() as frames, made() as other:
        first = frames.state_dict()
        frames.next()
        frames.update_policy_weights_(weights_of(5.0))
        state = frames.state_dict()
        other.load_state_dict(state)
        frames.load_state_dict(state)
        for one in (other, frames):
            assert (next(batch for batch in one if one.state_dict()["frames"] > random)["action"] == 5.0).all()
        frames.load_state_dict(first)
        assert (next(batch for batch in frames if frames.state_dict()["frames"] > random)["action"] == 1.0).all()


def test_the_state_has_the_statistics_that_were_sent() -> None:
    """Without them, an environment with a normalizer cannot act."""

    def make() -> Any:
        return TransformedEnv(GymEnv("CartPole-v1"), VecNormV2(["observation"]))

    trained = make()
    trained.rollout(20, break_when_any_done=False)
    with collector(make, policy=leaning()) as frames:
        frames.update_policy_weights_(weights_dict={"env.transform": trained.transform})
        state = frames.state_dict()
        expected = frames.next()
    with collector(make, policy=leaning()) as frames:
        frames.load_state_dict(state)
        assert torch.equal(frames.next()["observation"], expected["observation"])


def test_a_runner_that_starts_later_gets_everything_that_was_sent() -> None:
    """Policy and statistics, whichever was sent last: it gets only the weights that the group published last."""

    def make() -> Any:
        return TransformedEnv(Steps(length=5), VecNormV2(["observation"]))

    trained = make()
    trained.rollout(20, break_when_any_done=False)
    with collector(make, constant(1.0)) as frames:
        for sent, action in (
            ({"policy": weights_of(0.5), "env.transform": trained.transform}, 0.5),
            ({"env.transform": trained.transform}, 0.5),
            ({"policy": weights_of(0.75)}, 0.75),
        ):
            frames.update_policy_weights_(weights_dict=sent)
            assert frames.group.published_weights is not None
            with collector(make, constant(1.0), frames_per_batch=5) as later:
                later.group.sync_weights(frames.group.published_weights.snapshot)
                assert (later.next()["action"] == action).all()


def test_after_the_end_nothing_is_collected() -> None:
    """It may be ended more than once; what TorchRL has and this has not is named."""
    frames = collector(frames_per_batch=5)
    for name in ("add_collectors", "remote_collectors"):
        with pytest.raises(AttributeError, match=name):
            getattr(frames, name)
    asyncio.run(frames.async_shutdown())
    frames.shutdown()
    with refused(EvalError, "stop"):
        frames.next()


def test_another_seed_is_another_plan() -> None:
    with collector(policy=leaning(), seed=3) as frames:
        first = frames.next()
        assert frames.set_seed(4) == 4
        assert not torch.equal(frames.next()["observation"], first["observation"])
        frames.set_seed(3)
        with frames.pause():
            pass
        assert torch.equal(frames.next()["observation"], first["observation"])


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"collector_kwargs": {"a": 1}}, "collector_kwargs['a']"),
        ({"collector_kwargs": {"storing_device": "meta"}}, "collector_kwargs['storing_device']"),
        ({"device": ["cpu", "meta"]}, "device"),
        ({"create_env_fn": []}, "create_env_fn"),
        ({"remote_configs": {"max_restarts": 3}}, "remote_configs"),
        ({"weight_updater": object()}, "weight_updater"),
        ({"env_device": "cuda:0"}, "env_device"),
        ({"create_env_fn": [cartpole, Steps]}, "create_env_fn"),
        ({"remote_configs": [{"num_cpus": 1}, {"num_cpus": 2}]}, "remote_configs"),
        ({"remote_configs": {"num_cpu": 1}}, "remote_configs"),
        ({"policy_factory": constant, "policy": constant()}, "policy_factory"),
        ({"frames_per_batch": 0}, "frames_per_batch"),
        ({"exploration_type": "wild"}, "exploration_type"),
    ],
)
def test_an_argument_without_a_counterpart_is_named(options: dict[str, Any], key: str) -> None:
    options = {"create_env_fn": cartpole, "frames_per_batch": 10, "num_collectors": 0, **options}
    with refused(ArgumentError, key):
        RayCollector(options.pop("create_env_fn"), **options)


def test_calls_that_cannot_be_honoured_are_named() -> None:
    with collector(policy=leaning()) as frames:
        frames.update_policy_weights_(worker_ids=[0], model_id="policy")
        for options in ({"worker_ids": 3}, {"model_id": "critic"}, {"weights": leaning()}):
            with refused(ArgumentError, next(iter(options))):
                frames.update_policy_weights_(leaning(), **options)
        models = {"policy": leaning()}
        for arguments, options, key in (([leaning()], {}, "weights_dict"), ([], {"model_id": "policy"}, "model_id")):
            with refused(ArgumentError, key):
                frames.update_policy_weights_(*arguments, weights_dict=models, **options)
        with refused(ArgumentError, "replay_buffer"):
            frames.start()
        with refused(ArgumentError, "resume"), frames.pause(resume=False):
            pass
        with refused(ArgumentError, "shutdown_ray"):
            frames.shutdown(shutdown_ray=True)
