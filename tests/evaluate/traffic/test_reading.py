"""Traces in every format become the same requests."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvgraft.engine.text import load_tokenizer
from kvgraft_lab.testbed import MODEL_DIR
from kvgraft_lab.traffic.tokens import WordPieces, open_tokens
from kvgraft_lab.traffic.trace import RequestTrace, read_trace

MESSAGES = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "the code of lamp is 42 ."},
]
BODY = {"model": "m", "messages": MESSAGES}
TEXT = "the code of lamp is 42 . the old river slept ."


def write(directory: Path, name: str, *lines: Any) -> Path:
    """A file of JSON lines; strings that are no JSON are written as they are."""
    path = directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    )
    return path


def read(*paths: Path, **options: Any) -> RequestTrace:
    return read_trace(paths, WordPieces(), **options)


def tokens(path: Path) -> list[list[int]]:
    return [request.tokens.tolist() for request in read(path).requests]


def test_bodies_are_read_bare_and_under_a_key_with_text_and_with_parts(tmp_path: Path):
    parts = [
        {"role": m["role"], "content": [{"type": "text", "text": m["content"]}]} for m in MESSAGES
    ]
    bare = tokens(write(tmp_path, "bare.jsonl", BODY))
    assert bare == tokens(write(tmp_path, "under.jsonl", {"type": "request", "body": BODY}))
    assert bare == tokens(write(tmp_path, "parts.jsonl", {"messages": parts}))
    assert bare == tokens(write(tmp_path, "pretty.json", json.dumps(BODY, indent=2)))
    assert len(bare) == 1
    assert len(bare[0]) > 10


def test_prompts_are_texts_token_ids_and_batches_of_them(tmp_path: Path):
    [text] = tokens(write(tmp_path, "text.jsonl", {"prompt": TEXT}))
    assert tokens(write(tmp_path, "string.jsonl", json.dumps(TEXT))) == [text]
    assert tokens(write(tmp_path, "ids.jsonl", {"prompt": [7, 8, 9]})) == [[7, 8, 9]]
    assert tokens(write(tmp_path, "batch.jsonl", {"prompt": [TEXT, TEXT]})) == [text, text]
    assert tokens(write(tmp_path, "ids2.jsonl", {"prompt": [[7, 8], [9]]})) == [[7, 8], [9]]
    (tmp_path / "plain.txt").write_text(TEXT)
    assert tokens(tmp_path / "plain.txt") == [text]


def test_tools_and_tool_calls_are_part_of_the_prompt(tmp_path: Path):
    call = {
        "id": "1",
        "type": "function",
        "function": {"name": "look", "arguments": '{"at": "lamp"}'},
    }
    turn = {"role": "assistant", "content": None, "tool_calls": [call]}
    tool = {"type": "function", "function": {"name": "look", "description": "looks"}}
    lengths = [
        len(tokens(write(tmp_path, f"{number}.jsonl", body))[0])
        for number, body in enumerate(
            (BODY, {"messages": [*MESSAGES, turn]}, {**BODY, "tools": [tool]})
        )
    ]
    assert lengths[0] < min(lengths[1:])


BLOCKS = {"timestamp": 2500, "input_length": 700, "output_length": 20, "hash_ids": [0, 7]}


def test_a_trace_of_blocks_says_which_beginnings_are_equal(tmp_path: Path):
    other = {**BLOCKS, "timestamp": 1500.0, "input_length": 1100, "hash_ids": [0, 9, 7]}
    trace = read(write(tmp_path, "a.jsonl", BLOCKS, other))
    second, first = (request.tokens for request in trace.requests)
    assert [request.timestamp for request in trace.requests] == [1.5, 2.5]
    assert [request.num_answered for request in trace.requests] == [20, 20]
    assert (len(first), len(second)) == (700, 1100)
    assert (first[:512] == second[:512]).all()
    assert not set(first[512:].tolist()) & set(second[512:1024].tolist())
    assert len({*first.tolist(), *second.tolist()}) == 700 + 1100 - 512 - 76, (
        "76 are of block 7 in both"
    )


@pytest.mark.parametrize("old", [True, False])
def test_a_log_of_vllm_is_read(tmp_path: Path, old: bool):
    prefix, prompt = (
        "(APIServer pid=7) DEBUG 11-22 14:00:01 [request_logger.py:50] ",
        'it\'s the "lamp"\n',
    )
    params = "SamplingParams(n=1, stop=[', prompt_token_ids: '])"
    with_ids, with_text = (
        f"Received request {name}: prompt: {prompt!r}, params: {params}, prompt_token_ids: {ids}, "
        "lora_request: None."
        if old
        else (
            f"Request {name} details: prompt: {prompt!r}, prompt_token_ids: {ids}, prompt_embeds "
            "shape: None."
        )
        for name, ids in (("cmpl-1", [5, 6, 7]), ("cmpl-2", None))
    )
    told = f"Received request cmpl-1: params: {params}, lora_request: None."
    answer = "Generated response cmpl-2: output: 'on the table', finish_reason: stop"
    lines = ("INFO: started", told, with_ids, with_text, answer)
    first, second = read(write(tmp_path, "server.log", *(prefix + line for line in lines))).requests
    assert first.tokens.tolist() == [5, 6, 7]
    assert len(first.answer) == 0
    reader = WordPieces()
    assert second.tokens.tolist() == reader.encode(prompt).tolist()
    assert len(second.answer) == len(reader.encode("on the table"))


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.txt"])
def test_an_array_has_a_request_an_item(tmp_path: Path, name: str, indent: int | None):
    items = [{**BODY, "user": "u"}, "a prompt", {"prompt": ["one", "two"]}, {"body": BODY}]
    path = tmp_path / name
    path.write_text(json.dumps(items, indent=indent))
    lines = write(tmp_path, "lines.jsonl", *map(json.dumps, items))
    found, expected = read(path).requests, read(lines).requests
    assert [request.tokens.tolist() for request in found] == [
        request.tokens.tolist() for request in expected
    ]
    assert {request.session for request in found} == {"u", name}


def test_a_bad_item_of_an_array_is_named_or_skipped(tmp_path: Path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps([BODY, {"model": "m"}, 5]))
    with pytest.raises(ValueError, match=r"a\.json, item 2: .*has neither"):
        read(path)
    trace = read(path, skip_bad_lines=True)
    assert (len(trace.requests), len(trace.bad_lines)) == (1, 2)


NO_REQUESTS = {
    "array.json": ("[]", "no request in"),
    "cut.json": (json.dumps([BODY, BODY])[:-5], "is not JSON"),
    "cut.txt": (json.dumps([BODY, BODY], indent=2)[:-5], "is not JSON"),
    "number.json": ("42", "a line is an OpenAI request body"),
    "proxy.log": (
        '10.0.0.1 - - [27/Nov/2026] "POST /v1/completions HTTP/1.1" 200 12\n',
        "this log has no request",
    ),
    "vllm.txt": (
        "(APIServer pid=7) INFO 11-27 15:23:44 [launcher.py:38] Route: /health\n",
        "this log has no request",
    ),
    "vllm.out": (
        'INFO:     127.0.0.1:1 - "POST /v1/completions HTTP/1.1" 200 OK\n',
        "this log has no request",
    ),
}


@pytest.mark.parametrize("name", NO_REQUESTS)
def test_a_file_that_holds_no_request_is_refused(tmp_path: Path, name: str):
    text, message = NO_REQUESTS[name]
    (tmp_path / name).write_text(text)
    for skip in (False, True):
        with pytest.raises(ValueError, match=name) as refused:
            read(tmp_path / name, skip_bad_lines=skip)
        assert message in str(refused.value)


def test_a_log_without_prompts_says_how_to_get_them(tmp_path: Path):
    path = write(
        tmp_path,
        "server.log",
        "INFO Received request a: params: SamplingParams(), lora_request: None.",
    )
    with pytest.raises(ValueError, match=r"server\.log, line 1: .*VLLM_LOGGING_LEVEL=DEBUG"):
        read(path)


def test_answers_belong_to_their_requests(tmp_path: Path):
    def answer(text: str) -> dict[str, Any]:
        return {"type": "response", "body": {"choices": [{"message": {"content": text}}]}}

    lines = (
        {"type": "request", "request_id": "a", "body": BODY},
        {"type": "request", "request_id": "b", "body": BODY},
        {**answer("lamp lamp"), "request_id": "a"},
        answer("river"),
        {"type": "response", "request_id": "b", "status_code": 500, "body": None},
    )
    first, second = read(write(tmp_path, "a.jsonl", *lines)).requests
    assert (len(first.answer), len(second.answer)) == (2, 1)


BAD = {
    "no json {": "is not JSON",
    '{"model": "m"}': '"messages" and "prompt": the request has neither',
    '{"messages": [], "prompt": ""}': "the request has both",
    '{"messages": []}': "must be a list of messages",
    '{"messages": [{"content": "a"}]}': 'must be an object with a "role"',
    '{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}': (
        'type "image_url": only text'
    ),
    '{"prompt": [1, -2]}': "must be a string, token ids",
    '{"prompt": ""}': "the prompt has no tokens",
    '{"prompt": "a", "timestamp": "noon"}': 'timestamp is "noon"',
    '{"type": "metrics", "body": {}}': 'must be "request" or "response"',
    "[1, 2]": "a line is an OpenAI request body",
    json.dumps({**BLOCKS, "input_length": 0}): "Expected `int` >= 1 - at `$.input_length`",
    json.dumps({**BLOCKS, "hash_ids": [1 << 22]}): "Expected `int` <= 4194303 - at `$.hash_ids[0]`",
    json.dumps(
        {**BLOCKS, "input_length": 1025}
    ): '"hash_ids" are 2, must be 3: one for each 512 tokens',
}


@pytest.mark.parametrize(("line", "message"), BAD.items(), ids=BAD.values())
def test_a_bad_line_is_named_or_skipped_and_counted(tmp_path: Path, line: str, message: str):
    path = write(tmp_path, "a.jsonl", BODY, line)
    with pytest.raises(ValueError, match="line 2") as refused:
        read(path)
    assert str(path) in str(refused.value)
    assert message in str(refused.value)
    trace = read(path, skip_bad_lines=True)
    assert len(trace.requests) == 1
    assert len(trace.bad_lines) == 1
    assert message in trace.bad_lines[0]


def test_what_is_not_there_or_holds_nothing_is_refused(tmp_path: Path):
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(FileNotFoundError, match=str(path)):
            read(path)
    with pytest.raises(ValueError, match="no request in"):
        read(write(tmp_path, "a.jsonl", {"type": "response", "body": {}}))
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"binary\.txt: is no UTF-8 text"):
        read(tmp_path / "binary.txt")


def test_sessions_are_those_of_the_fields_or_else_the_files(tmp_path: Path):
    named = [{"body": BODY, "session": "s"}, {**BODY, "user": "u"}, {**BODY, "session_id": 3}, BODY]
    write(tmp_path, "one/a.jsonl", *named)
    write(tmp_path, "one/deep/b.jsonl", BODY)
    write(tmp_path, "one/c.txt", TEXT)
    write(tmp_path, "one/d.txt", TEXT)
    write(tmp_path, "one/README.md", "not read")
    trace = read(tmp_path / "one")
    assert set(trace.by_session()) == {"s", "u", "3", "a.jsonl", "deep/b.jsonl", "one"}
    assert len(trace.by_session()["one"]) == 2, "texts beside each other are one session"
    assert [path.name for path in trace.left_out] == ["README.md"]
    other = write(tmp_path, "two/a.jsonl", BODY)
    assert len(read(tmp_path / "one" / "a.jsonl", other).by_session()) == 5, (
        "files of one name are two sessions"
    )


def test_requests_go_by_time_or_take_turns(tmp_path: Path):
    def lines(name: str, *times: object) -> list[dict[str, Any]]:
        return [
            {"prompt": f"{name} {number}", "timestamp": time} for number, time in enumerate(times)
        ]

    early, late = "2026-04-18T00:00:00Z", "2026-04-18T02:00:00+01:00"
    write(tmp_path, "a.jsonl", *lines("a", late, None))
    write(tmp_path, "b.jsonl", *lines("b", early, early))
    turns = read(tmp_path)
    assert not turns.by_time
    assert [(r.session, r.turn) for r in turns.requests] == [
        ("a.jsonl", 1), ("b.jsonl", 1), ("a.jsonl", 2), ("b.jsonl", 2)
    ]  # fmt: skip
    write(tmp_path, "a.jsonl", *lines("a", late))
    timed = read(tmp_path)
    assert timed.by_time
    assert [(r.session, r.turn) for r in timed.requests] == [
        ("b.jsonl", 1),
        ("b.jsonl", 2),
        ("a.jsonl", 1),
    ]


def test_a_model_reads_a_conversation_as_its_server_would(tmp_path: Path):
    reader = open_tokens(MODEL_DIR)
    [request] = read_trace([write(tmp_path, "a.jsonl", BODY)], reader).requests
    tokenizer = load_tokenizer(MODEL_DIR)
    text = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert request.tokens.tolist() == tokenizer.encode(text, add_special_tokens=False)
    roles = tokenizer.convert_tokens_to_ids(["<system>", "<user>", "<assistant>"])
    assert request.tokens[request.segments].tolist() == roles, (
        "messages begin where their role is named"
    )
    refused = write(tmp_path, "b.jsonl", {"messages": [{"role": "judge", "content": "a"}]})
    with pytest.raises(ValueError, match="refuses the messages: unknown role judge"):
        read_trace([refused], reader)


def test_words_that_a_tokenizer_does_not_know_are_counted(tmp_path: Path):
    trace = read_trace(
        [write(tmp_path, "a.jsonl", {"prompt": "the code of zyx is 42"})], open_tokens(MODEL_DIR)
    )
    assert trace.num_unknown == 1
