"""Draft model of speculative decoding.

Its keys and values have layers of their own under the same block tables as the model's. They never
change an answer, only which tokens are proposed.
"""

from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata

from kvgraft.kv.rope import Rope


class Drafter:
    """vLLM's drafter, as recoveries use it.

    Args:
        runner: vLLM's model runner, V1.

    Attributes:
        attentions: attention layers of the draft model.
        rope: rotary frequencies of the draft model.
        takes_hidden: True if the draft model reads hidden states of the model.
        entering: layers of the model whose input the drafter reads as hidden states (EAGLE-3). The
            number of layers stands for the output of the last one.
    """

    def __init__(self, runner: Any) -> None:
        self._proposer = runner.drafter
        self._config: VllmConfig = runner.vllm_config
        self._names = sorted(self._proposer._draft_attn_layer_names)
        layers = self._config.compilation_config.static_forward_context
        self.attentions = [layers[name] for name in self._names]
        self.rope = draft_rope(self._config)
        self.takes_hidden = bool(self._proposer.pass_hidden_states_to_model)
        uses_entering = runner.use_aux_hidden_state_outputs
        self.entering = (
            tuple(runner.get_model().model.aux_hidden_state_layers) if uses_entering else ()
        )

    def inputs_of(self, token_ids: Tensor, where: Tensor) -> Tensor:
        """Return the token ids int64 [n] that the drafter reads where `where` bool [T] is set.

        With hidden states these are the tokens one position further.
        """
        return (token_ids.roll(-1) if self.takes_hidden else token_ids)[where]

    def run(
        self,
        token_ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        common: CommonAttentionMetadata,
        hidden: Tensor | None,
    ) -> None:
        """Write the draft model's keys and values of n tokens to their slots.

        Args:
            token_ids, positions, slots: int64 [n].
            common: vLLM's attention metadata of the tokens.
            hidden: hidden states of the model, [n, D] or of several layers [n, m D]; None if
                unused.
        """
        metadata = {
            name: group.get_metadata_builder().build(0, common, fast_build=True)
            for group in self._proposer.draft_attn_groups
            for name in group.layer_names
        }
        given: dict[str, Tensor] = {"input_ids": token_ids.to(torch.int32), "positions": positions}
        model = self._proposer.model
        if hidden is not None:
            given["hidden_states"] = (
                model.combine_hidden_states(hidden) if self.entering else hidden
            )

        with set_forward_context(
            metadata,
            self._config,
            num_tokens=slots.numel(),
            slot_mapping=dict.fromkeys(self._names, slots),
            skip_compiled=True,
        ):
            model(**given)


def has_draft_model(config: VllmConfig) -> bool:
    """Return True if drafts are made by layers with keys and values of their own."""
    speculation = config.speculative_config
    return speculation is not None and (speculation.use_eagle() or speculation.uses_draft_model())


def draft_rope(config: VllmConfig) -> Rope:
    """Return the draft model's rotary frequencies.

    Raises:
        ValueError: they are not static.
    """
    model = config.speculative_config.draft_model_config
    return Rope.from_parameters(model.get_head_size(), model.hf_text_config.rope_parameters)
