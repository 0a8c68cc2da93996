"""The recording of the README: `overspill run` on a machine without a GPU, as an animated SVG.

python docs/recording.py    writes docs/pictures/first-minute.svg; needs vLLM's CPU build

The model is a tiny one that learns one answer here. Pauses are cut short, and lines that only say that
it still does the same are left out; the seconds that are printed are real.
"""

from __future__ import annotations

import argparse
import os
import platform
import pty
import select
import subprocess
import sys
import tempfile
import time
from html import escape
from pathlib import Path

HERE = Path(__file__).parent
COMMAND = "overspill run ./tiny-chat --gpu-memory 8MiB --ram 6GiB"
QUESTION = "What does Overspill do?"
ANSWER = (
    "It keeps in the machine's RAM what the GPU cannot hold: conversations, the rest of a long context, and weights."
)
PROMPT = ">>> "
# What suits a machine without a GPU, whatever its CPU can do.
MACHINE = {"OVERSPILL_DTYPE": "float32", "OVERSPILL_ENFORCE_EAGER": "true", "OVERSPILL_MAX_NUM_SEQS": "4"}
LONGEST_PAUSE_S, KEY_S = 0.7, 0.05
COLUMNS, LINE, TOP, LEFT, CHARACTER = 116, 19, 46, 18, 8.05  # of the picture, in its units
Event = tuple[float, str]


def taught(path: Path, question: str, answer: str) -> Path:
    """A tiny Llama with a tokenizer of these words, trained until it knows the answer by heart."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from overspill.tiny import HEAD_DIM, common_config

    words = list(dict.fromkeys(["<unk>", "<s>", "</s>", *question.split(), *answer.split()]))
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    fast.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    torch.manual_seed(0)
    torch.set_num_threads(1)  # for so little more are slower
    model = LlamaForCausalLM(LlamaConfig(**common_config(4), head_dim=HEAD_DIM)).float()
    text = torch.tensor([[*(words.index(word) for word in f"{question} {answer}".split()), words.index("</s>")]])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(150):
        loss = model(input_ids=text, labels=text).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(path)
    fast.save_pretrained(path)
    return path


def record(folder: Path) -> list[Event]:
    """What the terminal showed, and when."""
    environment = {
        **os.environ, **MACHINE, "HOME": str(folder), "XDG_STATE_HOME": str(folder / ".local/state"),
        "XDG_CONFIG_HOME": str(folder / ".config"), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
        "TERM": "dumb", "COLUMNS": str(COLUMNS),
    }  # fmt: skip
    terminal, child = pty.openpty()
    words = [sys.executable, "-m", "overspill", *COMMAND.split()[1:]]
    process = subprocess.Popen(words, stdin=child, stdout=child, stderr=child, env=environment, cwd=folder)
    os.close(child)
    events: list[Event] = []
    began, seen = time.monotonic(), ""

    def read_until(prompts: int) -> None:
        nonlocal seen
        while seen.count(PROMPT) < prompts:
            if select.select([terminal], [], [], 600)[0]:
                text = os.read(terminal, 4096).decode(errors="replace")
                seen += text
                events.append((time.monotonic() - began, text))

    try:
        read_until(1)
        for key in QUESTION:
            os.write(terminal, key.encode())
            time.sleep(KEY_S)
        os.write(terminal, b"\n")
        read_until(2)
    finally:
        process.terminate()
        process.wait(120)
        os.close(terminal)
    return events


def played(events: list[Event], folder: Path) -> list[list[Event]]:
    """Lines of pieces, each with the moment at which it appears; the command is typed first."""
    lines = [[(0.0, "$ "), *((KEY_S * number, key) for number, key in enumerate(COMMAND, start=10))], []]
    now, before = lines[0][-1][0], 0.0
    for at, text in events:
        now += min(at - before, LONGEST_PAUSE_S)
        before = at
        shown = text.replace("\r", "").replace(str(folder), "~")
        for number, piece in enumerate(shown.split("\n")):
            if number:
                lines.append([])
            if piece:
                lines[-1].append((now, piece))
    told = [line for line in lines if " s  still " not in "".join(text for _, text in line)]
    return [row for line in told for row in wrapped(line)]


def wrapped(line: list[Event]) -> list[list[Event]]:
    """As a terminal does."""
    rows: list[list[Event]] = [[]]
    used = 0
    for at, piece in line:
        while piece:
            if used == COLUMNS:
                rows.append([])
                used = 0
            part, piece = piece[: COLUMNS - used], piece[COLUMNS - used :]
            rows[-1].append((at, part))
            used += len(part)
    return rows


def as_svg(lines: list[list[Event]]) -> str:
    height = TOP + LINE * len(lines)
    width = round(2 * LEFT + CHARACTER * COLUMNS)
    said = escape("\n".join("".join(text for _, text in line) for line in lines))
    texts = []
    for row, line in enumerate(lines):
        column = 0
        for at, text in line:
            kind = ' class="quiet"' if text.startswith("overspill: ") else ""
            x, y = LEFT + CHARACTER * column, TOP + LINE * row
            texts.append(
                f'<text x="{x:.1f}" y="{y}"{kind} textLength="{CHARACTER * len(text):.1f}" '
                f'style="animation-delay:{at:.2f}s">{escape(text)}</text>'
            )
            column += len(text)
    return f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-labelledby="said">
<title id="said">{said}</title>
<style>
text {{ font: 13.4px ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; fill: #e4ebe9; white-space: pre;
  opacity: 0; animation: shown 1ms linear forwards; }}
.quiet {{ fill: #a3b0ad; }}
@keyframes shown {{ to {{ opacity: 1; }} }}
@media (prefers-reduced-motion: reduce) {{ text {{ animation: none; opacity: 1; }} }}
</style>
<rect width="{width}" height="{height}" rx="10" fill="#141a1a"/>
<circle cx="22" cy="18" r="5.5" fill="#f79c8c"/><circle cx="40" cy="18" r="5.5" fill="#efbf6a"/>
<circle cx="58" cy="18" r="5.5" fill="#74d49c"/>
{chr(10).join(texts)}
</svg>
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE / "pictures/first-minute.svg", help="the file for it")
    out = parser.parse_args().out
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        taught(folder / "tiny-chat", QUESTION, ANSWER)
        lines = played(record(folder), folder)
    text = as_svg(lines)
    told = [word for word in (name, tempfile.gettempdir(), platform.node(), str(Path.home())) if word in text]
    if told:
        sys.exit(f"not written: it would show {told}")
    if ANSWER not in "".join(piece for line in lines for _, piece in line):
        sys.exit(f"not written: the answer is another one: {lines[-8:]}")
    out.write_text(text)
    print(f"wrote {out}, {len(text):,} bytes")


if __name__ == "__main__":
    main()
