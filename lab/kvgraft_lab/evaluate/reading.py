"""Demonstration on a real model: questions about texts that it has read in other prompts, or calls
in code to complete.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvgraft.cli.progress import OnProgress
from kvgraft.core.prompt import mark, parse_markers, render_chat
from kvgraft.engine.engine import Engine
from kvgraft.engine.request import Request, Result
from kvgraft.engine.sampling import SamplingParams
from kvgraft.prefill import DEFAULT_POLICY
from kvgraft_lab.evaluate.metrics import line_match
from kvgraft_lab.evaluate.passages import WORLD, Passage, Reading, TextQuestion

POLICIES = ("full", DEFAULT_POLICY)
# timed runs of each policy, in turn
REPEATS = 3
MAX_TOKENS = 40


@dataclass(frozen=True)
class PolicyAnswer:
    """Answer of one policy to one question.

    Attributes:
        ttft_s: seconds to the first token, median of `REPEATS`.
        reused, recomputed: grafted tokens, and those of them that were recomputed.
    """

    policy: str
    text: str
    ttft_s: float
    reused: int
    recomputed: int
    fallback: str | None


@dataclass(frozen=True)
class AnsweredQuestion:
    """A question with the titles of the texts before it, and its answers, that of `full` first.

    Attributes:
        reordered: answer of full recomputation with the texts in reverse order; None if that is
            the same order.
    """

    question: str
    titles: tuple[str, ...]
    prompt_tokens: int
    answers: tuple[PolicyAnswer, ...]
    reordered: str | None
    expected: str | None = None


@dataclass(frozen=True)
class ReadingReport:
    """All questions, and a summary."""

    setup: str
    questions: tuple[AnsweredQuestion, ...]
    summary: str


def run_reading_demo(
    engine: Engine,
    reading: Reading = WORLD,
    *,
    policies: Sequence[str] = POLICIES,
    on_progress: OnProgress | None = None,
) -> ReadingReport:
    """Prefill the texts behind other instructions, then ask each question under every policy.

    Questions store nothing, so all policies reuse the same pages.

    Args:
        engine: engine on a model with a chat template and about 2,000 positions.
        reading: texts and questions.
        policies: names with or without options; the first is `full`, the reference of the others.
        on_progress: called after each question with the number of finished and of all questions.

    Raises:
        ValueError: `policies` does not begin with `full`, or the engine cannot serve a policy or a
            prompt (for example, too long for the model); the message says why.
    """
    if len(policies) < 2 or policies[0] != "full":
        raise ValueError(
            f"policies must be full and at least one more, got {', '.join(policies) or 'none'}"
        )

    engine.clear_cache()
    for instruction, passages in reading.read:
        _send(engine, _prompt(engine, instruction, _texts(passages)), "full", 1, remember=True)

    questions = reading.questions
    for policy in policies:  # warm-up
        _send(engine, _question(engine, reading, questions[0]), policy, 1, remember=False)

    answered = []
    for done, question in enumerate(questions, 1):
        answered.append(_ask(engine, reading, question, policies))
        if on_progress is not None:
            on_progress(done, len(questions))

    return ReadingReport(_describe(engine), tuple(answered), _summary(answered, reading.subject))


def _texts(passages: Sequence[Passage]) -> str:
    """Return the passages, each marked as a segment."""
    return "\n\n".join(mark(f"{passage.title}\n\n{passage.text}") for passage in passages)


def _prompt(engine: Engine, instruction: str, message: str) -> str:
    """Return a conversation, up to the beginning of the assistant's answer."""
    messages = ({"role": "system", "content": instruction}, {"role": "user", "content": message})
    return render_chat(engine.tokenizer, messages)


def _question(engine: Engine, reading: Reading, question: TextQuestion) -> str:
    message = f"{reading.opening}\n\n{_texts(question.passages)}\n\n{question.asked}"
    return _prompt(engine, reading.instruction, message) + question.begun


def _ask(
    engine: Engine, reading: Reading, question: TextQuestion, policies: Sequence[str]
) -> AnsweredQuestion:
    prompt = _question(engine, reading, question)
    results: dict[str, list[Result]] = {policy: [] for policy in policies}
    for number in range(REPEATS):
        for policy in (*policies[number:], *policies[:number]):
            max_tokens = MAX_TOKENS if number == 0 else 1
            results[policy].append(_send(engine, prompt, policy, max_tokens, remember=False))
    reordered = None
    if (turned := replace(question, passages=question.passages[::-1])) != question:
        prompt = _question(engine, reading, turned)
        reordered = _send(engine, prompt, "full", MAX_TOKENS, remember=False).text.strip()
    return AnsweredQuestion(
        question=question.text,
        titles=tuple(passage.title for passage in question.passages),
        prompt_tokens=results["full"][0].report.prompt_tokens,
        answers=tuple(_answer(policy, results[policy]) for policy in policies),
        reordered=reordered,
        expected=question.expected,
    )


