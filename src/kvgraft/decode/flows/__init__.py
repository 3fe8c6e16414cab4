"""The flows by name. A new flow is one file and one line here, or a file of the user's."""

from kvgraft.decode.flow import Flow
from kvgraft.decode.flows.block_topk import BlockTopK
from kvgraft.decode.flows.h2o import H2O
from kvgraft.decode.flows.quest import Quest
from kvgraft.decode.flows.streaming import Streaming

FLOWS: dict[str, type[Flow]] = {flow.name: flow for flow in (BlockTopK, Quest, H2O, Streaming)}
