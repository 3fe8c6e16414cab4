"""Offline measurements of a model, stored as JSON in the model's directory."""

from pathlib import Path
from typing import Self

import msgspec

# name of the file in a model directory
LAYERS_FILE = "layers.json"


class ModelProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A JSON file about one model.

    Attributes:
        model: fingerprint of the measured checkpoint (`ModelConfig.identity`).
    """

    model: str

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a file.

        Raises:
            FileNotFoundError, ValueError: there is no file, or it is not such a profile; the
                message says why.
        """
        if not Path(path).is_file():
            raise FileNotFoundError(f"no such file: {path}")
        try:
            return msgspec.json.decode(Path(path).read_bytes(), type=cls)
        except msgspec.DecodeError as error:
            raise ValueError(f"{path} is no {cls.describe()}: {error}") from error

    @classmethod
    def describe(cls) -> str:
        """Return the name of the profile in messages."""
        return "profile"

    def save(self, path: str | Path) -> None:
        """Write the profile as JSON, with one line per matrix row or record."""
        fields = []
        for name, value in msgspec.structs.asdict(self).items():
            is_matrix = (
                isinstance(value, tuple) and value and isinstance(value[0], tuple | msgspec.Struct)
            )
            rows = (
                ",\n  ".join(msgspec.json.encode(row).decode() for row in value)
                if is_matrix
                else ""
            )
            fields.append(
                f' "{name}": '
                + (f"[\n  {rows}\n ]" if rows else msgspec.json.encode(value).decode())
            )

        Path(path).write_text("{\n" + ",\n".join(fields) + "\n}\n")

    def check_model(self, model: str) -> None:
        """Raise ValueError unless the profile was made for this model."""
        if self.model != model:
            raise ValueError(
                f"the {self.describe()} was made for model {self.model[:12]}, this one is "
                f"{model[:12]}: profile it"
            )


class LayerProfile(ModelProfile, frozen=True, forbid_unknown_fields=True):
    """Layers that agree on the most important block of a text (SamKV, Appendix A.2, `kvgraft
    profile-layers`).

    Attributes:
        stable: N*, ascending.
        scores: for each layer, share of texts whose most important block stands out in it.
    """

    stable: tuple[int, ...]
    scores: tuple[float, ...] = ()

    @classmethod
    def describe(cls) -> str:
        return "layer profile"

    def check(self, model: str, num_layers: int) -> None:
        """Raise ValueError unless the profile was made for this model and is valid."""
        self.check_model(model)
        if not self.stable or sorted(set(self.stable)) != list(self.stable):
            raise ValueError(
                f"stable layers must be different numbers, ascending, got {list(self.stable)}"
            )
        if not 0 <= self.stable[0] <= self.stable[-1] < num_layers:
            raise ValueError(
                f"stable layers must be in 0..{num_layers - 1}, got {list(self.stable)}"
            )


def last_layers(num_layers: int) -> tuple[int, ...]:
    """Return the default N* of a model without a profile: the last eighth of its layers, at least
    one. The paper found this in three models.
    """
    return tuple(range(num_layers - max(1, num_layers // 8), num_layers))
