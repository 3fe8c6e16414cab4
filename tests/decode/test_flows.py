"""Each flow chooses what its paper says, for one request computed by hand."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from devices import CLOSE, DEVICE
from every_flow import CHANNELS
from kvgraft.decode.batch import Batch
from kvgraft.decode.executor import fill, select
from kvgraft.decode.flow import Flow, trace
from kvgraft.decode.planner import plan
from kvgraft.flows import FLOWS, parse_flow, with_default

BLOCK, DIM, GROUP = 16, 8, 2


class Request:
    """A KV head's keys and values over some blocks, of which the last is being filled, and its
    caches."""

    def __init__(self, flow: Flow, num_blocks: int, seed: int = 0) -> None:
        random = torch.Generator().manual_seed(seed)
        self.keys, self.values = torch.randn(2, num_blocks, BLOCK, DIM, generator=random).to(DEVICE)
        self.program = trace(flow, BLOCK, DIM, GROUP)
        shapes = {name: (num_blocks, *shape) for name, shape in self.program.caches.items()}
        self.caches = {
            name: torch.full(shape, 9.0, device=DEVICE) for name, shape in shapes.items()
        }
        self.filled = num_blocks - 1
        self.pool = {"k": self.keys, "v": self.values, **self.caches}
        rows = torch.arange(num_blocks, device=DEVICE)
        fill(self.program, self.pool, rows[: self.filled])
        self.batch = Batch(rows[None], torch.tensor([self.filled * BLOCK + 1]), BLOCK)

    def step(self, query: Tensor) -> set[int]:
        """Blocks chosen for queries [g, d]."""
        found = select(self.program, plan(self.program), query[None], self.pool, self.batch)[0]
        return set(found[found >= 0].tolist())

    def best(self, scores: Tensor, k: int) -> set[int]:
        """Of [B], without the blocks that are attended to in any case."""
        return set((scores[1 : self.filled - 1].topk(k).indices + 1).tolist())


def scores(name: str, keys: Tensor, query: Tensor) -> Tensor:
    if name == "block_topk":
        return (keys.mean(1) @ query.T).amax(1)
    if name == "quest":
        high, low = keys.amax(1), keys.amin(1)  # [B, d]
        return torch.stack([torch.maximum(q * high, q * low).sum(1) for q in query]).amax(0)
    if name == "double_sparse":
        weight = query.mean(0).abs()
        return (keys @ (query * (weight > weight.mean())).T).amax((1, 2))
    if name == "nsa_block_topk":
        logits = keys.unflatten(1, (2, -1)).mean(2) @ query.T * DIM**-0.5  # [B, 2, g]
        return logits.flatten(0, 1).softmax(0).view(logits.shape).sum((1, 2))
    return (keys.mean(1) @ query.T).softmax(0).sum(1)


@pytest.mark.parametrize("name", ["block_topk", "quest", "h2o", "double_sparse", "nsa_block_topk"])
def test_a_flow_chooses_the_best_blocks(name: str):
    request = Request(FLOWS[name](topk_blocks=3), 12)
    query = torch.randn(GROUP, DIM).to(DEVICE)
    assert request.step(query) == request.best(
        scores(name, request.keys[: request.filled], query), 3
    )


@pytest.mark.parametrize(("name", "most"), [("block_topk", 15), ("quest", 20)])
def test_a_flow_is_short(name: str, most: int):
    lines = Path(inspect.getfile(FLOWS[name])).read_text().splitlines()
    assert sum(bool(line.strip()) for line in lines) <= most


def test_masked_channels_have_no_say():
    for name, like in (("channel_topk", "block_topk"), ("channel_quest", "quest")):
        request = Request(find(f"{CHANNELS}:{name}:topk_blocks=3,groups=4,masked=0+3"), 12)
        query = torch.randn(GROUP, DIM).to(DEVICE)
        without = query.clone()
        without[:, [0, 1, 6, 7]] = 0
        assert request.step(query) == request.best(
            scores(like, request.keys[: request.filled], without), 3
        )
        with pytest.raises(ValueError, match="masked must be groups from 0 to 3, got 4"):
            Request(find(f"{CHANNELS}:{name}:groups=4,masked=4"), 12)


def find(text: str) -> Flow:
    flow = parse_flow(text)
    assert flow is not None
    return flow


@pytest.mark.parametrize(
    ("behind", "message"),
    [
        (
            "",
            r"channels.py has several flows: name one \(.*channels.py:channel_topk\) of "
            r"channel_topk, channel_quest",
        ),
        (":topk_blocks=9", "has several flows"),
        (
            ":channel",
            r"unknown flow of .*channels.py 'channel': choose from channel_quest, channel_topk",
        ),
        (":channel:topk_blocks=9", "unknown flow of .* 'channel'"),
        (
            ":channel_topk:j=9",
            r"has no option 'j': it has topk_blocks, layers_skip, from_tokens, groups, masked",
        ),
        (":channel_topk:topk_blocks", "option 'topk_blocks' is not option=value"),
    ],
)
def test_a_flow_of_a_file_is_named_behind_a_colon(behind: str, message: str):
    assert find(f"{CHANNELS}:channel_quest").name == "channel_quest"
    assert find(f"{CHANNELS}:channel_quest:topk_blocks=9").topk_blocks == 9
    assert find(f"{CHANNELS}:channel_quest") == find(f"{CHANNELS}:channel_quest"), (
        "a file is not run again"
    )
    with pytest.raises(ValueError, match=message):
        parse_flow(f"{CHANNELS}{behind}")


def test_an_unknown_flow_is_told_the_few_that_have_names(tmp_path: Path):
    with pytest.raises(
        ValueError,
        match=r"'quset': choose from block_topk, .*, or give a file \(my_flow.py, my_flow",
    ):
        parse_flow("quset:topk_blocks=9")
    with pytest.raises(ValueError, match=r"unknown flow 'my\.pyx'"):
        parse_flow("my.pyx")
    odd = tmp_path / "a.pyx"
    odd.mkdir()
    mine = "from kvgraft.flows.quest import Quest\n\n\nclass Mine(Quest):\n    name = 'mine'\n"
    (odd / "mine.py").write_text(mine)
    assert find(f"{odd}/mine.py:topk_blocks=7").topk_blocks == 7
    (odd / "mine.py").write_text(mine.replace("'mine'", "'other'"))
    assert find(f"{odd}/mine.py").name == "other", "it has changed"


def test_h2o_adds_up_over_steps():
    request, total = Request(FLOWS["h2o"](topk_blocks=2), 10), torch.zeros(9, device=DEVICE)
    for query in torch.randn(4, GROUP, DIM).to(DEVICE):
        total += scores("h2o", request.keys[:9], query)
        assert request.step(query) == request.best(total, 2)
        torch.testing.assert_close(request.caches["acc"][:9, 0], total, **CLOSE)


def test_streaming_has_the_last_blocks():
    request: Any = Request(FLOWS["streaming"](topk_blocks=4), 12)
    assert request.step(torch.randn(GROUP, DIM).to(DEVICE)) == {7, 8, 9, 10}
    assert Request(FLOWS["streaming"](topk_blocks=40), 5).step(
        torch.randn(GROUP, DIM).to(DEVICE)
    ) == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("quest", "quest:from_tokens=9"),
        ("quest:topk_blocks=4", "quest:topk_blocks=4,from_tokens=9"),
        ("quest:from_tokens=4", "quest:from_tokens=4"),
        ("k=3/my.py", "k=3/my.py:from_tokens=9"),
        ("my.py:one", "my.py:one:from_tokens=9"),
        ("my.py:topk_blocks=4", "my.py:topk_blocks=4,from_tokens=9"),
    ],
)
def test_an_option_is_added_to_the_text_of_a_flow(text: str, expected: str):
    assert with_default(text, "from_tokens", 9) == expected
