"""Texts of segments, the last of which is the question, as a prompt: a line each, and what a chat
template adds."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from kvgraft.engine.text import opening_ids
from kvgraft.segments.prompt import Part, Segment, render_chat

SYSTEM, USER = "(instruction)", "(text)"  # where a template puts them


@dataclass(frozen=True)
class Chat:
    """What a model's chat template puts before the first text of a prompt (an instruction), between
    it and the others (what the user says), and behind these."""

    before: str
    between: str
    after: str


def find_chat(tokenizer: Any) -> Chat | None:
    """A tokenizer's chat template; None if it has none. The instruction is the system's message,
    or, where the template knows no such, the beginning of the user's.

    Raises:
        ValueError: the template does not leave messages as they are.
    """
    if not tokenizer.chat_template:
        return None
    # every text gets that anyway
    by_itself = tokenizer.bos_token if opening_ids(tokenizer, "") else ""
    for messages in (
        [{"role": "system", "content": SYSTEM}, {"role": "user", "content": USER}],
        [{"role": "user", "content": f"{SYSTEM}\n{USER}"}],
    ):
        try:
            text = render_chat(tokenizer, messages)
        except ValueError:
            continue
        before, _, rest = text.partition(SYSTEM)
        between, _, after = rest.partition(USER)
        if (
            f"{before}{SYSTEM}{between}{USER}{after}" == text
            and SYSTEM not in rest
            and USER not in before + after
        ):
            return Chat(before.removeprefix(by_itself), between, after)
    raise ValueError(
        "the chat template of the model takes no message of a system or a user as it is"
    )


def as_parts(
    segments: Sequence[str],
    reused: Collection[str] | None = None,
    chat: Chat | None = None,
    begun: str = "",
) -> list[Part]:
    """For the native engine: every part is tokenised on its own; those that are `reused` (None: all
    but the last) are marked as segments. `begun` is how the answer begins."""
    marked = segments[:-1] if reused is None else reused
    *lines, last = _lines(segments, chat, begun)
    known = (segment in marked for segment in segments)
    return [
        *(Segment(line) if reuse else line for line, reuse in zip(lines, known, strict=False)),
        last,
    ]


def as_text(segments: Sequence[str], chat: Chat | None = None, begun: str = "") -> str:
    """For a server."""
    return "".join(_lines(segments, chat, begun))


def _lines(segments: Sequence[str], chat: Chat | None, begun: str) -> list[str]:
    lines = [*(f"{segment}\n" for segment in segments[:-1]), segments[-1]]
    if chat is None:
        lines[-1] += begun
    else:
        lines[0] = f"{chat.before}{segments[0]}{chat.between}"
        lines[-1] += chat.after + begun.lstrip()
    return lines
