"""Conversations: LoCoMo, with questions about sessions, and MT-RAG, whose last turn is answered
from passages.
"""

import re
from collections.abc import Mapping
from typing import Any

from kvgraft_lab.evaluate.tasks.files.records import FileRecord, ask, texts

ANSWERABLE = {"ANSWERABLE", "PARTIAL"}
SPEAKERS = {"user": "User", "agent": "Assistant"}
GROUNDED = (
    "Continue the conversation: answer the user's last message from the passages, in a few "
    "sentences."
)


def locomo(record: Mapping[str, Any], stem: str) -> FileRecord:
    """Parse a LoCoMo record. Each session is a segment; questions without an answer (adversarial)
    are left out.
    """
    talk = record["conversation"]
    sessions = sorted(
        (key for key in talk if re.fullmatch(r"session_\d+", key)), key=lambda key: int(key[8:])
    )
    segments = tuple(
        "\n".join(
            [
                talk.get(f"{key}_date_time", ""),
                *(f"{turn['speaker']}: {_said(turn)}" for turn in talk[key]),
            ]
        )
        for key in sessions
    )
    answered = [qa for qa in record["qa"] if qa.get("answer") is not None]
    questions = tuple((ask(qa["question"]), texts([qa["answer"]])) for qa in answered)
    return FileRecord(segments, questions, "f1", stem)


def mtrag(record: Mapping[str, Any], stem: str) -> FileRecord:
    """Parse an MT-RAG record. Passages, then the turns so far with their answers, are segments; the
    user's last message is the question.

    Tasks without passages, or without an answer in them, are left out.
    """
    *turns, last = record["input"]
    passages = tuple(context["text"].strip() for context in record["contexts"])
    earlier = tuple(
        "\n".join(map(_turn, turns[start : start + 2])) for start in range(0, len(turns), 2)
    )
    answers = texts(target["text"] for target in record["targets"])
    answered = passages and not ANSWERABLE.isdisjoint(record.get("answerability", ANSWERABLE))
    questions = ((f"{_turn(last)}\nAssistant:", answers),) if answered else ()
    group = record.get("conversation_id", "")
    return FileRecord((*passages, *earlier), questions, "f1", stem, GROUNDED, 128, group=group)


def _said(turn: Mapping[str, Any]) -> str:
    """Return the text of a turn, with the caption of its picture."""
    return (
        f"{turn['text']} [picture: {turn['blip_caption']}]"
        if "blip_caption" in turn
        else str(turn["text"])
    )


def _turn(turn: Mapping[str, Any]) -> str:
    return f"{SPEAKERS[turn['speaker']]}: {turn['text'].strip()}"
