import pytest

from kvgraft.prefill.policies import POLICIES, Full, Policy, SparseX, make_policy, parse_policy


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


@pytest.mark.parametrize("policy", [Full(), SparseX(), SparseX(boundary=0, topk=1e-05, overflow_blocks=2)], ids=str)
def test_a_policy_is_written_as_it_is_read(policy: Policy):
    assert parse_policy(str(policy)) == policy


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("magic", "unknown policy 'magic': choose from full, naive, sparsex"),
        ("", "unknown policy ''"),
        ("sparsex:budget=1", "no option 'budget': it has boundary, topk, overflow_blocks, tail_tokens"),
        ("full:topk=1", "no option 'topk': it has none"),
        ("sparsex:topk=much", "'topk=much' is not option=number"),
        ("sparsex:topk", "'topk' is not option=number"),
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
    assert SparseX(boundary=boundary).num_dense_layers(layers) == dense
