"""Tokenisation of prompts, and checks against the model's limits."""

from collections.abc import Sequence
from typing import Any

from kvgraft.core.prompt import TokenisedPrompt, split_at_anchors, tokenise
from kvgraft.engine.request import Request, check_forced_output
from kvgraft.engine.text import opening_ids


class PromptReader:
    """A model's tokenizer and its limits.

    Args:
        anchors: strings that begin a segment wherever they occur in a text prompt.
        block_size: pad explicit segments to blocks of this number of tokens; None does not pad.
        max_length: tokens of a prompt and its answer together.

    Raises:
        ValueError: padding without a pad token, or empty anchors.
    """

    def __init__(
        self,
        tokenizer: Any,
        anchors: Sequence[str],
        block_size: int | None,
        vocab_size: int,
        max_length: int,
    ) -> None:
        self.tokenizer = tokenizer
        self.anchors = tuple(anchors)
        self._padding: dict[str, int] = {}
        if block_size is not None:
            if tokenizer.pad_token_id is None:
                raise ValueError(
                    "pad_segments needs a tokenizer with a pad token, and this one has none"
                )
            self._padding = {"block_size": block_size, "pad_id": tokenizer.pad_token_id}
        self._vocab_size = vocab_size
        self._max_length = max_length

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens."""
        return self.tokenizer.encode(text, add_special_tokens=False)

    def read(self, request: Request) -> TokenisedPrompt:
        """Return the tokens of a prompt; ValueError if it can never be served."""
        prompt = request.prompt
        if self.anchors and isinstance(prompt, str):
            prompt = split_at_anchors(prompt, self.anchors)

        prefix = opening_ids(self.tokenizer, prompt)
        tokenised = tokenise(prompt, self.encode, prefix_ids=prefix, **self._padding)
        tokens = tokenised.token_ids
        if not isinstance(request.namespace, str):
            raise ValueError(f"namespace must be a string, got {request.namespace!r}")

        least, most = tokens.min(), tokens.max()
        if least < 0 or most >= self._vocab_size:
            raise ValueError(f"token ids must be in 0..{self._vocab_size - 1}, got {least}..{most}")
        if len(tokens) + request.sampling.max_tokens > self._max_length:
            raise ValueError(
                f"{len(tokens)} prompt tokens and {request.sampling.max_tokens} to generate exceed "
                f"the limit of {self._max_length}"
            )

        check_forced_output(request, self._vocab_size)
        return tokenised
