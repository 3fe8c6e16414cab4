"""Profiles of a model: given by the caller, or stored with its weights."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from kvgraft.engine.checkpoint import identify
from kvgraft.engine.config import ModelConfig
from kvgraft.kv.heads import HEAD_MAP_FILE, HeadMap
from kvgraft.kv.profiles import LAYERS_FILE, LayerProfile, last_layers
from kvgraft.policies import DEFAULT_POLICY, parse_policy
from kvgraft.policies.profile import POLICY_FILE, PolicyProfile
from kvgraft.prefill.context import Policy

logger = logging.getLogger("kvgraft")
MAKE_MAP = (
    f"run `kvgraft profile-heads MODEL`, which writes {HEAD_MAP_FILE} into the model directory"
)


def load_head_map(
    given: str | Path | HeadMap | None, model_dir: Path, num_layers: int, num_kv_heads: int
) -> HeadMap | None:
    """Load the given head map, or the one in the model directory; None if the latter does not fit
    the model.

    Raises:
        FileNotFoundError, ValueError: the given one does not exist, or it is of another model.
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
    """Return the policy of requests that name none, and the profile that names it, if any.

    The policy is the given one, the one that a profile names, or the default.

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
    """Load the given policy profile, or the one in the model directory; None if the latter does not
    fit.

    Args:
        identity: fingerprint of the checkpoint.

    Raises:
        FileNotFoundError, ValueError: the given one does not exist, is no policy profile, or is of
            another checkpoint.
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
    """Return whether a profile fits the weights; ValueError if a given one does not."""
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
    """Return the given layers, or those of a profile in the model directory, or the last layers if
    there is none that fits."""
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
