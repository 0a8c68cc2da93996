"""Real conversations as a workload: texts from a file, tokenized by the server under test."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import httpx

from overspill.address import client_context
from overspill.measure import CannotMeasure
from overspill.measure.sharegpt import Turn, read_conversations
from overspill.measure.target import Target
from overspill.measure.workload import Chain, Piece, Script, Step, Workload, ids_as_text

# Questions and answers with fewer tokens say nothing; vLLM's own benchmark leaves them out, too.
_FEWEST_TOKENS = 4
_TIMEOUT_S = 60.0

Tokenize = Callable[[str, bool], Sequence[int]]
"""Returns the tokens of a text; the flag is true for a text that begins a prompt."""


def conversation_script(
    workload: Workload, seed: int, max_model_len: int | None, tokenize: Tokenize
) -> tuple[Script, list[str]]:
    """Script of conversations drawn by the seed, each cut where it no longer fits, and notes for the reader."""
    given, conversations = workload.parameters, read_conversations(workload.file)
    if conversations.digest != workload.digest:
        raise CannotMeasure(f"{workload.file} has changed since the measurement began; measure anew")
    order = random.Random(f"{seed}/file").sample(range(len(conversations.turns)), len(conversations.turns))
    wanted, rate = int(given["conversations"]), float(given["rate"])
    chains: list[Chain] = []
    index = 0
    for one in order:
        turns = conversations.turns[one][: int(given["turns"])]
        steps = tuple(_steps(f"file/{one}", turns, index, int(given["output"]), max_model_len, tokenize))
        if steps:
            chains.append(Chain(steps, len(chains) / rate if rate else 0.0))
            index += len(steps)
        if len(chains) == wanted:
            break
    if not chains:
        limit = f" and have no more than {max_model_len:,} with it" if max_model_len is not None else ""
        raise CannotMeasure(
            f"no conversation of {workload.file} can be used: its question and answer must have at least "
            f"{_FEWEST_TOKENS} tokens each{limit}"
        )
    few = f"only {len(chains)} of {wanted} conversations: no more of {workload.file} fit"
    return Script(tuple(chains), int(given["concurrency"])), [few] if len(chains) < wanted else []


def _steps(
    name: str, turns: Sequence[Turn], index: int, output: int, max_model_len: int | None, tokenize: Tokenize
) -> Iterator[Step]:
    known = 0
    for number, (question, answer) in enumerate(turns):
        ids = tokenize(question, not number)
        tokens = output or len(tokenize(answer, False))
        is_short = len(ids) < _FEWEST_TOKENS or (tokens < _FEWEST_TOKENS and not output)
        if is_short or (max_model_len is not None and known + len(ids) + tokens > max_model_len):
            return
        piece = Piece(f"{name}-{number}", len(ids), ids_as_text(ids))
        yield Step(index=index + number, pieces=(piece,), output=tokens, known_tokens=known, continues=bool(number))
        known += len(ids) + tokens


@contextmanager
def tokenizer_of(target: Target) -> Iterator[Tokenize]:
    """Tokenizer of the server, called over its API: always the model's own, whatever is installed here."""
    with httpx.Client(
        timeout=_TIMEOUT_S, headers=target.headers, trust_env=False, verify=client_context(target.url) or True
    ) as client:

        def tokenize(text: str, begins: bool) -> Sequence[int]:
            asked = {"model": target.model, "prompt": text, "add_special_tokens": begins}
            try:
                answer = client.post(f"{target.url}/tokenize", json=asked)
                return list(map(int, answer.raise_for_status().json()["tokens"]))
            except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
                raise CannotMeasure(
                    f"the server at {target.url} cannot tokenize text ({error!r:.120}); a workload from a file "
                    "needs vLLM's POST /tokenize. Serve the model with its tokenizer, or use another workload"
                ) from error

        yield tokenize
