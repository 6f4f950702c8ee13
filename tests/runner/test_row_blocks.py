from __future__ import annotations

import numpy as np

from specdec.runner.row_blocks import RowBlocks


def test_chunks_are_products_of_their_own_and_the_rest_is_cut_in_blocks() -> None:
    blocks = RowBlocks(4)
    blocks.plan(3 + 20 + 6 + 2, [0, 1, 3, 23, 29])
    assert blocks.cuts == [(0, 3), (3, 23), (23, 27), (27, 31)]
    assert blocks.chunks == {(3, 23)}
    blocks.clear()
    assert (blocks.cuts, blocks.chunks) == ([], set())


def test_many_rows_of_a_decoding_request_are_no_chunk() -> None:
    blocks = RowBlocks(8)
    blocks.plan(21 + 20, [0, 21, 41], [False, True])
    assert blocks.cuts == [(0, 8), (8, 16), (16, 21), (21, 41)]
    assert blocks.chunks == {(21, 41)}


def test_arrays_are_planned_as_lists_are() -> None:
    blocks, same = RowBlocks(8), RowBlocks(8)
    blocks.plan(41, np.array([0, 21, 41]), np.array([False, True]))
    same.plan(41, [0, 21, 41], [False, True])
    assert blocks == same or (blocks.cuts, blocks.chunks) == (same.cuts, same.chunks)


def test_padding_rows_are_cut_with_those_before_them() -> None:
    blocks = RowBlocks(4)
    blocks.plan(6, [0, 1])
    assert blocks.cuts == [(0, 4), (4, 6)]
