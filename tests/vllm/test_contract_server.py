"""What the API server relies on in vLLM's API server, beside the names and calls that
`test_contract.py` reads."""

import ast
import inspect
import re
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from vllm import envs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.plugins import DEFAULT_PLUGINS_GROUP, ENDPOINT_PLUGINS_GROUP, load_endpoint_plugins
from vllm.plugins.endpoint_plugins.interface import EndpointPlugin
from vllm.sampling_params import SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.core.sched import scheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.engine.core_client import DPLBAsyncMPClient
from vllm.v1.engine.output_processor import OutputProcessor, RequestState
from vllm.v1.engine.parallel_sampling import ParentRequest

from kvgraft.server import arguments, keys, serve
from kvgraft.server.engine_choice import resets_are_complete
from kvgraft.server.engine_client import NOT_RESET, TenantEngineClient
from kvgraft.server.plugin import ServerPlugin
from kvgraft.vllm.compat.command_line import make_arg_parser
from kvgraft.vllm.patches.reports import StoppedReports

SOURCE = Path(arguments.__file__).parent


@cache
def vllms_arguments() -> frozenset[str]:
    """What the command line of `vllm serve` sets."""
    parser = make_arg_parser(FlexibleArgumentParser())
    return frozenset(action.dest for action in parser._actions)


@pytest.mark.parametrize("file", sorted(SOURCE.glob("*.py")), ids=lambda file: file.name)
def test_the_arguments_that_we_read_exist(file: Path):
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in (
            "args",
            "app.state.args",
        ):
            ours = node.attr in ("no_kvgraft", "check") or node.attr.startswith("kvgraft_")
            known = node.attr in vllms_arguments() or ours
            assert known, (
                f"{file.name}:{node.lineno} reads args.{node.attr}, which vLLM's parser does not "
                "set"
            )


def test_the_defaults_that_we_set_are_of_arguments_that_exist():
    for node in ast.walk(ast.parse(inspect.getsource(arguments._make_parser))):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "parser.set_defaults":
            unknown = {keyword.arg for keyword in node.keywords} - vllms_arguments()
            assert not unknown, (
                f"arguments._make_parser sets defaults of {unknown}: argparse would take any name"
            )
    assert set(arguments.NEVER) <= vllms_arguments(), "arguments.NEVER refuses these by name"


def test_the_environment_that_we_read_and_set_is_vllms():
    for name in (serve.PLUGINS, keys.API_KEY, keys.RESPONSES_STORE, "VLLM_USE_RUST_FRONTEND"):
        assert name in envs.environment_variables, f"{name} steers vLLM no more"


def test_the_server_plugin_is_an_endpoint_plugin(monkeypatch: pytest.MonkeyPatch):
    assert serve.ENDPOINTS == ENDPOINT_PLUGINS_GROUP, (
        "pyproject registers the API server in this group"
    )
    assert DEFAULT_PLUGINS_GROUP in serve.OTHER_GROUPS, (
        "allowed_plugins keeps what vLLM would load without a list"
    )
    [point] = entry_points(group=ENDPOINT_PLUGINS_GROUP, name=serve.PLUGIN)
    assert point.load() is ServerPlugin
    monkeypatch.setenv(serve.PLUGINS, serve.allowed_plugins(None))
    [loaded] = [
        plugin for plugin in load_endpoint_plugins(("generate",)) if plugin.name == serve.PLUGIN
    ]
    assert isinstance(loaded, ServerPlugin)
    assert isinstance(loaded, EndpointPlugin)
    monkeypatch.delenv(serve.PLUGINS)
    assert load_endpoint_plugins(("generate",)) == [], (
        "plain `vllm serve` has no API server unless it is named"
    )


@pytest.mark.parametrize("name", ["attach_router", "init_state"])
def test_the_server_plugin_is_called_as_it_expects(name: str):
    theirs, ours = (inspect.signature(getattr(cls, name)) for cls in (EndpointPlugin, ServerPlugin))
    assert list(theirs.parameters) == list(ours.parameters)
    assert inspect.iscoroutinefunction(getattr(EndpointPlugin, name)) == (name == "init_state")


def test_the_server_plugin_sees_every_route_before_vllm_checks_keys(
    monkeypatch: pytest.MonkeyPatch,
):
    """Our plugin takes the keys away from vLLM, and its middleware lies around all routes that vLLM
    has."""
    seen: dict[str, Any] = {}

    def attach(self: Any, app: FastAPI) -> None:
        seen["routes"] = {getattr(route, "path", "") for route in app.routes}
        seen["args"] = app.state.args
        app.state.args.api_key = [""]

    monkeypatch.setattr(ServerPlugin, "attach_router", attach)
    monkeypatch.setenv(serve.PLUGINS, serve.PLUGIN)
    monkeypatch.setenv(keys.API_KEY, "secret")
    args = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    app = build_app(args, ("generate",))
    assert seen["args"] is args, "ServerPlugin.attach_router reads app.state.args"
    assert {"/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize"} <= seen[
        "routes"
    ]
    names = {middleware.cls.__name__ for middleware in app.user_middleware}
    assert "AuthenticationMiddleware" not in names, (
        "vLLM takes the keys from app.state.args after the plugins"
    )


def test_vllm_checks_keys_by_itself_without_the_server_plugin(monkeypatch: pytest.MonkeyPatch):
    """So that the test above can fail."""
    monkeypatch.setenv(keys.API_KEY, "secret")
    app = build_app(make_arg_parser(FlexibleArgumentParser()).parse_args([]), ("generate",))
    assert "AuthenticationMiddleware" in {
        middleware.cls.__name__ for middleware in app.user_middleware
    }


