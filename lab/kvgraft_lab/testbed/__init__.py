"""A small bundled language model and its training tasks.

The model (8 layers, 475 words, up to 4608 tokens) answers questions that need one fact, or several
facts from different places in its prompt. Its answers show whether reused KV has the same meaning
as freshly computed KV.
"""

from pathlib import Path

MODEL_DIR: Path = Path(__file__).parent / "model"
"""Directory of the bundled model: configuration, tokenizer and weights in the Hugging Face
format."""


def is_testbed(model: Path) -> bool:
    """Return whether a model directory has the bundled model's tokenizer, which reads no English.

    This is so for the bundled model, its copies, and models trained from it.
    """
    tokenizer = model / "tokenizer.json"
    return (
        tokenizer.is_file()
        and tokenizer.read_bytes() == (MODEL_DIR / "tokenizer.json").read_bytes()
    )
