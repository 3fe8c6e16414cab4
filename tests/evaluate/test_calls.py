import json

import pytest

from kvgraft_lab.evaluate.calls import find_calls, match_calls

PLAY = json.dumps(
    {"spotify.play": {"artist": ["Taylor Swift"], "minutes": [20, 20.5], "loud": ["", False]}}
)
STOP = json.dumps({"stop": {}})
ORDER = json.dumps(
    {"order": {"drink": [{"size": ["large"], "milk": ["coconut", ""]}], "at": [[3, "noon"]]}}
)


@pytest.mark.parametrize(
    ("answer", "calls"),
    [
        ("f(a=1, b='x')", [("f", {"a": 1, "b": "x"})]),
        ("[f.g(a=[1, 2]), h()]\nThat is all.", [("f.g", {"a": [1, 2]}), ("h", {})]),
        ('```json\n{"name": "f", "arguments": {"a": true}}\n```', [("f", {"a": True})]),
        ('<tool_call>[{"name": "f", "arguments": {}}]</tool_call>', [("f", {})]),
        (
            '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n<tool_call>\n'
            '{"name": "g", "arguments": {"a": 1}}\n</tool_call>',
            [("f", {}), ("g", {"a": 1})],
        ),
        (
            'I call f.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\nDone.',
            [("f", {"a": 1})],
        ),
        # a call that is cut off, or not JSON
        (
            '<tool_call>{"name": "f", "arguments": {}}</tool_call><tool_call>{"name": "f", "arg',
            [],
        ),
        ('{"name": "f", "arguments": {}}\n{"name": "f", "arg', []),
        ('<tool_call>g</tool_call><tool_call>{"name": "f", "arguments": {}}</tool_call>', []),
        ('{"name": "f", "arguments": {}} and more', []),
        ('{"name": "f", "arguments": ""}', []),
        ("f(a=name, b=-1)", [("f", {"a": "name", "b": -1})]),
        ("f(1)", []),
        ("I cannot call that.", []),
        ("", []),
        ("(" * 10_000, []),
    ],
)
def test_calls_are_found_in_python_and_json(answer: str, calls: list):
    assert find_calls(answer) == calls


@pytest.mark.parametrize(
    ("answer", "expected", "score"),
    [
        # case and what may be left out
        ("[spotify.play(artist='taylor swift', minutes=20)]", [PLAY], 1.0),
        ("[spotify.play(artist='Taylor-Swift.', minutes=20.5, loud=False)]", [PLAY], 1.0),
        (
            '{"name": "spotify.play", "arguments": {"artist": "Taylor Swift", "minutes": 20}}',
            [PLAY],
            1.0,
        ),
        ("[spotify.play(artist='Taylor Swift')]", [PLAY], 0.0),  # an argument is missing
        ("[spotify.play(artist='Taylor Swift', minutes=21)]", [PLAY], 0.0),
        # no truth value
        ("[spotify.play(artist='Taylor Swift', minutes=20, loud=0)]", [PLAY], 0.0),
        ("[spotify.play(artist='Taylor Swift', minutes=20, fast=True)]", [PLAY], 0.0),
        ("[play(artist='Taylor Swift', minutes=20)]", [PLAY], 0.0),
        ("[stop(), spotify.play(artist='Taylor Swift', minutes=20)]", [PLAY, STOP], 1.0),
        ("[stop(), stop()]", [STOP], 0.0),
        ("[stop()]", [STOP, STOP], 0.0),
        ("[order(drink={'size': 'Large'}, at=[3, 'Noon'])]", [ORDER], 1.0),
        ("[order(drink={'size': 'Large', 'milk': 'soy'}, at=[3, 'Noon'])]", [ORDER], 0.0),
        ("[order(drink={'milk': 'coconut'}, at=[3, 'noon'])]", [ORDER], 0.0),
        ("[order(drink={'size': 'large'}, at=[3])]", [ORDER], 0.0),
        ("[move(to={'x': 1.5})]", [json.dumps({"move": {"to": [{"x": 1.5}]}})], 1.0),
        ("nothing", [STOP], 0.0),
    ],
)
def test_a_match_is_the_name_and_the_arguments_of_every_call(
    answer: str, expected: list[str], score: float
):
    assert match_calls(answer, expected) == score
