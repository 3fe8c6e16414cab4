"""How vLLM behaves where we rely on it, shown on its own scheduler, pool, runners and kernels
without a model.

Each failure says what of ours depends on the fact. Names and signatures are in `test_contract.py`.
"""

import importlib
from copy import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import warm
from engines import ENVIRONMENT, HAS_KERNELS
from vllm.config import KVTransferConfig, VllmConfig, set_current_vllm_config
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from kvgraft.kv.rope import Rope, rotate
from kvgraft.vllm.connector.metadata import WorkerMetadata
from kvgraft.vllm.groups import CacheGroups
from kvgraft.vllm.patches.prefix_cache import on_cache_reset
from kvgraft.vllm.patches.requests import set_prompt
from kvgraft.vllm.recovery import RecoveryResult
from kvgraft_lab.testbed import MODEL_DIR

YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 4.0,
    "original_max_position_embeddings": 2048,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0 + 0.1 * i for i in range(16)],
    "long_factor": [1.0 + 0.9 * i for i in range(16)],
}
BLOCK, NUM_BLOCKS, NUM_LAYERS, HEADS, DIM = 32, 24, 2, 4, 32
NONCE = b"nonce" * 7
PROMPT = list(range(100))  # fills three blocks and a bit of a fourth
ENGINE = Path(__file__).with_name("grafting_engine.py")


