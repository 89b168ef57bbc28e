"""Ulysses: which rings swap heads for tokens, and which degrees share heads out evenly (see
`longctx.attention.ulysses`)."""


def swaps_heads(length: int, first_rank: int, degree: int, ulysses_degree: int) -> bool:
    """Returns whether a ring consists of whole groups of `ulysses_degree` ranks, with tokens in
    both chunks of each rank."""
    whole = first_rank % ulysses_degree == 0 and degree % ulysses_degree == 0
    return ulysses_degree > 1 and whole and length >= 2 * degree


def ulysses_degrees(query_heads: int, kv_heads: int) -> list[int]:
    """Returns the Ulysses degrees that share heads out evenly: divisors of `kv_heads`, and
    multiples that divide `query_heads`.

    With a multiple, ranks that use the same KV head have copies of it.
    """
    dividing = [u for u in range(1, query_heads + 1) if query_heads % u == 0]
    return [u for u in dividing if kv_heads % u == 0 or u % kv_heads == 0]
