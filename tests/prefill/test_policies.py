import pytest

from kvgraft.methods import count_layers
from kvgraft.policies import (
    POLICIES,
    Full,
    Policy,
    SparseX,
    make_policy,
    parse_policy,
    with_options,
)
from kvgraft.prefill.selection import shares_by_round


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_has_defaults_a_name_and_a_description(name: str):
    policy = make_policy(name)
    assert policy == parse_policy(name)
    assert policy.name == name
    assert type(policy).__doc__


def test_options_are_parsed_as_shares_and_counts():
    assert parse_policy("sparsex:boundary_layers=2,recompute_share=0.25") == SparseX(
        boundary_layers=2, recompute_share=0.25
    )
    assert parse_policy("sparsex:boundary_share=0.2") == SparseX(boundary_share=0.2)
    assert parse_policy("full") == Full()


@pytest.mark.parametrize(
    "policy",
    [
        *(make_policy(name) for name in POLICIES),
        SparseX(
            boundary_layers=0,
            recompute_share=1e-05,
            overflow_blocks=2,
            rows="question",
            reduction="max",
            unit="block",
        ),
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
            "unknown policy 'magic': choose from auto, cacheblend, condense, epic, full, naive, "
            "prophet, "
            "redknot, samkv, "
            "similar, sparsex, spread, transitive",
        ),
        ("", "unknown policy ''"),
        (
            "sparsex:budget=1",
            "no option 'budget': it has rows, reduction, unit, boundary_layers, boundary_share, "
            "recompute_share",
        ),
        ("full:topk=1", "no option 'topk': it has none"),
        ("sparsex:recompute_share=much", "recompute_share must be a share from 0 to 1, got 'much'"),
        ("sparsex:topk", "'topk' is not option=value"),
        ("sparsex:recompute_share=nan", "recompute_share must be a share from 0 to 1, got nan"),
        ("sparsex:rows=1", "rows must be one of all_fresh, question, got 1"),
        ("sparsex:reduction=mean", "reduction must be one of sum, max, got 'mean'"),
        ("transitive:unit=page", "unit must be one of token, block, got 'page'"),
        ("transitive:probe_layers=-1", "probe_layers must be an integer of at least 0, got -1"),
        ("transitive:hops=-1", "hops must be an integer of at least 0, got -1"),
        ("transitive:first_share=2", "first_share must be a share from 0 to 1, got 2"),
        ("spread:start_tokens=-1", "start_tokens must be an integer of at least 0, got -1"),
        ("spread:start_share=2", "start_share must be a share from 0 to 1, got 2"),
        ("spread:spread_share=1.5", "spread_share must be a share from 0 to 1, got 1.5"),
        ("redknot:mass_share=2", "mass_share must be a share from 0 to 1, got 2"),
        ("redknot:last_mass_share=x", "last_mass_share must be a share from 0 to 1, got 'x'"),
        ("redknot:recent_tokens=-1", "recent_tokens must be an integer of at least 0, got -1"),
        ("redknot:windows=maybe", "windows must be one of on, off, got 'maybe'"),
        ("samkv:kept_share=2", "kept_share must be a share from 0 to 1, got 2"),
        ("samkv:block_tokens=0", "block_tokens must be an integer of at least 1, got 0"),
        ("samkv:local_blocks=-1", "local_blocks must be an integer of at least 0, got -1"),
        ("samkv:recomputed=all", "recomputed must be one of none, anchors, kept, got 'all'"),
        ("samkv:update=mix", "update must be one of overwrite, fusion, got 'mix'"),
        (
            "samkv:initial_blocks=0,local_blocks=0",
            "initial and local must not both be 0: their blocks are the anchors of Eq. 2",
        ),
        ("samkv:bias=no", "bias must be one of on, off, got 'no'"),
        ("condense:rounds=0", "rounds must be an integer of at least 1, got 0"),
        ("condense:hop_tokens=0.5", "hop_tokens must be an integer of at least 0, got 0.5"),
        (
            "condense:skipped_share=1",
            "skipped_share must be less than 1: the attention of some layer has to count",
        ),
        (
            "auto:same_context=redknot",
            "same_context=redknot: unknown policy 'redknot': choose from cacheblend, epic, naive, ",
        ),
        (
            "auto:new_context=spread:recompute_share=2/hops=1",
            "new_context=spread:recompute_share=2/hops=1: recompute_share must be a share",
        ),
        ("auto:new_context=spread:hop=1", "policy 'spread' has no option 'hop'"),
        (
            "auto:same_context=1",
            "same_context must be a policy, name:option=value/option=value, got 1",
        ),
        ("epic:start_tokens=-1", "tokens must be an integer of at least 0, got -1"),
        ("cacheblend:check_layer=0.5", "check_layer must be an integer of at least 0, got 0.5"),
        ("cacheblend:recompute_share=9", "share must be a share from 0 to 1, got 9"),
        ("prophet:recompute_share=x", "share must be a share from 0 to 1, got 'x'"),
        ("sparsex:recompute_share=1.5", "recompute_share must be a share from 0 to 1, got 1.5"),
        ("sparsex:recompute_share=-0.1", "recompute_share must be a share from 0 to 1, got -0.1"),
        ("sparsex:boundary_layers=-1", "boundary_layers must be an integer of at least 0, got -1"),
        ("sparsex:boundary_share=1.5", "boundary_share must be a share from 0 to 1, got 1.5"),
        (
            "sparsex:overflow_blocks=0.5",
            "overflow_blocks must be an integer of at least 0, got 0.5",
        ),
        ("sparsex:tail_tokens=0", "tail_tokens must be an integer of at least 1, got 0"),
    ],
)
def test_bad_options_are_refused_by_name_and_value(text: str, message: str):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        parse_policy(text)


