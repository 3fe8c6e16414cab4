"""vLLM with our connector inside the test's own process, driven step by step."""

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any

import torch
from engines import OFF, Answer, Ask, as_answer, as_lora, as_prompt, as_sampling, start_engine
from torch import Tensor
from vllm.v1.core.kv_cache_utils import get_group_id


class Host:
    """An engine, its scheduler side and its worker side. Requests go by the names that `add` gives
    them.

    Attributes:
        outputs: the latest output of every request.
        stats: what the connector's metrics have counted since `forget`.
        num_preemptions, num_evictions, num_drafted, num_accepted: since `forget`; the last two of
            drafted tokens.
    """

    def __init__(self, model: Path, **settings: Any) -> None:
        from kvgraft.vllm.stats import Stats

        self.llm = start_engine(model, with_kvgraft=True, **settings)
        self.engine = self.llm.llm_engine
        self.scheduler = self.engine.engine_core.engine_core.scheduler
        self.manager = self.scheduler.kv_cache_manager
        self.side = self.scheduler.connector.scheduler_side
        self.known = self.side.admission
        self.outputs: dict[str, Any] = {}
        self.stats = Stats()
        self.num_preemptions = self.num_evictions = self.num_drafted = self.num_accepted = 0
        self._names = map(str, count())
        self._ids: dict[str, str] = {}
        self._listen()

    @cached_property
    def worker(self) -> Any:
        """The worker side of the connector."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group().worker_side

    @property
    def queue(self) -> Any:
        """The worker's recoveries."""
        return self.worker._queue

    @property
    def model(self) -> Any:
        """The worker's `ModelHost`."""
        return self.queue._host

    def add(self, ask: Ask, **sampling: Any) -> str:
        """Hand in a request; returns its name."""
        name = next(self._names)
        params = as_sampling(ask, **sampling)
        self._ids[name] = self.engine.add_request(
            name, as_prompt(ask), params, lora_request=as_lora(ask)
        )
        return name

    def count_forwards(self) -> int:
        """Count from now on in `num_forwards` the recoveries' forwards of the whole model, and in
        `num_layers` the layers that are called in them, which a compiled model does not call."""
        self.num_forwards = self.num_layers = 0
        run_model = self.model.run_model

        def counting(*given: Any) -> Any:
            self.num_forwards += 1
            hooks = [
                layer.module.register_forward_pre_hook(count_layer) for layer in self.model.layers
            ]
            states = run_model(*given)
            for hook in hooks:
                hook.remove()
            return states

        def count_layer(*_: Any) -> None:
            self.num_layers += 1

        self.model.run_model = counting
        return 0

    def request(self, name: str) -> Any:
        """vLLM's own object, as long as it lives."""
        return self.scheduler.requests[self._ids[name]]

    def state(self, name: str) -> Any:
        """What our scheduler side knows of a request, as long as it lives."""
        return self.side._requests[self._ids[name]]

    def is_alive(self, name: str) -> bool:
        """Whether vLLM still holds the request."""
        return self._ids[name] in self.scheduler.requests

    def preempt(self, name: str, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Take a running request's blocks, as for want of others; it comes back after something has
        happened."""
        request = self.request(name)
        blocks = {
            block
            for table in self.manager.get_block_ids(request.request_id)
            for block in table
            if block
        }
        self.scheduler.running.remove(request)
        self.scheduler._preempt_request(request, 0.0)
        self.scheduler.waiting.remove_requests([request])
        self.evict(blocks)
        meanwhile()
        self.scheduler.waiting.prepend_request(request)

    def abort(self, *names: str) -> None:
        """As when clients go away."""
        self.engine.abort_request(list(names))

    def step(self) -> list[Any]:
        """One step of the engine; returns vLLM's outputs."""
        outputs = self.engine.step()
        self.outputs |= {output.request_id: output for output in outputs}
        return outputs

    def step_until(self, condition: Callable[[], bool], limit: int = 4000) -> int:
        """Steps until the condition holds; returns how many. AssertionError if it never does."""
        for number in range(limit):
            if condition():
                return number
            self.step()
        raise AssertionError(
            f"nothing ended in {limit} steps: {[*self.scheduler.waiting]}, {self.scheduler.running}"
        )

    def finish(self, *names: str, limit: int = 4000) -> list[Answer]:
        """Step until these requests have ended and their last output is here."""
        self.step_until(
            lambda: all(name in self.outputs and self.outputs[name].finished for name in names),
            limit,
        )
        return [as_answer(self.outputs[name]) for name in names]

    def ask(self, *asks: Ask, limit: int = 4000) -> list[Answer]:
        """Answers to requests that arrive together."""
        return self.finish(*[self.add(ask) for ask in asks], limit=limit)

    def read(self, *texts: Sequence[int], salt: str | None = None) -> None:
        """Make texts known, each in a request of its own that generates one token."""
        for text in texts:
            self.ask(Ask(text, OFF, salt, max_tokens=1))

    def settle(self) -> None:
        """Step as a server does until there is nothing left to do."""
        self.step_until(lambda: not self.scheduler.has_requests())

    def abandon(self) -> None:
        """Abort whatever is left, and settle."""
        self.abort(*[name for name in self._ids if self.is_alive(name)])
        self.settle()

    def forget(self) -> None:
        """Back to the state of a new engine: nothing known, and nothing true in the pages."""
        self.abandon()
        assert self.llm.reset_prefix_cache()
        self.known.index.segments.blocks.discard_stale()
        self.known.pool.hit_counts[:] = 0
        self.stats.reset()
        self.num_preemptions = self.num_evictions = self.num_drafted = self.num_accepted = 0
        self.poison(range(1, self.manager.block_pool.num_gpu_blocks))

    def slots(self, name: str) -> Tensor:
        """int64 [n]: where the KV of a running request's tokens lies, in the layers of the main
        group."""
        blocks = self.manager.get_block_ids(self._ids[name])[self.known.pool.groups.main]
        return self.slots_of(blocks)[: self.request(name).num_tokens]

    def slots_of(self, blocks: Iterable[int]) -> Tensor:
        """int64 [n * block size]."""
        size = self.known.pool.block_size
        return (
            torch.tensor(list(blocks), dtype=torch.int64)[:, None] * size + torch.arange(size)
        ).flatten()

    def read_kv(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of all attention layers, each [L, n, Hkv, d]."""
        pairs = [
            self.model.read(layer, slots) for layer in range(self.model.draft_attentions.start)
        ]
        keys, values = zip(*pairs, strict=True)
        return torch.stack(keys), torch.stack(values)

    def write_kv(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """As `read_kv` reads them."""
        for layer in range(self.model.draft_attentions.start):
            self.model.write(
                layer, keys[layer].to(self.model.dtype), values[layer].to(self.model.dtype), slots
            )

    def poison(self, blocks: Iterable[int], value: float = 3.0) -> None:
        """Fill blocks with something that was never computed; finite, so that no check can notice
        it. What is known of a block is of one group, whose layers alone have it: others may lay it
        out in another way."""
        blocks, pool = list(blocks), self.manager.block_pool.blocks
        groups = [self.known.pool.groups.main, *self.known.pool.groups.others]
        of_block = {
            b: get_group_id(pool[b].block_hash) for b in blocks if pool[b].block_hash is not None
        }
        for at in range(self.model.draft_attentions.start):
            group = groups[self.model.group_of[at]]
            slots = self.slots_of(block for block in blocks if of_block.get(block, group) == group)
            keys, values = self.model.read(at, slots)
            self.model.write(
                at, torch.full_like(keys, value), torch.full_like(values, -value), slots
            )

    def poison_known(self) -> int:
        """Poison all that vLLM or the index could offer to somebody; how many blocks."""
        self.poison(known := self.blocks_with_content())
        return len(known)

    def evict(self, blocks: Iterable[int]) -> None:
        """What happens to blocks that are reclaimed: vLLM forgets their content, others write to
        them."""
        blocks = set(blocks)
        assert all(self.manager.block_pool.blocks[block].ref_cnt == 0 for block in blocks)
        self.manager.block_pool.evict_blocks(blocks)
        self.poison(blocks)

    def blocks_with_content(self) -> set[int]:
        """Blocks that vLLM or the index could offer to somebody."""
        return {
            block.block_id
            for block in self.manager.block_pool.blocks
            if block.block_hash is not None
        }

    def continuable(self) -> set[bytes]:
        """Hashes of approximate blocks that a prompt would find which goes on with all that stands
        before them."""
        known, cached = (
            self.side.admission.approximate._blocks,
            self.manager.block_pool.get_cached_block,
        )
        reachable: set[Any] = set()
        for (before, _), (key, *_) in known.items():  # what follows was added later
            if (before in reachable or isinstance(before, tuple)) and cached(key, [0]):
                reachable.add(key)
        return reachable

    def count(self, metric: str, label: str = "") -> float:
        """What a counter has counted since `forget`."""
        return float(self.stats.data.get(f"kvgraft:{metric}", {}).get(label, 0))

    def problems(self) -> list[str]:
        """Everything that must not be when no request is left; an empty list is good."""
        entries = [page for entry in self.known.pins.list() for page in entry.pages]
        pinned = [held for page in entries for held in self.known.pool.held(page)]
        references = {
            block.block_id: block.ref_cnt
            for block in self.manager.block_pool.blocks
            if not block.is_null
        }
        expected = {block: pinned.count(block) for block in references}
        tables = {
            number: m.req_to_blocks
            for number, m in enumerate(self.manager.coordinator.single_type_managers)
        }
        checks = {
            "requests in vLLM's scheduler": dict(self.scheduler.requests),
            "block tables": {number: dict(table) for number, table in tables.items() if table},
            "pages held by nobody's leave": self.known.pool._held.keys() - set(entries),
            "requests on the scheduler side": self.side._requests,
            "tentative pins": self.side._recoveries._tentative,
            "pages that are recovered in place": self.side._recoveries._rewritten,
            "jobs not sent": self.side._recoveries._jobs,
            "cancellations not sent": self.side._recoveries._cancelled,
            "recoveries queued": list(self.queue._batches),
            "cancellations kept": self.queue._cancelled,
            "outcomes not taken": self.worker._ended or self.worker._reported,
            "blocks held for nobody": {b: n for b, n in references.items() if n != expected[b]},
            "used blocks that are not pinned": self.known.pool.num_used - len(set(pinned)),
        }
        return [f"{what}: {found}" for what, found in checks.items() if found]

    def _listen(self) -> None:
        """Keep what would go to Prometheus, and count."""
        from kvgraft.vllm.stats import Stats

        client, pool = self.engine.engine_core, self.manager.block_pool
        get_output, preempt, evict = (
            client.get_output,
            self.scheduler._preempt_request,
            pool._maybe_evict_cached_block,
        )

        def listening() -> Any:
            outputs = get_output()
            stats = outputs.scheduler_stats
            if stats and stats.kv_connector_stats:
                self.stats.aggregate(Stats(data=stats.kv_connector_stats))
            if stats and stats.spec_decoding_stats:
                self.num_drafted += stats.spec_decoding_stats.num_draft_tokens
                self.num_accepted += stats.spec_decoding_stats.num_accepted_tokens
            return outputs

        def counting_preempt(*args: Any, **kwargs: Any) -> None:
            self.num_preemptions += 1
            preempt(*args, **kwargs)

        def counting_evict(block: Any) -> bool:
            evicted = bool(evict(block))
            self.num_evictions += evicted
            return evicted

        client.get_output = listening
        self.scheduler._preempt_request = counting_preempt
        pool._maybe_evict_cached_block = counting_evict
