"""Documents that a host has read on their own, for policies that keep a part of them."""

import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvgraft.core.plan import Plan
from kvgraft.kv.documents import BlockCut, Document, DocumentStore
from kvgraft.prefill.context import Hidden
from kvgraft.prefill.documents.context import DocumentLayout, Placed
from kvgraft.prefill.documents.keeping import KeepsDocuments
from kvgraft.prefill.documents.partial import LayerHost, PartialPrefill
from kvgraft.prefill.documents.reading import read_document


class Library:
    """Returns documents by their tokens, and reads those that it does not have.

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
        """Return the document of these tokens int64 [n], and whether it had to be read.

        Args:
            scope: scope of the prompt, which owns documents that are read.
            shared: other scopes whose documents it may use.
            remember: store a document that was read.
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
        """Prefill a prompt int64 [T] whose documents the policy keeps in part.

        Args:
            kept: bool [L, T], the policy's earlier choice for this prompt, or None.

        Returns:
            The pass, the last states of the question, and the number of documents that had to be
                read.
        """
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
        """Return the layout of the documents of a prompt int64 [T], and the number of documents
        that had to be read."""
        placed, num_read = [], 0
        for span in documents:
            mine = tokens[span.start : span.stop]
            document, was_read = self.fetch(
                host, mine, scope, blocks, shared=shared, remember=remember
            )
            placed.append(Placed(span.start, document))
            num_read += was_read
        return DocumentLayout(placed, blocks, len(tokens)), num_read
