"""The list of models (`/v1/models`), without paths of the host."""

from pathlib import Path
from typing import Any


def hide_paths(models: Any) -> None:
    """Make `/v1/models` give the name of a model or adapter where vLLM gives its path on this
    machine (`root`). An address that is no local path stays.

    Args:
        models: vLLM's `OpenAIServingModels`.
    """
    show = models.show_available_models

    async def show_names() -> Any:
        found = await show()
        for card in found.data:
            path = Path(card.root)
            if path.is_absolute() or path.exists():
                card.root = card.id
        return found

    models.show_available_models = show_names
