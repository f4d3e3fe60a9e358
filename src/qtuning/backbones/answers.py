"""Label words as token sequences, scored together: shared beginnings are computed once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

TokenIds = tuple[int, ...]


@dataclass(frozen=True)
class AnswerSet:
    """The token sequences of all labels of one task, and the fewest inputs that score them all.

    To score a sequence, a model must read all of it but the last token. `paths` are those inputs,
    less every one that another path begins with: labels of one token each need a single, empty path.
    """

    sequences: tuple[TokenIds, ...]
    paths: tuple[TokenIds, ...]
    path_of: tuple[int, ...]
    """For each sequence, the path that contains its input."""

    @classmethod
    def build(cls, sequences: Sequence[TokenIds]) -> AnswerSet:
        """From one token sequence per label."""
        inputs = sorted({sequence[:-1] for sequence in sequences}, key=lambda ids: (-len(ids), ids))
        paths: list[TokenIds] = []
        for ids in inputs:
            if not any(path[: len(ids)] == ids for path in paths):
                paths.append(ids)
        path_of = tuple(
            next(i for i, path in enumerate(paths) if path[: len(seq) - 1] == seq[:-1])
            for seq in sequences
        )
        return cls(tuple(sequences), tuple(paths), path_of)

    @property
    def longest(self) -> int:
        """Tokens of the longest label."""
        return max(len(sequence) for sequence in self.sequences)
