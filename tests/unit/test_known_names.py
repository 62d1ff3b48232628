"""Names of other frameworks' workers: each has a row in the docs, and what stands there in its place exists."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from rl_eval import EnvContext, EvalRunner, EvalRunnerGroup
from rl_eval.config.references import import_attribute
from rl_eval.config.settings import SECTIONS
from rl_eval.execution.worker_calls import GroupCallbacks
from rl_eval.runners import EpisodeObserver

PAGE: Final = Path(__file__).parents[2] / "docs" / "worker_interface.md"
OWNERS: Final[dict[str, Any]] = {
    "group": EvalRunnerGroup,
    "runner": EvalRunner,
    "context": EnvContext({}, 0, 0, 1),
    "observer": EpisodeObserver,
    "callbacks": GroupCallbacks,
}
ON_INSTANCES: Final = {"runner.runner_index", "runner.settings"}
"""Attributes that the classes annotate, and constructors set."""

KNOWN: Final = """
env_creator policy_graph policy policies_to_train tf_session_creator episode_horizon preprocessor_pref sample_async
compress_observations num_envs observation_fn observation_filter clip_rewards clip_actions env_config model_config
policy_config worker_index vector_index remote num_workers monitor_path log_dir log_level callbacks input_creator
output_creator remote_worker_envs async_remote_worker_envs remote_env_batch_wait_ms soft_horizon no_done_at_end seed
extra_python_environs fake_sampler num_cpus num_gpus memory object_store_memory resources

as_remote get_weights set_weights compute_gradients apply_gradients learn_on_batch sample_and_learn get_metrics
foreach_env get_policy for_policy foreach_policy foreach_trainable_policy get_filters sync_filters save restore
set_global_vars get_global_vars export_policy_model export_policy_checkpoint import_policy_model_from_h5 stop
func policy_id policy_dict _build_policy_map wrap weights new_filters flush_after objs export_dir filename_prefix
import_file global_vars grads samples expected_batch_size num_sgd_iter sgd_minibatch_size standardize_fields url
world_rank world_size backend
creation_args setup_torch_data_parallel get_node_ip find_free_port EnvContext on_episode_start on_episode_step
on_episode_end on_sample_end on_runner_restart

EnvRunner config assert_healthy env module make_env make_module get_spaces _try_env_reset _try_env_step
restart_failed_sub_environments ENV_RESET_FAILURE ENV_STEP_FAILURE _convert_to_tensor struct actions apply

create_env_fn create_env_kwargs policy_factory trust_policy device policy_device storing_device env_device
reset_at_each_iter exploration_type collector_class collector_kwargs num_workers_per_collector num_collectors
remote_configs ray_init_config update_after_each_batch max_weight_update_interval weight_updater init_updater
weight_sync_schemes weight_recv_schemes register_scheme_receiver use_env_creator no_cuda_sync add_collectors shutdown
async_shutdown cascade_execute update_policy_weights_ receive_weights remote_collectors worker_idx policy_or_weights
worker_ids synchronize_weights attr_path static_seed shutdown_ray timeout

sample gen_rollouts sample_with_count ParallelIteratorWorker batch_steps rollout_fragment_length frames_per_batch
batch_mode sync split_trajs state_dict load_state_dict set_seed RayCollector total_frames max_frames_per_traj
init_random_frames postproc replay_buffer pause input_evaluation policies policy_mapping_fn weights_dict model_id
"""


def rows() -> dict[str, tuple[str, str]]:
    """Return counterpart and remark of every name in the tables."""
    found: dict[str, tuple[str, str]] = {}
    for line in PAGE.read_text().partition("## Names that you know")[2].splitlines():
        if line.startswith("| `"):
            names, here, remark = (cell.strip() for cell in line.strip("|").split("|"))
            for name in re.findall(r"`([^`]+)`", names):
                assert name not in found, f"{name} has two rows"
                found[name] = here, remark
    return found


def counterparts(text: str) -> Iterator[str]:
    """Yield what a cell names in code that looks like a counterpart."""
    for code in re.findall(r"`([^`]+)`", text):
        owner = code.partition(".")[0]
        if owner in OWNERS or owner in SECTIONS or (code.startswith("rl_eval.") and ":" in code):
            yield code


def exists(code: str) -> bool:
    """Whether a counterpart is there: a config key, a ``module:attr``, or an attribute of its owner."""
    if ":" in code:
        return import_attribute("a counterpart", code.partition(": ")[0]) is not None
    owner, _, name = code.partition(".")
    if owner in SECTIONS and name in SECTIONS[owner].model_fields:
        return True
    return code in ON_INSTANCES or (owner in OWNERS and hasattr(OWNERS[owner], name))


def test_every_known_name_has_a_row() -> None:
    """Of arguments, methods and callbacks alike."""
    assert sorted(set(KNOWN.split())) == sorted(rows())


@pytest.mark.parametrize("name", sorted(rows()))
def test_a_counterpart_exists_or_there_is_a_reason(name: str) -> None:
    """In the second column one, or ``none`` with a reason in the third; whatever the third names exists, too."""
    here, remark = rows()[name]
    if here == "none":
        assert remark, f"{name}: say why it has no counterpart"
    else:
        assert list(counterparts(here)), f"{name}: {here}"
    for code in counterparts(f"{here} {remark}"):
        if not re.match(r"runners\.\w+: ", code):
            assert exists(code), f"{name}: there is no {code}"


def test_a_counterpart_that_is_missing_is_noticed() -> None:
    """The check can fail."""
    missing = ("group.no_such", "runners.no_such", "context.no_such", "rl_eval.errors:NoSuch")
    assert [code for code in missing if "errors" not in code and exists(code)] == []
    with pytest.raises(Exception, match="NoSuch"):
        exists("rl_eval.errors:NoSuch")


def test_yaml_of_the_page_are_keys_that_there_are() -> None:
    """And of the page on environments."""
    import yaml

    from rl_eval import EvalConfig

    for page in (PAGE, PAGE.with_name("environments.md")):
        found = re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL)
        assert found
        for block in found:
            EvalConfig.from_dict(yaml.safe_load(block))