def test_a_policy_in_an_option_has_no_commas():
    with pytest.raises(ValueError, match="new_context must be a policy"):
        make_policy("auto", {"new_context": "spread:hops=1,recompute_share=0.05"})


def test_nan_is_no_share():
    with pytest.raises(ValueError, match="recompute_share"):
        SparseX(recompute_share=float("nan"))


@pytest.mark.parametrize(
    ("count", "share", "layers", "dense"),
    [
        (0, 0.5, 6, 0),
        (3, 0.5, 2, 2),
        (None, 0.15, 6, 1),
        (None, 0.2, 36, 8),
        (None, 0.2, 10, 2),
        (None, 0.0, 6, 0),
    ],
)
def test_the_boundary_is_a_count_or_a_share(
    count: int | None, share: float, layers: int, dense: int
):
    assert count_layers(count, share, layers) == dense


def test_a_count_and_a_share_of_layers_exclude_each_other():
    with pytest.raises(ValueError, match="takes boundary_layers or boundary_share, not both"):
        parse_policy("sparsex:boundary_layers=1,boundary_share=0.5")
    given = with_options(parse_policy("sparsex:boundary_layers=1"), {"boundary_share": 0.5})
    assert given == SparseX(boundary_share=0.5)
    assert with_options(given, {"boundary_layers": 2}) == SparseX(
        boundary_layers=2, boundary_share=0.5
    )


@pytest.mark.parametrize(
    ("given", "shares"),
    [
        ((0.5, 0.4, 2), [0.2, 0.15 / 0.8, 0.15 / 0.65]),
        ((1.0, 0.4, 2), [0.4, 0.5, 1.0]),
        ((0.5, 0.4, 0), [0.5]),
        ((0.0, 0.4, 1), [0.0, 0.0]),
        ((1.0, 1.0, 2), [1.0, 0.0, 0.0]),
    ],
)
def test_hops_share_what_is_left(given: tuple[float, float, int], shares: list[float]):
    assert shares_by_round(*given) == pytest.approx(shares)
