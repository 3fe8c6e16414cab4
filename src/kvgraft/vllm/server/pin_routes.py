"""The segments API: documents that stay in the cache of one tenant until the admin deletes them."""

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from vllm.entrypoints.serve.tokenize.protocol import TokenizeChatRequest, TokenizeCompletionRequest

from kvgraft.vllm.options import MAX_NAME, Control, check_name
from kvgraft.vllm.server.errors import Refused
from kvgraft.vllm.server.pins import shown
from kvgraft.vllm.server.server_state import ServerState
from kvgraft.vllm.server.sharing import SHARED
from kvgraft.vllm.server.tenancy import Principal, Tenant

MAX_TEXT = 2 << 20  # characters
MAX_MESSAGES = 1024
PATH = "/v1/kvgraft/pins"

router = APIRouter()


def _name(value: str) -> str:
    check_name("name", value)
    return value


def _namespace(value: str) -> str:
    check_name("namespace", value, may_be_empty=True)
    return value


Name = Annotated[str, Field(max_length=MAX_NAME), AfterValidator(_name)]
Namespace = Annotated[str, Field(max_length=MAX_NAME), AfterValidator(_namespace)]
Label = Annotated[str, Field(max_length=MAX_NAME)]


class Message(BaseModel):
    """One message of a chat, of text only."""

    model_config = ConfigDict(extra="forbid")

    role: str = Field(max_length=32)
    content: str = Field(max_length=MAX_TEXT)


class NewPin(BaseModel):
    """What to keep: a text, or messages as the chat template renders them, under a name in a
    tenant's namespace. `model` names the adapter under which it is read: requests with that model
    graft from it, and no others."""

    model_config = ConfigDict(extra="forbid")

    name: Name
    text: str | None = Field(default=None, min_length=1, max_length=MAX_TEXT)
    messages: list[Message] | None = Field(default=None, min_length=1, max_length=MAX_MESSAGES)
    namespace: Namespace = ""
    tenant: Label | None = None
    model: Label | None = None

    @model_validator(mode="after")
    def _one_source(self) -> "NewPin":
        if (self.text is None) == (self.messages is None):
            raise ValueError("give either text or messages")
        return self


@router.post(PATH)
async def pin(wanted: NewPin, request: Request) -> dict[str, Any]:
    """Compute a document and keep it; the answer names it, and how many there are."""
    tenant = _owner(request, wanted.tenant, wanted.namespace)
    token_ids = await _token_ids(wanted, request)
    lora_request = _adapter(request, wanted.model)
    control = Control("pin", wanted.name, adapter=_adapter_name(request, wanted.model))
    return await _operate(request, tenant, wanted.namespace, control, token_ids, lora_request)


@router.get(PATH)
async def list_pins(
    request: Request,
    tenant: Annotated[Label | None, Query()] = None,
    namespace: Annotated[Namespace, Query()] = "",
    model: Annotated[Label | None, Query()] = None,
) -> dict[str, Any]:
    """List the pinned documents of a tenant's namespace, of one model; of all tenants, if there are
    several and the query names none of these."""
    state = _state(request)
    if tenant is None and not state.keyring.has_one_tenant and not namespace and model is None:
        admin = Principal(state.keyring.tenants[0], is_admin=True)
        return {"pins": await state.pins.view(admin)}
    control = Control("list", adapter=_adapter_name(request, model))
    return await _operate(request, _owner(request, tenant, namespace), namespace, control)


@router.delete(PATH + "/{name:path}")
async def delete(
    request: Request,
    name: Name,
    tenant: Annotated[Label | None, Query()] = None,
    namespace: Annotated[Namespace, Query()] = "",
    model: Annotated[Label | None, Query()] = None,
) -> dict[str, Any]:
    """Let a segment go."""
    control = Control("delete", name, adapter=_adapter_name(request, model))
    return await _operate(request, _owner(request, tenant, namespace), namespace, control)


@router.get("/v1/kvgraft/tenants")
async def tenants(request: Request) -> dict[str, Any]:
    """Whom segments can belong to; shared namespaces are those of a tenant that nobody is."""
    state = _state(request)
    listed: list[dict[str, Any]] = [{"tenant": tenant.label} for tenant in state.keyring.tenants]
    if state.grants.names:
        listed.append({"tenant": SHARED.label, "namespaces": list(state.grants.names)})
    return {"tenants": listed}


async def _operate(
    request: Request,
    tenant: Tenant,
    namespace: str,
    control: Control,
    token_ids: list[int] | None = None,
    lora_request: Any = None,
) -> dict[str, Any]:
    answer = await _state(request).pins.operate(tenant, namespace, control, token_ids, lora_request)
    return {**shown(tenant, namespace, control.adapter), **answer}


async def _token_ids(wanted: NewPin, request: Request) -> list[int]:
    """The tokens of the document, exactly as those of a prompt of its kind: vLLM's own
    tokenisation."""
    if wanted.text is not None:
        asked = TokenizeCompletionRequest(prompt=wanted.text)
    else:
        messages = [message.model_dump() for message in wanted.messages or ()]
        asked = TokenizeChatRequest(messages=messages, add_generation_prompt=False)
    answer = await request.app.state.serving_tokenization.create_tokenize(asked, request)
    error = getattr(answer, "error", None)
    if error is not None:
        raise Refused(error.code, error.message, param=error.param)
    return answer.tokens


def _adapter(request: Request, model: str | None) -> Any:
    """vLLM's request for the adapter that is served under this name; None: it is the model
    itself."""
    models = request.app.state.openai_serving_models
    if model is None or models.is_base_model(model):
        return None
    if (found := models.lora_requests.get(model)) is None:
        raise Refused(404, f"no model {model!r} is served here", param="model")
    return found


def _adapter_name(request: Request, model: str | None) -> str:
    """The adapter whose segments are meant, be it served by now or not; empty: those of the model
    itself."""
    is_base = model is None or request.app.state.openai_serving_models.is_base_model(model)
    return "" if is_base else str(model)


def _owner(request: Request, label: str | None, namespace: str) -> Tenant:
    try:
        return _state(request).owner(label, namespace)
    except ValueError as error:
        raise Refused(
            400, str(error), param="namespace" if label == SHARED.label else "tenant"
        ) from error


def _state(request: Request) -> ServerState:
    return request.app.state.kvgraft
