"""Residual streams beside vLLM's cache: what is kept of a cached token stays what it was while
others come and go."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from engines import BLOCK, NUM_BLOCKS, Ask, words
from hosts import Host
from torch import Tensor

from kvgraft.vllm.compat.residuals import ResidualStreams

EXITS = (1, 2)
SHARED, OTHERS = words(12 * BLOCK, 1), words(12 * BLOCK, 2)
DOCUMENTS = [words(9 * BLOCK, 3), words(6 * BLOCK, 4), words(8 * BLOCK, 5)]
PROMPT = words(21, 6) + DOCUMENTS[2] + words(3, 7) + DOCUMENTS[0] + DOCUMENTS[1] + words(17, 8)
CONDENSE = {"policy": "condense", "kept_share": 0.25}
GRAFT = {"policy": "sparsex", "boundary_layers": 2, "shallow": "fresh", "recompute_share": 0.0}


@pytest.fixture
def keeping(host: Host, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    """Keeps residual streams, and gives its blocks out in order: the lowest first."""
    model, hooks = (
        host.model,
        [dict(layer.module._forward_pre_hooks) for layer in host.model.layers],
    )
    names = [attention.layer_name for attention in model.attentions]
    width = model.config.model_config.get_hidden_size()
    streams = ResidualStreams(
        model.layers, names, EXITS, (NUM_BLOCKS + 1) * BLOCK, width, model.dtype, model.device
    )
    monkeypatch.setattr(model, "residuals", streams)
    monkeypatch.setattr(host.side.intake.eligibility, "_residual_layers", set(EXITS))
    pool = host.manager.block_pool
    pool.free_blocks(sorted(pool.get_new_blocks(NUM_BLOCKS), key=lambda block: block.block_id))
    yield host
    host.queue.library.store.clear()
    for layer, before in zip(model.layers, hooks, strict=True):
        layer.module._forward_pre_hooks.clear()
        layer.module._forward_pre_hooks.update(before)


def cached(host: Host) -> dict[int, Any]:
    """Blocks that hold something, and what by its hash."""
    return {
        block.block_id: block.block_hash
        for block in host.manager.block_pool.blocks
        if block.block_hash
    }


def rows(host: Host, block: int) -> list[Tensor]:
    return [
        states[host.slots_of([block])].clone() for states in host.model.residuals.states.values()
    ]


def test_documents_that_are_read_on_their_own_leave_the_residual_rows_of_others_alone(
    keeping: Host,
):
    host = keeping
    host.read(SHARED)
    host.read(OTHERS, salt="another tenant")
    assert set(cached(host)) == set(range(1, 25)), (
        "these must own the slots that have the numbers of positions"
    )
    host.read(*DOCUMENTS)
    grafts = [
        Ask(words(10, 9) + SHARED, GRAFT),
        Ask(words(10, 9) + OTHERS, GRAFT, "another tenant"),
    ]
    truth = host.ask(*grafts)
    before = {block: (content, rows(host, block)) for block, content in cached(host).items()}

    [condensed] = host.ask(Ask(PROMPT, CONDENSE))
    assert condensed.report["kept_tokens"] < 0.4 * len(PROMPT)
    kept = {
        block for block, content in cached(host).items() if before.get(block, (None,))[0] == content
    }
    assert kept >= set(range(1, 25))
    changed = [
        block
        for block in sorted(kept)
        if not all(map(torch.equal, rows(host, block), before[block][1]))
    ]
    assert changed == []
    assert all(bool(state.abs().sum() > 0) for block in range(1, 25) for state in before[block][1])
    host.known.approximate.clear()  # or they would go on with what they have left
    again = host.ask(*grafts)
    assert [answer.tokens for answer in again] == [answer.tokens for answer in truth]
    assert [answer.grafted for answer in again] == [len(SHARED) - 1] * 2
