"""vLLM over several stages is refused with the reason; its replicas know each their own."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import warm
from engines import EVERYTHING, OFF, TWO_RANKS, words
from processes import HostProcess

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two cores, one for each process"),
]
ENGINE = Path(__file__).with_name("parallel_engine.py")
DOCUMENT = words(300, 1)
PROMPT = [*words(40, 2), *DOCUMENT, *words(9, 3)]


def run(model: Path, log: Path, **engine: Any) -> Any:
    """What replicas answer when the first has read a text; everything that they print is in the
    log."""
    asks = [(DOCUMENT, OFF, 0), (PROMPT, EVERYTHING, 1), (PROMPT, EVERYTHING, 0)]
    job = {"model": str(model), "with_kvgraft": True, "engine": engine, "asks": asks}
    with log.open("w") as errors:
        program = warm.start([str(ENGINE)], os.environ | TWO_RANKS, errors)
        try:
            print(json.dumps(job), file=program.stdin)
            program.stdin.close()
            said = program.stdout.readline()
        finally:
            program.end()
    assert said, log.read_text()[-4000:]
    return json.loads(said)


@pytest.mark.soak  # `test_compat` has the reason
def test_stages_are_refused(model: Path, tmp_path: Path):
    said = run(model, log := tmp_path / "log", pipeline_parallel_size=2)
    assert "Engine core initialization failed" in said["refused"]
    assert "pipeline_parallel_size 2: a recovery goes through all layers" in log.read_text()


@pytest.mark.soak
def test_replicas_graft_what_they_have_read_themselves(
    model: Path, plain: HostProcess, tmp_path: Path
):
    """And nothing else, which is why `kvgraft serve` starts one: segments would be known to one
    replica alone."""
    _, other, same = run(model, tmp_path / "log", data_parallel_size=2)
    assert (other["grafted"], other["reason"]) == (0, "no_known_text")
    assert same["grafted"] >= 256
    assert [other["tokens"]] == [same["tokens"]] == plain.tokens(PROMPT)
