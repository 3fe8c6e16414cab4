"""Conversion of GGUF files to Hugging Face directories, which the native engine and vLLM read."""

import json
from collections.abc import Iterator, Mapping
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

from gguf import GGUFReader
from safetensors.torch import save_file
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer

# by their names in GGUF files; Mistral models are named llama
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# end tokens of a text, a turn, a message
END_OF_ANSWER = ("eos", "eot", "eom")


def convert(gguf: Path, out: Path) -> None:
    """Write config.json, generation_config.json, model.safetensors (float32), tokenizer and chat
    template.

    Raises:
        ValueError: the file is not GGUF, has another architecture, or has data that the conversion
            would lose.
    """
    metadata, num_tensors = _read(gguf)
    architecture = str(metadata.get("general.architecture"))
    if architecture not in ARCHITECTURES:
        raise ValueError(
            f"GGUF architecture {architecture!r} is not supported: {', '.join(ARCHITECTURES)} are"
        )

    _refuse([*_left_out(metadata, architecture)])
    model, tokenizer = _load(gguf)
    tied = bool(model.config.tie_word_embeddings)
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if tied:
        del tensors["lm_head.weight"]
    if len(tensors) != num_tensors:
        _refuse([f"{num_tensors} tensors where {ARCHITECTURES[architecture]} has {len(tensors)}"])

    _set_add_bos(tokenizer, metadata.get("tokenizer.ggml.add_bos_token"))
    out.mkdir()
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    special = _special_ids(metadata)
    config = (
        model.config.to_dict()
        | {"architectures": [ARCHITECTURES[architecture]], "dtype": "float32"}
        | special
    )
    for name in ("quantization_config", "_name_or_path"):
        config.pop(name, None)

    (out / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    ends = [metadata.get(f"tokenizer.ggml.{end}_token_id") for end in END_OF_ANSWER]
    generation = special | {
        "eos_token_id": [*dict.fromkeys(int(end) for end in ends if end is not None)]
    }
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2), encoding="utf-8")
    tokenizer.save_pretrained(out)


def _read(gguf: Path) -> tuple[dict[str, Any], int]:
    """Return the metadata without its arrays, and the number of tensors."""
    try:
        reader = GGUFReader(gguf)
        fields = {name: field for name, field in reader.fields.items() if len(field.types) == 1}
        return {name: field.contents() for name, field in fields.items()}, len(reader.tensors)
    except Exception as error:  # the type depends on the bytes of the file
        raise ValueError(f"not a GGUF file that can be read: {error}") from error


def _left_out(metadata: Mapping[str, Any], architecture: str) -> Iterator[str]:
    """Yield the metadata that transformers ignores for these architectures, although it changes the
    model.
    """
    if experts := metadata.get(f"{architecture}.expert_count"):
        yield f"{experts} experts"
    if (scaling := metadata.get(f"{architecture}.rope.scaling.type", "none")) != "none":
        yield f"RoPE scaling {scaling!r}"
    window = metadata.get(f"{architecture}.attention.sliding_window")
    positions = metadata.get(f"{architecture}.context_length")
    if window and (positions is None or window < positions):
        yield f"a sliding window of {window} tokens"


def _refuse(reasons: list[str]) -> None:
    if reasons:
        raise ValueError(
            f"the model has {'; '.join(reasons)}: this is not supported, and would be lost"
        )


def _load(gguf: Path) -> tuple[Any, Any]:
    """Load model in float32 and tokenizer, without running code or downloading."""
    where, options = (
        str(gguf.parent),
        {"gguf_file": gguf.name, "local_files_only": True, "trust_remote_code": False},
    )
    try:
        with redirect_stderr(StringIO()):  # hides progress bars of transformers
            tokenizer = AutoTokenizer.from_pretrained(where, **options)
            model, found = AutoModelForCausalLM.from_pretrained(
                where, dtype="float32", output_loading_info=True, **options
            )
    except Exception as error:  # transformers raises errors of many types
        raise ValueError(f"transformers cannot read it: {error}") from error

    if missing := sorted(found["missing_keys"]):
        raise ValueError(
            f"{len(missing)} of its tensors are missing: {', '.join(missing[:3])}, ..."
        )

    return model, tokenizer


def _special_ids(metadata: Mapping[str, Any]) -> dict[str, int | None]:
    """Return special token ids for config.json. For GGUF files transformers uses its own
    defaults.
    """
    keys = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    found = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
    return {name: None if value is None else int(value) for name, value in found.items()}


def _set_add_bos(tokenizer: Any, add_bos: bool | None) -> None:
    """Configure whether the tokenizer puts the beginning-of-sequence token before a text, as the
    file says.
    """
    bos = tokenizer.bos_token_id
    if add_bos is None or bos is None or (tokenizer.encode("a")[:1] == [bos]) == bool(add_bos):
        return
    opening = f"{tokenizer.bos_token} " if add_bos else ""
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{opening}$A",
        pair=f"{opening}$A {opening}$B",
        special_tokens=[(tokenizer.bos_token, bos)],
    )
