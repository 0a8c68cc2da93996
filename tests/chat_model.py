"""A tiny model with a tokenizer, whose words are t3, t4 and so on; a conversation is its messages' words."""

from pathlib import Path

from overspill.tiny import VOCAB, make_llama


def make_chat_model(path: Path, *, seed: int = 0) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    make_llama(path, seed=seed)
    special = ["<unk>", "<s>", "</s>"]
    names = [*special, *(f"t{i}" for i in range(len(special), VOCAB))]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    fast.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    fast.save_pretrained(path)
    return path