@pytest.mark.parametrize("name", ["serving_tokenization", "openai_serving_models"])
def test_the_application_keeps_what_our_routes_ask(name: str):
    package = Path(inspect.getfile(init_app_state)).parents[2]
    stored = [file for file in package.rglob("*.py") if f"state.{name} = " in file.read_text()]
    assert stored, f"our routes read app.state.{name}"


def test_every_request_passes_the_guard():
    source = inspect.getsource(AsyncLLM)
    sends = [
        line.strip()
        for line in source.splitlines()
        if "add_request" in line and "engine_core" in line
    ]
    assert sends, "TenantEngineClient.admit stands in for engine_core.add_request_async"
    assert all("self.engine_core.add_request_async(" in line for line in sends), (
        "TenantEngineClient guards this entrance only"
    )
    theirs, ours = (
        list(inspect.signature(cls.generate).parameters) for cls in (AsyncLLM, TenantEngineClient)
    )
    assert theirs[:4] == ["self", "prompt", "sampling_params", "request_id"], (
        "TenantEngineClient.control passes these"
    )
    assert ours[:3] == theirs[:3]
    admit = list(inspect.signature(TenantEngineClient.admit).parameters)
    assert admit == ["self", "request"], "engine_core.add_request_async(request)"


def test_an_idle_refresh_can_be_aborted_by_the_name_that_it_was_given():
    assert callable(OutputProcessor.has_unfinished_requests), "TenantEngineClient.is_idle asks it"
    assert list(inspect.signature(AsyncLLM.abort).parameters)[:2] == ["self", "request_id"]
    source = inspect.getsource(OutputProcessor.abort_requests)
    assert "external_req_ids" in source, (
        "AsyncLLM.abort takes the names that were given to generate"
    )
    assert "queue.put(" in source, "IdleReader waits for the end of what it aborts"
    added = inspect.getsource(AsyncLLM._add_request)
    known, sent = (
        added.index("output_processor.add_request("),
        added.index("engine_core.add_request_async("),
    )
    assert known < sent, "TenantEngineClient.admit is called for what can be aborted"


def test_the_engine_of_a_request_may_be_chosen_and_other_calls_reach_all_engines():
    chosen = inspect.getsource(DPLBAsyncMPClient.get_core_engine_for_request)
    assert "request.data_parallel_rank) is None" in chosen, "EngineChoice sets it"
    assert "self.core_engines[eng_index]" in chosen
    assert "for engine in self.core_engines" in inspect.getsource(
        DPLBAsyncMPClient.call_utility_all_async
        if resets_are_complete()
        else DPLBAsyncMPClient.call_utility_async
    )
    if resets_are_complete():
        reset = inspect.getsource(DPLBAsyncMPClient.reset_prefix_cache_async)
        assert re.search(r"all\(\s*await self.call_utility_all_async\(", reset)
    independent = inspect.getsource(EngineCoreProc.run_engine_core)
    assert "parallel_config.data_parallel_index = dp_rank" in independent, "reports name it"


def test_every_output_passes_the_guard_and_carries_what_went_ahead():
    source = inspect.getsource(AsyncLLM._run_output_handler)
    assert "output_processor.process_outputs(" in source, "StoppedReports stands before it"
    theirs, ours = (
        inspect.signature(cls.process_outputs) for cls in (OutputProcessor, StoppedReports)
    )
    assert next(iter(list(theirs.parameters)[1:])) == "engine_core_outputs", (
        "StoppedReports takes them by place"
    )
    assert len(ours.parameters) == 4
    made = inspect.getsource(Scheduler.update_from_output)
    assert "trace_headers=request.trace_headers" in made, (
        "patches.reports.send_ahead sets the headers of the request"
    )
    outputs, stats = made.index("EngineCoreOutput("), made.index("get_kv_connector_stats(")
    assert outputs < stats, "EarlyReports.end_of_step is called when the outputs have been made"
    for kept in (RequestState, ParentRequest):
        assert kept.__weakrefoffset__, "StoppedReports keeps a report as long as vLLM keeps this"
    assert {"parent_req", "request_index"} <= inspect.signature(
        RequestState.__init__
    ).parameters.keys()


def test_what_the_guard_of_quality_reads():
    for output, name in ((RequestOutput, "num_cached_tokens"), (CompletionOutput, "logprobs")):
        assert name in inspect.signature(output.__init__).parameters, "Scorer and Watched read it"
    assert "external_req_id" in EngineCoreRequest.__struct_fields__, (
        "TenantEngineClient.admit finds what is watched"
    )


def test_what_vllm_says_of_a_reset_that_cannot_be():
    said = "".join(
        ast.literal_eval(node)
        for node in ast.walk(ast.parse(inspect.getsource(scheduler)))
        if is_text(node)
    )
    assert NOT_RESET in said, "TenantEngineClient.reset_prefix_cache answers False to it"


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def test_options_travel_in_the_extra_arguments():
    params = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": {"kvgraft": {}}})
    assert params.extra_args == {"kv_transfer_params": {"kvgraft": {}}}, (
        "guard._params_of reads them there"
    )
    for request in (CompletionRequest, ChatCompletionRequest, ResponsesRequest):
        for field in ("kv_transfer_params", "cache_salt"):
            assert field in request.model_fields, (
                f"{request.__name__} carries {field}, which the guard sets or reads"
            )