class Recorder(KVConnectorBase_V1, SupportsHMA):
    """Notes what vLLM calls, in its order; claims what the test tells it to, and hides it behind a
    nonce as we do."""

    def __init__(self, vllm_config: VllmConfig, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.calls: list[tuple[Any, ...]] = []
        self.claims: list[tuple[int | None, bool]] = []

    def take(self) -> list[tuple[Any, ...]]:
        """The calls since the last time."""
        calls, self.calls = self.calls, []
        return calls

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self.calls.append(("bind",))

    def on_new_request(self, request: Any) -> None:
        self.calls.append(("new", request.request_id))

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        self.calls.append(("match", num_computed_tokens))
        return self.claims.pop(0) if self.claims else (0, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.calls.append(("alloc", num_external_tokens, len(blocks.get_block_ids()[0])))
        if num_external_tokens:
            request.block_hashes[:] = [NONCE] * len(request.block_hashes)
            request.prefill_stats.set(
                request.num_tokens, 0, request.prefill_stats.num_external_cached_tokens - 40
            )

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        self.calls.append(("meta", scheduler_output.total_num_scheduled_tokens))
        return KVConnectorMetadata()

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self.calls.append(("outcomes", connector_output.finished_recving))

    def request_finished_all_groups(
        self, request: Any, block_ids: Any
    ) -> tuple[bool, dict[str, Any] | None]:
        pool = self._kv_cache_manager.block_pool
        self.calls.append(
            ("finished", len(block_ids[0]), {pool.blocks[block].ref_cnt for block in block_ids[0]})
        )
        return False, {"report": 1}

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self.calls.append(("bind_metadata",))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self.calls.append(("load",))

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        self.calls.append(("results",))
        return KVConnectorTransferResults(finished_recving={"r"}, failed_recving={"r"})

    def build_connector_worker_meta(self) -> WorkerMetadata:
        self.calls.append(("worker_meta",))
        return WorkerMetadata({"r": RecoveryResult()})

    def wait_for_layer_load(self, layer_name: str) -> None: ...
    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None: ...
    def wait_for_save(self) -> None: ...


@pytest.fixture(scope="module")
def config() -> VllmConfig:
    transfer = KVTransferConfig(
        kv_connector="Recorder",
        kv_connector_module_path=__name__,
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
    )
    args = EngineArgs(
        model=str(MODEL_DIR),
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        max_num_batched_tokens=512,
        block_size=BLOCK,
        enable_prefix_caching=True,
        num_gpu_blocks_override=NUM_BLOCKS,
        kv_transfer_config=transfer,
        async_scheduling=False,
    )
    made = args.create_engine_config()
    # the engine core resolves it, for the CPU always to this
    made.cache_config.kv_cache_layout = "LBHNC"
    return made


def plan_cache(config: VllmConfig, specs: list[dict[str, Any]], memory: list[int]) -> list[Any]:
    try:
        planning = importlib.import_module("vllm.v1.core.kv_cache_planning")
    except ModuleNotFoundError:  # 0.31, 0.32
        return list(kv_cache_utils.get_kv_cache_configs(config, specs, memory))
    return list(
        planning.get_kv_cache_configs(
            config, specs, memory, planning.get_global_kv_cache_groups(config, specs)
        )
    )


@pytest.fixture(scope="module")
def cache_config(config: VllmConfig) -> Any:
    spec = FullAttentionSpec(
        block_size=BLOCK, num_kv_heads=HEADS, head_size=DIM, dtype=torch.float32
    )
    layers = {f"model.layers.{i}.self_attn.attn": spec for i in range(NUM_LAYERS)}
    [made] = plan_cache(config, [layers], [1 << 26])
    config.cache_config.num_gpu_blocks = made.num_blocks
    return made


class Driver:
    """vLLM's scheduler with the recorder as its connector; the test speaks for the workers."""

    def __init__(self, config: VllmConfig, cache_config: Any) -> None:
        self.scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=cache_config,
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
            hash_block_size=BLOCK,
            log_stats=True,
        )
        self.recorder: Recorder = getattr(
            self.scheduler.connector, "sub_connectors", [self.scheduler.connector]
        )[0]
        self.pool = self.scheduler.kv_cache_manager.block_pool
        if not hasattr(kv_cache_utils, "NONE_HASH"):  # an engine in this process may have its own
            kv_cache_utils.init_none_hash(sha256)
        self.hasher = kv_cache_utils.get_request_block_hasher(BLOCK, sha256)

    def add(
        self, name: str, tokens: list[int], max_tokens: int = 2, cache_salt: str | None = None
    ) -> Request:
        params = SamplingParams(
            max_tokens=max_tokens, extra_args={"kv_transfer_params": {"kvgraft": {}}}
        )
        request = Request(
            name, tokens, params, None, cache_salt=cache_salt, block_hasher=self.hasher
        )
        self.scheduler.add_request(request)
        return request

    def step(self, **connector: Any) -> tuple[SchedulerOutput, list[Any]]:
        """One step in which every scheduled request gets the token 7 and the workers' connectors
        say `connector`."""
        plan = self.scheduler.schedule()
        names = list(plan.num_scheduled_tokens)
        answer = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[[7] for _ in names],
            kv_connector_output=KVConnectorOutput(**connector) if connector else None,
        )
        outputs = self.scheduler.update_from_output(plan, answer)
        return plan, [output for group in outputs.values() for output in group.outputs]

    def run(self, name: str, tokens: list[int], **options: Any) -> Request:
        """A request from its arrival to its end."""
        request = self.add(name, tokens, **options)
        while not request.is_finished():
            self.step()
        return request

    def load(self, name: str = "r") -> Request:
        """A request whose asynchronous load of the whole prompt has been admitted."""
        self.recorder.claims = [(len(PROMPT), True)]
        request = self.add(name, PROMPT)
        self.plan, _ = self.step()
        return request

    def hashes(self, request: Request) -> list[bytes | None]:
        [blocks] = self.scheduler.kv_cache_manager.get_block_ids(request.request_id)
        return [self.pool.blocks[block].block_hash for block in blocks]


@pytest.fixture
def driver(config: VllmConfig, cache_config: Any) -> Driver:
    return Driver(config, cache_config)


def test_a_request_is_announced_matched_admitted_and_reported_in_this_order(driver: Driver):
    request = driver.load()
    assert driver.recorder.take() == [
        ("bind",),  # SchedulerSide.bind makes what all others use
        ("new", "r"),  # SchedulerSide.match looks the request up
        ("match", 0),
        ("alloc", 100, 4),  # SchedulerSide.admit gets all blocks of the prompt
        ("meta", 0),  # SchedulerSide.end_of_schedule closes every step, also an empty one
    ]
    assert request.kv_transfer_params == {"kvgraft": {}}, (
        "SchedulerSide._parse reads the options there"
    )


