"""Texts of segments, the last of which is the question, as a prompt: a line each."""

from collections.abc import Sequence

from kvgraft.segments.prompt import Part, Segment


def as_parts(segments: Sequence[str]) -> list[Part]:
    """For the native engine, which tokenises every segment but the last on its own."""
    return [*(Segment(f"{segment}\n") for segment in segments[:-1]), segments[-1]]


def as_text(segments: Sequence[str]) -> str:
    """For a server."""
    return "\n".join(segments)
