"""Profiles of a model: given by the caller, or beside its weights."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from kvgraft.engine.checkpoint import identify
from kvgraft.engine.config import ModelConfig
from kvgraft.kv.heads import HEAD_MAP_FILE, HeadMap
from kvgraft.kv.profiles import LAYERS_FILE, LayerProfile, last_layers
from kvgraft.prefill.context import Policy
from kvgraft.prefill.policies import DEFAULT_POLICY, parse_policy
from kvgraft.prefill.profile import POLICY_FILE, PolicyProfile

logger = logging.getLogger("kvgraft")
MAKE_MAP = (
    f"run `kvgraft profile-heads MODEL`, which writes {HEAD_MAP_FILE} into the model directory"
)


def load_head_map(
    given: str | Path | HeadMap | None, model_dir: Path, num_layers: int, num_kv_heads: int
) -> HeadMap | None:
    """The map that was given, or that lies beside the weights; if that does not fit them, none.

    Raises:
        FileNotFoundError, ValueError: there is none where one was given, or it is of another model.
    """
    beside = model_dir / HEAD_MAP_FILE
    if given is None and not beside.is_file():
        return None
    head_map = given if isinstance(given, HeadMap) else HeadMap.load(given or beside)
    check = partial(head_map.check, identify(model_dir), num_layers, num_kv_heads)
    return head_map if _fits(check, beside, given=given is not None) else None


def choose_policy(
    policy: str | Policy | None, profile: str | Path | None, model_dir: Path, config: ModelConfig
) -> tuple[Policy, PolicyProfile | None]:
    """The policy of requests that name none: the one that was given, or that a profile names, or
    the default one; and that profile.

    Raises:
        FileNotFoundError, ValueError: it cannot be used, or both were given.
    """
    if policy is None:
        found = load_policy_profile(profile, model_dir, config.identity)
        return parse_policy(found.policy if found else DEFAULT_POLICY), found
    if profile is not None:
        raise ValueError(f"give either a policy or a profile, got {policy} and {profile}")
    return parse_policy(policy), None


def load_policy_profile(
    given: str | Path | None, model_dir: Path, identity: str
) -> PolicyProfile | None:
    """The profile that was given, or that lies beside the weights of the checkpoint of this
    fingerprint; if that does not fit them, none.

    Raises:
        FileNotFoundError, ValueError: there is none where one was given, or it is no such profile,
            or one of another checkpoint.
    """
    beside = model_dir / POLICY_FILE
    if given is None and not beside.is_file():
        return None
    profile = PolicyProfile.load(given or beside)
    return (
        profile
        if _fits(partial(profile.check_model, identity), beside, given=given is not None)
        else None
    )


def _fits(check: Callable[[], None], beside: Path, *, given: bool) -> bool:
    """Whether a profile fits the weights; ValueError of one that was given and does not."""
    try:
        check()
    except ValueError as error:
        if given:
            raise
        logger.warning("%s is not used: %s", beside, error)
        return False
    return True


def load_stable_layers(
    given: Sequence[int] | None, model_dir: Path, config: ModelConfig
) -> tuple[int, ...]:
    """Those that were given, or that a profile beside the weights names; if that does not fit them,
    the last ones."""
    if given is not None:
        profile = LayerProfile(config.identity, tuple(given))
        profile.check(config.identity, config.num_layers)
        return profile.stable
    beside = model_dir / LAYERS_FILE
    try:
        profile = LayerProfile.load(beside)
        profile.check(config.identity, config.num_layers)
    except FileNotFoundError:
        return last_layers(config.num_layers)
    except ValueError as error:
        logger.warning("%s is not used: %s", beside, error)
        return last_layers(config.num_layers)
    return profile.stable