def test_an_asynchronous_load_runs_after_the_forward_pass(driver: Driver):
    driver.load()
    assert not driver.plan.has_sync_kv_loads, (
        "WorkerSide.step reads blocks that the same step computes"
    )


def test_a_loading_request_keeps_waiting_and_the_engine_keeps_stepping(driver: Driver):
    request = driver.load()
    driver.recorder.take()
    driver.step()
    assert request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    assert driver.recorder.take() == [("meta", 0)], (
        "a recovery goes on in steps without tokens; it is not matched again"
    )
    assert driver.scheduler.has_requests(), "EngineCore stops stepping when there are no requests"


def test_loading_blocks_get_hashes_only_when_the_load_has_ended(driver: Driver):
    request = driver.load()
    assert driver.hashes(request) == [None] * 4, (
        "SchedulerSide._hide replaces the hashes after the allocation"
    )
    driver.step(finished_recving={"r"})
    driver.step()
    full = driver.hashes(request)[:3]
    assert [hash_[: len(NONCE)] for hash_ in full if hash_] == [NONCE] * 3, (
        "SharedPool reads versions off hash heads"
    )


def test_only_the_last_token_is_computed_after_a_load(driver: Driver):
    request = driver.load()
    driver.step(finished_recving={"r"})
    driver.recorder.take()
    plan, _ = driver.step()
    assert plan.num_scheduled_tokens == {"r": 1}, (
        "the last token's logits come from vLLM's own forward pass"
    )
    assert driver.recorder.take() == [("alloc", 0, 4), ("meta", 1)], (
        "SchedulerSide.admit is called again with nothing"
    )
    assert request.status == RequestStatus.RUNNING, (
        "SchedulerSide._is_busy knows running requests by their status"
    )


def test_our_count_of_cached_tokens_stands(driver: Driver):
    request = driver.load()
    assert request.prefill_stats.num_cached_tokens == 60, (
        "vLLM sets prefill_stats before SchedulerSide._start does"
    )
    driver.step(finished_recving={"r"})
    _, [output] = driver.step()
    assert output.prefill_stats.num_cached_tokens == 60, (
        "usage.prompt_tokens_details shows what _start has set"
    )


def test_a_failed_load_is_computed_by_vllm(driver: Driver):
    request = driver.load()
    free = driver.pool.get_num_free_blocks()
    driver.step(finished_recving={"r"}, failed_recving={"r"})
    driver.recorder.take()
    plan, _ = driver.step()
    assert driver.recorder.take() == [("match", 0), ("alloc", 0, 4), ("meta", 100)], (
        "SchedulerSide.match refuses then"
    )
    assert plan.num_scheduled_tokens == {"r": 100}, "fallbacks are computed in full"
    assert driver.pool.get_num_free_blocks() == free, "the blocks of the failed load are given back"
    assert request.num_preemptions == 0


def test_a_prompt_that_turns_out_shorter_is_scheduled_as_such(driver: Driver):
    """ShorterPrompts.settle: of a prompt of 100 tokens 40 are kept, and two blocks of four are free
    at once."""
    request = driver.load()
    free = driver.pool.get_num_free_blocks()
    driver.step(finished_recving={"r"})
    set_prompt(request, PROMPT[-40:])
    request.num_computed_tokens = 40
    CacheGroups.of(driver.scheduler.kv_cache_manager, BLOCK).trim("r", 40)
    assert driver.pool.get_num_free_blocks() == free + 2
    driver.recorder.take()
    plan, _ = driver.step()
    [sent] = plan.scheduled_new_reqs
    assert (sent.prompt_token_ids, sent.num_computed_tokens, len(sent.block_ids[0])) == (
        PROMPT[-40:],
        39,
        2,
    )
    assert plan.num_scheduled_tokens == {"r": 1}
    assert driver.recorder.take() == [("alloc", 0, 2), ("meta", 1)]
    driver.step()
    assert driver.pool.get_num_free_blocks() == NUM_BLOCKS - 1, "all of them are given back, once"


def test_the_outcomes_arrive_before_the_request_is_scheduled_again(driver: Driver):
    driver.load()
    driver.recorder.take()
    driver.step(finished_recving={"r"})
    assert driver.recorder.take() == [("meta", 0), ("outcomes", {"r"})], (
        "SchedulerSide.on_outcomes restores hashes"
    )


