"""Contents of a fleet's server as it reports them to routers."""

from kvgraft.core.text_contents import TextContents
from kvgraft.fleet.router_view import pack


class ReplicaContents(TextContents):
    """Fingerprints of the prompts that a server has read, with sketches for its reports."""

    _sketched: tuple[int, tuple[bytes, bytes]] | None = None

    def sketches(self) -> tuple[bytes, bytes]:
        """Return sketches (`router_view.pack`) of the fingerprints and of their chains."""
        if self._sketched is None or self._sketched[0] != self.version:
            held, begun = self.values()
            self._sketched = self.version, (pack(held), pack(begun))
        return self._sketched[1]
