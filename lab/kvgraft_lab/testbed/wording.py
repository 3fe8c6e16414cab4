"""Wording of segments in applications: retrieved documents, agents' reports, tool observations,
chat turns.
"""

from collections.abc import Sequence
from random import Random
from typing import Literal, get_args

from kvgraft_lab.testbed import vocabulary

Frame = Literal["plain", "documents", "agents", "tools", "chat"]
FRAMES: tuple[Frame, ...] = get_args(Frame)


def frame(rng: Random, segments: Sequence[str], kind: Frame) -> list[str]:
    """Return the segments in an application's wording. Numbers and mentioned things are random and
    mean nothing.
    """
    return [_dress(rng, segment, kind) for segment in segments]


def _dress(rng: Random, text: str, kind: Frame) -> str:
    match kind:
        case "documents":
            return f"doc {rng.choice(vocabulary.NUMBERS)} : {text}"
        case "agents":
            return f"agent {rng.choice(vocabulary.NUMBERS)} wrote : {text}"
        case "tools":
            thing = rng.choice(vocabulary.THINGS)
            return (
                f"thought : need the code of {thing} . action : search {thing} . observation : "
                f"{text}"
            )
        case "chat" if text.startswith("note "):
            return f"<system> : {text}"
        case "chat":
            return f"<user> : {text} <assistant> : noted {vocabulary.END}"
        case "plain":
            return text


def ask(question: str, *, chat: bool) -> str:
    """Return the question before its answer: as the chat template renders it, or as plain text."""
    return f"<user> : {question.removesuffix(' answer :')} <assistant> :" if chat else question
