"""Texts of recorded requests."""

from collections.abc import Sequence
from pathlib import Path

from kvgraft_lab.traffic.files import find_files, read_file
from kvgraft_lab.traffic.records import BadLine, Conversation, LoggedRequest


def read_messages(paths: Sequence[Path]) -> dict[str, str]:
    """Return the messages and prompts of a trace, each once, by their first place. Prompts of token
    ids are left out.

    Raises:
        FileNotFoundError, ValueError: there is no such file, a line cannot be read, or there is no
            text.
    """
    found: dict[str, str] = {}
    for file in find_files(paths)[0]:
        for _, (place, said) in read_file(file):
            if isinstance(said, BadLine):
                raise ValueError(f"{place}: {said}")
            if isinstance(said, LoggedRequest):
                for text in _texts(said):
                    found.setdefault(text, place)
    if not found:
        raise ValueError(f"{', '.join(map(str, paths))}: there is no text in these requests")
    return {
        f"{place}, text {number}": text for number, (text, place) in enumerate(found.items(), 1)
    }


def _texts(request: LoggedRequest) -> list[str]:
    if isinstance(request.prompt, Conversation):
        return [
            message["content"] for message in request.prompt.messages if message["content"].strip()
        ]
    return [request.prompt] if isinstance(request.prompt, str) else []
