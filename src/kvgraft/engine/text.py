"""Tokenizer of a model, and incremental decoding of token ids to text."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from kvgraft.core.prompt import Part, Segment

# A decoder returns this for the bytes of an unfinished character.
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


def load_tokenizer(model_dir: str | Path) -> Any:
    """Load the transformers tokenizer of a model directory, without its code and without the
    network.

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
    """Return the special tokens that the tokenizer puts before a text, such as
    beginning-of-sequence.

    Returns an empty list for token ids, which are used unchanged, and for a text that already
    begins with that token, as a rendered chat template may.
    """
    first = prompt if isinstance(prompt, str) else prompt[0] if len(prompt) else ""
    text = first.text if isinstance(first, Segment) else first
    if not isinstance(text, str) or (tokenizer.bos_token and text.startswith(tokenizer.bos_token)):
        return []
    bare, whole = (tokenizer.encode("a", add_special_tokens=special) for special in (False, True))
    return whole[: -len(bare)] if bare and whole[-len(bare) :] == bare else []


def anchor_ids(tokenizer: Any, anchors: Iterable[str]) -> list[list[int]]:
    """Return the token ids of each anchor. Anchors with unknown tokens are left out."""
    found = (tokenizer.encode(anchor, add_special_tokens=False) for anchor in anchors)
    return [ids for ids in found if ids and tokenizer.unk_token_id not in ids]


class IncrementalText:
    """The text of a growing token sequence. Text is released as soon as it is final, and ends at a
    stop string.

    Attributes:
        text: all text released so far; it never contains a stop string.
        stopped: a stop string was found; no more text is released.
    """

    def __init__(self, tokenizer: Any, stop: tuple[str, ...] = ()) -> None:
        self.text = ""
        self.stopped = False
        self._tokenizer = tokenizer
        self._stop = stop
        # Two tokens in a row may decode differently than each alone (spaces, bytes of one
        # character), so a window of tokens is decoded. Its first _num_given tokens are context
        # whose text was already released; the text of the rest is not complete yet.
        self._window: list[int] = []
        self._num_given = 0
        self._held = ""  # complete text that may be the beginning of a stop string

    def push(self, token_id: int) -> str:
        """Add one token. Return the text that became final: no half character and no partial stop
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
        """Return the text that was held back, at the end of generation, with U+FFFD for the bytes
        of a half character."""
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
            # The stop string that ends first wins, so results do not depend on how text arrives.
            cut = min(stops)[1]
        else:
            cut = len(text) if final else len(text) - self._num_begun(text)

        self._held = text[cut:]
        self.text += text[:cut]
        return text[:cut]

    def _num_begun(self, text: str) -> int:
        """Length of the longest suffix of `text` that is a prefix of a stop string."""
        longest = max(map(len, self._stop), default=1) - 1
        return next(
            (n for n in range(min(longest, len(text)), 0, -1) if self._begins_stop(text[-n:])), 0
        )

    def _begins_stop(self, ending: str) -> bool:
        return any(stop.startswith(ending) for stop in self._stop)
