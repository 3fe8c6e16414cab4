"""Prompts from texts of segments and a final question: one line each, within a chat template if
wanted.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from kvgraft.core.prompt import Part, Segment, render_chat
from kvgraft.engine.text import opening_ids

# placeholders that show where a template puts its messages
SYSTEM, USER = "(instruction)", "(text)"


@dataclass(frozen=True)
class Chat:
    """Texts of a model's chat template.

    Attributes:
        before: text before the first text of a prompt, the instruction.
        between: text between the instruction and the others, the user's message.
        after: text after these.
    """

    before: str
    between: str
    after: str


def find_chat(tokenizer: Any) -> Chat | None:
    """Return a tokenizer's chat template, or None if it has none.

    The instruction is the system message. If the template has no system role, it is the beginning
    of the user's message.

    Raises:
        ValueError: the template changes the text of messages.
    """
    if not tokenizer.chat_template:
        return None

    # the tokenizer adds its opening token to every text anyway
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
    """Return a prompt for the native engine, in parts that are tokenised separately.

    Args:
        reused: texts that become segments; None is all but the last.
        begun: beginning of the answer.
    """
    marked = segments[:-1] if reused is None else reused
    *lines, last = _lines(segments, chat, begun)
    known = (segment in marked for segment in segments)
    return [
        *(Segment(line) if reuse else line for line, reuse in zip(lines, known, strict=False)),
        last,
    ]


def as_text(segments: Sequence[str], chat: Chat | None = None, begun: str = "") -> str:
    """Return a prompt for a server."""
    return "".join(_lines(segments, chat, begun))


def _lines(segments: Sequence[str], chat: Chat | None, begun: str) -> list[str]:
    lines = [*(f"{segment}\n" for segment in segments[:-1]), segments[-1]]
    if chat is None:
        lines[-1] += begun
    else:
        lines[0] = f"{chat.before}{segments[0]}{chat.between}"
        lines[-1] += chat.after + begun.lstrip()
    return lines