def test_an_aborted_load_keeps_its_blocks_until_the_workers_let_go(driver: Driver):
    driver.load()
    free = driver.pool.get_num_free_blocks()
    driver.recorder.take()
    driver.scheduler.finish_requests("r", RequestStatus.FINISHED_ABORTED)
    assert driver.recorder.take() == [("finished", 4, {1})], (
        "SchedulerSide.finish cancels the recovery"
    )
    assert driver.pool.get_num_free_blocks() == free, "the recovery may still write to them"
    driver.step()
    assert driver.scheduler.has_requests(), "steps must go on until the workers report"
    driver.step(finished_recving={"r"})
    assert driver.pool.get_num_free_blocks() == free + 4
    assert not driver.scheduler.has_unfinished_requests()


def test_a_request_is_matched_in_every_step_until_it_is_admitted(driver: Driver):
    driver.add("long", list(range(1000, 1500)), max_tokens=12)  # 16 of 23 blocks
    driver.step()
    driver.recorder.claims = [(300, True)] * 2 + [(None, False)]
    waiting = driver.add("r", list(range(300)))
    driver.recorder.take()
    for expected in ([("match", 0), ("meta", 1)],) * 3:
        driver.step()
        assert driver.recorder.take() == expected, (
            "SchedulerSide pins in match, unpins in end_of_schedule"
        )
    assert waiting.status == RequestStatus.WAITING


def test_exact_hits_are_counted_in_whole_blocks_and_leave_a_token(driver: Driver):
    driver.run("first", PROMPT)
    for name, tokens, hit in (("more", PROMPT, 96), ("full", PROMPT[:96], 64)):
        driver.recorder.take()
        driver.run(name, tokens)
        assert ("match", hit) in driver.recorder.take(), (
            "SchedulerSide.match takes whole blocks as the prefix"
        )


def test_a_nonce_hides_blocks_and_all_that_follows_them(driver: Driver):
    request = driver.load()
    driver.step(finished_recving={"r"})
    request.append_output_token_ids([5] * 40)  # fills the fourth block
    exact = Request(
        "x", [*PROMPT, *[5] * 40], SamplingParams(max_tokens=1), None, block_hasher=driver.hasher
    )
    assert request.block_hashes[3] != exact.block_hashes[3], (
        "hashes of new blocks chain from the nonce before them"
    )
    driver.recorder.take()
    driver.run("same", PROMPT)
    assert ("match", 0) in driver.recorder.take(), (
        "SchedulerSide._hide keeps approximate blocks from exact lookups"
    )


def test_offloading_beside_us_would_keep_grafts_under_the_hashes_of_the_prompt(
    config: VllmConfig, cache_config: Any
):
    beside = copy(config)
    offloading = {"cpu_bytes_to_use": 1 << 26, "block_size": BLOCK}
    children = [
        {"kv_connector": "Recorder", "kv_connector_module_path": __name__, "kv_role": "kv_both"},
        {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": offloading,
        },
    ]
    beside.kv_transfer_config = KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"connectors": children},
    )
    driver = Driver(beside, cache_config)
    prompt = Request("x", PROMPT, SamplingParams(max_tokens=1), None, block_hasher=driver.hasher)
    request = driver.load()
    driver.step(finished_recving={"r"})
    driver.step()
    assert request.block_hashes == [NONCE] * 3
    jobs = driver.scheduler.connector.sub_connectors[1].connector_scheduler._jobs.values()
    kept = {bytes(key) for job in jobs for key in job.keys}
    assert all(any(own in key for key in kept) for own in prompt.block_hashes), (
        "check_connector refuses other connectors, as there approximate KV would come back as exact"
    )


def test_the_salt_is_part_of_every_hash(driver: Driver):
    driver.run("first", PROMPT, cache_salt="a")
    for salt, hit in (("b", 0), ("a", 96)):
        driver.recorder.take()
        driver.run(f"salt {salt}", PROMPT, cache_salt=salt)
        assert ("match", hit) in driver.recorder.take(), (
            "our scope and vLLM's hashes have one isolation key"
        )


