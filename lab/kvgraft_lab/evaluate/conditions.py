"""What an evaluation compares: a policy, or a policy and the flow under which answers are decoded,
as in `spread with quest:topk_blocks=16`.
"""

from kvgraft.flows import parse_flow
from kvgraft.policies import parse_policy

WITH = " with "


def split_condition(condition: str) -> tuple[str, str | None]:
    """Return the policy of a condition, and its flow; None if it names none."""
    policy, _, flow = condition.partition(WITH)
    return policy, flow or None


def check_condition(condition: str) -> None:
    """Check the policy and the flow of a condition.

    Raises:
        FileNotFoundError, ValueError: an unknown policy or flow, or a wrong option of one.
    """
    policy, flow = split_condition(condition)
    parse_policy(policy)
    if flow is not None:
        parse_flow(flow)
