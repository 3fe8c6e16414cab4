"""Questions about passages: RULER, LongBench, HotpotQA (and 2WikiMultihopQA in the same format),
MuSiQue.
"""

import re
from collections.abc import Mapping
from typing import Any

from kvgraft_lab.evaluate.tasks.files.records import FileRecord, ask, paragraphs, texts
from kvgraft_lab.evaluate.tasks.items import Metric


def ruler(record: Mapping[str, Any], stem: str) -> FileRecord:
    """Parse a RULER record. The last line of `input` is the question; `answer_prefix` begins the
    answer.
    """
    context, _, question = record["input"].rstrip().rpartition("\n")
    metric: Metric = "contains_any" if stem.startswith("qa") else "contains_all"
    questions = ((question, texts(record["outputs"])),)
    return FileRecord(
        paragraphs(context), questions, metric, stem, begun=record.get("answer_prefix", "")
    )


def longbench(record: Mapping[str, Any], stem: str) -> FileRecord:
    passages = re.split(r"(?=^Passage \d+:)", record["context"], flags=re.MULTILINE)
    segments = (
        tuple(filter(str.strip, passages)) if len(passages) > 2 else paragraphs(record["context"])
    )
    return FileRecord(
        segments,
        ((ask(record["input"]), texts(record["answers"])),),
        "f1",
        record.get("dataset", stem),
    )


def hotpotqa(record: Mapping[str, Any], stem: str) -> FileRecord:
    """Parse a HotpotQA record. `context` is a list of (title, sentences), or titles and lists of
    sentences as on Hugging Face.
    """
    context = record["context"]
    if isinstance(context, Mapping):
        context = list(zip(context["title"], context["sentences"], strict=True))
    segments = tuple(f"{title}\n{''.join(sentences)}" for title, sentences in context)
    return FileRecord(segments, ((ask(record["question"]), texts([record["answer"]])),), "f1", stem)


def musique(record: Mapping[str, Any], stem: str) -> FileRecord:
    """Parse a MuSiQue record. Questions without an answer in their paragraphs are left out."""
    segments = tuple(
        f"{paragraph['title']}\n{paragraph['paragraph_text']}" for paragraph in record["paragraphs"]
    )
    answers = texts([record["answer"], *record.get("answer_aliases", ())])
    asked = ((ask(record["question"]), answers),) if record.get("answerable", True) else ()
    return FileRecord(segments, asked, "f1", stem)
