"""How the prompts of agents nearly repeat, from step to step and from episode to episode."""

from dataclasses import dataclass
from typing import Literal, get_args

Order = Literal["oldest", "newest"]
ORDERS: tuple[Order, ...] = get_args(Order)
CONTEXT = 4608  # tokens of the bundled model
MAX_SEARCHES = 4  # and look-ups, in one episode
MAX_PASSAGES = 8
MIN_WORDS = 40
ROOM_BESIDE = 800  # words of a prompt beside the passages found
ROOM_AROUND = 16  # words for a passage's label, edits, and the end of its last sentence


@dataclass(frozen=True)
class Variation:
    """What differs between prompts that say the same.

    Attributes:
        edit_rate: words substituted, inserted or deleted in what an episode finds of a page or a
            tool's description, as a share of its words. Edits are in its filler, never in what
            answers need.
        changed_notes: share of the notes of the preamble to which an episode gives a number of its
            own.
        order: of the observations in the scratchpad.
        counter: prompts begin with the number of their step.
        relabel: the `doc 42 :` before a passage is drawn anew for every step.
        retrieve_tools: every step lists the tools that the episode needs in another order, with
            others beside them.
        num_passages: in an observation of a search or a look-up, the page in question among others.
        passage_words: least and most words of a page.

    Raises:
        ValueError: a value is out of range, or prompts would not fit the bundled model.
    """

    edit_rate: float = 0.005
    changed_notes: float = 0.5
    order: Order = "oldest"
    counter: bool = True
    relabel: bool = True
    retrieve_tools: bool = True
    num_passages: int = 4
    passage_words: tuple[int, int] = (140, 220)

    def __post_init__(self) -> None:
        for name in ("edit_rate", "changed_notes"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be in [0, 1], got {getattr(self, name)}")
        if self.order not in ORDERS:
            raise ValueError(f"unknown order {self.order!r}: choose from {', '.join(ORDERS)}")
        if not 1 <= self.num_passages <= MAX_PASSAGES:
            raise ValueError(f"num_passages must be 1 to {MAX_PASSAGES}, got {self.num_passages}")
        least, most = self.passage_words
        if not MIN_WORDS <= least <= most:
            raise ValueError(
                f"passage_words must be two numbers from {MIN_WORDS}, in order, got "
                f"{self.passage_words}"
            )
        length = ROOM_BESIDE + MAX_SEARCHES * self.num_passages * (most + ROOM_AROUND)
        if length > CONTEXT:
            raise ValueError(
                f"num_passages {self.num_passages} of {most} words make prompts of up to {length} "
                "tokens, "
                f"at most {CONTEXT} are allowed"
            )
