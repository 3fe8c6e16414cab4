"""The native engine: load a model, reuse text that it has read, generate."""

from collections.abc import Iterator
from pathlib import Path

import torch

from kvgraft.core.admission import Admission
from kvgraft.core.keys import scope_digest
from kvgraft.core.pins import PinnedDocument, PinnedDocuments
from kvgraft.core.provenance import BlockProvenance
from kvgraft.core.reuse_index import ReuseIndex, wants_similar
from kvgraft.core.segmentation import ANCHORS
from kvgraft.engine.config import ModelConfig
from kvgraft.engine.costs import make_cost_model
from kvgraft.engine.decoder import load_decoder
from kvgraft.engine.handover import load_payload, put_payload, save_payload
from kvgraft.engine.memory import Memory
from kvgraft.engine.options import EngineOptions
from kvgraft.engine.pools import lay_out, make_pool, needs
from kvgraft.engine.profiles import MAKE_MAP, choose_policy, load_head_map, load_stable_layers
from kvgraft.engine.reader import PromptReader
from kvgraft.engine.request import (
    Event,
    Prompt,
    Prompts,
    Report,
    Request,
    RequestError,
    Result,
    as_request,
    as_requests,
    check_shared,
)
from kvgraft.engine.sampling import Sampler, SamplingParams
from kvgraft.engine.scheduler import Scheduler
from kvgraft.engine.sequence_state import SequenceState
from kvgraft.engine.store_tier import StoreTier
from kvgraft.engine.text import IncrementalText, anchor_ids, load_tokenizer
from kvgraft.kv.documents import DocumentStore
from kvgraft.methods import require_at_least
from kvgraft.models import find_model
from kvgraft.policies import parse_policy
from kvgraft.policies.profile import default_match
from kvgraft.prefill.documents.keeping import KeepsDocuments
from kvgraft.prefill.documents.library import Library
from kvgraft.setting_schema import with_keywords
from kvgraft.store import SegmentStore

MAKE_SIMILAR = "make the engine with match='similar'"


