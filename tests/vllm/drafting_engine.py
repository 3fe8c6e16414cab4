"""An engine with our connector that drafts with a model: one job as JSON on stdin, its answers as
the last line.

    {"model": directory, "speculative_config": of vLLM, or null, "read": [token ids], "prompt": token ids,
     "options": [kvgraft options]}

The prompt is asked with each of the options, in a namespace of its own that has read what is to be
read; the answers are a list of {tokens, grafted, accepted, drafted, draft}: how many tokens were
drafted, and the keys and values of the draft model [2 L, T - 1, H d] of all but the prompt's last
token when its answer begins. All that nobody may find is poisoned first, in the draft model's
layers, too."""

import json
import os
import sys
from pathlib import Path
from typing import IO, Any

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "vllm")]

from engines import NUM_BLOCKS, Ask, as_answer  # noqa: E402
from hosts import Host  # noqa: E402


class DraftingHost(Host):
    """Also its draft model."""

    @property
    def draft_layers(self) -> range:
        """Its layers, behind the model's."""
        return range(self.model.num_layers, len(self.model.attentions))

    def poison_drafts(self) -> None:
        """Leave something in the draft model's layers, of nobody."""
        slots = self.slots_of(set(range(1, NUM_BLOCKS + 1)) - self.blocks_with_content())
        for layer in self.draft_layers:
            keys, values = self.model.read(layer, slots)
            self.model.write(layer, keys.fill_(3.0), values.fill_(-3.0), slots)

    def answer(self, ask: Ask) -> dict[str, Any]:
        """As the module says."""
        self.poison_drafts()
        accepted, drafted = self.num_accepted, self.num_drafted
        name = self.add(ask)
        self.step_until(
            lambda: name in self.outputs and bool(self.outputs[name].outputs[0].token_ids)
        )
        slots = self.slots(name)[: len(ask.prompt) - 1]
        layers = [
            states.flatten(1).tolist()
            for layer in self.draft_layers
            for states in self.model.read(layer, slots)
        ]
        self.finish(name)
        answer = as_answer(self.outputs[name])
        return {
            "tokens": answer.tokens,
            "grafted": answer.grafted,
            "accepted": self.num_accepted - accepted,
            "drafted": self.num_drafted - drafted,
            "draft": layers,
        }


def main(answers: IO[str]) -> None:
    job = json.load(sys.stdin)
    # prompts in one step
    settings = {"speculative_config": job["speculative_config"], "max_num_batched_tokens": 512}
    host = DraftingHost(Path(job["model"]), **settings)
    found = []
    for number, options in enumerate(job["options"]):
        host.read(*job["read"], salt=str(number))
        found.append(host.answer(Ask(job["prompt"], options, str(number), max_tokens=60)))
    host.settle()
    if problems := host.problems():
        raise AssertionError(problems)
    print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints is no answer
    main(output)
