"""Suites in the language of the testbed model, with the form of the papers' tasks.

ruler         MQ-NIAH, variable tracking, common words, frequent words (RULER; SparseX Table 2)
multihop      two facts in different documents, in either order (HotpotQA, 2WikiMQA, MuSiQue)
instruction   an instruction before the documents gives their meaning
chat          facts from many turns of a long conversation (LoCoMo; SparseX Table 1)
agents        a judge of n agents, a moderator of a debate, a ReAct loop with a tool (AutoGen, MAD;
              SparseX Table 3)
multidoc      questions over 2 to 10 documents, few of them relevant: one fact among similar ones,
              two hops, chains (HotpotQA, 2WikiMQA, MuSiQue; SamKV Table 3)
stress        hard for methods that choose few tokens: majorities of resolved values, the longest
              chains
sheets        documents of the same sentences with other things and codes (in English, for any
              model: `alike`)
"""

from collections.abc import Sequence
from random import Random

from kvgraft_lab.evaluate.tasks.items import (
    QUESTIONS,
    Ask,
    Item,
    Pattern,
    Shape,
    Suite,
    arrange,
    read_before,
)
from kvgraft_lab.testbed import tasks, vocabulary, wording
from kvgraft_lab.testbed.documents import Facts, make_documents, make_glossary
from kvgraft_lab.testbed.tasks import Question
from kvgraft_lab.testbed.wording import Frame

# kind of question -> words that one of its facts takes, and their maximum number
_FACTS = {
    "needle": (7, 24), "variable": (4, 40), "hop": (14, 16), "glossary": (7, 16), "coreference": (6,
    18),
    "frequent": (84, 1), "common": (64, 1), "vote": (24, 10), "poll": (40, 4),
}  # fmt: skip
# each text has one list, as in RULER
LISTS = ("common", "frequent")
_MULTIDOC = {
    "distractors": "needle",
    "two_hop": "hop",
    "two_hop_reversed": "hop_reversed",
    "chain": "variable",
}
# questions -> name of the facts that they use
_KINDS = {"needles": "needle", "hop_reversed": "hop"}


def _ruler(rng: Random, shape: Shape, task: str, pattern: Pattern) -> Item:
    return _write(rng, shape, pattern, task, (task,), "documents")


def _multihop(rng: Random, shape: Shape, task: str, pattern: Pattern) -> Item:
    return _write(rng, shape, pattern, task, (task,), "documents")


def _multidoc(rng: Random, shape: Shape, task: str, pattern: Pattern) -> Item:
    return _write(rng, shape, pattern, task, (_MULTIDOC[task],), "documents", share=0.2)


def _instruction(rng: Random, shape: Shape, task: str, pattern: Pattern) -> Item:
    return _write(rng, shape, pattern, task, ("glossary",), "plain")


def _chat(rng: Random, shape: Shape, task: str, pattern: Pattern) -> Item:
    return _write(rng, shape, pattern, task, (task,), "chat")


def _agents(rng: Random, shape: Shape, task: str, pattern: Pattern) -> Item:
    """Write an item of agents: a judge counts answers, a moderator reads two long sides, or a ReAct
    loop reads observations.
    """
    if task == "judge":
        return _write(rng, shape, pattern, task, ("vote",), "agents")
    if task == "debate":
        two = Shape(shape.length, 2, shape.patterns)
        return _write(rng, two, pattern, task, ("variable", "coreference"), "agents")
    return _write(rng, shape, pattern, task, ("hop", "hop_reversed", "needle"), "tools")


def _stress(rng: Random, shape: Shape, task: str, pattern: Pattern) -> Item:
    return _write(
        rng, shape, pattern, task, ("poll",) if task == "poll" else ("variable",), "documents"
    )


