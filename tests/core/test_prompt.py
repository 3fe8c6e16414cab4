import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from kvgraft.core.prompt import Segment, parse_markers, render_chat, split_at_anchors, tokenise

VOCABULARY = {
    token: number for number, token in enumerate(["a", "b", "c", "ab", "bc", "abc", "<pad>"])
}
PAD, BOS = VOCABULARY["<pad>"], 99
TOKENIZER = Tokenizer(BPE(VOCABULARY, [("a", "b"), ("b", "c"), ("ab", "c")]))

letters = st.text("abc", max_size=9)
segments = st.builds(Segment, st.text("abc", min_size=1, max_size=9))


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text).ids


@given(letters, segments, letters)
@settings(deadline=None, derandomize=True)
def test_token_ids_of_a_segment_do_not_depend_on_its_neighbours(
    left: str, segment: Segment, right: str
) -> None:
    prompt = tokenise([left, segment, right], encode, prefix_ids=[BOS])
    [(start, stop)] = prompt.segments
    assert prompt.token_ids[start:stop].tolist() == encode(segment.text)
    assert prompt.token_ids.tolist() == [BOS, *encode(left), *encode(segment.text), *encode(right)]
    assert prompt.token_ids.dtype == np.int64


def test_plain_text_is_tokenised_as_one_so_that_neighbours_matter() -> None:
    assert encode("a") + encode("bc") != encode("abc")
    assert tokenise("abc", encode).token_ids.tolist() == encode("abc")
    assert tokenise("abc", encode).segments == ()


@given(st.lists(letters | segments, max_size=6).filter(any), st.integers(1, 5), st.integers(0, 3))
@settings(deadline=None, derandomize=True)
def test_padding_aligns_both_ends_of_segments_and_adds_nothing_else(
    parts: list[str | Segment], block_size: int, num_prefix: int
) -> None:
    given_parts = [*parts, Segment("ab"), "c"]
    prefix = [BOS] * num_prefix
    padded = tokenise(given_parts, encode, prefix_ids=prefix, block_size=block_size, pad_id=PAD)
    plain = tokenise(given_parts, encode, prefix_ids=prefix)
    ids = padded.token_ids
    assert ids[ids != PAD].tolist() == plain.token_ids.tolist()
    assert len(padded.segments) == sum(isinstance(part, Segment) for part in given_parts)
    for (start, stop), (plain_start, plain_stop) in zip(
        padded.segments, plain.segments, strict=True
    ):
        assert start % block_size == 0
        assert ids[start:stop].tolist() == plain.token_ids[plain_start:plain_stop].tolist()
        end = stop + -stop % block_size
        assert set(ids[stop:end]) <= {PAD}
        assert ids[end] != PAD


def test_padding_stands_at_the_edges_of_segments_only() -> None:
    parts = ["a", "b", Segment("abc"), Segment("c"), "a"]
    prompt = tokenise(parts, encode, block_size=4, pad_id=PAD)
    a, b, c, abc = (VOCABULARY[token] for token in ("a", "b", "c", "abc"))
    assert prompt.token_ids.tolist() == [a, b, PAD, PAD, abc, PAD, PAD, PAD, c, PAD, PAD, PAD, a]
    assert prompt.segments == ((4, 5), (8, 9))
    assert tokenise(["a", Segment("b")], encode, block_size=4, pad_id=PAD).token_ids.size == 5


def test_token_ids_are_taken_as_they_are() -> None:
    prompt = tokenise(np.array([5, 3, 4]).tolist(), encode, prefix_ids=[BOS])
    assert prompt.token_ids.tolist() == [BOS, 5, 3, 4]
    with pytest.raises(TypeError, match="float"):
        tokenise([1.5], encode)  # type: ignore[list-item]


@pytest.mark.parametrize("parts", ["", [], ["", Segment("")]])
def test_a_prompt_without_tokens_is_refused(parts: str | list) -> None:
    with pytest.raises(ValueError, match="no tokens"):
        tokenise(parts, encode, prefix_ids=[BOS])


