"""Tables 1 to 3 of SparseX, its figures beside ours."""

from collections.abc import Mapping, Sequence

from kvgraft_lab.evaluate import results
from kvgraft_lab.evaluate.runner import EvalRow

PAPER_METHODS = {  # the rows of SparseX's tables
    "full": "full recompute", "naive": "naive reuse", "cacheblend": "CacheBlend", "epic": "EPIC",
    "sparsex:boundary_layers=0": "SparseX (w/o hybrid)", "sparsex": "SparseX (w/ hybrid)",
    "transitive": "transitive (ours)",
}  # fmt: skip
TABLE_1 = {  # LOCOMO, Qwen3-32B: score, TTFT in seconds
    "full": (0.68, 9.23), "naive": (0.54, 0.48), "cacheblend": (0.60, 1.32), "epic": (0.55, 0.59),
    "sparsex:boundary_layers=0": (0.64, 0.66), "sparsex": (0.67, 0.87),
}  # fmt: skip
TABLE_2 = {  # RULER, Qwen3-8B: MQ-NIAH, VT, CWE, FWE
    "full": (1.00, 1.00, 0.95, 0.87), "naive": (0.69, 0.33, 0.92, 0.82), "cacheblend": (0.81, 0.65,
    0.95, 0.84),
    "epic": (0.84, 0.49, 0.93, 0.83), "sparsex:boundary_layers=0": (0.90, 0.80, 0.95, 0.86),
    "sparsex": (1.00, 0.94, 0.94, 0.89),
}  # fmt: skip
TABLE_3 = {  # mean over the eight tasks of Qwen2.5-7B: AutoGen, MAD
    "full": (52.70, 47.62), "sparsex:boundary_layers=0": (50.83, 50.96), "sparsex": (51.48, 50.84)
}  # fmt: skip


def paper_tables(rows: Sequence[EvalRow]) -> str:
    """Tables 1 to 3 of SparseX, its figures beside ours (SparseX, section 5)."""
    suites = {(s.policy, s.group): s for s in results.summarise(rows, "suite")}
    tasks = {(s.policy, s.group): s for s in results.summarise(rows, "task")}

    def ours(policy: str, task: str) -> str:
        return results.with_spread(tasks[policy, task], 2)

    chat, ruler, agents = [], [], []
    for policy, name in PAPER_METHODS.items():
        summary, paper = suites[policy, "chat"], TABLE_1.get(policy)
        theirs = f"{paper[0]:.2f} | {TABLE_1['full'][1] / paper[1]:.1f}" if paper else "- | -"
        chat.append(
            f"| {name} | {results.with_spread(summary, 2)} | {summary.speedup:.1f} | {theirs} |"
        )
        columns = ("needles", "variable", "common", "frequent")
        marks = TABLE_2.get(policy)
        mean = sum(tasks[policy, f"ruler/{task}"].score for task in columns) / len(columns)
        cells = [f"{ours(policy, f'ruler/{task}')} ({marks[i]:.2f})" if marks else ours(policy,
        f"ruler/{task}")
                 for i, task in enumerate(columns)]  # fmt: skip
        cells.append(f"{mean:.2f} ({sum(marks) / 4:.2f})" if marks else f"{mean:.2f}")
        ruler.append(f"| {name} | {' | '.join(cells)} |")
        if policy in TABLE_3 or policy == "transitive":
            autogen, mad = TABLE_3.get(policy, (None, None))
            theirs = f"{autogen:.1f} | {mad:.1f}" if autogen else "- | -"
            agents.append(
                f"| {name} | {ours(policy, 'agents/judge')} | {ours(policy, 'agents/debate')} | "
                f"{theirs} |"
            )
    return "\n".join([
        "# SparseX's tables on the testbed", "",
        "`python -m research.quality main`; the paper's figures beside ours.", "",
        "## Table 1: long chats (ours: suite chat; paper: LOCOMO, Qwen3-32B)", "",
        "| method | score | faster | paper's score | faster |", "|---|---|---|---|---|", *chat, "",
        _order_of_times({policy: suites[policy, "chat"].speedup for policy in TABLE_1}), "",
        "## Table 2: RULER (in brackets the paper's, Qwen3-8B)", "",
        "| method | MQ-NIAH | VT | CWE | FWE | average |", "|---|---|---|---|---|---|", *ruler, "",
        "## Table 3: agents (paper: mean of eight tasks, Qwen2.5-7B)", "",
        "| method | judge | debate | paper's AutoGen | paper's MAD |", "|---|---|---|---|---|",
        *agents, "",
    ])  # fmt: skip


def _order_of_times(speedups: Mapping[str, float]) -> str:
    """What Table 1 says of SparseX beside CacheBlend, there and here."""
    theirs = {policy: TABLE_1["full"][1] / seconds for policy, (_, seconds) in TABLE_1.items()}
    said = [
        f"{of['sparsex']:.1f}x for SparseX (w/ hybrid) and {of['cacheblend']:.1f}x for CacheBlend"
        for of in (theirs, speedups)
    ]
    return f"Times sooner, the paper's: {said[0]}; ours: {said[1]}."
