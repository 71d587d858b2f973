import hashlib
import struct
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from segue.block_hash import block_hashes, chain_root, tenant_root, tenant_salt, token_bytes

ROOT = chain_root({"format": 1, "weights": "abc"})


def test_chain_follows_the_published_definition() -> None:
    tokens = [1, 2, 3, 4, 5]
    first = hashlib.sha256(ROOT + struct.pack("<2I", 1, 2)).digest()[:16]
    second = hashlib.sha256(first + struct.pack("<2I", 3, 4)).digest()[:16]
    assert block_hashes(ROOT, token_bytes(tokens), 2) == [first, second]


def test_only_full_blocks_are_hashed() -> None:
    assert [len(block_hashes(ROOT, token_bytes(range(count)), 4)) for count in (0, 3, 4, 5, 8)] == [0, 0, 1, 1, 2]


def test_hash_covers_the_whole_prefix() -> None:
    left = block_hashes(ROOT, token_bytes([1, 2, 3, 4]), 2)
    right = block_hashes(ROOT, token_bytes([9, 2, 3, 4]), 2)
    assert left[1] != right[1]


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.integers(1, 7), st.data())
def test_continued_chain_equals_the_whole_one(tokens: list[int], block_size: int, data: st.DataObject) -> None:
    whole = block_hashes(ROOT, token_bytes(tokens), block_size)
    start = data.draw(st.integers(0, len(whole)))
    parent = whole[start - 1] if start else None
    assert block_hashes(ROOT, token_bytes(tokens), block_size, start_block=start, parent=parent) == whole[start:]


def test_continuing_without_a_parent_is_refused() -> None:
    with pytest.raises(ValueError, match="continued"):
        block_hashes(ROOT, token_bytes([1, 2]), 1, start_block=1)


def test_root_does_not_depend_on_the_order_of_its_parts() -> None:
    assert chain_root({"a": 1, "b": b"x"}) == chain_root({"b": b"x", "a": 1})


def test_root_separates_types_and_boundaries() -> None:
    roots = [
        chain_root({"a": 1}),
        chain_root({"a": "1"}),
        chain_root({"a": b"1"}),
        chain_root({"a1": ""}),
        chain_root({"a": "1b", "c": ""}),
        chain_root({"a": "1", "bc": ""}),
    ]
    assert len(set(roots)) == len(roots)


def test_root_and_hashes_are_the_same_in_another_process() -> None:
    code = (
        "from segue.block_hash import *;"
        "r = chain_root({'format': 1, 'weights': 'abc'});"
        "print((r + block_hashes(r, token_bytes([7, 8, 9]), 1)[-1]).hex())"
    )
    environment = {"PYTHONHASHSEED": "12345"}
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert other.stdout.strip() == (ROOT + block_hashes(ROOT, token_bytes([7, 8, 9]), 1)[-1]).hex()


def test_tenants_do_not_share_but_one_tenant_does() -> None:
    secret = b"server secret"
    mine, theirs = (tenant_root(ROOT, tenant_salt(secret, tenant)) for tenant in ("a", "b"))
    tokens = token_bytes([1, 2, 3, 4])
    assert not set(block_hashes(mine, tokens, 2)) & set(block_hashes(theirs, tokens, 2))
    assert mine == tenant_root(ROOT, tenant_salt(secret, "a"))


def test_tenant_salt_needs_the_secret() -> None:
    assert tenant_salt(b"one", "a") != tenant_salt(b"two", "a")


def test_empty_tenant_is_not_salted() -> None:
    assert tenant_root(ROOT, tenant_salt(b"secret", "")) == ROOT


def test_token_ids_are_little_endian_u32() -> None:
    assert token_bytes([1, 2**32 - 1]) == b"\x01\0\0\0\xff\xff\xff\xff"