def test_a_finished_request_still_holds_its_blocks_and_its_report_is_sent(driver: Driver):
    driver.add("r", PROMPT, max_tokens=1)
    driver.recorder.take()
    _, [output] = driver.step()
    assert driver.recorder.take()[-1] == ("finished", 4, {1}), (
        "SchedulerSide.finish names blocks while they are held"
    )
    assert output.kv_transfer_params == {"report": 1}, "the Report travels in kv_transfer_params"


def test_a_reset_asks_us_first(driver: Driver):
    driver.run("r", PROMPT)
    pool = driver.pool
    pinned = next(block for block in pool.blocks if block.block_hash is not None)
    pool.touch([pinned])
    assert driver.scheduler.reset_prefix_cache() is False, (
        "pinned blocks would make every reset fail"
    )
    may_reset = [False, True]

    def let_go() -> bool:
        pool.free_blocks([pinned] if may_reset[0] else [])
        return may_reset.pop(0)

    on_cache_reset(driver.scheduler.kv_cache_manager, let_go)
    assert driver.scheduler.reset_prefix_cache() is False, "we may refuse"
    assert driver.scheduler.reset_prefix_cache() is True, (
        "compat.on_cache_reset wraps the manager's method"
    )
    assert pinned.block_hash is None, "virtual blocks die with the hashes"


def test_a_preempted_request_is_matched_again_with_its_own_blocks(driver: Driver):
    request = driver.add("r", PROMPT, max_tokens=8)
    driver.step()
    driver.scheduler._preempt_request(driver.scheduler.running.pop(), 0.0)
    driver.recorder.take()
    driver.step()
    assert driver.recorder.take() == [("match", 96), ("alloc", 0, 4), ("meta", 5)], (
        "RequestState.admitted tells them apart"
    )
    assert request.num_preemptions == 1, (
        "SchedulerSide._start leaves vLLM's count of resumed requests alone"
    )


def test_requests_that_skip_the_prefix_cache_say_so(driver: Driver):
    params = SamplingParams(max_tokens=1, prompt_logprobs=1)
    asks = Request("p", PROMPT, params, None)
    plain = Request("q", PROMPT, SamplingParams(max_tokens=1), None)
    assert asks.skip_reading_prefix_cache, "_refusal: prompt_logprobs"
    assert not plain.skip_reading_prefix_cache, "_refusal: prompt_logprobs"
    nothing = (
        plain.lora_request,
        plain.mm_features,
        plain.prompt_embeds,
        plain.pooling_params,
        plain.resumable,
    )
    assert not any(nothing), "_refusal tells plain requests by these"


def test_the_v1_runner_starts_loads_after_the_forward_pass(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
):
    driver.load()
    driver.recorder.take()
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", driver.recorder)
    context = set_forward_context(None, driver.scheduler.vllm_config)
    with context, KVConnectorModelRunnerMixin._get_kv_connector_output(driver.plan) as output:
        driver.recorder.calls.append(("forward",))
    check_runner(driver, output)


def test_the_v2_runner_starts_loads_after_the_forward_pass(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
):
    driver.load()
    driver.recorder.take()
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", driver.recorder)
    connector = ActiveKVConnector(driver.scheduler.vllm_config, {})
    connector.pre_forward(driver.plan)
    driver.recorder.calls.append(("forward",))
    connector.finish_forward()
    check_runner(driver, connector.post_forward(set()))


def check_runner(driver: Driver, output: Any) -> None:
    order = [name for name, *_ in driver.recorder.take()]
    assert order == ["bind_metadata", "forward", "load", "results", "worker_meta"], (
        "WorkerSide.step reads what the forward pass wrote; take_worker_metadata reports on "
        "take_results"
    )
    assert (output.finished_recving, output.failed_recving) == ({"r"}, {"r"}), (
        "SchedulerSide.on_outcomes"
    )
    assert output.kv_connector_worker_meta.outcomes == {"r": RecoveryResult()}, (
        "SchedulerSide.on_outcomes"
    )


