"""The policy `auto` inside vLLM: each prompt is recovered by the policy for its context."""

from engines import words
from jobs import graft

FIRST, SECOND = words(320, 21), words(320, 22)
READ = [*words(40, 23), *FIRST, *SECOND]
MOVED = [*words(60, 24), *FIRST, *SECOND, *words(9, 25)]
SWAPPED = [*words(60, 24), *SECOND, *FIRST, *words(9, 25)]
SAME, NEW = "naive", "spread:recompute_share=0.2"
OPTIONS = [
    {"policy": f"auto:same_context={SAME},new_context={NEW}"},
    {"policy": SAME},
    {"policy": NEW},
    {"reuse": "off"},
]


def test_a_prompt_is_recovered_by_the_policy_for_its_context():
    engine = {"num_gpu_blocks_override": 200}
    moved, swapped = graft([MOVED, SWAPPED], OPTIONS, [READ], engine=engine, max_depth=0)
    for (auto, naive, spread, off), context in ((moved, "same"), (swapped, "new")):
        chosen, other = (naive, spread) if context == "same" else (spread, naive)
        assert auto["logprobs"] == chosen["logprobs"]
        assert auto["logprobs"] != other["logprobs"]
        report = auto["report"]
        assert report["grafted_tokens"] > 600
        assert report["recomputed_tokens"] == chosen["report"]["recomputed_tokens"]
        assert report["recovered_by"].split(":")[0] == {"same": "naive", "new": "spread"}[context]
        assert [one["report"]["recovered_by"] for one in (naive, spread, off)] == [None] * 3