@pytest.mark.parametrize(
    "options", [{"pad_id": 0}, {"block_size": 16}, {"block_size": 0, "pad_id": 0}]
)
def test_padding_that_cannot_work_is_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="both or neither"):
        tokenise("a", encode, **options)


def test_markers() -> None:
    text = "Read <|reuse|>one<|/reuse|><|reuse|>two<|/reuse|>, answer.<|reuse|><|/reuse|>"
    assert parse_markers(text) == ["Read ", Segment("one"), Segment("two"), ", answer."]
    assert parse_markers("(one)*[two]", start="(", end=")") == [Segment("one"), "*[two]"]
    assert parse_markers("plain") == ["plain"]
    assert parse_markers("") == []


@pytest.mark.parametrize(
    ("text", "position"),
    [
        ("ab<|reuse|>c", 2),
        ("a<|/reuse|>", 1),
        ("<|reuse|>a<|reuse|>b<|/reuse|>", 10),
        ("<|reuse|><|/reuse|><|/reuse|>", 19),
    ],
)
def test_unbalanced_markers_are_refused_with_their_position(text: str, position: int) -> None:
    with pytest.raises(ValueError, match=f"at character {position}:"):
        parse_markers(text)


@pytest.mark.parametrize(("start", "end"), [("", "x"), ("x", ""), ("x", "x"), ("x", "xy")])
def test_markers_that_cannot_be_told_apart_are_refused(start: str, end: str) -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        parse_markers("text", start=start, end=end)


def test_anchors_begin_segments() -> None:
    trace = "Go.\nThought: x\nAction: y\nThought: z"
    expected = ["Go.", Segment("\nThought: x"), Segment("\nAction: y"), Segment("\nThought: z")]
    assert split_at_anchors(trace, ["\nThought:", "\nAction:"]) == expected
    assert split_at_anchors("(a(b", ["("]) == [Segment("(a"), Segment("(b")]
    assert split_at_anchors("", ["x"]) == []


@given(st.text("abc"), st.lists(st.text("abc", min_size=1, max_size=2), min_size=1, max_size=3))
@settings(deadline=None, derandomize=True)
def test_anchors_lose_no_text(text: str, anchors: list[str]) -> None:
    parts = split_at_anchors(text, anchors)
    assert "".join(part.text if isinstance(part, Segment) else part for part in parts) == text
    assert all(part.text.startswith(tuple(anchors)) for part in parts if isinstance(part, Segment))


@pytest.mark.parametrize("anchors", [[], ["a", ""]])
def test_anchors_that_cannot_work_are_refused(anchors: list[str]) -> None:
    with pytest.raises(ValueError, match="at least one"):
        split_at_anchors("text", anchors)


TEMPLATE = """{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}\
[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"""


def chat_tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=TOKENIZER, chat_template=template)


def test_chat_is_rendered_by_the_template_and_keeps_markers() -> None:
    messages = [
        {"role": "system", "content": "<|reuse|>doc<|/reuse|>"},
        {"role": "user", "content": "q"},
    ]
    text = render_chat(chat_tokenizer(TEMPLATE), messages)
    assert parse_markers(text) == ["[system]", Segment("doc"), "[user]q[assistant]"]


@pytest.mark.parametrize(
    ("template", "message", "reason"),
    [
        (None, {"role": "user", "content": "q"}, "no chat template"),
        (
            TEMPLATE,
            {"role": "root", "content": "q"},
            "message 0, role 'root': allowed are system, user",
        ),
        (TEMPLATE, {"role": "user"}, "message 0: must have"),
        (TEMPLATE, {"role": "user", "content": ["q"]}, "message 0: must have"),
        (TEMPLATE, {"role": "user", "content": "q", "name": "x"}, "message 0: must have"),
        (TEMPLATE, {"role": "tool", "content": "q"}, "template refuses these messages: no tools"),
        ("{{ messages.__class__.__mro__ }}", {"role": "user", "content": "q"}, "template refuses"),
    ],
)
def test_chats_that_are_refused(template: str | None, message: dict, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        render_chat(chat_tokenizer(template), [message])