def test_ranks_are_waited_for_and_a_failure_of_one_counts():
    aggregator = KVOutputAggregator(expected_finished_count=2)

    def rank(**connector: Any) -> ModelRunnerOutput:
        return ModelRunnerOutput(
            req_ids=[], req_id_to_index={}, kv_connector_output=KVConnectorOutput(**connector)
        )

    ended = {"finished_recving": {"r"}}
    first = aggregator.aggregate(
        [rank(**ended, kv_connector_worker_meta=WorkerMetadata({"r": RecoveryResult()})), rank()]
    )
    assert not first.kv_connector_output.finished_recving, (
        "a prompt is whole when every rank has recovered its share"
    )
    failed = WorkerMetadata({"r": RecoveryResult("non_finite")})
    both = aggregator.aggregate(
        [rank(), rank(**ended, failed_recving={"r"}, kv_connector_worker_meta=failed)]
    )
    assert (
        both.kv_connector_output.finished_recving
        == both.kv_connector_output.failed_recving
        == {"r"}
    )
    assert both.kv_connector_output.kv_connector_worker_meta.outcomes["r"].failure == "non_finite"


def test_the_workers_cache_is_heads_by_tokens(config: VllmConfig, cache_config: Any):
    utils = pytest.importorskip("vllm.v1.worker.utils")
    caches = utils.allocate_kv_cache(
        cache_config,
        torch.device("cpu"),
        config.cache_config.get_resolved_kv_cache_layout(),
        [BLOCK],
    )
    shapes = {tuple(cache.shape) for cache in caches.values()}
    assert shapes == {(NUM_BLOCKS, HEADS, BLOCK, 2 * DIM)}, (
        "ModelHost._content takes caches as [B, H, N, 2 d]"
    )


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "default", "rope_theta": 1e6},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
        {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        YARN,
        YARN | {"rope_type": "deepseek_yarn", "mscale": 0.8, "beta_fast": 16},
        LONGROPE | {"original_max_position_embeddings": 256, "factor": 8192 / 256},
        LONGROPE | {"original_max_position_embeddings": 8192},
    ],
    ids=lambda parameters: parameters["rope_type"],
)
def test_a_shift_of_ours_is_a_rotation_of_theirs(config: VllmConfig, parameters: dict[str, Any]):
    keys = torch.randn(5, HEADS, DIM, generator=torch.Generator().manual_seed(0))
    old, new = torch.tensor([0, 3, 100, 900, 4000]), torch.tensor([7, 3, 50, 8000, 1])
    with set_current_vllm_config(config):
        theirs = get_rope(DIM, 8192, True, parameters, torch.float32)
    turn, given = getattr(theirs, "forward_native", None), keys
    if turn is None:  # longrope
        turn, given = theirs.forward, keys.flatten(1)
    at_old, at_new = (
        turn(p, given.clone(), given.clone())[1].view(5, HEADS, DIM) for p in (old, new)
    )
    rope = Rope.from_parameters(DIM, parameters, max_position=config.model_config.max_model_len)
    moved, fresh = rotate(at_old, *rope.table(new - old)), rotate(keys, *rope.fresh_table(new))
    torch.testing.assert_close(
        moved, at_new, rtol=0, atol=5e-4, msg="VllmPrefill.graft moves keys by this"
    )
    torch.testing.assert_close(
        fresh, at_new, rtol=0, atol=5e-4, msg="Rope.fresh_table is what vLLM rotates by"
    )


@pytest.mark.slow
@pytest.mark.skipif(
    not HAS_KERNELS, reason="this vLLM has nothing compiled: Python files of a wheel for CUDA"
)
def test_a_grafted_request_recomputed_in_full_answers_as_an_ungrafted_one():
    documents = [[20 + (i * i + 7 * d) % 400 for i in range(150)] for d in range(2)]
    prompt = [*range(30, 70), *documents[1], *documents[0], *range(90, 100)]
    job = {
        "read": [[*documents[0], *documents[1]]],
        "prompts": [prompt],
        "options": [{"recompute_share": 1.0}, {"reuse": "off"}],
    }
    [[full, off]] = warm.run(ENGINE, job, **ENVIRONMENT)
    assert full["report"]["grafted_tokens"] >= 200, "the whole way through a real engine grafts"
    assert full["tokens"] == off["tokens"], (
        "recomputing everything through the stock layers is exact"
    )
