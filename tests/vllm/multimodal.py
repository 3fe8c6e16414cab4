"""Write tiny random checkpoints of multimodal families, with their processors.

    python tests/vllm/multimodal.py "Gemma 3 with images" DIRECTORY

transformers and vLLM need torchvision for these. `make .venv-vision/.ready` installs it beside the
environment, where only the processes that want it find it: see `vision/sitecustomize.py`.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "vllm")]

import torch  # noqa: E402
import transformers  # noqa: E402
from families import FAMILIES as TEXT_FAMILIES  # noqa: E402
from families import GEMMA, GEMMA3_ROPE, SIZES  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

from models import VOCAB_SIZE, make_tokenizer  # noqa: E402

PLACE = TESTS.parent / ".venv-vision"
# of the processes that make and run these models
PYTHONPATH = f"{PLACE}:{TESTS / 'vllm' / 'vision'}"
# pixels of an image
IMAGE = 28
# words that stand for images, behind the ordinary ones that prompts of tests hold
WORDS = (
    "\n", "\n\n", "\n\n\n", "\n\n\n\n", "<image>", "<begin>", "<end>", "<break>", "<video>",
    "<patch>",
)  # fmt: skip
IDS = {word: VOCAB_SIZE - 3 + place for place, word in enumerate(WORDS)}
TEXT = SIZES | {"vocab_size": VOCAB_SIZE + len(WORDS)}
VISION = {"hidden_size": 32, "intermediate_size": 48}
QWEN_VISION = VISION | {
    "depth": 2, "num_heads": 2, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2,
    "out_hidden_size": SIZES["hidden_size"],
}  # fmt: skip
QWEN_IDS = {
    "image_token_id": IDS["<image>"], "video_token_id": IDS["<video>"],
    "vision_start_token_id": IDS["<begin>"], "vision_end_token_id": IDS["<end>"],
}  # fmt: skip
QWEN3_VISION = QWEN_VISION | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
M_ROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6]}
# name -> model type, text config beside SIZES, vision config, other config, word of an image
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any], str]] = {
    "Gemma 3 with images": (
        "gemma3",
        GEMMA | {"layer_types": ["sliding_attention"] * 3 + ["full_attention"],
                 "rope_parameters": GEMMA3_ROPE},
        VISION | {"num_hidden_layers": 2, "num_attention_heads": 2, "image_size": IMAGE,
                  "patch_size": 14},
        {"mm_tokens_per_image": 4, "image_token_index": IDS["<image>"],
         "boi_token_index": IDS["<begin>"], "eoi_token_index": IDS["<end>"]},
        "<begin>",
    ),
    "Mistral 3 with images": (
        "mistral3",
        {"sliding_window": None, "hidden_size": 128},
        VISION | {"num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 16,
                  "image_size": IMAGE, "patch_size": 7},
        {"image_token_index": IDS["<image>"], "spatial_merge_size": 2},
        "<image>",
    ),
    "Qwen2.5-VL": (
        "qwen2_5_vl",
        {"hidden_size": 128, "rope_parameters": M_ROPE},
        QWEN_VISION | {"out_hidden_size": 128, "window_size": 56, "fullatt_block_indexes": [1]},
        QWEN_IDS,
        "<image>",
    ),
    "Qwen3-VL": (
        "qwen3_vl",
        {"rope_parameters": M_ROPE | {"mrope_interleaved": True}},
        QWEN3_VISION,
        QWEN_IDS,
        "<image>",
    ),
    "Llama 4 with images": (
        "llama4",
        TEXT_FAMILIES["Llama 4"][1],
        {"hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 2,
         "num_attention_heads": 2, "image_size": IMAGE, "patch_size": 14,
         "projector_input_dim": 48, "projector_output_dim": 48, "vision_output_dim": 48},
        {"image_token_index": IDS["<patch>"], "boi_token_index": IDS["<begin>"],
         "eoi_token_index": IDS["<end>"]},
        "<image>",
    ),
}  # fmt: skip
# their images end vLLM 0.32 on CPUs: a tensor of its vision attention has a wrong layout
TEXT_ONLY = ("Llama 4 with images",)
WINDOWED = ("Gemma 3 with images", "Llama 4 with images")


def make(name: str, directory: Path) -> None:
    """Write a checkpoint: random weights whose answers depend on text and image."""
    torch.manual_seed(0)
    kind, text, vision, others, _ = FAMILIES[name]
    config = transformers.AutoConfig.for_model(
        kind, text_config=TEXT | text, vision_config=vision, **others
    )
    model = transformers.AutoModelForImageTextToText.from_config(config)
    for part, parameter in model.named_parameters():
        if part.endswith("bias") or "norm" in part:
            parameter.data += 0.1 * torch.randn_like(parameter)
    if name.startswith("Gemma"):
        model.get_input_embeddings().weight.data *= 0.1
    model.float().save_pretrained(directory)
    _processor(kind).save_pretrained(directory)
    if kind == "gemma3":
        _rename(directory / "model.safetensors", "vision_tower.", "vision_tower.vision_model.")


def image_token(name: str) -> int | None:
    """Return the token that stands for an image; None if images cannot be tested."""
    return None if name in TEXT_ONLY else IDS[FAMILIES[name][4]]


def make_apart(name: str, directory: Path) -> None:
    """Write a checkpoint, in a process that finds torchvision.

    Raises:
        FileNotFoundError: torchvision was not installed for the tests.
    """
    if not PLACE.is_dir():
        raise FileNotFoundError(f"{PLACE}: run make {PLACE.name}/.ready")
    subprocess.run(
        [sys.executable, __file__, name, str(directory)],
        env=os.environ | {"PYTHONPATH": PYTHONPATH},
        check=True,
    )


def run(script: Path, job: dict[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
    """Return what a script answers in JSON to a job, in a process that finds torchvision."""
    done = subprocess.run(
        [sys.executable, str(script)],
        input=json.dumps(job),
        env=os.environ | environment | {"PYTHONPATH": PYTHONPATH},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _rename(file: Path, before: str, after: str) -> None:
    """Give tensors the prefix that they have in published checkpoints."""
    save_file(
        {name.replace(before, after): tensor for name, tensor in load_file(file).items()},
        file,
        {"format": "pt"},
    )


def _tokenizer(named: dict[str, str]) -> Any:
    described = json.loads(make_tokenizer(TEXT["vocab_size"]).backend_tokenizer.to_str())
    vocabulary = described["model"]["vocab"]
    for word, number in IDS.items():
        del vocabulary[f"w{number}"]
        vocabulary[word] = number
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(described)),
        bos_token="<bos>", eos_token="<eos>", unk_token="<unk>", extra_special_tokens=named,
    )  # fmt: skip


def _processor(kind: str) -> Any:
    size = {"height": IMAGE, "width": IMAGE}
    if kind == "gemma3":
        named = {"boi_token": "<begin>", "eoi_token": "<end>", "image_token": "<image>"}
        return transformers.Gemma3Processor(
            transformers.Gemma3ImageProcessor(size=size), _tokenizer(named), image_seq_length=4
        )
    if kind == "mistral3":
        images = transformers.PixtralImageProcessor(
            size={"longest_edge": IMAGE}, patch_size={"height": 7, "width": 7}
        )
        return transformers.PixtralProcessor(
            images, _tokenizer({}), patch_size=7, spatial_merge_size=2, image_token="<image>",
            image_break_token="<break>", image_end_token="<end>",
        )  # fmt: skip
    if kind == "llama4":
        images = transformers.Llama4ImageProcessor(size=size, max_patches=1)
        return transformers.Llama4Processor(
            images, _tokenizer({}), patch_size=14, image_token="<image>",
            fake_image_token="<image>", start_of_image_token="<begin>",
            end_of_image_token="<end>", patch_token="<patch>", tile_x_separator_token="<break>",
            tile_y_separator_token="<video>",
        )  # fmt: skip
    named = {
        "image_token": "<image>", "video_token": "<video>", "vision_bos_token": "<begin>",
        "vision_eos_token": "<end>",
    }  # fmt: skip
    sizes = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2}
    pixels = {"min_pixels": IMAGE * IMAGE, "max_pixels": 4 * IMAGE * IMAGE}
    images = transformers.Qwen2VLImageProcessor(**sizes, **pixels)
    if kind == "qwen2_5_vl":
        videos = transformers.Qwen2VLVideoProcessor(**sizes, **pixels)
        return transformers.Qwen2_5_VLProcessor(images, _tokenizer(named), videos)
    videos = transformers.Qwen3VLVideoProcessor(**sizes)
    return transformers.Qwen3VLProcessor(images, _tokenizer(named), videos)


if __name__ == "__main__":
    make(sys.argv[1], Path(sys.argv[2]))