class Engine:
    """Offline generation with segment reuse. Not thread-safe; streams may be interleaved in one
    thread.

    Args:
        model_dir: a Hugging Face directory of a Llama, Mistral, Qwen2, Qwen3, Qwen3-MoE or
            DeepSeek-V2/V3 model, or the name of a model (`kvgraft models get smollm2`, then
            `smollm2`).
        options: made of the other keywords, which are the fields of `EngineOptions`;
            docs/engine.md lists them.

    Raises:
        FileNotFoundError, UnsupportedModel, ValueError: the model or an argument cannot be used;
            the message says why.
    """

    @with_keywords(EngineOptions)
    def __init__(self, model_dir: str | Path, options: EngineOptions) -> None:
        model_dir = find_model(model_dir)
        self.decoder, self.tokenizer = (
            load_decoder(model_dir, options.dtype, options.device),
            load_tokenizer(model_dir),
        )
        config = self.decoder.config
        self.policy, self.profile = choose_policy(
            options.policy, options.profile, model_dir, config
        )
        self.max_length = _length(options.max_length, config.max_position)
        padding = options.block_size if options.pad_segments else None
        self._reader = PromptReader(
            self.tokenizer, options.anchors, padding, config.vocab_size, self.max_length
        )
        self.head_map = load_head_map(
            options.head_map, model_dir, config.num_layers, config.num_kv_heads
        )
        layout, self._model = lay_out(
            config, self.decoder.dtype, self.head_map, head_paging=options.head_paging
        )
        served = [self.policy, *map(parse_policy, options.policies)]
        match = options.match or default_match(served, self.profile)
        needed, similarity = needs(served, options.residual_layers, match, config.num_layers)
        pool, cache = make_pool(
            self.decoder,
            layout,
            options.block_size,
            options.num_pages,
            options.kv_gib,
            self.max_length,
            needed,
            poison=options.poison_dropped_pages,
        )
        cuts = similarity, anchor_ids(self.tokenizer, options.anchors or ANCHORS)
        index = ReuseIndex(pool, options.max_depth, options.require_clean_context, *cuts)
        tier = None if options.store is None else StoreTier.open(options.store, pool, cache, index)
        cost_model = make_cost_model(
            options.costs, options.exactness_weight, self.decoder, cache, self.max_length
        )
        admission = Admission(
            pool,
            index,
            PinnedDocuments(pool, options.watermark, options.pin_capacity),
            cost_model,
            # Local heads keep no pages of the middle of a text, so nobody can continue from it.
            continuation=options.continuation and not layout.num_local_lists,
        )
        self.memory = Memory(admission, cache, options.max_prefill_tokens, tier)
        stable = load_stable_layers(options.stable_layers, model_dir, config)
        self.library = Library(DocumentStore(int(options.document_gib * 2**30)), stable)
        self.scheduler = Scheduler(
            self.decoder,
            self.memory,
            self.library,
            self.head_map,
            enforce_eager=options.enforce_eager,
        )
        self.flow = self.scheduler.flows.find(options.flow)

    @property
    def config(self) -> ModelConfig:
        """Shape of the model."""
        return self.decoder.config

    @property
    def index(self) -> ReuseIndex:
        """Index of the text that prompts can graft from."""
        return self.memory.admission.index

    @property
    def pins(self) -> PinnedDocuments:
        """Pinned documents."""
        return self.memory.admission.pins

    @property
    def store(self) -> SegmentStore | None:
        """The tiers below the KV pool, if there are any."""
        return None if self.memory.store is None else self.memory.store.store

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Write all pending blocks to the store and close it. An engine with a store cannot serve
        afterwards."""
        if self.store is not None:
            self.store.close()

    def generate(self, requests: Prompts) -> list[Result]:
        """Answer all requests, batched; results in their order.

        Args:
            requests: one prompt, or a sequence of prompts: each is a `Request`, text, or token ids.

        Raises:
            RequestError: a request that can never be served; nothing has run then.
        """
        requests = as_requests(requests)
        results: dict[int, Result] = {}
        for event in self.stream(requests):
            if event.result is not None:
                results[event.index] = event.result
        return [results[index] for index in range(len(requests))]

    def stream(self, requests: Prompts) -> Iterator[Event]:
        """Answer all requests like `generate`, but yield each piece of text as soon as it is final.
        Closing the iterator aborts the requests."""
        sequences = [
            self._sequence(index, request) for index, request in enumerate(as_requests(requests))
        ]
        return self.scheduler.run(sequences)

    def prefill(self, request: Prompt, path: str | Path) -> Report:
        """Compute a prompt and the first token of its answer, and write them to a file. Another
        engine continues from the file (`resume`).

        Raises:
            RequestError: the request can never be served, or its answer ends with its first token.
        """
        sequence = self._sequence(0, request)
        self.scheduler.submit([sequence])
        try:
            while sequence.first_token_pending and not sequence.done:
                self.scheduler.step()
            if sequence.done:
                result = sequence.events[-1].result
                raise RequestError(
                    (result and result.error) or "the answer ends with its first token"
                )
            save_payload(Path(path), sequence, self.memory.cache, self._model)
        finally:
            self.scheduler.abort([sequence])

        return sequence.report

    def resume(self, path: str | Path) -> Result:
        """Finish a request that `prefill` of an engine with the same model and head classes began.

        The result holds the whole answer. Other requests find nothing of it. Sampling with a seed
        draws other tokens than it would have drawn in the first engine.

        Raises:
            FileNotFoundError, ValueError: the file cannot be used; the message says why.
            PoolExhausted: not enough pages are free.
        """
        payload = load_payload(Path(path), self.memory.cache, self._model)
        header = payload.header
        request = Request(
            header.prompt,
            "full",
            header.sampling,
            remember=False,
            forced_output=header.forced_output,
        )
        sequence = self._sequence(0, request)
        sequence.num_dropped = header.num_dropped
        self.scheduler.adopt(sequence)
        put_payload(payload, sequence, self.memory.cache)
        sequence.accept(header.first_token, torch.zeros(0), self.config.eos_token_ids)
        *_, last = self.scheduler.drain([sequence])
        if last.result is None:
            raise RuntimeError("the sequence ended without a result")

        return last.result

    def occupy(self, requests: Prompts) -> list[SequenceState]:
        """Return sequences that run as if their prompts had been computed, over arbitrary page
        contents.

        Benchmarks of decode steps use it. `scheduler.abort` ends the sequences.

        Raises:
            RequestError, PoolExhausted: they cannot be served, or do not fit.
        """
        sequences = [
            self._sequence(index, request) for index, request in enumerate(as_requests(requests))
        ]
        for sequence in sequences:
            self.scheduler.adopt(sequence)
        return sequences

    def pin(self, name: str, prompt: Prompt) -> PinnedDocument:
        """Read a text and keep its blocks pinned under `name`, in the request's namespace.

        Raises:
            RequestError, ValueError: the text cannot be read, fills no block, or exceeds the pinned
                capacity.
        """
        request = as_request(prompt)
        sampling = SamplingParams(max_tokens=1, ignore_eos=True)
        reading = Request(
            request.prompt, policy="full", sampling=sampling, namespace=request.namespace
        )
        result = self.generate([reading])[0]
        if result.error:
            raise RequestError(result.error)
        pages = self.memory.lookup.find_prefix(
            self.token_ids(request), self.scope_of(request.namespace)
        )
        return self.pins.insert(name, request.namespace, self.memory.lookup.payload(pages))

    def read_documents(self, prompt: Prompt) -> int:
        """Compute the segments of a prompt on their own, if its policy keeps a part of them.

        A request does the same for documents that the library does not have. Returns the number of
        new documents.

        Raises:
            RequestError: the prompt can never be served.
        """
        return self.scheduler.read_documents(self._sequence(0, prompt))

    def idle_refresh(self, max_tokens: int) -> int:
        """Recompute text exactly that is known only approximately and has been grafted, the most
        used first.

        Later prompts prefer the exact KV. Returns the number of tokens computed, at most
        max_tokens. Computes nothing while requests run.

        Raises:
            ValueError: max_tokens is below 0.
        """
        require_at_least("max_tokens", max_tokens, 0)
        sampling, num_read = SamplingParams(max_tokens=1, ignore_eos=True), 0
        while not (self.scheduler.running or self.scheduler.waiting):
            room = self.pins.num_unpressed * self.memory.pool.block_size
            text = self.memory.refresh.choose(min(max_tokens - num_read, room), self.max_length - 1)
            if text is None:
                break
            reading = Request(text.tokens.tolist(), "full", sampling, text.namespace, flow="dense")
            num_read += self.generate([reading])[0].report.fresh_tokens
        return num_read

    def clear_cache(self) -> None:
        """Forget everything that is cached, except what running requests, pinned documents and the
        store hold."""
        self.library.store.clear()
        self.memory.pool.clear()
        self.index.segments.blocks.discard_stale()

    def check(self) -> None:
        """Raise RuntimeError if page counts do not follow from running requests and pinned entries
        (tests)."""
        tables = [s.lists.held for s in self.scheduler.running if s.lists is not None]
        self.memory.pool.check([*tables, *(entry.pages for entry in self.pins.list())])

    def scope_of(self, namespace: str) -> bytes:
        """Return the scope of a namespace for this model, in the index and in the store:
        `scope_digest`."""
        return scope_digest(self._model, namespace)

    def token_ids(self, request: Request) -> list[int]:
        """Return the token ids of a prompt as this engine would read it.

        Raises:
            ValueError: it can never be served; the message says why.
        """
        ids: list[int] = self._reader.read(request).token_ids.tolist()
        return ids

    def _sequence(self, index: int, given: Prompt) -> SequenceState:
        request = as_request(given, index)
        try:
            policy = self.policy if request.policy is None else parse_policy(request.policy)
            tokenised = self._reader.read(request)
            if policy.needs_head_map and self.head_map is None:
                raise ValueError(f"policy {policy.name!r} needs a head map: {MAKE_MAP}")
            self.memory.cache.require_residuals(policy.residual_layers(self.config.num_layers))
            similar = wants_similar(
                request.match, offered=self.index.knows_similar, how=MAKE_SIMILAR
            )
            shared = tuple(self.scope_of(name) for name in check_shared(request))
            flow = self.flow if request.flow is None else self.scheduler.flows.find(request.flow)
        except (ValueError, TypeError, FileNotFoundError) as error:
            raise RequestError(f"request {index}: {error}") from error

        text = IncrementalText(self.tokenizer, request.sampling.stop)
        provenance = BlockProvenance(self.scope_of(request.namespace))
        sampler = Sampler(request.sampling)
        sequence = SequenceState(
            index, request, policy, tokenised.token_ids, provenance, sampler, text, flow
        )
        sequence.matches_similar, sequence.shared = similar, shared
        if request.policy is None and self.profile is not None:
            sequence.report.profile = self.profile.name

        if flow is not None:
            sequence.shares_prefix = not self.scheduler.flows.program(flow).is_stateful

        if isinstance(policy, KeepsDocuments):
            sequence.place_documents(policy, tokenised.segments, self.memory.cache.layout)

        return sequence

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens."""
        return self._reader.encode(text)


def _length(given: int | None, most: int) -> int:
    """Return the length of the longest sequence in tokens; ValueError if the model has fewer
    positions."""
    length = given or most
    if not 1 < length <= most:
        raise ValueError(f"max_length {given} is not in 2..{most}, the positions of this model")
    return length
