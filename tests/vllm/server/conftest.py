import os
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # tests import their helpers by name

from running import ADMIN, ALICE, BOB, RunningServer, running

from kvgraft_lab.testbed.documents import Facts, make_documents

CHAT = (
    "{% for message in messages %}<bos> {{ message['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}question : code of{% endif %}"
)
# of 32 tokens, half of which may be pinned: five texts of the greatest length fill it
NUM_BLOCKS = 640


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """`kvgraft serve` on the bundled model with two tenants, an admin and two shared namespaces;
    one for all tests."""
    arguments = ["-m", "kvgraft", "serve", "--api-key", ALICE, BOB, "--chat-template", CHAT]
    arguments += ["--num-gpu-blocks-override", str(NUM_BLOCKS), "--kvgraft-pin-quota", "0.5"]
    arguments += ["--kvgraft-costs", "tokens"]
    arguments += ["--kvgraft-share", f"wiki={ALICE}", "--kvgraft-share", "law=*"]
    log = tmp_path_factory.mktemp("server") / "log"
    with running(arguments, log, {**os.environ, "KVGRAFT_ADMIN_KEY": ADMIN}, anew=True) as started:
        yield started


class Texts:
    """Documents of the bundled model's words that no earlier test has sent."""

    def __init__(self) -> None:
        self._rng = Random(0)

    def document(self, num_tokens: int = 600) -> str:
        """A new one."""
        [text] = make_documents(self._rng, Facts(needle=8), orders=[(0,)], num_tokens=num_tokens)
        return text


@pytest.fixture(scope="session")
def texts() -> Texts:
    return Texts()
