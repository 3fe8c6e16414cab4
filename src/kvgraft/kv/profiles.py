"""What is measured of a model offline and lies beside its weights as JSON."""

from pathlib import Path
from typing import Self

import msgspec

LAYERS_FILE = "layers.json"  # in a model directory


class ModelProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A JSON file about one model.

    Attributes:
        model: fingerprint of the checkpoint that it was made for (`ModelConfig.identity`).
    """

    model: str

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a file.

        Raises:
            FileNotFoundError, ValueError: there is none, or it is no such profile; the message says
                why.
        """
        if not Path(path).is_file():
            raise FileNotFoundError(f"no such file: {path}")
        try:
            return msgspec.json.decode(Path(path).read_bytes(), type=cls)
        except msgspec.DecodeError as error:
            raise ValueError(f"{path} is no {cls.describe()}: {error}") from error

    @classmethod
    def describe(cls) -> str:
        """What messages call it."""
        return "profile"

    def save(self, path: str | Path) -> None:
        """Write it as JSON, a row of a matrix or a record a line."""
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
        """Raise ValueError unless it was made for this model."""
        if self.model != model:
            raise ValueError(
                f"the {self.describe()} was made for model {self.model[:12]}, this one is "
                f"{model[:12]}: profile it"
            )


class LayerProfile(ModelProfile, frozen=True, forbid_unknown_fields=True):
    """Which layers agree on what is important in a text (SamKV, Appendix A.2, `kvgraft
    profile-layers`).

    Attributes:
        stable: N*, ascending.
        scores: of every layer the share of texts whose most important block stands out there.
    """

    stable: tuple[int, ...]
    scores: tuple[float, ...] = ()

    @classmethod
    def describe(cls) -> str:
        return "layer profile"

    def check(self, model: str, num_layers: int) -> None:
        """Raise ValueError unless it was made for this model and can be used."""
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
    """N* of a model that nobody has profiled: the last eighth, at least one, as the paper found it
    in three models."""
    return tuple(range(num_layers - max(1, num_layers // 8), num_layers))
