"""The documents that a host has read on their own, for policies that keep a part of them."""

import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvgraft.kv.documents import BlockCut, Document, DocumentStore
from kvgraft.prefill.context import Hidden
from kvgraft.prefill.documents.context import DocumentLayout, Placed
from kvgraft.prefill.documents.keeping import KeepsDocuments
from kvgraft.prefill.documents.partial import LayerHost, PartialPrefill
from kvgraft.prefill.documents.reading import read_document
from kvgraft.prefill.plan import Plan


class Library:
    """Gives documents by their tokens, and reads those that it does not have.

    Args:
        stable_layers: of the model (N*).
    """

    def __init__(self, store: DocumentStore, stable_layers: Sequence[int]) -> None:
        self.store = store
        self.stable_layers = tuple(stable_layers)

    def fetch(
        self,
        host: LayerHost,
        tokens: np.ndarray,
        scope: bytes,
        blocks: BlockCut,
        *,
        shared: Sequence[bytes] = (),
        remember: bool = True,
    ) -> tuple[Document, bool]:
        """The document of these tokens int64 [n], and whether it had to be read; that is remembered
        if it may be.

        Args:
            scope: of the prompt; what is read belongs to it.
            shared: others, whose documents it may have.
        """
        for known in (scope, *shared):
            if (document := self.store.get(tokens, known, blocks)) is not None:
                return document, False
        document = read_document(host, tokens, blocks)
        if remember:
            self.store.put(tokens, scope, blocks, document)
        return document, True

    def keep(
        self,
        host: LayerHost,
        policy: KeepsDocuments,
        plan: Plan,
        tokens: np.ndarray,
        documents: Sequence[range],
        scope: bytes,
        *,
        kept: Tensor | None = None,
        shared: Sequence[bytes] = (),
        remember: bool = True,
    ) -> tuple[PartialPrefill, Hidden, int]:
        """Prefill a prompt int64 [T] of which the policy keeps a part, `kept` bool [L, T] if it has
        chosen that before: what was done, the question's last states, and how many documents had to
        be read first."""
        started = time.perf_counter()
        layout, num_read = self.place(
            host, tokens, documents, scope, policy.blocks, shared=shared, remember=remember
        )
        room = policy.num_kept(layout.lengths) + int(plan.fresh.sum())
        ctx = PartialPrefill(host, plan, torch.from_numpy(tokens), layout, room, self.stable_layers)
        ctx.times.add("read", time.perf_counter() - started)
        return ctx, policy.keep(ctx, kept), num_read

    def place(
        self,
        host: LayerHost,
        tokens: np.ndarray,
        documents: Sequence[range],
        scope: bytes,
        blocks: BlockCut,
        *,
        shared: Sequence[bytes] = (),
        remember: bool = True,
    ) -> tuple[DocumentLayout, int]:
        """Where the documents of a prompt int64 [T] lie, and how many of them had to be read."""
        placed, num_read = [], 0
        for span in documents:
            mine = tokens[span.start : span.stop]
            document, was_read = self.fetch(
                host, mine, scope, blocks, shared=shared, remember=remember
            )
            placed.append(Placed(span.start, document))
            num_read += was_read
        return DocumentLayout(placed, blocks, len(tokens)), num_read
