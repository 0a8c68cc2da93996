"""The prompts of benchmarks/drafts.py: which tokens a model that counts goes on with, and what drafts find for them."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import drafts

VOCABULARY = 8192


def found(text: list[int], number: int = 4) -> list[int]:
    """What follows the last pair where it stood before."""
    for at in range(len(text) - 3, -1, -1):
        if text[at : at + 2] == text[-2:]:
            return text[at + 2 : at + 2 + number]
    return []


@pytest.mark.parametrize(("text", "right"), [("edit", True), ("vain", False)])
def test_every_draft_is_right_or_wrong(text: str, right: bool) -> None:
    prompt = drafts.prompt_of(text, 3, 600, VOCABULARY)
    assert len(prompt) == 600 and max(prompt) < VOCABULARY
    for _ in range(2):
        prompt.append(prompt[-1] + 1)
    for _ in range(40):
        guessed = found(prompt)
        assert guessed and (guessed[0] == prompt[-1] + 1) is right
        prompt.append(prompt[-1] + 1)


def test_new_text_has_no_drafts() -> None:
    prompt = drafts.prompt_of("write", 3, 600, VOCABULARY)
    for _ in range(40):
        prompt.append(prompt[-1] + 1)
        assert not found(prompt)
