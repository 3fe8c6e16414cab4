"""Text that is given out token by token: whole characters, no begun stop string, nothing lost."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from kvgraft.core.prompt import Segment
from kvgraft.engine.text import IncrementalText, load_tokenizer, opening_ids
from models import BOS, make_tokenizer
from properties import examples

SAMPLE = "naïve café 漢字かな 🙂🙃 déjà vu, the end. "
WORDS = make_tokenizer()


def byte_level() -> PreTrainedTokenizerFast:
    """As GPT-2, Llama 3 and Qwen: tokens are byte strings that may end within a character."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [SAMPLE] * 3,
        trainers.BpeTrainer(vocab_size=290, special_tokens=["<eos>"], initial_alphabet=alphabet),
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def sentence_piece() -> PreTrainedTokenizerFast:
    """As Llama 2 and Mistral: a word begins with ▁, unknown characters fall back to one token per
    byte."""
    pieces = [
        "<unk>",
        "<eos>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *"aehnt",
        "▁t",
        "▁th",
        "▁the",
        "▁a",
    ]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("▁", "a")]
    tokenizer = Tokenizer(BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    strip = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    tokenizer.decoder = decoders.Sequence(strip)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>")


BYTE_LEVEL, SENTENCE_PIECE = byte_level(), sentence_piece()
repeatable = examples(150)


def stream(
    tokenizer: PreTrainedTokenizerFast, token_ids: list[int], stop: tuple[str, ...] = ()
) -> list[str]:
    text = IncrementalText(tokenizer, stop)
    parts = [*map(text.push, token_ids), text.flush()]
    assert "".join(parts) == text.text
    return parts


def cut(text: str, stop: tuple[str, ...]) -> str:
    """What is left of a text that is read character by character up to the first complete stop
    string."""
    for end in range(len(text) + 1):
        complete = [ending for ending in stop if text[:end].endswith(ending)]
        if complete:
            return text[: end - len(max(complete, key=len))]
    return text


@repeatable
@given(st.text(alphabet=SAMPLE, max_size=30))
@pytest.mark.parametrize(
    "tokenizer", [BYTE_LEVEL, SENTENCE_PIECE], ids=["byte-level", "sentence-piece"]
)
def test_the_parts_are_the_text_in_whole_characters(
    tokenizer: PreTrainedTokenizerFast, text: str
) -> None:
    token_ids = tokenizer(text)["input_ids"]
    parts = stream(tokenizer, token_ids)
    assert "".join(parts) == tokenizer.decode(token_ids)
    assert "\ufffd" not in "".join(parts)
    assert parts[-1] == ""  # nothing was late


@repeatable
@given(st.lists(st.integers(0, len(BYTE_LEVEL) - 1), max_size=20))
def test_any_tokens_of_a_byte_level_vocabulary(token_ids: list[int]) -> None:
    assert "".join(stream(BYTE_LEVEL, token_ids)) == BYTE_LEVEL.decode(
        token_ids, skip_special_tokens=True
    )


@repeatable
@given(st.lists(st.integers(0, len(SENTENCE_PIECE) - 1), max_size=20))
def test_invalid_bytes_never_fail(token_ids: list[int]) -> None:
    stream(SENTENCE_PIECE, token_ids)


def test_words_are_given_out_at_once() -> None:
    assert stream(WORDS, [3, 4, 1, 5]) == ["w3", " w4", "", " w5", ""]  # 1 is <eos>


def test_characters_of_several_tokens_are_held_back() -> None:
    token_ids = SENTENCE_PIECE("a 🙂")["input_ids"]
    assert len(token_ids) == 6
    assert stream(SENTENCE_PIECE, token_ids) == ["a", " ", "", "", "", "🙂", ""]
    assert stream(SENTENCE_PIECE, token_ids[:-1])[-1] == "\ufffd" * 3


@repeatable
@given(
    st.text(alphabet="abé", max_size=20),
    st.lists(st.text(alphabet="abé", min_size=1, max_size=4), max_size=3).map(tuple),
)
def test_the_first_complete_stop_string_ends_the_text(text: str, stop: tuple[str, ...]) -> None:
    incremental = IncrementalText(BYTE_LEVEL, stop)
    given_out = ""
    for token_id in BYTE_LEVEL(text)["input_ids"]:
        given_out += incremental.push(token_id)
        assert cut(text, stop).startswith(given_out)
    given_out += incremental.flush()
    assert given_out == incremental.text == cut(text, stop)
    assert incremental.stopped == (cut(text, stop) != text)


def test_a_begun_stop_string_is_held_until_decided() -> None:
    assert stream(WORDS, [3, 4, 5], (" w4 w6",)) == ["w3", "", " w4 w5", ""]
    assert stream(WORDS, [3, 4], (" w4 w6",)) == ["w3", "", " w4"]
    assert stream(WORDS, [3, 4, 6, 7, 8], (" w4 w6",)) == ["w3", "", "", "", "", ""]


def test_a_tokenizer_is_loaded_from_its_directory_only(
    model_dirs: dict[str, Path], tmp_path: Path
) -> None:
    tokenizer = load_tokenizer(model_dirs["qwen3"])
    assert tokenizer("w5 w9")["input_ids"] == [5, 9]
    messages = [{"role": "user", "content": "w5"}]
    chat = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert tokenizer(chat)["input_ids"] == [198, 5, 199]
    with pytest.raises(FileNotFoundError, match="absent is not a directory"):
        load_tokenizer(tmp_path / "absent")
    with pytest.raises(ValueError, match="no usable tokenizer in"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("adds_bos", [False, True])
def test_only_the_tokenizers_own_special_tokens_open_a_text(adds_bos: bool):
    tokenizer = make_tokenizer()
    if adds_bos:
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", BOS)]
        )
    expected = [BOS] if adds_bos else []
    for prompt in ("w5 w6", ["w5", Segment("w6")], [Segment("w5")]):
        assert opening_ids(tokenizer, prompt) == expected
    for prompt in ("<bos> w5", [Segment("<bos> w5"), "w6"], [5, 6]):
        assert opening_ids(tokenizer, prompt) == []
