"""Rows of running sequences: known tokens and block tables, on the device, written only by plans and by sampling.

A step's inputs are gathered on the device from (row, position), so the newest token never has to reach the host before
the next step starts. The host knows only counts: how many tokens and pages each row has.

Copies to a GPU do not wait for it (see `upload`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine.upload import upload
from segue.errors import InternalError


class RowState:
    """`rows_max` rows of at most `positions_max` tokens. Token table int64 [rows, positions_max], block table int32
    [rows, blocks_max]."""

    def __init__(self, rows_max: int, positions_max: int, block_size: int, device: torch.device) -> None:
        self.block_size, self.device = block_size, device
        self.blocks_max = -(-positions_max // block_size)
        self.tokens = torch.zeros((rows_max, positions_max), dtype=torch.int64, device=device)
        self.block_tables = torch.zeros((rows_max, self.blocks_max), dtype=torch.int32, device=device)
        self.seqs: list[int | None] = [None] * rows_max
        self.tokens_known = [0] * rows_max
        self.pages_known = [0] * rows_max

    def end(self, row: int) -> None:
        self.seq(row)
        self.seqs[row] = None

    def start(self, row: int, seq: int, tokens: list[int], pages: list[int], tokens_ready: int = 0) -> None:
        """The first `tokens_ready` tokens have K/V already and will not be read: they stay on the host."""
        if self.seqs[row] is not None:
            raise InternalError(f"row {row} starts sequence {seq} while it holds {self.seqs[row]}")
        self.seqs[row] = seq
        self.tokens[row, tokens_ready : len(tokens)].copy_(upload(tokens[tokens_ready:], self.device))
        self.tokens_known[row], self.pages_known[row] = len(tokens), 0
        self.grow([(row, pages)])

    def grow(self, grows: Sequence[tuple[int, list[int]]]) -> None:
        """Append pages to block tables, all in one transfer."""
        entries: list[tuple[int, int, int]] = []
        for row, pages in grows:
            first = self.pages_known[row]
            entries.extend((row, first + index, page) for index, page in enumerate(pages))
            self.pages_known[row] += len(pages)
        if entries:
            packed = upload(np.array(entries, dtype=np.int64).T, self.device)
            self.block_tables.index_put_((packed[0], packed[1]), packed[2].int())

    def append(self, rows: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor, rows_host: list[int]) -> None:
        """Newly sampled tokens, int64 [n] each."""
        self.tokens.index_put_((rows, positions), tokens)
        for row in rows_host:
            self.tokens_known[row] += 1

    def seq(self, row: int) -> int:
        seq = self.seqs[row]
        if seq is None:
            raise InternalError(f"row {row} holds no sequence")
        return seq

    def check_pages(self, row: int, positions: int) -> None:
        """K/V of `positions` positions must fit the row's pages: writing past them would hit another sequence."""
        if positions > self.pages_known[row] * self.block_size:
            raise InternalError(f"row {row} has {self.pages_known[row]} pages, too few for {positions} positions")
