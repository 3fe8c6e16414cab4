"""The trained model as a Hugging Face directory that transformers and vLLM load: weights,
tokenizer, chat template."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedTokenizerFast

from kvgraft_lab.testbed import vocabulary

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message.role not in ('system', 'user', 'assistant', 'tool') -%}"
    "{{ raise_exception('unknown role ' ~ message.role ~ ': system, user, assistant and tool are "
    "known') }}"
    "{%- endif -%}"
    "{{ '<' ~ message.role ~ '> : ' ~ message.content ~ (' <eos> ' if message.role == 'assistant' "
    "else ' ') }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<assistant> :' }}{%- endif -%}"
)


def make_tokenizer(max_tokens: int) -> PreTrainedTokenizerFast:
    """One token a word, separated by white space; words it does not know become `<unk>`."""
    words = {word: number for number, word in enumerate(vocabulary.VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))  # noqa: S106 - a token of a text
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = dict(
        zip(("pad_token", "bos_token", "eos_token", "unk_token"), vocabulary.SPECIAL, strict=False)
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **special,
        additional_special_tokens=list(vocabulary.SPECIAL[len(special) :]),
        chat_template=CHAT_TEMPLATE,
        model_max_length=max_tokens,
        clean_up_tokenization_spaces=False,
    )


def export(weights: Path, config: PreTrainedConfig, directory: Path) -> None:
    """Write the weights of a checkpoint file, in bfloat16, and all that a server needs beside
    them."""
    model = AutoModelForCausalLM.from_config(config)
    state = load_file(weights)
    model.load_state_dict(
        {
            name.removeprefix("model."): tensor
            for name, tensor in state.items()
            if name.startswith("model.")
        },
        strict=False,  # the output weights are the embeddings
    )
    model.to(torch.bfloat16).save_pretrained(directory)
    make_tokenizer(model.config.max_position_embeddings).save_pretrained(directory)
