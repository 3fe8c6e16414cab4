"""The sixty flows that three models proposed (Vortex, section 14), each as its description says.

Formulas are elided there, so each class says what was chosen where the words leave a choice. Parameters, such as rates
of averages, were set once, by hand, and never tuned.
"""

from kvgraft.decode.flow import Flow
from kvgraft.decode.flows.proposed import gpt, opus, sonnet
from kvgraft.decode.flows.proposed.motifs import Scored

PROPOSED: tuple[type[Flow], ...] = tuple(
    found
    for module in (opus, sonnet, gpt)
    for found in vars(module).values()
    if isinstance(found, type) and issubclass(found, Scored) and found is not Scored
)
