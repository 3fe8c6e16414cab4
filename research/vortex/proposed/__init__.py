"""The sixty flows that three models proposed (Vortex, section 14), each as its description says.

Formulas are elided there, so each class says what was chosen where the words leave a choice.
Parameters, such as rates of averages, were set once, by hand, and never tuned. Each file is one
that users can name: `gpt.py:gpt_sub_block_peak`."""

from pathlib import Path

from kvgraft.flows import load_flows

ROOT = Path(__file__).parents[3]
FILES = tuple(
    Path(__file__).with_name(f"{model}.py").relative_to(ROOT) for model in ("opus", "sonnet", "gpt")
)
"""From the repository's root."""
PROPOSED = {name: f"{path}:{name}" for path in FILES for name in load_flows(ROOT / path)}
"""What names each flow there."""
