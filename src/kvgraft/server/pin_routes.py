"""Routes of the pins API: documents that stay in a tenant's cache until the admin deletes them."""

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from vllm.entrypoints.serve.tokenize.protocol import TokenizeChatRequest, TokenizeCompletionRequest

from kvgraft.server.errors import Refused
from kvgraft.server.pins import shown
from kvgraft.server.server_state import ServerState
from kvgraft.server.sharing import SHARED
from kvgraft.server.tenancy import Principal, Tenant
from kvgraft.vllm.options import Control
from kvgraft.vllm.request_fields import MAX_NAME, NAME, NAMESPACE

# characters
MAX_TEXT = 2 << 20
MAX_MESSAGES = 1024
PATH = "/v1/kvgraft/pins"

router = APIRouter()


def _name(value: str) -> str:
    """Validate the name of a pinned document."""
    NAME.check("name", value)
    return value


def _namespace(value: str) -> str:
    """Validate a namespace, which may be empty."""
    NAMESPACE.check("namespace", value)
    return value


Name = Annotated[str, Field(max_length=MAX_NAME), AfterValidator(_name)]
Namespace = Annotated[str, Field(max_length=MAX_NAME), AfterValidator(_namespace)]
Label = Annotated[str, Field(max_length=MAX_NAME)]


class Message(BaseModel):
    """One chat message that consists of text only."""

    model_config = ConfigDict(extra="forbid")

    role: str = Field(max_length=32)
    content: str = Field(max_length=MAX_TEXT)


class NewPin(BaseModel):
    """Body of a request to pin a document.

    The document is a text, or messages in the form that the chat template renders. It gets a name
    in a tenant's namespace. `model` names the adapter with which it is computed: only requests for
    that model graft from it.
    """

    model_config = ConfigDict(extra="forbid")

    name: Name
    text: str | None = Field(default=None, min_length=1, max_length=MAX_TEXT)
    messages: list[Message] | None = Field(default=None, min_length=1, max_length=MAX_MESSAGES)
    namespace: Namespace = ""
    tenant: Label | None = None
    model: Label | None = None

    @model_validator(mode="after")
    def _one_source(self) -> "NewPin":
        """Require either a text or messages."""
        if (self.text is None) == (self.messages is None):
            raise ValueError("give either text or messages")
        return self


@router.post(PATH)
async def pin(wanted: NewPin, request: Request) -> dict[str, Any]:
    """Compute a document and pin it; the answer describes the pin and counts those of the
    namespace."""
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
    """List the pinned documents of one tenant, namespace and model.

    If the query names no tenant, no namespace and no model, list the documents of all of them.
    """
    state = _state(request)
    if tenant is None and not namespace and model is None:
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
    """Unpin a document."""
    control = Control("delete", name, adapter=_adapter_name(request, model))
    return await _operate(request, _owner(request, tenant, namespace), namespace, control)


@router.get("/v1/kvgraft/tenants")
async def tenants(request: Request) -> dict[str, Any]:
    """List the tenants that can own pinned documents, and the shared namespaces under the name
    `shared`. A tenant with a name also has its label."""
    state = _state(request)
    listed: list[dict[str, Any]] = [
        {"tenant": one.name} | ({"label": one.label} if one.given_name else {})
        for one in state.keyring.tenants
    ]
    if state.grants.names:
        listed.append({"tenant": SHARED.name, "namespaces": list(state.grants.names)})
    return {"tenants": listed}


async def _operate(
    request: Request,
    tenant: Tenant,
    namespace: str,
    control: Control,
    token_ids: list[int] | None = None,
    lora_request: Any = None,
) -> dict[str, Any]:
    """Run an operation on pinned documents; its answer also names tenant, namespace and adapter."""
    answer = await _state(request).pins.operate(tenant, namespace, control, token_ids, lora_request)
    return {**shown(tenant, namespace, control.adapter), **answer}


async def _token_ids(wanted: NewPin, request: Request) -> list[int]:
    """Return the document's token ids, from the same vLLM code that tokenises a prompt of its kind.

    Raises:
        Refused: vLLM refused the text.
    """
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
    """Return vLLM's LoRA request for a served model name; None for the base model.

    Raises:
        Refused: no such model is served.
    """
    models = request.app.state.openai_serving_models
    if model is None or models.is_base_model(model):
        return None
    if (found := models.lora_requests.get(model)) is None:
        raise Refused(404, f"no model {model!r} is served here", param="model")
    return found


def _adapter_name(request: Request, model: str | None) -> str:
    """Return the name of an adapter, which need not be loaded; empty for the base model."""
    is_base = model is None or request.app.state.openai_serving_models.is_base_model(model)
    return "" if is_base else str(model)


def _owner(request: Request, label: str | None, namespace: str) -> Tenant:
    """Return the tenant that owns the namespace.

    Raises:
        Refused: there is no such tenant or shared namespace.
    """
    try:
        return _state(request).owner(label, namespace)
    except ValueError as error:
        raise Refused(
            400, str(error), param="namespace" if label == SHARED.label else "tenant"
        ) from error


def _state(request: Request) -> ServerState:
    """Return the server's state."""
    return request.app.state.kvgraft
