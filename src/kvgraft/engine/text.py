"""From token ids to text: the model's tokenizer, and decoding one token at a time."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from kvgraft.segments.prompt import Part, Segment

# what a decoder shows for the bytes of an unfinished character
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


def load_tokenizer(model_dir: str | Path) -> Any:
    """The transformers tokenizer of a model directory; neither its code nor the network is used.

    Raises:
        FileNotFoundError: there is no such directory.
        ValueError: the directory holds no tokenizer that transformers can load; the message says
            why.
    """
    if not Path(model_dir).is_dir():
        raise FileNotFoundError(f"{model_dir} is not a directory")
    try:
        return AutoTokenizer.from_pretrained(
            str(model_dir), local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"no usable tokenizer in {model_dir}: {error}") from error


def opening_ids(tokenizer: Any, prompt: str | Sequence[Part] | Sequence[int]) -> list[int]:
    """The special tokens that the tokenizer itself puts before a text, as a beginning-of-sequence
    token.

    None before token ids, which are taken as they are, nor before a text that already begins with
    that token, as a rendered chat template may."""
    first = prompt if isinstance(prompt, str) else prompt[0] if len(prompt) else ""
    text = first.text if isinstance(first, Segment) else first
    if not isinstance(text, str) or (tokenizer.bos_token and text.startswith(tokenizer.bos_token)):
        return []
    bare, whole = (tokenizer.encode("a", add_special_tokens=special) for special in (False, True))
    return whole[: -len(bare)] if bare and whole[-len(bare) :] == bare else []


def anchor_ids(tokenizer: Any, anchors: Iterable[str]) -> list[list[int]]:
    """The tokens of anchors as they stand in a text, of those that the vocabulary has words for."""
    found = (tokenizer.encode(anchor, add_special_tokens=False) for anchor in anchors)
    return [ids for ids in found if ids and tokenizer.unk_token_id not in ids]


class IncrementalText:
    """The text of a growing token sequence, given out as soon as it is certain and ended by a stop
    string.

    Attributes:
        text: all text given out so far; it never contains a stop string.
        stopped: a stop string was found; nothing is given out any more.
    """

    def __init__(self, tokenizer: Any, stop: tuple[str, ...] = ()) -> None:
        self.text = ""
        self.stopped = False
        self._tokenizer = tokenizer
        self._stop = stop
        # Two tokens in a row may decode differently than each alone (spaces, bytes of one
        # character), so a window is decoded: [0, _num_given) gives context and is already text, the
        # rest is not complete yet.
        self._window: list[int] = []
        self._num_given = 0
        self._held = ""  # complete text that may be the beginning of a stop string

    def push(self, token_id: int) -> str:
        """Add one token; returns the text that became certain: no half character, no begun stop
        string."""
        self._window.append(token_id)
        fresh = self._undecided()
        if not fresh or fresh.endswith(_INCOMPLETE):
            return ""
        self._window, self._num_given = (
            self._window[self._num_given :],
            len(self._window) - self._num_given,
        )
        return self._give(fresh, final=False)

    def flush(self) -> str:
        """At the end of generation: returns what was held back, with U+FFFD for the bytes of a half
        character."""
        fresh = self._undecided()
        self._num_given = len(self._window)
        return self._give(fresh, final=True)

    def _undecided(self) -> str:
        given = self._decode(self._window[: self._num_given])
        return self._decode(self._window)[len(given) :]

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)

    def _give(self, fresh: str, final: bool) -> str:
        if self.stopped:
            return ""
        text = self._held + fresh
        stops = [
            (start + len(stop), start) for stop in self._stop if (start := text.find(stop)) >= 0
        ]
        if stops:
            self.stopped = True
            cut = min(stops)[1]  # the stop string that is complete first, however the text arrives
        else:
            cut = len(text) if final else len(text) - self._num_begun(text)
        self._held = text[cut:]
        self.text += text[:cut]
        return text[:cut]

    def _num_begun(self, text: str) -> int:
        """Length of the longest end of `text` with which a stop string begins."""
        longest = max(map(len, self._stop), default=1) - 1
        return next(
            (n for n in range(min(longest, len(text)), 0, -1) if self._begins_stop(text[-n:])), 0
        )

    def _begins_stop(self, ending: str) -> bool:
        return any(stop.startswith(ending) for stop in self._stop)