def _send(engine: Engine, prompt: str, policy: str, max_tokens: int, *, remember: bool) -> Result:
    sampling = SamplingParams(max_tokens=max_tokens, stop=("\n",))  # an answer is one line
    request = Request(parse_markers(prompt), policy, sampling, remember=remember)
    engine.read_documents(request)
    [result] = engine.generate([request])
    if result.error:
        raise ValueError(f"the engine cannot answer a prompt of the demo: {result.error}")
    return result


def _answer(policy: str, results: Sequence[Result]) -> PolicyAnswer:
    whole, report = results[0], results[0].report
    return PolicyAnswer(
        policy=policy,
        text=whole.text.strip(),
        ttft_s=median(result.report.ttft_s for result in results),
        reused=report.grafted_tokens,
        recomputed=report.recomputed_tokens,
        fallback=report.fallback,
    )


def _describe(engine: Engine) -> str:
    config, decoder = engine.config, engine.decoder
    return (
        f"{config.architecture}, {config.num_layers} layers, "
        f"{str(decoder.dtype).removeprefix('torch.')} on "
        f"{decoder.device}, {torch.get_num_threads()} threads"
    )


def _summary(answered: Sequence[AnsweredQuestion], subject: str) -> str:
    """Return the summary, with a sentence about right answers if they are known."""
    count = len(answered)
    others = zip(*(question.answers[1:] for question in answered), strict=True)
    seen = [_compared(answers, answered) for answers in others]
    return (
        f"You saw {count} {subject} that the model had read before, in other prompts and in "
        f"another order: {'; '.join(seen)}.{_reordered(answered)}{_right(answered)}"
    )


def _reordered(answered: Sequence[AnsweredQuestion]) -> str:
    """Return how often full recomputation keeps its answer if the texts are reversed, in a
    sentence, if that was asked."""
    asked = [question for question in answered if question.reordered is not None]
    if not asked:
        return ""
    same = sum(question.reordered == question.answers[0].text for question in asked)
    return (
        " With the texts in reverse order, full recomputation itself gave "
        f"{_agreement(same, len(asked))}."
    )


def _right(answered: Sequence[AnsweredQuestion]) -> str:
    """Return how many expected answers each policy gave, without regard to white space, in a
    sentence, if there are any."""
    if any(question.expected is None for question in answered):
        return ""
    right = Counter[str]()
    for question in answered:
        answers = {answer.policy: answer.text for answer in question.answers}
        answers["full with the texts in reverse order"] = question.reordered or ""
        right.update(
            {
                name: int(line_match(text, [question.expected or ""]))
                for name, text in answers.items()
            }
        )
    counts = ", ".join(f"{name} {count}" for name, count in right.items())
    return f" Equal to the file, of {len(answered)}: {counts}."


def _compared(answers: Sequence[PolicyAnswer], answered: Sequence[AnsweredQuestion]) -> str:
    """Return the comparison of one policy with full over all questions."""
    fulls = [question.answers[0] for question in answered]
    same = sum(ours.text == full.text for ours, full in zip(answers, fulls, strict=True))
    speedup = median(full.ttft_s / ours.ttft_s for ours, full in zip(answers, fulls, strict=True))
    reused = sum(ours.reused for ours in answers)
    share = reused / sum(question.prompt_tokens for question in answered)
    again = sum(ours.recomputed for ours in answers) / max(1, reused)
    return (
        f"{answers[0].policy} took over {share:.0%} of the tokens, computed {again:.0%} of those "
        "again, began to "
        f"answer {speedup:.1f} times as fast as full recomputation, and gave "
        f"{_agreement(same, len(answered))}"
    )


def _agreement(same: int, count: int) -> str:
    if same == count:
        return f"the same answer, word for word, to all {count}"
    if same == 0:
        return f"an answer in other words to all {count}"
    others = "another one to 1" if count - same == 1 else f"other ones to {count - same}"
    return f"the same answer, word for word, to {same} and {others}"


def render(report: ReadingReport) -> RenderableType:
    """Return every question with its answers, and the summary, for a rich console of 80 columns."""
    parts: list[RenderableType] = [
        Text(f"{report.setup}; s: seconds to the first token", style="dim")
    ]
    for number, question in enumerate(report.questions, 1):
        parts.append(Text(f"\n{number}. {question.question}", style="bold"))
        parts.append(
            Text(f"{question.prompt_tokens} tokens: {', '.join(question.titles)}", style="dim")
        )
        parts.append(_table(question))
    return Group(*parts, Text(f"\n{report.summary}"))


def _table(question: AnsweredQuestion) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(overflow="fold", max_width=24)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")

    for answer in question.answers:
        said = Text(answer.text or "(nothing)")
        if answer.fallback:
            said.append(f"\nnothing reused: {answer.fallback}", style="dim")
        elif answer is not question.answers[0]:
            said.append(
                f"\n{answer.reused} tokens reused, {answer.recomputed} of them recomputed",
                style="dim",
            )
        table.add_row(answer.policy, f"{answer.ttft_s:.2f} s", said)
    if question.reordered is not None:
        table.add_row("full, texts reversed", "", Text(question.reordered or "(nothing)"))
    if question.expected is not None:
        table.add_row(Text("the file", style="dim"), "", Text(question.expected, style="dim"))

    return table
