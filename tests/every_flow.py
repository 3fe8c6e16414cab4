"""Every flow of the project, as users name it: those of the package, and those that research/vortex
holds in files."""

from collections.abc import Mapping

from kvgraft.decode.flow import Flow
from kvgraft.flows import FLOWS, load_flows
from research.vortex.proposed import FILES, PROPOSED, ROOT

EVERY_FLOW: Mapping[str, type[Flow]] = {
    **FLOWS,
    **{n: f for path in FILES for n, f in load_flows(ROOT / path).items()},
}
NAMED: Mapping[str, str] = {name: name for name in FLOWS} | {
    name: f"{ROOT}/{text}" for name, text in PROPOSED.items()
}
"""By the flow's own name."""
CHANNELS = f"{ROOT}/research/vortex/channels.py"
