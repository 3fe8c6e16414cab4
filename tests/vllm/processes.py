"""An engine in a process of its own, since only one can have our connector in a process, and plain
vLLM has none.

Run as a script it reads lines of JSON, each a list of `Ask` or the name of a number that a `Host`
counts or returns, and writes for each a line: the list of `Answer` or the number."""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "vllm")]

import warm  # noqa: E402
from engines import (  # noqa: E402
    ENVIRONMENT,
    Answer,
    Ask,
    as_answer,
    as_lora,
    as_prompt,
    as_sampling,
    start_engine,
)
from hosts import Host  # noqa: E402


class HostProcess:
    """Answers requests from another process. Answers without options are kept, so asking again is
    free.

    Args:
        log: file for everything that the engine says.
        with_kvgraft: our connector, or plain vLLM.
        settings: further arguments of vLLM's `LLM`.
    """

    def __init__(self, model: Path, log: Path, *, with_kvgraft: bool, **settings: Any) -> None:
        arguments = json.dumps({"model": str(model), "with_kvgraft": with_kvgraft, **settings})
        self._log = log
        self._kept: dict[str, Answer] = {}
        with log.open("w") as errors:
            self._process = warm.start([__file__, arguments], os.environ | ENVIRONMENT, errors)

    def ask(self, *asks: Ask) -> list[Answer]:
        """Answers to requests that arrive together."""
        keys = [json.dumps(asdict(ask)) for ask in asks]
        new = [
            ask for ask, key in zip(asks, keys, strict=True) if ask.options or key not in self._kept
        ]
        if new:
            found = self._exchange([asdict(ask) for ask in new])
            self._kept |= {
                json.dumps(asdict(ask)): Answer(**answer)
                for ask, answer in zip(new, found, strict=True)
            }
        return [self._kept[key] for key in keys]

    def tokens(self, *prompts: Any, max_tokens: int = 8) -> list[list[int]]:
        """What is generated for these prompts."""
        return [
            answer.tokens
            for answer in self.ask(*[Ask(prompt, max_tokens=max_tokens) for prompt in prompts])
        ]

    def counted(self, name: str) -> int:
        """A number that the `Host` in there has counted."""
        return int(self._exchange(name))

    def close(self) -> None:
        """End the process."""
        self._process.end()

    def _exchange(self, message: Any) -> Any:
        to, answers = self._process.stdin, self._process.stdout
        if to is None or answers is None:
            raise RuntimeError("no pipes")
        line = ""
        if self._process.poll() is None:
            print(json.dumps(message), file=to, flush=True)
            line = answers.readline()
        if not line:
            raise RuntimeError(f"the engine's process has died:\n{self._log.read_text()[-4000:]}")
        return json.loads(line)


def main(arguments: str) -> None:
    """Serve lines until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints is no answer
    settings = json.loads(arguments)
    model, with_kvgraft = Path(settings.pop("model")), settings.pop("with_kvgraft")
    if with_kvgraft:
        _serve(Host(model, **settings), sys.stdin, answers)
    else:
        _serve(start_engine(model, with_kvgraft=False, **settings), sys.stdin, answers)


def _serve(engine: Any, questions: IO[str], answers: IO[str]) -> None:
    for line in questions:
        message = json.loads(line)
        if isinstance(message, str):
            found = getattr(engine, message)
            found = found() if callable(found) else found
        else:
            found = [asdict(answer) for answer in _answers(engine, [Ask(**ask) for ask in message])]
        print(json.dumps(found), file=answers, flush=True)


def _answers(engine: Any, asks: list[Ask]) -> list[Answer]:
    if not isinstance(engine, Host):
        loras = [as_lora(a) for a in asks] if any(a.adapter for a in asks) else None
        params = [as_sampling(a) for a in asks]
        outputs = engine.generate(
            [as_prompt(a) for a in asks], params, use_tqdm=False, lora_request=loras
        )
        return [as_answer(output) for output in outputs]
    found = engine.ask(*asks)
    engine.settle()
    if problems := engine.problems():
        raise AssertionError(problems)
    return found


if __name__ == "__main__":
    main(sys.argv[1])
