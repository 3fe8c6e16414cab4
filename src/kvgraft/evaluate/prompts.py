"""Texts of segments, the last of which is the question, as a prompt: a line each."""

from collections.abc import Collection, Sequence

from kvgraft.segments.prompt import Part, Segment


def as_parts(segments: Sequence[str], reused: Collection[str] | None = None) -> list[Part]:
    """For the native engine: every part is tokenised on its own; those that are `reused` (None: all but the last) are
    marked as segments."""
    marked = segments[:-1] if reused is None else reused
    lines = [f"{segment}\n" for segment in segments[:-1]]
    return [*(Segment(line) if line[:-1] in marked else line for line in lines), segments[-1]]


def as_text(segments: Sequence[str]) -> str:
    """For a server."""
    return "\n".join(segments)
