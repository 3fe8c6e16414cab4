"""What a program of an attention kernel takes at a time."""

MOST = 64  # tokens, and rows of queries
ENTRIES = 8192  # of a tile of more than 16: shared memory holds several


def tile_of(dim: int) -> int:
    """Tokens, and rows of queries, whose heads are padded to `dim`."""
    return max(16, min(MOST, ENTRIES // dim))


def parts_of(group: int, rows: int) -> int:
    """How many equal parts of at most `rows` the query heads of a KV head are cut into."""
    return next(parts for parts in range(1, group + 1) if group % parts == 0 and group // parts <= rows)