def _sheets(rng: Random, shape: Shape, task: str, pattern: Pattern) -> Item:
    """Write documents that share their filler. In each, other codes stand between the sentences."""
    count, colours = shape.num_segments, rng.sample(vocabulary.COLOURS, 8)
    words = (shape.length - 60) // count
    codes = max(1, min(len(vocabulary.THINGS) // count, int(0.4 * words / _FACTS["needle"][0])))
    [filler] = make_documents(
        rng, Facts(), orders=[(0,)], num_tokens=max(0, words - codes * _FACTS["needle"][0])
    )
    sentences = [f"{sentence.strip()} ." for sentence in filler.split(" .") if sentence.strip()]
    places = sorted((rng.randint(0, len(sentences)) for _ in range(codes)), reverse=True)
    things = iter(rng.sample(vocabulary.THINGS, codes * count))
    documents = []
    for _ in range(count):
        text = list(sentences)
        for place in places:
            text.insert(place, f"the code of {next(things)} is {rng.choice(vocabulary.NUMBERS)} .")
        documents.append(" ".join(text))

    return _ask(rng, pattern, task, documents, ("needle",), "documents", colours)


GENERATED = {
    suite.name: suite
    for suite in (
        Suite(
            "ruler",
            "RULER: four tasks",
            ("needles", "variable", "common", "frequent"),
            _ruler,
            LISTS,
        ),
        Suite("multihop", "two facts in different documents", ("hop", "hop_reversed"), _multihop),
        Suite("multidoc", "few of many documents matter", tuple(_MULTIDOC), _multidoc),
        Suite(
            "instruction", "an instruction decides what documents mean", ("glossary",), _instruction
        ),
        Suite("chat", "facts from many turns", ("coreference", "needle", "glossary"), _chat),
        Suite("agents", "judge, debate, ReAct", ("judge", "debate", "react"), _agents),
        Suite(
            "stress",
            "majorities of resolved values, the longest chains",
            ("poll", "chain"),
            _stress,
        ),
        Suite("sheets", "documents of the same sentences with other codes", ("codes",), _sheets),
    )
}


def _write(
    rng: Random,
    shape: Shape,
    pattern: Pattern,
    task: str,
    wanted: tuple[str, ...],
    frame: Frame,
    share: float = 0.45,
) -> Item:
    """Write documents with facts for questions of the `wanted` kinds. They are read in one context
    and asked about in another.

    Facts are at most a `share` of the text.
    """
    colours = rng.sample(vocabulary.COLOURS, 8)
    words = shape.length - 60  # room for the instruction, the question and the frame
    orders = [tuple(range(shape.num_segments))]
    facts = _facts(rng, wanted, words, share)
    documents = make_documents(rng, facts, orders=orders, num_tokens=words, colours=colours)
    return _ask(rng, pattern, task, documents, wanted, frame, colours)


def _ask(
    rng: Random,
    pattern: Pattern,
    task: str,
    documents: Sequence[str],
    wanted: tuple[str, ...],
    frame: Frame,
    colours: list[str],
) -> Item:
    """Return an item of the framed documents, with questions of the `wanted` kinds."""
    segments = tuple(wording.frame(rng, documents, frame))
    instructions = [_instruct(rng, colours, frame) for _ in range(len(segments) + 1)]
    notes = [f"then doc {rng.choice(vocabulary.NUMBERS)} :" for _ in segments]
    prompt = arrange(instructions[0], segments, pattern, notes)
    questions = _choose(rng, prompt, wanted, longest=task == "chain")
    read = read_before(
        rng, instructions[1:], segments, pattern, [question.text for question in questions]
    )
    asks = tuple(
        Ask(
            task,
            (*prompt, q.text),
            tuple(q.answer.split()),
            len(q.answer.split()) + 1,
            crosses=q.crosses,
        )
        for q in questions
    )
    return Item(pattern, read, asks)


def _facts(rng: Random, wanted: tuple[str, ...], words: int, share: float) -> Facts:
    kinds = {_KINDS.get(kind, kind) for kind in wanted}
    counts = {}
    for kind in sorted(kinds):
        cost, most = _FACTS[kind]
        counts[kind] = max(1, min(most, int(share * words / len(kinds) / cost)))
    others = [kind for kind in ("needle", "variable", "vote") if kind not in kinds]
    distractor = rng.choice(others)
    counts[distractor] = max(1, min(6, int(0.08 * words / _FACTS[distractor][0])))
    return Facts(**counts, size=4)


def _instruct(rng: Random, colours: list[str], frame: Frame) -> str:
    """Return notes of random length, so that later text gets another position."""
    glossary = make_glossary(rng, rng.sample(colours, len(colours)), rng.randint(6, 8))
    return f"<system> : {glossary}" if frame == "chat" else glossary


def _choose(
    rng: Random, prompt: tuple[str, ...], wanted: tuple[str, ...], *, longest: bool
) -> list[Question]:
    """Return questions of the wanted kinds, in equal numbers.

    Questions with facts in several segments come first, or with `longest` those with facts in most
    segments.
    """
    found = list(tasks.read(prompt))
    rng.shuffle(found)
    if wanted == ("needles",):
        codes = [question for question in found if tasks.is_code(question)]
        groups = [codes[i : i + tasks.NEEDLES] for i in range(0, len(codes), tasks.NEEDLES)]
        return [tasks.together(group) for group in groups if len(group) == tasks.NEEDLES][
            :QUESTIONS
        ]

    fitting = [question for question in found if question.task in wanted]
    # the order is random otherwise
    fitting.sort(key=lambda question: -len(question.segments) if longest else not question.crosses)
    chosen = []
    for number in range(QUESTIONS):
        kind = wanted[number % len(wanted)]
        chosen += [
            question for question in fitting if question.task == kind and question not in chosen
        ][:1]

    return chosen
