"""Whether a folder can hold a tokenizer, without which vLLM ends only after it has loaded half of itself."""

import os
from fnmatch import fnmatch
from pathlib import Path

from overspill.model.folder import CONFIG, Folder
from overspill.serve.errors import CannotServe
from overspill.serve.flags import matches
from overspill.serve.prepared import Prepared

# Tokenizers come in too many files to know them all; these are surely none. Whatever else is there may be one.
_NO_TOKENIZER = (
    CONFIG, "generation_config.json", "hf_quant_config.json", "quantize_config.json", "preprocessor_config.json",
    "chat_template.jinja", "*.safetensors", "*.safetensors.index.json", "*.bin.index.json", "pytorch_model*.bin",
    "*.md", "LICENSE*", "NOTICE*", ".*",
)  # fmt: skip
# Classes that need no files, and code that comes from elsewhere, are named in the config.
_NAMED = (b'"tokenizer_class"', b'"auto_map"')
# With these, vLLM looks elsewhere, in another way, or not at all.
_FLAGS = ("--skip-tokenizer-init", "--tokenizer", "--tokenizer-mode", "--hf-overrides", "--hf-config-path")


def require_tokenizer(prepared: Prepared) -> None:
    folder = Path(os.path.expanduser(prepared.model))
    if prepared.plan.wishes.force or not folder.is_dir() or has_tokenizer(folder):
        return
    if any(matches(flag.name, name) for flag in prepared.combined.given for name in _FLAGS):
        return
    raise CannotServe(
        f"there is no tokenizer in {folder}; copy its files there, name a model that has the same one with "
        "--tokenizer, or add --skip-tokenizer-init, and send and get token ids"
    )


def has_tokenizer(folder: Path) -> bool:
    """Also where it only may have one."""
    if any(not any(fnmatch(entry.name, known) for known in _NO_TOKENIZER) for entry in folder.iterdir()):
        return True
    config = Folder(folder).content(CONFIG) or b""
    return any(named in config for named in _NAMED)
