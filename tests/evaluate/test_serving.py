import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from kvgraft.server.process import serving
from kvgraft_lab.evaluate.serving import ServingReport, render, run_serving_demo

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def report() -> ServingReport:
    return run_serving_demo()


def test_documents_in_another_order_are_grafted_streaming_and_not(report: ServingReport):
    first, *later, last = report.rows
    assert (first.grafted, first.reason) == (0, "no_known_text")
    assert (last.grafted, last.reason) == (0, "off")
    assert len(later) == 4
    for row in later:
        assert row.reason is None
        assert max(row.grafted, row.continued) > 0.9 * row.prompt_tokens, (
            "the same prompt again is gone on with"
        )
        assert 0 < row.recomputed < 0.3 * (row.grafted + row.continued)
    assert sum(row.grafted > 0 for row in later) >= 2


def test_tokens_add_up_in_every_response(report: ServingReport):
    for row in report.rows:
        assert row.prefix + row.continued + row.grafted + row.fresh == row.prompt_tokens
        assert row.cached_tokens == row.prefix + row.continued + row.grafted


def test_reuse_gives_the_answer_of_full_prefill(report: ServingReport):
    assert report.rows[-2].answer == report.rows[-1].answer


def test_metrics_count_what_the_responses_say(report: ServingReport):
    counted = {line.split("{")[0] + "/" + line.split('kind="')[1].split('"')[0]: float(line.split()[-1])
               for line in report.metrics if 'kind="' in line}  # fmt: skip
    for kind in ("grafted", "recomputed"):
        assert counted[f"kvgraft:tokens_total/{kind}"] == sum(
            getattr(row, kind) for row in report.rows
        )


def test_the_table_shows_every_request(report: ServingReport):
    from io import StringIO

    from rich.console import Console

    text = StringIO()
    Console(file=text, width=80).print(render(report))
    assert all(f"{row.request} " in text.getvalue() for row in report.rows), "no cell is folded"
    assert text.getvalue().count(f"({report.rows[1].expected})") == 1


@pytest.mark.soak
def test_a_server_that_does_not_start_says_why():
    with pytest.raises(RuntimeError, match="nowhere"), serving("/nowhere/model"):
        pass
