"""Function calling: BFCL, whose function definitions are the segments."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvgraft_lab.evaluate.tasks.files.records import FileRecord

INSTRUCTION = (
    "You answer requests by calling functions. The functions that you may call are given as JSON, "
    "one a line."
)
# the form that several models, such as Qwen's and Hermes', are trained to write
FORM = (
    "Write each call between <tool_call> and </tool_call>, as a JSON object with the name of the "
    'function and its arguments:\n<tool_call>\n{"name": <function-name>, "arguments": '
    "<args-json-object>}\n</tool_call>"
)
MAX_TOKENS = 256
ANSWERS = "possible_answer"


def bfcl(record: Mapping[str, Any], stem: str) -> FileRecord:
    """Parse a BFCL request of one turn. The answers are the expected calls, each a JSON object."""
    [messages] = record["question"]
    request = "\n".join(message["content"] for message in messages)
    answers = tuple(json.dumps(call) for call in record["ground_truth"])
    segments = tuple(
        json.dumps({"type": "function", "function": function}, ensure_ascii=False)
        for function in record["function"]
    )
    asked = f"{FORM}\n\n{request}"
    return FileRecord(segments, ((asked, answers),), "calls", stem, INSTRUCTION, MAX_TOKENS)


def with_answers(path: Path, records: list[Any]) -> list[Any]:
    """Return the records with the expected calls from the file of the same name in
    `possible_answer`.

    Raises:
        FileNotFoundError, ValueError: there is no such file, or it is not JSON.
    """
    beside = path.parent / ANSWERS / path.name
    if not beside.is_file():
        raise FileNotFoundError(
            f"{path}: the answers of BFCL are looked for in {beside}, and there is no such file"
        )

    try:
        answers = {
            answer["id"]: answer
            for answer in map(json.loads, beside.read_text(encoding="utf-8").splitlines())
        }
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{beside}: must have a record with an id a line: {type(error).__name__} {error}"
        ) from error

    return [{**record, **answers.get(record.get("id"), {})} for record in records]
