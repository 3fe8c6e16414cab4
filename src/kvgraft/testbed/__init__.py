"""A small bundled language model and the tasks that it was trained on.

The model (8 layers, 475 words, up to 4608 tokens) answers questions that need one fact, or several
facts from different places in its prompt. Its answers tell whether reused KV still means what
freshly computed KV means."""

from pathlib import Path

MODEL_DIR: Path = Path(__file__).parent / "model"
"""Directory of the bundled model: configuration, tokenizer and weights in the Hugging Face
format."""
