import pytest

from kvgraft.methods import count_layers
from kvgraft.prefill.policies import POLICIES, Full, Policy, SparseX, Transitive, make_policy, parse_policy


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_has_defaults_a_name_and_a_description(name: str):
    policy = make_policy(name)
    assert policy == parse_policy(name)
    assert policy.name == name
    assert type(policy).__doc__


def test_options_are_parsed_as_shares_and_counts():
    assert parse_policy("sparsex:boundary=2,topk=0.25") == SparseX(boundary=2, topk=0.25)
    assert parse_policy("sparsex:boundary=0.2") == SparseX(boundary=0.2)
    assert parse_policy("full") == Full()


@pytest.mark.parametrize(
    "policy",
    [
        *(make_policy(name) for name in POLICIES),
        SparseX(boundary=0, topk=1e-05, overflow_blocks=2, rows="question", reduction="max", unit="block"),
    ],
    ids=str,
)
def test_a_policy_is_written_as_it_is_read(policy: Policy):
    assert parse_policy(str(policy)) == policy


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "magic",
            "unknown policy 'magic': choose from cacheblend, condense, epic, full, naive, prophet, redknot, samkv, "
            "similar, sparsex, transitive",
        ),
        ("", "unknown policy ''"),
        ("sparsex:budget=1", "no option 'budget': it has rows, reduction, unit, boundary, topk, overflow_blocks"),
        ("full:topk=1", "no option 'topk': it has none"),
        ("sparsex:topk=much", "topk must be a share from 0 to 1, got 'much'"),
        ("sparsex:topk", "'topk' is not option=value"),
        ("sparsex:topk=nan", "topk must be a share from 0 to 1, got nan"),
        ("sparsex:rows=1", "rows must be one of all_fresh, question, got 1"),
        ("sparsex:reduction=mean", "reduction must be one of sum, max, got 'mean'"),
        ("transitive:unit=page", "unit must be one of token, block, got 'page'"),
        ("transitive:probe=-1", "probe must be an integer of at least 0, got -1"),
        ("transitive:hops=-1", "hops must be an integer of at least 0, got -1"),
        ("transitive:first=2", "first must be a share from 0 to 1, got 2"),
        ("redknot:mass=2", "mass must be a share from 0 to 1, got 2"),
        ("redknot:last_mass=x", "last_mass must be a share from 0 to 1, got 'x'"),
        ("redknot:recent=-1", "recent must be an integer of at least 0, got -1"),
        ("redknot:windows=maybe", "windows must be one of on, off, got 'maybe'"),
        ("samkv:ratio=2", "ratio must be a share from 0 to 1, got 2"),
        ("samkv:block=0", "block must be an integer of at least 1, got 0"),
        ("samkv:local=-1", "local must be an integer of at least 0, got -1"),
        ("samkv:recomputed=all", "recomputed must be one of none, anchors, kept, got 'all'"),
        ("samkv:update=mix", "update must be one of overwrite, fusion, got 'mix'"),
        ("samkv:initial=0,local=0", "initial and local must not both be 0: their blocks are the anchors of Eq. 2"),
        ("samkv:bias=no", "bias must be one of on, off, got 'no'"),
        ("condense:rounds=0", "rounds must be an integer of at least 1, got 0"),
        ("condense:hops=0.5", "hops must be an integer of at least 0, got 0.5"),
        ("condense:skipped=1", "skipped must be less than 1: the attention of some layer has to count"),
        ("epic:tokens=-1", "tokens must be an integer of at least 0, got -1"),
        ("cacheblend:check_layer=0.5", "check_layer must be an integer of at least 0, got 0.5"),
        ("cacheblend:share=9", "share must be a share from 0 to 1, got 9"),
        ("prophet:share=x", "share must be a share from 0 to 1, got 'x'"),
        ("sparsex:topk=1.5", "topk must be a share from 0 to 1, got 1.5"),
        ("sparsex:topk=-0.1", "topk must be a share from 0 to 1, got -0.1"),
        ("sparsex:boundary=-1", "boundary must be an integer of at least 0, got -1"),
        ("sparsex:boundary=1.5", "boundary must be a share from 0 to 1, got 1.5"),
        ("sparsex:overflow_blocks=0.5", "overflow_blocks must be an integer of at least 0, got 0.5"),
        ("sparsex:tail_tokens=0", "tail_tokens must be an integer of at least 1, got 0"),
    ],
)
def test_bad_options_are_refused_by_name_and_value(text: str, message: str):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        parse_policy(text)


def test_nan_is_no_share():
    with pytest.raises(ValueError, match="topk"):
        SparseX(topk=float("nan"))


@pytest.mark.parametrize(
    ("boundary", "layers", "dense"), [(0, 6, 0), (3, 2, 2), (0.15, 6, 1), (0.2, 36, 8), (0.2, 10, 2), (0.0, 6, 0)]
)
def test_the_boundary_is_a_count_or_a_share(boundary: int | float, layers: int, dense: int):
    assert count_layers(boundary, layers) == dense


@pytest.mark.parametrize(
    ("options", "shares"),
    [
        ({"topk": 0.5, "first": 0.4, "hops": 2}, [0.2, 0.15 / 0.8, 0.15 / 0.65]),
        ({"topk": 1.0, "first": 0.4, "hops": 2}, [0.4, 0.5, 1.0]),
        ({"topk": 0.5, "hops": 0}, [0.5]),
        ({"topk": 0.0, "hops": 1}, [0.0, 0.0]),
        ({"topk": 1.0, "first": 1.0, "hops": 2}, [1.0, 0.0, 0.0]),
    ],
)
def test_hops_share_what_is_left(options: dict, shares: list[float]):
    assert Transitive(**options)._shares() == pytest.approx(shares)
